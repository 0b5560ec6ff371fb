"""A signal handler that raises, as Ctrl-C does, in an exchange on the attach socket: the next one gets its own answer.

The interpreter runs handlers when a call of C returns. A profile function counts these places and raises at one: first
at the first, then at the second, until a call of the library ends before it.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest

import mqfs
from mqfs import ring
from mqfs.client.transport import ring_attachment
from mqfs.ring import protocol
from tests.support.eventually import HANG_S
from tests.support.server import Server

pytestmark = [pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING), pytest.mark.process]

EXCHANGE = (ring_attachment.__file__, protocol.__file__, socket.__file__)


def interrupt_at(place: int, call: Callable[[], Any]) -> bool:
    """Call, and raise KeyboardInterrupt at that place. Returns whether there is one."""
    left = place

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event == "c_return" and frame.f_code.co_filename in EXCHANGE:
            left -= 1
            if not left:
                raise KeyboardInterrupt

    before = sys.getprofile()
    gc.disable()  # the end of what an earlier test left is no place in this call
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
        gc.enable()
    return left <= 0


def test_a_message_goes_to_its_stream_after_an_interrupted_publish(away: Server) -> None:
    """The answer that was not read is not taken for that of the next question."""
    with away.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.publish("first", b"first")
        place = 1
        while interrupt_at(place, partial(group.publish, f"asked-{place}", b"asked-%d" % place)):
            for name in (f"after-{place}", f"asked-{place}", "first"):
                group.publish(name, name.encode())
            place += 1
        assert place > 5
        assert all(message.body == message.stream.encode() for message in group.history())


def test_a_reader_names_streams_after_an_interrupted_get(away: Server) -> None:
    """As above, of the names of streams."""
    with away.connect() as writer, away.connect() as reader:
        group = writer.group("g", create=True, ctl=["replay all"])
        messages = reader.group("g").subscribe()
        group.publish("first", b"first")
        assert messages.get(HANG_S).stream == "first"
        place, got = 1, list[mqfs.Message]()
        while True:
            wanted = [f"asked-{place}", f"after-{place}", f"last-{place}"]
            for name in wanted:
                group.publish(name, name.encode())
            got.clear()
            is_interrupted = interrupt_at(place, lambda: got.append(messages.get(HANG_S)))
            while len(got) < len(wanted):
                got.append(messages.get(HANG_S))
            assert [message.stream for message in got] == wanted
            assert [message.body.decode() for message in got] == wanted
            if not is_interrupted:
                break
            place += 1
        assert place > 5


def rings_open() -> int:
    """Descriptors of rings in this process, those of rings that nothing refers to any more aside."""
    gc.collect()
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += "mqfs-ring" in os.readlink(f"/proc/self/fd/{fd}")
    return count


def test_an_interrupted_attach_leaves_no_descriptor(away: Server) -> None:
    """Wherever it is interrupted: the process would run out of them."""

    def publish(place: int) -> bool:
        with away.connect() as client:
            group = client.group("g", create=True, ctl=["replay all"])
            is_interrupted = interrupt_at(place, partial(group.publish, "s", b"s"))
            group.publish("s", b"s")
            return is_interrupted

    publish(1 << 30)
    before, place = rings_open(), 1
    while publish(place):
        assert rings_open() == before, place
        place += 1
    assert place > 10


@contextmanager
def interrupted(server: int, seconds: float) -> Iterator[None]:
    """Within it the server stands still. After those seconds a signal raises KeyboardInterrupt, and the server runs
    again. Not SIGALRM, which is pytest-timeout's."""

    def interrupt(number: int, frame: object) -> None:
        os.kill(server, signal.SIGCONT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    os.kill(server, signal.SIGSTOP)
    gc.disable()  # in the end of what an earlier test left it would be ignored
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            timer.start()
            yield
    finally:
        gc.enable()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("transport", ["ring", "9p"])
def test_a_call_that_waited_for_a_busy_server_is_interrupted(away: Server, transport: str) -> None:
    """A real signal, while the answer is awaited: of a question, of a write, and of a write with its answer read."""
    with away.connect(transport=transport) as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.publish("first", b"first")
        calls: list[Callable[[str], mqfs.Receipt]] = [
            lambda name: group.publish(name, name.encode()),
            lambda name: group.publish(name, name.encode(), headers={"own": name}),
        ]
        for number, publish in enumerate(calls):
            with interrupted(away.pid, 0.3):
                publish(f"asked-{number}")
            for name in (f"after-{number}", f"asked-{number}"):
                receipt = publish(name)
                assert group.get(receipt.sequence).stream == name
        assert all(message.body == message.stream.encode() for message in group.history())
