"""`python -m mqfs` is the command `mqfs`."""

from mqfs.cli import main

if __name__ == "__main__":
    main()
