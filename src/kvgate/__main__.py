"""`python -m kvgate`: the same as the `kvgate` command."""

from kvgate.cli import main

if __name__ == "__main__":
    main(prog_name="kvgate")
