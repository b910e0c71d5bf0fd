"""Results for people: what tuning won and how close to the roof it came, as text, files and pictures."""
