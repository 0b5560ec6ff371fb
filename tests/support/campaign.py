"""How long a campaign runs: a seeded part by default, whole under `make soak` (MQFS_SOAK=1)."""

import os


def whole() -> bool:
    return os.environ.get("MQFS_SOAK") == "1"


def size(full: int, part: int = 10) -> int:
    """How many rounds of `full` to run now: all, or a tenth, or less where a round costs much."""
    return full if whole() else max(1, full // part)


def seed() -> int:
    """The seed of every random campaign; MQFS_SEED repeats a run."""
    return int(os.environ.get("MQFS_SEED", "1"))
