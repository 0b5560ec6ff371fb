"""How long a campaign runs: a fiftieth, or what MQFS_SAMPLE says, or whole under `make soak` (MQFS_SOAK=1)."""

import os
import subprocess
from fractions import Fraction
from functools import cache

from tests.support import ROOT

PART = 50


def whole() -> bool:
    return os.environ.get("MQFS_SOAK") == "1"


def size(full: int, part: int = PART, *, least: int = 1) -> int:
    """How many rounds of `full` to run now: all, or a fiftieth, or a smaller `part` where a round costs much.

    MQFS_SAMPLE=1/10 stands for the fiftieth; a smaller part grows by as much.
    """
    if whole():
        return full
    sample = min(Fraction(1), Fraction(os.environ.get("MQFS_SAMPLE", "1/50")) * PART / part)
    return max(min(least, full), int(full * sample))


def seed() -> int:
    """The seed of a random campaign: 1, or MQFS_SEED."""
    return int(os.environ.get("MQFS_SEED", "1"))


def tree_seed() -> int:
    """The seed of a campaign that passes with any: that of the committed files, so that a second run repeats the first;
    or MQFS_SEED. 1 where there is no repository."""
    return int(os.environ.get("MQFS_SEED") or _of_tree())


@cache
def _of_tree() -> int:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=4", "HEAD^{tree}"]
    try:
        return int(subprocess.run(command, check=True, capture_output=True).stdout[:4], 16)
    except (OSError, subprocess.CalledProcessError):
        return 1
