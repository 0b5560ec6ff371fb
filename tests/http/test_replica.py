"""HTTP under `sync replica`: a publish is answered, and its message seen, when the replica has it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqfs.engine.nodes import Meta
from mqfs.store.store import DiskStore
from tests.engine.subject import USER
from tests.http.subject import HttpSubject
from tests.models.pubsub import WAIT
from tests.support.copied import follow


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[Any]:
    made = HttpSubject(DiskStore(str(tmp_path / "store"), replica=lambda: None))
    yield made
    made.call(made.tree.close)
    made.abandon()
    made.store.close()


def confirm(subject: Any) -> None:
    subject.call(lambda: list(follow(subject.store.replication)))


def lag_of(subject: Any) -> float:
    """By `/.metrics`, which is not below the group."""
    text = subject.ask(9, "GET", "../.metrics").body.decode()
    return float(text.split("\nmqfs_replica_lag_bytes ")[1].split("\n")[0])


def test_a_silent_replica_is_a_warning_and_no_reason_to_send_work_elsewhere(subject: Any) -> None:
    assert json.loads(subject.ask(1, "GET", "../.ready").body) == {"status": "ok", "reasons": [], "warnings": []}
    subject.store.replication.silent_s = lambda: 42.0
    answer = subject.ask(2, "GET", "../.ready")
    assert answer.status == 200
    assert json.loads(answer.body)["warnings"] == ["the replica has not answered for 42 s"]
    assert "\nmqfs_replica_lag_seconds 42\n" in subject.ask(3, "GET", "../.metrics").body.decode().replace("42.0", "42")
    assert json.loads(subject.ask(4, "GET", ".stats").body)["replica_lag_seconds"] == 42.0


def test_a_publish_its_readers_and_its_page_wait_for_the_replica(subject: Any) -> None:
    def begin() -> None:
        subject.tree.open(USER, Meta(subject.group, "ctl"), os.O_WRONLY).write(b"replay all\nsync replica\n")
        subject.group.make_stream("s", 0o644, USER)

    subject.call(begin)
    confirm(subject)
    assert subject.ask(1, "GET", "s?wait=60s&since=first") == WAIT
    assert subject.ask(2, "PUT", "s", b"one") == WAIT
    assert subject.ask(3, "POST", "s", b"two") == WAIT
    page = subject.ask(4, "GET", "s?since=first&wait=0s")
    assert (page.status, page.headers["Mqfs-Next"]) == (204, "1")
    assert subject.answers == []
    assert lag_of(subject) == 80
    confirm(subject)
    assert lag_of(subject) == 0
    answers = dict(subject.answers)
    assert answers[1].body == b"onetwo"
    assert [(answers[n].status, answers[n].headers["Mqfs-Sequence"]) for n in (2, 3)] == [(201, "1"), (201, "2")]
    assert subject.ask(6, "GET", "s?since=first").body == b"onetwo"
