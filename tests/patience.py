"""How long a test waits before it takes what does not come for a hang. Only MQFS_TEST_PATIENCE scales it."""

import os

HANG_S = 300.0  # for what Spark does, which on a busy machine may take minutes


def patient(seconds: float) -> float:
    """So long, times MQFS_TEST_PATIENCE (1)."""
    return seconds * float(os.environ.get("MQFS_TEST_PATIENCE", "1"))
