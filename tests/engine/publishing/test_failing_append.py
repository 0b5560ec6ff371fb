"""What the log does not take has not happened: memory is as it was, and a start finds the same."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqfs import errors
from mqfs.engine.core.portions import exhaust
from mqfs.engine.files import status
from mqfs.model import Wait
from tests.engine.publishing.test_crash import Lying
from tests.support.batches import frame
from tests.support.campaign import seed
from tests.support.hand import ROOT
from tests.support.lying_disk import LyingDisk, Stopped
from tests.support.temp_store import SMALL, lowered


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    logging.getLogger("mqfs").setLevel(logging.CRITICAL)
    with lowered(**SMALL):
        yield
    logging.getLogger("mqfs").setLevel(logging.NOTSET)


def scene(disk: LyingDisk) -> Lying:
    """Messages, consumers with claims, dead letters, a message for one taker, a delayed one, a part, a view."""
    u = Lying(disk)
    u.ctl("replay off", "sync off", "retries 9", "consumer w s", "consumer v", "consumer back s", "bind view s")
    for name in ("s", "t", "dead"):
        u.stream(name)
    u.write("s", *(b"%d" % number for number in range(6)))
    u.write("t", b"t")
    worker = u.worker("back")
    worker.read(64)
    worker.write(b"dead 1\n")
    u.put(b"only", single=True)
    u.put(b"later", delay="1h")
    u.stage("p", "s", b"staged")
    return u


Deed = Callable[[Lying], Any]


def claiming(command: bytes, count: int = 1) -> Callable[[Lying], Deed]:
    """With messages claimed before: the acks and nacks of them."""

    def prepare(u: Lying) -> Deed:
        worker = u.worker()
        for _ in range(count):
            worker.read(64)
        return lambda u: worker.write(command)

    return prepare


def taking(count: int) -> Callable[[Lying], Deed]:
    def prepare(u: Lying) -> Deed:
        worker = u.worker()
        for _ in range(count):
            worker.read(64)
        return lambda u: worker.read(64)

    return prepare


DEEDS: dict[str, Deed] = {
    "clear one": lambda u: u.ctl("clear s"),
    "clear all": lambda u: u.ctl("clear"),
    "drop": lambda u: u.ctl("drop s 2 4"),
    "drop delayed": lambda u: u.ctl("drop s 10"),
    "depth by count": lambda u: u.ctl("depth 3"),
    "settings": lambda u: u.ctl("ttl 1h", "depth 9", "replay last", "lease 5s", "full reject"),
    "settings and names": lambda u: u.ctl("ttl 1h", "consumer x", "bind more t", "unbind view", "remove v", "clear t"),
    "redrive": lambda u: u.ctl("redrive"),
    "consumer": lambda u: u.ctl("consumer new s"),
    "remove consumer": lambda u: u.ctl("remove back"),
    "remove stream": lambda u: u.tree.unlink(ROOT, u.group, "s"),
    "rename": lambda u: u.tree.rename(ROOT, u.group, "s", u.group, "z"),
    "attributes": lambda u: u.tree.setattr(ROOT, u.group.streams["s"], mode=0o600),
    "put": lambda u: u.put(b"x", id="x", ttl="1h"),
    "put later": lambda u: u.put(b"x", id="x", delay="1h"),
    "commit": lambda u: u.say("commit job.1 p"),
    "write": lambda u: u.write("s", b"new"),
}
CLAIMING: dict[str, Callable[[Lying], Deed]] = {
    "ack": claiming(b"ack\n"),
    "nack": claiming(b"nack 1h\n"),
    "dead": claiming(b"dead\n"),
    "seek": claiming(b"seek 3\n"),
    "claim": taking(0),
    "claim what is for one": taking(6),
    "release what is for one": claiming(b"release\n", 7),
    "close": lambda u: (lambda w: (w.read(64), lambda u: w.close())[1])(u.worker()),
}


def seen(u: Lying, *, claims: bool = True) -> dict[str, Any]:
    """What the group's state is, but for what a start makes of claims."""
    for stream in u.group.numbers.values():
        stream.kept.update_low_watermark()
    own = json.loads(u.group.state.encode())
    named = [row for row in own["consumers"] if row[4]]
    rows = {row[3]: (row[:10], row[10:] if claims else ()) for row in named}
    what = {key: own[key] for key in ("mode", "ctl", "files", "views", "ids", "producers", "next_stream")}
    what["streams"] = [row[:6] for row in own["streams"]]
    what["kept"] = {name: (s.kept.count, s.kept.size) for name, s in u.group.streams.items()}
    what["names"] = [sorted(u.group.streams), sorted(u.group.consumers), sorted(u.group.views)]
    what["ctl"] = exhaust(status.ctl(u.group, ROOT))
    return {**what, "held": len(u.group.held), "consumers": rows}


