"""`mqfs restore` to a message of a group, and of some groups."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import shutil
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import pytest

import mqfs as library
from mqfs import limits
from mqfs.errors import BadReplica, BadStore, DiskFailed, DiskFull
from mqfs.ninep.client import connection
from mqfs.replica import state
from mqfs.replica.checkpoint import Checkpointer, load
from mqfs.replica.log import Append, NoAnswer, Position, ReplicatedLog, Writer, open_log
from mqfs.replica.objects import FileObjects, ObjectLog
from mqfs.replica.restore import Point, restore
from mqfs.store.check import check
from mqfs.store.disk import Disk
from mqfs.store.replication import LogBytes
from tests.replica.test_servers import Node
from tests.support.batches import frame
from tests.support.campaign import size, tree_seed
from tests.support.eventually import HANG_S
from tests.support.server import mqfs, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
ROUNDS = 8  # of writes, until the server ends
LARGE = 340_000  # bytes of a body; of a batch of three no frame has all


@attrs.define
class Written:
    """What a primary wrote: in `a/b` batches of a stream, and beside each one message in `other`."""

    url: str
    batches: list[list[tuple[int, bytes]]]  # sequence and body

    def expected(self, sequence: int) -> list[bytes]:
        """What `a/b` has up to that message, with the rest of its batch."""
        return [body for batch in self.batches if batch[0][0] <= sequence for _, body in batch]


def checkpoint(node: Node, url: str) -> None:
    """Make one of a server that has ended."""
    found = state.read(str(node.store))
    assert found is not None
    log = open_log(url)
    Checkpointer(log, str(node.store)).make(found.position, found.have)
    log.close()


@pytest.fixture(scope="module")
def written() -> Iterator[Written]:
    """With two checkpoints on the way; the group was called something else first, and is renamed again later."""
    rng, bodies = random.Random(tree_seed()), list[list[bytes]]()
    with short_folder() as folder:
        url = f"file://{folder}/log"
        with Node.of(folder, url) as node:
            with node.connect() as client:
                for path in ("a/c", "other", "removed/inside"):
                    client.group(path, create=True, ctl=["replay all", "sync replica"])
            for part in range(3):
                with connection.connect(node.address, timeout=HANG_S, msize=1 << 20) as files:
                    if part == 1:
                        files.rename("a/c", "b")
                    with files.open("a/c/.batch" if not part else "a/b/.batch", "w") as batch:
                        if not part:
                            files.create("a/c/s").close()
                            files.create("other/s").close()
                        with files.open("other/s", "w") as other:
                            for number in range(ROUNDS):
                                body = rng.randbytes(LARGE if number == 5 else 100)
                                count = 3 if number in (5, ROUNDS - 1) else rng.choice([1, 1, 3])
                                bodies.append([b"%d.%d.%d " % (part, number, at) + body for at in range(count)])
                                batch.write(b"".join(frame("s", one) for one in bodies[-1]))
                                other.write(b"%d" % len(bodies))
                assert node.stop() == 0
                if part < 2:
                    checkpoint(node, url)
                node.start()
            with node.connect() as client:
                found = iter([(message.sequence, message.body) for message in client.group("a/b").history()])
                client.remove_group("removed", recursive=True)
            yield Written(url, [[next(found) for _ in batch] for batch in bodies])


def bodies_of(path: Path, group: str) -> list[bytes]:
    with library.open(path) as client:
        return [message.body for message in client.group(group).history()]


def test_a_restore_ends_with_a_message(written: Written, tmp_path: Path) -> None:
    log = open_log(written.url, create=False)
    every = [sequence for batch in written.batches for sequence, _ in batch]
    for sequence in random.Random(tree_seed()).sample(every, size(len(every), 8)):
        group, path = ("a/c" if sequence < written.batches[ROUNDS][0][0] else "a/b"), tmp_path / f"r{sequence}"
        try:
            restore(log, str(path), Point(group=group, sequence=sequence))
            expected = written.expected(sequence)
            renamed = len(expected) == sum(map(len, written.batches[:ROUNDS]))  # before the next message
            assert bodies_of(path, "a/b" if renamed else group) == expected
            others = [int(body) for body in bodies_of(path, "other")]
            count = sum(batch[0][0] <= sequence for batch in written.batches)
            assert others == list(range(1, len(others) + 1))
            assert count - 1 <= len(others) <= count + 1, "as they were when that message was written"
            assert check(str(path), report=print) == 0
        except AssertionError as error:
            raise AssertionError(f"at {group}:{sequence}, seed {tree_seed()}: {error}") from None
    log.close()


def test_a_restore_to_any_message_of_the_last_batch_has_all_of_it(written: Written, tmp_path: Path) -> None:
    log = open_log(written.url, create=False)
    for sequence, _ in written.batches[-1]:
        restore(log, str(tmp_path / f"r{sequence}"), Point(group="a/b", sequence=sequence))
        assert bodies_of(tmp_path / f"r{sequence}", "a/b") == written.expected(sequence)
    log.close()


def test_a_restore_of_groups_leaves_out_the_others(written: Written, tmp_path: Path) -> None:
    done = mqfs("restore", written.url, "part", "--group", "/a/b/", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("part: 3 groups, up to frame ")
    with library.open(tmp_path / "part") as client:
        assert client.group("").groups() == ["a"]
        assert client.group("a").groups() == ["b"]
        assert [message.body for message in client.group("a/b").history()] == written.expected(1 << 60)
        client.group("a/b", ctl=["sync always"])
        assert client.group("a/b").publish("s", b"").sequence > 1 << 32
        client.group("a/new", create=True)
    done = mqfs("restore", written.url, "both", "--group", "a", "--group", "other", "--until", "a/b:100", cwd=tmp_path)
    assert "not in the log (expected at most" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--until", "a/x:1"], "unknown group 'a/x'"),
        (["--until", "a/b:99999"], "--until a/b:99999: not in the log (expected at most "),
        (["--until", "nonsense"], "invalid time (expected @UNIX-SECONDS, @2026-01-31T12:00:00 or GROUP:SEQUENCE)"),
        (["--until", "@nonsense:1"], "invalid time"),
        (["--group", "a/c"], "--group a/c: unknown group 'a/c' (expected one of a a/b other"),
    ],
)
def test_a_point_that_is_not_there_is_one_line(
    written: Written, tmp_path: Path, options: list[str], words: str
) -> None:
    done = mqfs("restore", written.url, "out", *options, cwd=tmp_path)
    assert done.returncode != 0
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("step", ["allocate", "fdatasync"])
def test_a_restore_whose_sequences_are_not_reserved_fails_and_leaves_no_store(
    written: Written, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients that saw later messages would see their numbers again. Until then no server begins with it."""
    path, kept, allocate, sync = tmp_path / "r", list[bool](), os.posix_fallocate, os.fdatasync

    def reserve(self: Disk, fd: int, position: int, length: int) -> None:
        kept.append(not (path / "mqfs").exists())
        if step == "allocate" and len(kept) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, position, length)

    def fail(fd: int) -> None:
        if step == "fdatasync" and len(kept) >= 3:
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    monkeypatch.setattr(Disk, "allocate", reserve)
    monkeypatch.setattr(Disk, "fdatasync", staticmethod(fail))
    words = f"{path}: " + ("no room on the disk" if step == "allocate" else "[Errno 5] Input/output error")
    log = open_log(written.url)
    with pytest.raises((DiskFull, DiskFailed)) as failed:
        restore(log, str(path), Point())
    log.close()
    assert str(failed.value) == words
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []  # nor another line
    assert all(kept)
    assert not list(path.iterdir())


