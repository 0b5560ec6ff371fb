"""How long a campaign runs: a seeded tenth by default, whole under `make soak` (MQFS_SOAK=1)."""

import os


def size(full: int) -> int:
    """How many rounds of `full` to run now."""
    return full if os.environ.get("MQFS_SOAK") == "1" else max(1, full // 10)


def seed() -> int:
    """The seed of every random campaign; MQFS_SEED repeats a run."""
    return int(os.environ.get("MQFS_SEED", "1"))