def attempt(prepare: Callable[[Lying], Deed], number: int, call: int) -> bool:
    """Do it while that call fails; False: it makes fewer."""
    disk = LyingDisk()
    u = scene(disk)
    deed = prepare(u)
    before = seen(u)
    disk.fail_at, disk.fail_with = disk.calls + call, number
    refused = False
    try:
        deed(u)
    except (errors.MqfsError, OSError):
        refused = True
    disk.fail_at = 0
    if refused:
        assert seen(u) == before
    after = seen(u, claims=False)
    again = seen(Lying(disk.after_kill()), claims=False)
    assert again == after, f"refused: {refused}"
    return bool(disk.failed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("what", [*DEEDS, *CLAIMING])
def test_what_the_log_does_not_take_has_not_happened(what: str, number: int) -> None:
    prepare = CLAIMING[what] if what in CLAIMING else lambda u: DEEDS[what]
    call = 1
    while attempt(prepare, number, call):
        call += 1
    assert call > 1


LINES = ("ttl 1h", "depth 4", "replay last", "consumer x t", "consumer w s backlog 3", "bind more t", "bind view t",
         "consumer y more private", "remove v", "clear t", "drop s 3 10", "unbind view", "bind view #.s")  # fmt: skip


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power loss"])
def test_one_write_to_ctl_holds_whole_or_not_at_all_after_a_crash(power: bool) -> None:
    luck = random.Random(seed())
    for call in range(1, 100):
        disk = LyingDisk()
        u = scene(disk)
        u.group.log.upkeep.sync()
        before = seen(u, claims=False)
        disk.stop_at = disk.calls + call
        try:
            u.ctl(*LINES)
        except Stopped:
            disk.stop_at = 0
            found = seen(Lying(disk.after_power_loss(luck) if power else disk.after_kill()), claims=False)
            assert found == before or (found["names"] == names_after() and found["next_stream"] > before["next_stream"])
        else:
            assert call > 1
            assert seen(u, claims=False)["names"] == names_after()
            return


def names_after() -> Any:
    u = scene(LyingDisk())
    u.ctl(*LINES)
    return seen(u)["names"]


# What a message does to those who wait for it: they are served one after the other, and each may record something.
RECEIVERS: dict[str, Deed] = {
    "backlog, oldest": lambda u: u.ctl("consumer bounded s backlog 1 full drop-old"),
    "backlog, newest": lambda u: u.ctl("consumer bounded s backlog 1 full drop-new"),
    "a claim": lambda u: u.worker("claims").read(64),
}


def publish(u: Lying, how: str) -> None:
    if how == "put":
        u.put(b"new", ttl="1h")
    elif how == "batch":
        u.say("commit job.1 p")
    else:
        u.write("s", b"new")


@pytest.mark.parametrize("how", ["write", "put", "batch"])
@pytest.mark.parametrize("receiver", RECEIVERS)
def test_a_write_that_is_in_the_log_is_answered_and_delivered(receiver: str, how: str) -> None:
    for call in range(1, 50):
        disk = LyingDisk()
        u = Lying(disk)
        u.ctl("replay all", "sync off", "consumer claims s")
        u.stream("s")
        u.write("s", b"first")
        if how == "batch":
            u.stage("p", "s", b"new")
        u.worker("claims").read(64)
        RECEIVERS[receiver](u)
        u.ctl("consumer last s")
        last = u.worker("last")
        last.read(64)
        wait = last.read(64)
        before = u.kept()
        disk.fail_at, disk.fail_with = disk.calls + call, errno.ENOSPC
        try:
            publish(u, how)
        except errors.MqfsError:
            assert u.kept() == before
        else:
            assert len(u.kept()) == len(before) + 1
            assert isinstance(wait, Wait)
            assert wait.settled
        if not disk.failed:
            assert call > 1
            return


def test_a_read_of_a_message_for_one_taker_fails_where_the_claim_cannot_be_recorded() -> None:
    """It is written all the same, and the next read takes it."""
    for call in range(2, 50):
        disk = LyingDisk()
        u = Lying(disk)
        u.ctl("replay all", "sync off")
        u.stream("s")
        taker = u.at("s", os.O_RDWR)
        wait, other = taker.read(64), u.at("s").read(64)
        disk.fail_at, disk.fail_with = disk.calls + call, errno.ENOSPC
        u.put(b"only", single=True)
        assert wait.settled
        if not disk.failed:
            assert wait.result() == b"only"
            assert call > 2
            return
        with pytest.raises(errors.DiskFull):
            wait.result()
        assert taker.read(64) == b"only"
        assert not other.settled


BOUNDED = {
    "all": ("replay all",),
    "consumer": ("replay off", "consumer c s"),
    "one": ("deliver one", "full drop-old"),
}
DEPTH = 4


def prepared(u: Lying, lines: tuple[str, ...]) -> None:
    u.ctl("sync off", f"depth {DEPTH}", *lines)
    u.stream("s")
    for number in range(DEPTH):
        u.put(b"%d" % number, key=f"{number}")
    u.stage("p", "s", b"new", b"newer", b"newest")


def say_batch(u: Lying) -> None:
    u.batch(*(frame("s", body) for body in (b"new", b"newer", b"newest")))


WRITES: dict[str, Callable[[Lying], Any]] = {
    "write": lambda u: u.write("s", b"newest"),
    "put": lambda u: u.put(b"newest", ttl="1h"),
    "id": lambda u: u.put(b"newest", id="1"),
    "batch": say_batch,
    "commit": lambda u: u.say("commit job.1 p"),
}


def all_of(u: Lying) -> list[int]:
    """The sequences that are kept, whatever a reader would get."""
    kept = u.group.streams["s"].kept
    kept.update_low_watermark()
    found, sequence = [], kept.state.floor
    while (record := u.group.log.reader.find(kept.number, sequence)) is not None:
        found += [record.sequence] * kept.is_counted(record.sequence)
        sequence = record.sequence + 1
    return found


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("bounded", BOUNDED)
def test_what_the_disk_refuses_takes_nothing_away(bounded: str, write: str, number: int) -> None:
    """With `full drop-old` a message displaces others when the log has it, not before; also after a kill."""
    for call in range(1, 50):
        disk = LyingDisk()
        u = Lying(disk)
        prepared(u, BOUNDED[bounded])
        before = all_of(u)
        assert len(before) == DEPTH
        disk.fail_at, disk.fail_with = disk.calls + call, number
        try:
            WRITES[write](u)
        except errors.MqfsError:
            assert all_of(u) == before
            if number == errno.ENOSPC:
                assert all_of(Lying(disk.after_kill())) == before
        else:
            after = all_of(u)
            new = [sequence for sequence in after if sequence > before[-1]]
            assert new
            assert after[-DEPTH:] == [*before, *new][-DEPTH:], "no more went than the new ones displace"
        if not disk.failed:
            assert call > 1
            assert len(after) == DEPTH
            return
