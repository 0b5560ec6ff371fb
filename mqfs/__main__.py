"""`python -m mqfs` is the command `mqfs`."""

import sys

from mq_tools.entry import mqfs

if __name__ == "__main__":
    sys.exit(mqfs())
