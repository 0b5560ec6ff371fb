"""Temporary streams: with the sticky bit, they go with their last open file and at a start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
import pytest

from mqfs import errors
from mqfs.model import Grant, Wait
from tests.support.hand import ANNA, BERT, ROOT
from tests.support.queues import Queues


def make(q: Queues, name: str = "t", mode: int = 0o1622, flags: int = os.O_RDWR) -> Any:
    return q.tree.open(ROOT, q.tree.create(ROOT, q.group, name, mode), flags)


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_it_goes_with_its_last_open_file(deliver: str) -> None:
    q = Queues(f"deliver {deliver}")
    first = make(q)
    second = q.at("t", os.O_WRONLY)
    assert q.tree.stat(q.group.streams["t"]).mode & 0o7777 == 0o1622
    first.close()
    assert "t" in q.group.streams
    second.write(b"kept or not")
    second.close()
    assert "t" not in q.group.streams
    with pytest.raises(errors.NotFound):
        q.put(b"late", "t")


def test_a_reader_that_waits_keeps_it() -> None:
    q = Queues()
    reader, writer = make(q, flags=os.O_RDONLY), q.at("t", os.O_WRONLY)
    step = reader.read(64)
    writer.write(b"one")
    writer.close()
    assert step.result() == b"one"
    assert isinstance(reader.read(64), Wait)
    reader.close()
    assert "t" not in q.group.streams


@pytest.mark.parametrize("clean", [True, False])
def test_none_is_there_after_a_start(tmp_path: Path, clean: bool) -> None:
    q = Queues("replay all", "protect on", path=tmp_path / "store")
    make(q).write(b"one")
    q.tree.create(ROOT, q.group, "never-opened", 0o1666)
    q.restart(clean=clean)
    assert list(q.group.streams) == ["s"]


def test_any_stream_may_become_one_and_cease_to_be() -> None:
    q = Queues()
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o1666)
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o666)
    q.at("s", os.O_WRONLY).close()
    assert "s" in q.group.streams
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o1666)
    q.at("s", os.O_WRONLY).close()
    assert "s" not in q.group.streams


def test_a_token_to_write_may_make_one() -> None:
    q = Queues()
    q.tree.setattr(ROOT, q.group, mode=0o777)
    user = attrs.evolve(ANNA, grant=Grant(ANNA.uid, "7f3a", "write", ("g",)))
    with pytest.raises(errors.Denied):
        q.tree.create(user, q.group, "plain", 0o666)
    node: Any = q.tree.create(user, q.group, "t", 0o1622)
    handle = q.tree.open(user, node, os.O_RDWR)
    q.at("t", os.O_WRONLY, BERT).write(b"reply")
    with pytest.raises(errors.Denied):
        q.at("t", os.O_RDONLY, BERT)
    handle.close()
