"""Several reads that wait at one open file: they get what they would have got one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from mqfs.model import Wait
from tests.support.parked import parked
from tests.support.queues import Queues

R, RW = os.O_RDONLY, os.O_RDWR
FILES: dict[str, tuple[str, int, str, str]] = {  # path, flags, commands, lines of ctl
    "stream": ("s", R, "", ""),
    "stream to write, too": ("s", RW, "", ""),
    "order": ("order", R, "", ""),
    "view": ("view", R, "", "bind view s"),
    **{f"cursor {form}": (".cursor", RW, f"format {form}\n", "") for form in ("raw", "each", "record", "json")},
    "cursor until": (".cursor", RW, "until 2\n", ""),
    "coalesce": ("s", RW, "", "data coalesce"),
    "deliver one": ("s", RW, "", "deliver one"),
    "ack read": ("s", RW, "", "deliver one\nack read"),
    **{
        f"consumer {form}": (".consumers/w", RW, f"format {form}\n", "replay all\nconsumer w")
        for form in ("raw", "each", "record", "json")
    },
}
BODIES = b"hello", b"", b"world", b"!"
COUNTS = [(2, 100, 100), (2, 1, 1, 1, 100), (100, 2, 100, 100, 100), (3,) * 12, (1,) * 8]


def opened(kind: str) -> tuple[Queues, Any]:
    path, flags, commands, lines = FILES[kind]
    queues = Queues(*lines.splitlines())
    handle = queues.at(path, flags)
    if commands:
        handle.write(commands.encode())
    return queues, handle


def result(step: Any) -> bytes | None:
    """None: it waits."""
    if isinstance(step, Wait):
        return step.result() if step.settled else None
    return bytes(step)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kind", FILES)
def test_they_get_what_they_would_get_one_after_the_other(kind: str, counts: tuple[int, ...]) -> None:
    queues, handle = opened(kind)
    steps = [handle.read(count) for count in counts]
    for body in BODIES:
        queues.write("s", body)
    steps += [handle.read(1_000) for _ in range(4)]

    queues, handle = opened(kind)
    later: list[bytes] = []
    for body in BODIES:
        queues.write("s", body)
        while len(later) < len(counts) + 4:
            count = [*counts, *[1_000] * 4][len(later)]
            step = handle.read(count)
            if isinstance(step, Wait):
                assert step.cancel()
                break
            later.append(step)
    got = [data for step in steps if (data := result(step)) is not None]
    if kind == "coalesce" or kind.endswith("record"):  # a later read gets several at once
        assert b"".join(got) == b"".join(later)
    else:
        assert got == later
    assert [result(step) for step in steps[: len(got)]] == got, "in the order in which they began to wait"


@pytest.mark.parametrize("kind", ["stream", "stream to write, too", "order", "view", "cursor raw", "cursor each"])
def test_a_short_read_before_others_loses_nothing(kind: str) -> None:
    queues, handle = opened(kind)
    steps = [handle.read(count) for count in (1, 100, 100, 100)]
    queues.write("s", b"hello")
    whole = {"order": b"s\0"}.get(kind, b"hello")
    end = [b""] if kind == "cursor each" else []
    assert [result(step) for step in steps] == [whole[:1], whole[1:], *end, *[None] * (2 - len(end))]


def test_an_offset_inside_the_message_is_given_from_there() -> None:
    queues, handle = opened("stream")
    steps = [handle.read(count, offset) for count, offset in ((2, 0), (2, 2), (100, 4), (100, 8_192))]
    queues.write("s", b"hello")
    assert [result(step) for step in steps] == [b"he", b"ll", b"o", None]
    queues.write("s", b"world")
    assert result(steps[3]) == b"world"


Act = Callable[[Any, list[Any]], object]


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda handle, steps: handle.push_back(b"he"), [b"he", b"hello", b"world", None]),
        (lambda handle, steps: steps[1].cancel(), [b"he", None, b"llo", b"world"]),
        (lambda handle, steps: [step.cancel() for step in steps[1:]], [b"he", None, None, None]),
        (lambda handle, steps: handle.close(), [b"he", b"", b"", b""]),
    ],
    ids=["it gives it back", "it cancels the next", "it cancels all", "it closes the file"],
)
@pytest.mark.parametrize("kind", ["stream to write, too", "cursor raw", "view"])
def test_who_gets_the_first_part_may_change_who_waits(kind: str, act: Act, expected: list[bytes | None]) -> None:
    queues, handle = opened(kind)
    steps = [handle.read(count) for count in (2, 100, 100, 100)]
    steps[0].subscribe(lambda _: act(handle, steps))
    queues.write("s", b"hello")
    queues.write("s", b"world")
    assert [result(step) for step in steps] == expected
    for step in steps:
        assert isinstance(step, Wait)
        step.cancel()
    assert parked(queues.tree) == 0


@pytest.mark.parametrize("kind", ["deliver one", "consumer raw"])
def test_what_a_claim_gives_back_is_for_the_next(kind: str) -> None:
    queues, handle = opened(kind)
    steps = [handle.read(count) for count in (2, 100, 100)]
    steps[0].subscribe(lambda _: handle.push_back(b"he"))
    queues.write("s", b"hello")
    queues.write("s", b"world")
    assert [result(step) for step in steps] == [b"he", b"hello", b"world"]
