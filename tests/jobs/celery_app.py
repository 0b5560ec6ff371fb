"""A Celery application, as its workers and publishers load it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery import Celery

import mqfs.kombu  # noqa: F401  # the transport `mqfs`
from tests.jobs.notes import write

app = Celery(
    "jobs", broker_url="mqfs://", backend="rpc://", broker_transport_options={"address": os.environ["JOBS_ADDRESS"]}
)
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def note(number: int) -> None:
    write(number)


@app.task(bind=True)
def fail_once(self: Any, number: int, body: str) -> None:
    if not self.request.retries:
        raise self.retry(countdown=0.2)
    write(number)


@app.task(bind=True)
def note_redelivery(self: Any) -> None:
    """The first delivery kills its worker."""
    is_redelivered = self.request.delivery_info["redelivered"]
    write(int(is_redelivered))
    if not is_redelivered:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task
def work(number: int, end: str) -> None:
    """Until there is a file."""
    write(number)
    while not os.path.exists(end):
        time.sleep(0.01)


def publish(number: int) -> None:
    note.delay(number)


def publish_later(number: int, delay_s: float) -> float:
    """When it is due, UNIX seconds."""
    due = time.time() + delay_s
    note.apply_async((number,), countdown=delay_s, priority=9)
    return due
