"""Actors of dramatiq, as workers and publishers load them: what a job does is a line in a file."""

from __future__ import annotations

import os

import dramatiq

from mqfs.dramatiq import MqfsBroker

broker = MqfsBroker(os.environ["JOBS_ADDRESS"])
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3, min_backoff=50)
def note(number: int) -> None:
    with open(os.environ["JOBS_DONE"], "ab", buffering=0) as file:
        file.write(f"{number}\n".encode())


@dramatiq.actor(max_retries=1, min_backoff=50)
def fail() -> None:
    raise ValueError
