"""Tasks of huey, as its consumers and publishers load them."""

from __future__ import annotations

import os
from datetime import UTC

from mqfs.huey import MqfsHuey
from tests.jobs.notes import write

huey = MqfsHuey("jobs", address=os.environ["JOBS_ADDRESS"])


@huey.task()  # type: ignore[untyped-decorator]
def note(number: int) -> None:
    write(number)


@huey.task()  # type: ignore[untyped-decorator]
def add(x: int, y: int) -> int:
    return x + y


def publish(number: int) -> None:
    note(number)


def publish_later(number: int, delay_s: float) -> float:
    """When it is due, UNIX seconds."""
    eta = note.schedule((number,), delay=delay_s, priority=9).task.eta
    return float(eta.replace(tzinfo=UTC).timestamp())
