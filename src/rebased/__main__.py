"""`python -m rebased` is the `rebased` command."""

from rebased.cli import main

if __name__ == "__main__":
    main()
