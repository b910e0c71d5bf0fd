"""The one exception that the command line turns into one line and an exit code."""

from __future__ import annotations

CHECK_FAILED = 1
BAD_INPUT = 2
NO_GPU = 3
INTERRUPTED = 128 + 2  # what a shell reports for a process ended by SIGINT


class UserError(Exception):
    """Something the user can put right: the message says what is wrong, where, and what to do, in one line."""

    def __init__(self, message: str, exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code
