"""The `kerneltune` command and `python -m kerneltune`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; an interrupt while it is still being imported is one line, as it is later."""
    try:
        from kerneltune.cli import main as run

        run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
