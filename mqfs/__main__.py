"""`python -m mqfs` is the command `mqfs`."""

from mqfs.cli.main import main

if __name__ == "__main__":
    main()
