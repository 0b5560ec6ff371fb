"""The receipt (`kept`) of a message whose id is known: that of the message, whatever the repeat says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mqfs.model import Wait
from tests.support.hand import ROOT
from tests.support.queues import Queues
from tests.support.temp_store import damage

SECOND = 10**9


def receipt(q: Queues, stream: str = "s", **keys: Any) -> list[int]:
    handle = q.at(".put", os.O_RDWR)
    try:
        assert not isinstance(handle.write(json.dumps({"stream": stream, "kept": True, **keys}).encode() + b" x"), Wait)
        return [int(word) for word in handle.read(200).split()]
    finally:
        handle.close()


WAYS: dict[str, dict[str, Any]] = {
    "at once": {}, "with a ttl": {"ttl": "9m"}, "with headers": {"headers": {"a": "b"}}, "for one": {"single": True},
    "delayed": {"delay": "20s"}, "delayed, with a ttl": {"delay": "20s", "ttl": "9m"},
    "delayed, for one": {"delay": "20s", "single": True},
}  # fmt: skip


@pytest.mark.parametrize("first", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("again", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("after_s", [3, 40])
@pytest.mark.parametrize("lines", [("replay all",), ("replay all", "ttl 1h"), ("deliver one",)], ids=" ".join)
def test_of_a_repeat(lines: tuple[str, ...], first: dict[str, Any], again: dict[str, Any], after_s: int) -> None:
    q = Queues("dedup 1h", *lines)
    q.stream("t")
    wanted = receipt(q, id="x", **first)
    assert wanted[3] == 0
    q.pass_time(after_s)
    for stream in "st":
        found = receipt(q, stream, id="x", **again)
        assert found == [*wanted[:3], 1, wanted[4]]
    assert q.kept("t") == []


def test_of_one_for_nobody() -> None:
    q = Queues("replay off")
    assert receipt(q, id="x")[4] == 0
    assert receipt(q, id="x", delay="5s")[4] == 0
    assert receipt(q, id="y", delay="5s")[4] == 1
    assert receipt(q, id="y")[4] == 1
    q.pass_time(9)
    assert receipt(q, id="y")[4] == 0, "it came, and no one was there"


@pytest.mark.parametrize("delay", [{}, {"delay": "1h"}], ids=["at once", "delayed"])
def test_of_one_whose_message_is_gone_or_damaged(tmp_path: Path, delay: dict[str, Any]) -> None:
    q = Queues("replay all", "dedup 1h", path=tmp_path / "store")
    sequence, *_ = receipt(q, id="x", headers={"mark": "find me"}, **delay)
    q.restart()
    damage(tmp_path / "store", b"find me")
    for again in ({}, {"delay": "5s"}):
        assert receipt(q, id="x", **again) == [sequence, 0, 0, 1, 0]
    assert receipt(q, id="y")[3] == 0
    q.tree.unlink(ROOT, q.group, "s")
    q.stream("s")
    assert receipt(q, id="y")[3:] == [1, 0]
