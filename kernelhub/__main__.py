"""``python -m kernelhub``: the same as the command ``kernelhub``."""

from kernelhub.cli import main

if __name__ == "__main__":
    main()
