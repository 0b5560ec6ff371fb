"""The files of `mqfs mount` are those of `mqfs serve --mount`: the same calls on both have the same answers."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fuse.served_by import WRITE, Child, calls
from tests.fuse.test_interrupts import WRITER
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, Server, short_folder, unmount

pytestmark = pytest.mark.process
numbers = itertools.count(1)


class Place(NamedTuple):
    """A new group, seen through one of the mounts. `near`: the same through the server's own."""

    group: Path
    near: Path

    def kept(self, stream: str = "s") -> bytes:
        return (self.near / ".kept" / stream).read_bytes()

    def say(self, *lines: str) -> None:
        """Write commands to ctl, where the server is."""
        (self.near / "ctl").write_text("".join(f"{line}\n" for line in lines))


def end(*servers: Server) -> None:
    """Whoever hangs on a mount of theirs is free then."""
    for server in servers:
        server.process.kill()


@pytest.fixture(scope="module")
def mounts() -> Iterator[list[Path]]:
    """The mount of a server, and one of `mqfs mount` of that server."""
    with short_folder() as folder, Server.at(folder, mount=True) as server:
        elsewhere = folder / "elsewhere"
        (folder / "mount").mkdir()
        elsewhere.mkdir()
        words = [*COMMAND, "mount", server.address, str(elsewhere)]
        guard = None
        try:
            with Server(cwd=folder / "mount", program=words) as mount:
                guard = threading.Timer(HANG_S, partial(end, mount, server))
                guard.start()
                yield [server.path, elsewhere]
        finally:
            if guard is not None:
                guard.cancel()
            unmount(elsewhere)


@pytest.fixture
def on_both(mounts: list[Path]) -> Callable[..., list[Any]]:
    """Run a scene in a group of its own on each mount; what came of it on both."""

    def run(scene: Callable[[Place], Any], *ctl: str) -> list[Any]:
        found = []
        for path in mounts:
            name = f"g{next(numbers)}"
            place = Place(path / name, mounts[0] / name)
            place.near.mkdir()
            place.say("replay all", *ctl)
            (place.near / "s").touch()
            found.append(scene(place))
        return found

    return run


def answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns; the name of its error."""
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


# ------------------------------------------------------------ whole lines

BLOCK = ("data line", "depth 2", "full block")


def fill(place: Place) -> None:
    """Until it has no room."""
    assert (place.near / "s").write_bytes(b"a\nb\n") == 4


@pytest.mark.parametrize("data", [b"c\n", b"c\nd\n"], ids=["one", "two"])
def test_a_signal_ends_a_write_of_lines_that_waits_for_room(on_both: Callable[..., list[Any]], data: bytes) -> None:
    def scene(place: Place) -> tuple[str, bytes]:
        fill(place)
        program = WRITER + f"print(errno.errorcode[-alarmed(write, {data!r})])\n"
        with Child(place.group, program + f"write({data!r})") as child:
            said = child.line()
            eventually(lambda: calls(child.process.pid, WRITE))
            child.process.send_signal(signal.SIGKILL)
            child.process.wait(HANG_S)
        place.say("clear s")
        (place.group / "s").write_bytes(b"later\n")
        return said, place.kept()

    assert on_both(scene, *BLOCK) == 2 * [("EINTR", b"later\n")]


@pytest.mark.parametrize("data", [b"c\n", b"c\nd\n", b"c\nd\nrest"], ids=["one", "two", "rest"])
def test_a_write_of_lines_that_does_not_wait_is_refused_at_once(on_both: Callable[..., list[Any]], data: bytes) -> None:
    def scene(place: Place) -> tuple[str, bytes]:
        fill(place)
        fd = os.open(place.group / "s", os.O_WRONLY | os.O_NONBLOCK)
        said = answer(os.write, fd, data)
        place.say("clear s")
        assert os.write(fd, b"later\n") == 6
        os.close(fd)
        return said, place.kept()

    assert on_both(scene, *BLOCK) == 2 * [("EAGAIN", b"later\n")]


@pytest.mark.parametrize("before", [b"", b"half "], ids=["whole", "unfinished"])
@pytest.mark.parametrize("data", [b"1\n2\n3\n", b"1\n2\n3\n4"], ids=["lines", "rest"])
def test_a_refused_write_of_lines_keeps_none_of_them(
    on_both: Callable[..., list[Any]], before: bytes, data: bytes
) -> None:
    """So a program that writes the same again doubles nothing; the unfinished line before it is as it was."""

    def scene(place: Place) -> tuple[Any, ...]:
        fill(place)
        with open(place.group / "s", "wb", buffering=0) as file:
            if before:
                file.write(before)
            refused = [answer(file.write, data), answer(file.write, data)]
            place.say("clear s")
            taken = answer(file.write, data)
        refusals = [json.loads(line)["text"] for line in (place.near / ".errors").read_text().splitlines()]
        eventually(lambda: place.kept().endswith(data[-1:]), "the last line, which is written after the close")
        return refused, taken, place.kept(), refusals

    full = "stream 's': depth reached with 2 messages, 4 bytes"
    assert on_both(scene, "data line", "depth 4", "full reject") == 2 * [
        (["ENOSPC", "ENOSPC"], len(data), before + data, [full, full])
    ]


def test_a_write_of_lines_is_seen_whole_or_not_at_all(on_both: Callable[..., list[Any]]) -> None:
    """The messages of one write lie next to each other."""

    def scene(place: Place) -> list[tuple[int, str]]:
        (place.group / "s").write_bytes(b"".join(b"%d\n" % number for number in range(100)))
        with open(place.near / ".cursor", "r+b", buffering=0) as cursor:
            cursor.write(b"seek first\nformat json\n")
            found = [json.loads(cursor.read(4096)) for _ in range(100)]
        first = found[0]["sequence"]
        return [(one["sequence"] - first, one["body"]) for one in found]

    here, elsewhere = on_both(scene, "data line")
    assert elsewhere == here


def test_lines_of_more_than_a_message_are_written_in_pieces(on_both: Callable[..., list[Any]]) -> None:
    """A program that continues after a short count, as all of coreutils do, writes each line once."""
    lines = b"".join(b"%d\n" % number for number in range(100_000))

    def scene(place: Place) -> bool:
        with open(place.group / "s", "wb", buffering=0) as file:
            file.write(bytes(900_000))
            rest = b"\n" + lines + b"end"
            while rest:
                rest = rest[file.write(rest) :]
        eventually(lambda: place.kept().endswith(b"end"), "the last line, which is written after the close")
        return place.kept() == bytes(900_000) + b"\n" + lines + b"end"

    assert on_both(scene, "data line") == [True, True]


# ------------------------------------------------------------ commands and their answers


class Session:
    """An open `.cursor` or consumer, which does not wait."""

    def __init__(self, place: Place, file: str) -> None:
        self.fd = os.open(place.group / file, os.O_RDWR | os.O_NONBLOCK)

    def write(self, data: bytes) -> Any:
        return answer(os.write, self.fd, data)

    def read(self, count: int = 4096) -> Any:
        return answer(os.read, self.fd, count)


STEPS: dict[str, list[bytes | int]] = {  # what is written, and how many bytes are read
    "refused, then the rest of its line": [b"bogus\nformat js", 4096, b"on\n", 4096, 4096],
    "refused, then another line": [
        b"bogus\nformat js",
        4096,
        b"format line\n",
        4096,
        b"bogus",
        b"\n",
        4096,
        b"x",
        b"y\n",
    ],
    "too much at once": [b"info\n" * 20_000, 4096, b"format json\n", 4096],
    "too much with the line before it": [b"x" * 40_000, b"x" * 40_000, 4096, b"format json\n", 4096],
    "info within a message": [b"seek first\n", 4, b"info\n", 4096, 4096, 4096],
    "info in pieces": [b"seek first\n", 4, b"info\n", 5, 7, 4096, 3, 4096],
    "a refusal within a message": [b"seek first\n", 4, b"seek nonsense\n", 4096, 4096, 4096],
    "a refusal in pieces": [b"seek first\n", 4, b"seek nonsense\n", 5, 5, 4096, 2, 4096],
    "a reason within an answer": [b"seek first\n", 4, b"info\n", 5, b"bogus\n", 4, 4096, 4096, 4096, 4096],
    "a reason within a reason": [b"seek first\n", 4, b"bogus\n", 5, b"seek nonsense\n", 4096, 4096, 4096],
    "an answer within a reason": [b"seek first\n", 4, b"bogus\n", 5, b"info\n", 4096, 4096, 4096, 4096],
    "an answer within an answer": [b"seek first\n", 4, b"selected\n", 5, b"info\n", 4096, 4096, 4096],
    "a select within a message": [b"seek first\n", 4, b"select s\n", 4096, 4096, 4096],
    "a cover within a message": [b"seek first\n", 4, b"cover s\n", 4096, 4096, 4096],
    "a format within a message": [b"seek first\n", 4, b"format json\n", 4096, 4096],
    "an until within a message": [b"seek first\n", 4, b"until 1\n", 4096, 4096],
    "both, the reason first": [b"seek first\n", 4, b"info\n", b"bogus\n", 4096, 4096, 4096, 4096],
    "two refusals, of which the last one counts": [
        b"seek first\n",
        4,
        b"bogus\n",
        b"seek nonsense\n",
        4096,
        4096,
        4096,
    ],
    "info and a seek": [b"seek first\n", 4, b"info\nseek first\n", 4096, 4096],
    "info, and a seek in the next write": [b"seek first\n", 4, b"info\n", b"seek last\n", 4096, 4096],
    "answers that are made": [b"seek first\n", 4, b"streams\n", 9, 4096, 4096, b"selected\n", 4096, 4096],
    "a measure": [b"seek first\n", 4, b"measure 1\n", 4096, 4096, 4096],
    "info without a message": [b"info\n", 4096, 4096],
    "each": [b"format each\n", 4, b"info\n", 4096, 4096, 4096, 4096],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("file", [".cursor", ".consumers/c"])
def test_commands_are_answered_at_the_next_read(
    on_both: Callable[..., list[Any]], file: str, steps: list[bytes | int]
) -> None:
    def scene(place: Place) -> list[Any]:
        for body in (b"abcdefghij\n", b"second\n"):
            (place.near / "s").write_bytes(body)
        (place.near / ".consumers" / "c").touch()
        session = Session(place, file)
        done = [session.write(step) if isinstance(step, bytes) else session.read(step) for step in steps]
        os.close(session.fd)
        return [re.sub(rb'"group": \d+|time"?[ :][\d.]+', b"", one) if isinstance(one, bytes) else one for one in done]

    here, elsewhere = on_both(scene)
    assert elsewhere == here


@pytest.mark.parametrize("command", [b"seek first\n", b"format record\nseek first\n"], ids=["seek", "format"])
def test_names_that_were_not_read_come_again(on_both: Callable[..., list[Any]], command: bytes) -> None:
    """A mount has the whole answer of its server, and drops what its reader did not read."""

    def scene(place: Place) -> list[bool]:
        (place.near / "stream-of-that-name").write_bytes(b"body\n")
        session = Session(place, ".cursor")
        session.write(b"format record\nseek first\n")
        begun = session.read(8)
        session.write(command)
        again = session.read()
        os.close(session.fd)
        return [b"stream-of-that-name" in one for one in (begun, again)]

    assert on_both(scene) == [[False, True], [False, True]]


# ------------------------------------------------------------ messages that were removed


def expire(place: Place) -> None:
    place.say("ttl 10ms")
    eventually(lambda: place.kept() == b"", "the end of the ttl")


REMOVALS: dict[str, Callable[[Place], object]] = {
    "ttl": expire,
    "clear": lambda place: place.say("clear"),
    "drop": lambda place: place.say("drop s 9 10 11 12 13 20"),
    "depth": lambda place: place.say("full drop-old", "depth 12"),
    "remove": lambda place: (place.near / "s").unlink(),
    "replay": lambda place: place.say("replay off"),
    "more": lambda place: (place.near / "s").write_bytes(b"more"),
    "nothing": lambda place: None,
}


AGE_S = 0.15  # as long as a mount may have a message, and not something waited for


def drain(fd: int, most: int = 100) -> list[Any]:
    """All that is there."""
    found: list[Any] = []
    while len(found) < most and (one := answer(os.read, fd, 64)) not in ("EAGAIN", b""):
        found.append(one)
    return found


@pytest.mark.parametrize("how", REMOVALS)
@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("s", "replay all"),
        ("order", "replay all"),
        ("v", "replay all"),
        ("s", "replay off, ttl 1h"),
        ("v", "replay off, depth 1000"),
    ],
)
def test_a_reader_that_paused_gets_what_is_there_then(
    on_both: Callable[..., list[Any]], file: str, settings: str, how: str
) -> None:
    """Whatever a mount asked for before the reader wanted it."""

    def scene(place: Place) -> tuple[Any, ...]:
        place.say(*settings.split(", "))
        fd = os.open(place.group / file, os.O_RDONLY)
        with open(place.near / "s", "wb", buffering=0) as stream:
            for number in range(40):
                stream.write(b"%d" % number)
        first = [os.read(fd, 64) for _ in range(8)]
        os.set_blocking(fd, False)
        REMOVALS[how](place)
        time.sleep(AGE_S)
        with select.epoll() as poll:
            poll.register(fd, select.EPOLLIN)
            is_there = file == "s" or bool(poll.poll(0))
        rest = drain(fd, 1)
        if how == "depth":  # a loss is reported once
            time.sleep(AGE_S)
        rest += drain(fd) if rest else []
        assert is_there or not rest
        later: list[Any] = []
        if how == "remove" and file == "s":
            later = [os.read(fd, 64)]
        elif how != "ttl":
            (place.near / "s").write_bytes(b"last")
            later = eventually(partial(drain, fd), "what is written then")
        os.close(fd)
        return first, rest, later

    here, elsewhere = on_both(scene, "bind v #")
    assert elsewhere == here


@pytest.mark.parametrize("setting", ["ttl 1h", "depth 1000"])
def test_a_reader_that_polls_has_one_message_ahead(on_both: Callable[..., list[Any]], setting: str) -> None:
    """Where the server keeps for it only what it was not given."""

    def scene(place: Place) -> tuple[Any, ...]:
        place.say("replay off", setting)
        fd = os.open(place.group / "s", os.O_RDONLY | os.O_NONBLOCK)
        with select.epoll() as poll:
            poll.register(fd, select.EPOLLIN)
            with open(place.near / "s", "wb", buffering=0) as stream:
                for number in range(4):
                    stream.write(b"%d" % number)
            eventually(lambda: poll.poll(0), "a message")
        first = os.read(fd, 64)
        time.sleep(AGE_S)
        REMOVALS["clear"](place)
        rest = drain(fd)
        os.close(fd)
        return first, rest

    here, elsewhere = on_both(scene)
    assert elsewhere == here == (b"0", ["EPIPE"])


def test_a_reader_that_polls_loses_nothing_by_another_replay(on_both: Callable[..., list[Any]]) -> None:
    """The server has removed by then what the mount has."""

    def scene(place: Place) -> list[Any]:
        fd = os.open(place.group / "s", os.O_RDONLY)
        with open(place.near / "s", "wb", buffering=0) as stream:
            for number in range(40):
                stream.write(b"%d" % number)
        first = [os.read(fd, 64) for _ in range(8)]
        REMOVALS["replay"](place)
        REMOVALS["more"](place)
        stats = place.near / ".stats"
        eventually(lambda: json.loads(stats.read_text())["streams"]["s"]["first"] > 8, "the stream to be trimmed")
        time.sleep(AGE_S)
        os.set_blocking(fd, False)
        with select.epoll() as poll:
            poll.register(fd, select.EPOLLIN)
            eventually(lambda: poll.poll(0), "a message")
        rest = drain(fd)
        os.close(fd)
        return first + rest

    assert on_both(scene) == 2 * [[*(b"%d" % number for number in range(40)), b"more"]]


def test_a_writer_waits_for_what_the_reader_has_not_read(on_both: Callable[..., list[Any]]) -> None:
    """`full block` counts what was read, not what a mount asked for."""

    def scene(place: Place) -> int:
        reader = os.open(place.group / "s", os.O_RDONLY)
        writer = os.open(place.near / "s", os.O_WRONLY | os.O_NONBLOCK)
        while answer(os.write, writer, b"x") == 1:
            pass
        for _ in range(8):
            os.read(reader, 64)
        written = 0
        while answer(os.write, writer, b"x") == 1:
            written += 1
        os.close(reader)
        os.close(writer)
        return written

    assert on_both(scene, "replay off", "depth 40", "full block") == [8, 8]
