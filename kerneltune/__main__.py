"""`python -m kerneltune` is the `kerneltune` command."""

from kerneltune.cli import main

if __name__ == "__main__":
    main()
