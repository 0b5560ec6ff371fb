"""The server is restarted at each call of a bridge in turn: none ends the bridge, and no message is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqfs import limits
from mqfs.errors import Disconnected
from tests.bridge.rig import Rig, rig
from tests.bridge.test_stop_points import Bridges, heard, state, times
from tests.support.campaign import size, whole
from tests.support.eventually import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(7_200 if whole() else 600)]
LONG = "x" * (limits.MESSAGE_BYTES + 1)  # more than a message has: appended in parts
ENDS = signal.SIGKILL, signal.SIGTERM  # of the server, in turn


def publish(r: Rig, body: str, **more: Any) -> None:
    """Once, also where our own connection is lost."""
    while True:
        with contextlib.suppress(Disconnected):
            r.group.publish("s", body, ttl="1h", id=body, **more)
            return


def at_each_call(r: Rig, options: str, begin: Callable[[str], Any], is_done: Callable[[str], Any]) -> None:
    """Begin something before each call at which the server is restarted, and have the same bridge finish it."""
    bridges = Bridges(r, *options.split())
    with contextlib.closing(bridges):
        begin("0")
        with bridges.bridge(0, pauses=True):
            eventually(lambda: is_done("0"), f"{options} without a restart")
            calls = bridges.count()
        for stop in range(1, calls + 1, 1 if whole() else max(1, calls // size(80))):
            with pausing(bridges, stop) as pid:
                for body in (str(stop), f"{stop}, behind it"):
                    begin(body)
                    eventually(lambda: is_resumed(r, pid, stop) and is_done(body), f"{options}, call {stop}")  # noqa: B023
            assert bridges.status == 0


@contextlib.contextmanager
def pausing(bridges: Bridges, stop: int) -> Iterator[int]:
    with bridges.bridge(stop, pauses=True) as pid:
        try:
            yield pid
        finally:
            bridges.calls.unlink()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            eventually(lambda: state(pid) in "SZ", "its threads to run: a signal before may be lost")


def is_resumed(r: Rig, pid: int, stop: int) -> bool:
    """True; where the bridge is stopped, the server is restarted before."""
    assert state(pid) != "Z", f"the bridge ended by a restart at call {stop}"
    if state(pid) == "T":
        r.server.restart(ENDS[stop % 2])
        with contextlib.suppress(Disconnected):  # the first call of our own connection
            r.group.streams()
        os.kill(pid, signal.SIGCONT)
    return True


def test_multis_into_the_group() -> None:
    with rig() as r:
        node = r.node()
        at_each_call(
            r,
            "--in --no-singles",
            lambda body: node.publish("s", body, ttl=3_600_000),
            lambda body: times(r, "s", body),
        )
        assert all(times(r, "s", body.decode()) == 1 for _, body in r.kept())


def test_long_bodies_into_the_group() -> None:
    with rig() as r:
        node = r.node()
        at_each_call(
            r,
            "--in --no-singles",
            lambda body: node.publish("s", body + LONG, ttl=3_600_000),
            lambda body: times(r, "s", body + LONG),
        )
        assert all(times(r, "s", body.decode()) == 1 for _, body in r.kept())


def test_multis_out_of_the_group() -> None:
    with rig() as r:
        node = r.node()
        node.subscribe()
        at_each_call(r, "--out --no-singles", lambda body: publish(r, body), lambda body: heard(node, body))
        assert all(heard(node, event["body"]) == 1 for event in node.messages())


def test_singles_out_of_the_group() -> None:
    with rig() as r:
        node = r.node()
        node.subscribe()
        at_each_call(
            r,
            "--out",
            lambda body: [publish(r, body), publish(r, f"{body}, single", single=True)],
            lambda body: heard(node, body) and heard(node, f"{body}, single"),
        )


def test_both_ways() -> None:
    handled: list[str] = []
    with rig() as r, r.group.work("workers", lambda claim: handled.append(claim.body.decode()), over="in"):
        node = r.node()
        node.subscribe()
        at_each_call(
            r,
            "--both",
            lambda body: [publish(r, body), node.publish("in", body, ttl=3_600_000, single=True)],
            lambda body: heard(node, body) and (body in handled or heard(node, body) > 1),
        )
