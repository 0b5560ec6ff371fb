"""A Celery application, as its workers and publishers load it: what a job does is a line in a file."""

from __future__ import annotations

import os

from celery import Celery

import mqfs.kombu  # noqa: F401  # the transport `mqfs`

app = Celery(
    "jobs", broker_url="mqfs://", backend="rpc://", broker_transport_options={"address": os.environ["JOBS_ADDRESS"]}
)
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def note(number: int) -> None:
    with open(os.environ["JOBS_DONE"], "ab", buffering=0) as file:
        file.write(f"{number}\n".encode())
