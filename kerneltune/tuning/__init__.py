"""One search, from the order of the trials to the table."""
