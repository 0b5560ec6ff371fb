"""`mqfs promote` asks the primary to hand over: by an object beside the log, in which a standby writes its next run.

    standby    notes the run in its state; writes the object now and then, each time with another count
    primary    looks every two seconds; takes no more writes, copies the rest, and appends the takeover of that run
    standby    reads that takeover as any other frame: it is the primary

The log alone decides: without that takeover the primary serves on, with it the standby is to serve, whatever became of
the command. A request counts for the epoch that it names, and only if it came between two looks: one that was left
there is none.
"""

from __future__ import annotations

import json
import uuid

import attrs

from mqfs.replica.log import Objects

_NAME = "handover"


@attrs.frozen
class Request:
    """The standby at that address asks the owner whose takeover is frame `own`. `count` is another one each time."""

    own: int
    run: uuid.UUID
    address: str
    count: int


def write(objects: Objects, request: Request) -> None:
    """Ask, in the place of who asked before. Raises NoAnswer, BadReplica."""
    text = {**attrs.asdict(request), "run": str(request.run)}
    objects.put(_NAME, json.dumps(text).encode())


def read(objects: Objects) -> Request | None:
    """The newest request; None where there is none. Raises NoAnswer, BadReplica."""
    try:
        found = json.loads(objects.get(_NAME) or b"")
        own, run, count = int(found["own"]), uuid.UUID(found["run"]), int(found["count"])
        return Request(own, run, str(found["address"]), count)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def remove(objects: Objects) -> None:
    """Nobody asks any more. Raises NoAnswer, BadReplica."""
    objects.delete(_NAME)
