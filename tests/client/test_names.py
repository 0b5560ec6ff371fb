"""Names are no paths and no files of the tree's own; one that makes no sense is refused, not waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqfs import Outgoing, errors
from mqfs.client import Client, Group
from tests.support.eventually import HANG_S

BAD = [
    "ctl",
    "order",
    ".put",
    ".batch",
    ".stats",
    "../other/ctl",
    "../other",
    "a/b",
    "s/../ctl",
    "/",
    ".",
    "..",
    "",
    "a\0b",
    "a\ud800b",
    "a\udc80b",
]
CALLS: dict[str, Callable[[Group, str], Any]] = {
    "publish": lambda group, name: group.publish(name, "protect on\n"),
    "publish without create": lambda group, name: group.publish(name, "protect on\n", create=False),
    "publish with headers": lambda group, name: group.publish(name, "protect on\n", headers={"a": "b"}),
    "publish and its sequence": lambda group, name: group.publish(name, "protect on\n").sequence,
    "publish much": lambda group, name: group.publish(name, bytes(2_000_000)),
    "publish_many": lambda group, name: group.publish_many([("good", "1"), (name, "protect on\n")]),
    "publish_many with options": lambda group, name: group.publish_many([Outgoing(name, "1", priority=3)]),
    "writer": lambda group, name: group.writer(name),
    "create": lambda group, name: group.create(name),
    "remove": lambda group, name: group.remove(name),
    "subscribe": lambda group, name: group.subscribe(name),
    "subscribe to several": lambda group, name: group.subscribe(["good", name]),
    "on": lambda group, name: group.on(name, print),
    "history": lambda group, name: group.history(pattern=name),
    "consume": lambda group, name: group.consume(name),
    "consume with options": lambda group, name: group.consume(name, over="good", transient=True),
    "work": lambda group, name: group.work(name, print),
    "take": lambda group, name: group.take(name),
    "take and create": lambda group, name: group.take(name, create=True),
    "remove_consumer": lambda group, name: group.remove_consumer(name),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_name_is_no_path(tree: Client, name: str, call: str) -> None:
    """Neither this group's files nor another's are touched."""
    other = tree.group(f"{name}-2", create=True)
    group = tree.group(name, create=True)
    group.create("good")
    group.publish(".put"[1:], "a file of that name is open")
    group.publish("good", "1", headers={"now": "there is an open .put"})
    for bad in BAD:
        with pytest.raises(errors.BadName, match=r"^reserved name|has a (slash|NUL)|empty|expected UTF-8"):
            CALLS[call](group, bad.replace("other", f"{name}-2"))
    assert group.settings().protect is other.settings().protect is False
    assert set(group.streams()) <= {"good", "put"}
    assert other.streams() == []
    assert group.consumers() == []


@pytest.mark.parametrize("bad", ["..", "a/../b", "a/ctl", ".consumers/c", "a/.txn"])
def test_a_path_of_groups_goes_down_only(tree: Client, bad: str) -> None:
    for call in tree.group, tree.remove_group, lambda path: tree.group(path, create=True):
        with pytest.raises(errors.BadName):
            call(bad)


def test_a_subscription_that_could_only_wait_is_refused(tree: Client, name: str) -> None:
    group = tree.group(name, create=True)
    for program in 'prefix:"a."', "exact:b":
        with pytest.raises(errors.BadRequest, match="routing program"):
            group.subscribe(program)
    group.create("exact:b")  # of which there may be a stream
    with group.subscribe("exact:b") as reading:
        group.publish("exact:b", b"1")
        assert reading.get(timeout=HANG_S).body == b"1"


def test_work_on_no_thread_is_refused(tree: Client, name: str) -> None:
    group = tree.group(name, create=True)
    with pytest.raises(errors.BadRequest, match="concurrency 0"):
        group.work("c", print, concurrency=0)
    assert group.consumers() == []


@pytest.mark.parametrize("body", [{"a": 1}, 5, None, [1, 2], object()])
def test_a_body_is_bytes_or_text(tree: Client, name: str, body: Any) -> None:
    group = tree.group(name, create=True)
    calls: list[Callable[[], Any]] = [
        lambda: group.publish("s", body),
        lambda: group.publish("s", body, headers={"a": "b"}),
        lambda: group.publish_many([("s", body)]),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=rf"invalid body: {type(body).__name__} \(expected bytes or str\)"):
            call()


@pytest.mark.slow
def test_groups_are_no_views(tree: Client, name: str) -> None:
    group = tree.group(name, create=True)
    for view in "plain", "my view", "it's", "#1":
        group.bind(view, "a.*")
    tree.group(f"{name}/my group", create=True)
    assert group.groups() == ["my group"]
