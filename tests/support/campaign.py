"""The size of a campaign: a fiftieth, or the part in MQFS_SAMPLE, or all under `make soak` (MQFS_SOAK=1)."""

import os
import subprocess
from fractions import Fraction
from functools import cache

from tests.support import ROOT

PART = 50


def whole() -> bool:
    return os.environ.get("MQFS_SOAK") == "1"


def size(full: int, part: int = PART, *, least: int = 1) -> int:
    """Return how many of `full` rounds to run, at least `least`: all in a soak, else one in `part`.

    `part` is 50, or more if a round is expensive. MQFS_SAMPLE=1/10 replaces 1/50; other parts grow by the same factor.
    """
    if whole():
        return full
    sample = min(Fraction(1), Fraction(os.environ.get("MQFS_SAMPLE", "1/50")) * PART / part)
    return max(min(least, full), int(full * sample))


def seed() -> int:
    """Return the seed of a random campaign: MQFS_SEED, by default 1."""
    return int(os.environ.get("MQFS_SEED", "1"))


def tree_seed() -> int:
    """Return the seed of a campaign that must pass with every seed: MQFS_SEED, or a number made from the committed
    files, so that a second run repeats the first. 1 without a repository."""
    return int(os.environ.get("MQFS_SEED") or _of_tree())


@cache
def _of_tree() -> int:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=4", "HEAD^{tree}"]
    try:
        return int(subprocess.run(command, check=True, capture_output=True).stdout[:4], 16)
    except (OSError, subprocess.CalledProcessError):
        return 1
