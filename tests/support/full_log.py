"""A group whose log is full: it refuses even small messages, and dead letters."""

from __future__ import annotations

from contextlib import suppress

from mqfs.client import Group
from mqfs.errors import StreamFull

FULL = ("keep ring", "full reject")  # a small log, in memory
FILLER = "filler"


def fill_log(group: Group) -> None:
    """Fill the log of a group with the settings FULL, and with `deliver one` or `replay all`. Removing FILLER makes
    room again."""
    group.create(FILLER)
    for size in (700_000, 70_000, 7_000, 700, 70, 1):
        with suppress(StreamFull):
            while True:
                group.publish(FILLER, b"x" * size)
