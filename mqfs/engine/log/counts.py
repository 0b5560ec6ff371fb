"""Counts of a group, shown in `.stats`."""

from __future__ import annotations

import attrs


@attrs.define
class Counts:
    """What happened in a group since the server started; shown in `.stats`."""

    written: int = 0  # messages
    written_bytes: int = 0
    read: int = 0  # messages handed to handles
    discarded: int = 0  # by `full drop-new`
    cut: int = 0  # by `full drop-old`
    fell_behind: int = 0  # times it was reported to a reader
    lost: int = 0  # messages they had not had
    refused: int = 0  # writes
