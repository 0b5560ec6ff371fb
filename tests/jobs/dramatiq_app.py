"""Actors of dramatiq, as workers and publishers load them."""

from __future__ import annotations

import os
import time

import dramatiq

from mqfs.dramatiq import MqfsBroker
from tests.jobs.notes import write

broker = MqfsBroker(os.environ["JOBS_ADDRESS"])
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3, min_backoff=50)
def note(number: int) -> None:
    write(number)


@dramatiq.actor(max_retries=1, min_backoff=50)
def fail() -> None:
    raise ValueError


def publish(number: int) -> None:
    note.send(number)


def publish_later(number: int, delay_s: float) -> float:
    """When it is due, UNIX seconds."""
    due = time.time() + delay_s
    note.send_with_options(args=(number,), delay=int(delay_s * 1000), broker_priority=4)
    return due
