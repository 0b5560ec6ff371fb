"""kill -9 of the server under schedules: each run is published once, and each schedule has a next one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from mqfs.client import Group
from tests.support.campaign import seed, size
from tests.support.eventually import eventually
from tests.support.server import Server, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]

NAMES = [f"n{number}" for number in range(20)]


def runs(group: Group) -> dict[str, list[str]]:
    """The times of the runs of each schedule, in the order in which they are in the log."""
    found: dict[str, list[str]] = {name: [] for name in NAMES}
    held = []
    for message in group.history():
        name, _, at = message.headers["id"].partition("@")
        found[name].append(at)
        held.append(message.headers["held"])
    assert len(set(held)) == len(held), "a delayed message was published twice"
    return found


def test_killed_under_schedules() -> None:
    luck = random.Random(seed())
    with short_folder() as folder:
        server = Server.at(Path(folder))
        try:
            with server.connect() as client:
                group = client.group("g", create=True, ctl=["replay all"])
                for name in NAMES:
                    group.schedule(name, "s", name, **({"cron": "* * * * *"} if name == "n0" else {"every": 1}))
            for _ in range(size(200, least=3)):
                time.sleep(luck.uniform(0.05, 1.2))  # when the kill comes
                server.restart()
                with server.connect() as client:
                    group = client.group("g")
                    assert sorted(group.stats().schedules) == sorted(NAMES)
                    for name, times in runs(group).items():
                        assert times == sorted(set(times)), f"{name}: a run twice, or out of order"
            with server.connect() as client:
                group = client.group("g")
                before = len(runs(group)["n1"])
                eventually(lambda: len(runs(group)["n1"]) > before)
        finally:
            server.close()
