"""The groups of libraries of jobs, where other programs made them first or at the same time: no job is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

import dramatiq
import pytest
from huey.api import Task
from kombu import Connection
from kombu.exceptions import OperationalError

import mqfs.kombu  # noqa: F401  # the transport `mqfs`
from mqfs.client import client as clients
from mqfs.client import connect
from mqfs.dramatiq import MqfsBroker
from mqfs.errors import Busy
from mqfs.huey import MqfsHuey
from tests.support.eventually import HANG_S, patient
from tests.support.server import Server

pytestmark = pytest.mark.process
Put = Callable[[], Any]  # a job
Get = Callable[[], Any]  # what it says, once it is there
PROGRAMS = 8


@contextmanager
def over_kombu(address: str, name: str) -> Iterator[tuple[Put, Get]]:
    with Connection(f"mqfs:///{name}", transport_options={"address": address}) as connection:
        queue = connection.SimpleQueue("q")
        yield lambda: queue.put("job"), lambda: queue.get(timeout=20).payload


@contextmanager
def over_dramatiq(address: str, name: str) -> Iterator[tuple[Put, Get]]:
    with closing(MqfsBroker(address, group=name, middleware=[])) as broker:
        broker.declare_queue("q")
        message = dramatiq.Message[Any]("q", "actor", ("job",), {}, {})

        def get() -> Any:
            with closing(broker.group.take("q")) as claims:
                return dramatiq.Message[Any].decode(claims.get(20).body).args[0]

        yield lambda: broker.enqueue(message), get


@contextmanager
def over_huey(address: str, name: str) -> Iterator[tuple[Put, Get]]:
    huey = MqfsHuey(name, address=address, read_timeout=20)

    @huey.task()  # type: ignore[untyped-decorator]
    def job(word: str) -> None:
        raise AssertionError(word)

    def get() -> Any:
        task = huey.dequeue()
        assert isinstance(task, Task)
        return task.args[0]

    with closing(huey.storage):
        yield lambda: job("job"), get


OVER = {"kombu": over_kombu, "dramatiq": over_dramatiq, "huey": over_huey}
GROUPS = {"kombu": "{}/queues", "dramatiq": "{}", "huey": "{}/tasks"}
QUEUES = {"kombu": "q", "dramatiq": "q", "huey": "queue"}
library = pytest.mark.parametrize("library", OVER)


@library
@pytest.mark.parametrize("before", [(), ("lease 1m",)], ids=["half-made", "set"])
def test_a_group_that_is_there_loses_no_job(server: Server, name: str, library: str, before: tuple[str, ...]) -> None:
    """Half-made: the program that made it was killed before it wrote the settings."""
    with server.connect() as client:
        group = client.group(GROUPS[library].format(name), create=True, ctl=before)
        lease = group.settings().lease
        with OVER[library](server.address, name) as (put, get):
            put()
            assert get() == "job"
        assert (group.settings().deliver, group.settings().lease) == ("one", lease)


@library
def test_settings_of_others_stay(server: Server, name: str, library: str) -> None:
    with server.connect() as client:
        group = client.group(GROUPS[library].format(name), create=True, ctl=["deliver one", "replay all", "depth 9"])
        with OVER[library](server.address, name) as (put, _):
            put()
        assert (group.settings().replay, group.settings().depth) == ("all", 9)


@library
def test_a_group_that_would_lose_jobs_is_not_used(
    server: Server, name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that hold up its settings are waited for, but not for ever."""
    path = GROUPS[library].format(name)
    with server.connect(transport="9p") as client:
        client.group(path, create=True).create("other")
        reader = client._link.open(f"{path}/other", "r")
        monkeypatch.setattr(clients, "SETTINGS_S", 0.1)
        with (
            pytest.raises((Busy, OperationalError), match=r"without 'deliver one': .*'other' is open"),
            OVER[library](server.address, name) as (put, _),
        ):
            put()
        monkeypatch.setattr(clients, "SETTINGS_S", HANG_S)
        threading.Timer(0.3, reader.close).start()
        with OVER[library](server.address, name) as (put, get):
            put()
            assert get() == "job"


@pytest.mark.root
@library
def test_a_program_that_may_write_a_queue_alone_publishes(
    server: Server, name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it declares is there."""
    queue = f"{GROUPS[library].format(name)}/{QUEUES[library]}"
    with OVER[library](server.address, name) as (put, get):
        put()
        assert get() == "job"
    with server.connect() as client:
        client._link.connection().chmod(queue, 0o622)
    with monkeypatch.context() as other:
        other.setattr(f"mqfs.{library}.connect", partial(connect, user="nobody", transport="9p"))
        with OVER[library](server.address, name) as (put, _):
            put()
    with server.connect() as client:
        [stream] = client.group(GROUPS[library].format(name)).stats().streams.values()
    assert stream.newest == 2


@pytest.mark.parametrize("library", ["dramatiq", "huey"])  # Celery itself makes new connections of kombu
def test_a_program_that_is_forked_publishes(server: Server, name: str, library: str) -> None:
    """After it published itself: a server of the web loads it and then forks."""
    with OVER[library](server.address, name) as (put, get):
        put()
        child = os.fork()
        if not child:
            signal.alarm(int(patient(20)))
            try:
                put()
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        put()
        assert [get() for _ in range(3)] == ["job"] * 3


def begin(address: str, name: str, library: str, at_once: Barrier) -> None:
    at_once.wait(HANG_S)
    with OVER[library](address, name) as (put, _):
        put()


@library
def test_programs_that_begin_at_once_lose_no_job(server: Server, name: str, library: str) -> None:
    context = multiprocessing.get_context("forkserver")
    at_once = context.Barrier(PROGRAMS)
    programs = [context.Process(target=begin, args=(server.address, name, library, at_once)) for _ in range(PROGRAMS)]
    for program in programs:
        program.start()
    for program in programs:
        program.join(HANG_S)
    assert [program.exitcode for program in programs] == [0] * PROGRAMS
    with server.connect() as client:
        [stream] = client.group(GROUPS[library].format(name)).stats().streams.values()
    assert stream.consumer is not None
    assert stream.consumer.waiting == PROGRAMS