def test_a_message_before_all_that_the_log_has_is_refused(written: Written, tmp_path: Path) -> None:
    """Its first frames and the checkpoint before it are gone."""
    shutil.copytree(written.url.removeprefix("file://"), tmp_path / "log")
    log = open_log(f"file://{tmp_path}/log")
    older, newer = log.objects.list("checkpoint/")
    log.objects.delete(older)
    made = load(log, newer)
    assert made is not None
    log.trim(made.position.number)
    with pytest.raises(BadReplica, match="begins after that point"):
        restore(log, str(tmp_path / "r"), Point(group="a/b", sequence=written.batches[1][0][0]))
    assert not (tmp_path / "r").exists() or not list((tmp_path / "r").iterdir())
    log.close()


def backup(tmp_path: Path, written: Written) -> dict[str, bytes]:
    """Another store, and what is in its files."""
    log = open_log(written.url)
    restore(log, str(tmp_path / "backup"), Point())
    log.close()
    return files_of(tmp_path / "backup")


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_restore_without_an_answer_removes_nothing_that_came_meanwhile(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it waits for the engine a backup is copied to that directory."""
    path, expected = tmp_path / "r", backup(tmp_path, written)

    def copy(self: ObjectLog, after: int) -> None:
        shutil.copytree(tmp_path / "backup", path, dirs_exist_ok=True)
        raise NoAnswer("timed out")

    monkeypatch.setattr(limits, "REPLICA_RESTORE_S", 0.0)
    monkeypatch.setattr(ObjectLog, "newest", copy)
    log = open_log(written.url)
    with pytest.raises(BadReplica, match="not restored: timed out"):
        restore(log, str(path), Point())
    log.close()
    assert files_of(path) == expected


def test_a_store_that_came_while_a_restore_read_stays_as_it_is(written: Written, tmp_path: Path) -> None:
    path, expected, seen = tmp_path / "r", backup(tmp_path, written), list[int]()

    def copy(number: int) -> None:
        if not seen:
            shutil.copytree(tmp_path / "backup", path, dirs_exist_ok=True)
        seen.append(number)

    log = open_log(written.url)
    with pytest.raises(BadStore, match="not empty"):
        restore(log, str(path), Point(), progress=copy)
    log.close()
    assert len(seen) > 0
    assert files_of(path) == expected
    assert not (path / "restore").exists()


def test_where_a_restore_is_under_way_no_other_one_begins_and_no_server(written: Written, tmp_path: Path) -> None:
    path, refused = tmp_path / "r", list[str]()

    def begin(number: int) -> None:
        if not refused:
            log = open_log(written.url)
            with pytest.raises(BadStore) as error:
                restore(log, str(path), Point())
            log.close()
            refused.append(str(error.value))
            done = mqfs("serve", "--store", str(path), "--listen", f"unix!{tmp_path}/s", cwd=tmp_path)
            refused.append(done.stderr)

    log = open_log(written.url)
    restore(log, str(path), Point(), progress=begin)
    log.close()
    assert refused[0] == f"{path}: not empty (expected a new directory)"
    assert f"{path}: not empty and not a store" in refused[1]
    assert bodies_of(path, "a/b") == written.expected(1 << 60)
    assert sorted(name.name for name in path.iterdir()) == ["buckets", "lock", "mqfs", "quarantine", "staging"]


def test_a_restore_that_fails_says_what_it_could_not_remove(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, unlink = tmp_path / "r", os.unlink

    def refuse(name: str) -> None:
        if name == f"{path}/restore/mqfs":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(name)

    monkeypatch.setattr(Disk, "unlink", staticmethod(refuse))
    log = open_log(written.url)
    with pytest.raises(BadReplica) as failed:
        restore(log, str(path), Point(), ["nope"])
    log.close()
    assert "--group nope: unknown group" in str(failed.value)
    assert str(failed.value).endswith(f" ({path}/restore stays: Read-only file system)")
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("name", ["staging", "buckets", "quarantine", "mqfs"])
def test_a_restore_that_cannot_be_put_in_place_leaves_nothing(
    written: Written, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename = tmp_path / "r", os.rename

    def refuse(old: str, new: str) -> None:
        if new == f"{path}/{name}":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    monkeypatch.setattr(Disk, "rename", staticmethod(refuse))
    log = open_log(written.url)
    with pytest.raises(DiskFailed, match="Input/output error"):
        restore(log, str(path), Point())
    log.close()
    assert not list(path.iterdir())


# ------------------------------------------------------------ what is damaged, or not there yet


def copied(written: Written, tmp_path: Path) -> ReplicatedLog:
    """The log in another place, where it may be damaged."""
    shutil.copytree(written.url.removeprefix("file://"), tmp_path / "log")
    return open_log(f"file://{tmp_path}/log")


def damage(log: ReplicatedLog, name: str, what: str) -> None:
    """One checkpoint: itself, or a part that only it has."""
    if what == "it is unreadable":
        log.objects.put(name, b"{}")
        return
    others = {part for other in log.objects.list("checkpoint/") if other != name for part in parts(log, other)}
    part = next(part for part in parts(log, name) if part not in others)
    if what == "a part is missing":
        log.objects.delete(part)
    else:
        log.objects.put(part, b"x")


def parts(log: ReplicatedLog, name: str) -> list[str]:
    made = load(log, name)
    return [] if made is None else [part.name for segment in made.segments for part in segment.parts]


@pytest.mark.parametrize("what", ["a part is missing", "a part has other bytes", "it is unreadable"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_restore_begins_with_an_older_checkpoint_where_the_newest_is_damaged(
    written: Written, tmp_path: Path, what: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where both are, with the first frame."""
    log = copied(written, tmp_path)
    names = list(reversed(log.objects.list("checkpoint/")))[:count]
    for name in names:
        damage(log, name, what)
    restore(log, str(tmp_path / "r"), Point())
    assert bodies_of(tmp_path / "r", "a/b") == written.expected(1 << 60)
    assert check(str(tmp_path / "r"), report=print) == 0
    lines = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert [name for name, line in zip(names, lines, strict=True) if f" {name} is not used" in line] == names
    oldest = log.objects.list("checkpoint/")[0]
    log.trim(int(oldest[11:31]))
    if count == 2:  # no other begin is there
        with pytest.raises(BadReplica, match=r"missing|wrong check sum|unreadable"):
            restore(log, str(tmp_path / "s"), Point())
        assert not list((tmp_path / "s").iterdir())
    log.close()


class Silence:
    """An engine that does not answer some of the calls of one kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: type, name: str, calls: range) -> None:
        self.calls, call, count = 0, getattr(engine, name), itertools.count()

        def answer(*arguments: Any) -> Any:
            if next(count) in calls:
                self.calls += 1
                raise NoAnswer("timed out")
            return call(*arguments)

        monkeypatch.setattr(engine, name, answer)


@pytest.mark.parametrize(("engine", "name"), [(ObjectLog, "newest"), (ObjectLog, "read"), (FileObjects, "get")])
@pytest.mark.parametrize("begin", [0, 3])
def test_a_restore_waits_for_an_engine_that_does_not_answer(
    written: Written, tmp_path: Path, engine: type, name: str, begin: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    log = open_log(written.url)
    begin = begin if name == "get" else 0  # the others are called once or twice
    silence = Silence(monkeypatch, engine, name, range(begin, begin + 3))
    restore(log, str(tmp_path / "r"), Point())
    log.close()
    assert silence.calls == 3
    assert bodies_of(tmp_path / "r", "a/b") == written.expected(1 << 60)
    assert f"{log.name}: no answer: timed out; tried again for 60 s" in caplog.messages


def test_a_restore_fails_where_the_engine_does_not_answer_any_more(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPLICA_RESTORE_S", 0.3)
    silence = Silence(monkeypatch, ObjectLog, "read", range(1, 1 << 30))
    log = open_log(written.url)
    with pytest.raises(BadReplica, match="not restored: timed out"):
        restore(log, str(tmp_path / "r"), Point())
    log.close()
    assert silence.calls > 2
    assert not list((tmp_path / "r").iterdir())


def append(log: ReplicatedLog, entries: list[LogBytes], *, more: bool) -> Position:
    """Append a frame as the primary would; returns where the log ended before."""
    last = log.newest(0)
    assert last is not None
    reader = Position()
    while records := log.read(reader.number, 0.0):
        for record in records:
            reader.advance(record)
    before = attrs.evolve(reader)
    assert before.store is not None
    writer = Writer(reader, before.store, uuid.uuid4())
    writer.is_owner = True
    writer.append(entries, before.time_ns + 10**9, more=more)
    request = writer.request
    assert isinstance(request, Append)
    log.append(request.data, request.after, request.own, takeover=False)
    return before


def test_a_result_says_what_of_the_log_is_not_restored(written: Written, tmp_path: Path) -> None:
    log = copied(written, tmp_path)
    before = append(log, [LogBytes(1 << 20, 1, 0, b"the rest comes later")], more=True)
    second, after = before.time_ns // 10**9, before.time_ns + 10**6
    batch = f"; without frames {before.number + 1} to {before.number + 1}, a batch whose end is not in the log"
    end = "; the time of --until is not reached: the log ends before it"
    for name, until, missed in [
        ("all", [], batch),
        ("later", ["--until", f"@{second + 3600}"], batch + end),
        ("here", ["--until", f"@{after // 10**9}.{after % 10**9:09d}"], ""),
        ("message", ["--until", f"a/b:{written.batches[-1][-1][0]}"], ""),
    ]:
        done = mqfs("restore", f"file://{tmp_path}/log", name, *until, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        at = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert done.stdout.partition(" groups, ")[2] == f"up to frame {before.number} of {at}{missed}\n"
    log.close()


def test_a_group_whose_newest_segment_is_not_whole_is_restored_without_it(
    written: Written, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes to quarantine/, and the one before it was sealed."""
    log, path = copied(written, tmp_path), tmp_path / "r"
    restore(log, str(tmp_path / "all"), Point())
    numbers = [int(file.parent.name) for file in (tmp_path / "all").glob("buckets/*/*/*.log")]
    for number in numbers:
        append(log, [LogBytes(number, 1 << 20, 0, b"no state" * 8)], more=False)
    done = restore(log, str(path), Point())
    log.close()
    assert done.groups == len(numbers)
    assert len(list((path / "quarantine").iterdir())) == len(numbers)
    assert caplog.text.count("its newest segment is not whole and was left out") == len(numbers)
    assert bodies_of(path, "a/b") == written.expected(1 << 60)
    assert check(str(path), report=print) == 0
    with library.open(path) as client:
        client.group("a/b", ctl=["sync always"])
        assert client.group("a/b").publish("s", b"new").sequence > 1 << 32
    assert bodies_of(path, "a/b") == [*written.expected(1 << 60), b"new"]
