"""The one exception that the command line turns into one line and an exit code."""

from __future__ import annotations

BAD_INPUT = 2
NO_GPU = 3


class UserError(Exception):
    """Something the user can put right: the message says what is wrong, where, and what to do, in one line."""

    def __init__(self, message: str, exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code
