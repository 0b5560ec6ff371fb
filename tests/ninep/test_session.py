"""The session where dialogues do not reach: waiting for the disk, limits, directories, other users, the end."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from mqfs import limits
from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadFrame, DiskFailed
from mqfs.model import User, Wait
from mqfs.ninep.codec.messages import Dir, Rread, Rreaddir, Twrite
from mqfs.ninep.codec.wire import Reader, encode
from mqfs.ninep.server.pending import both
from tests.support.ninep import ME, META, Line, SlowStore, open_handles
from tests.support.parked import parked

FOR_ALL = (
    "Twstat tag 1 fid 0 stat {type ~ dev ~ qid 0.0.f mode 020000000777 "
    'atime ~ mtime ~ length ~ name "" uid "" gid "" muid ""}'
)


@pytest.fixture
def line(tree: Tree) -> Line:
    return Line(tree, version="9P2000")


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A bug is logged with its traceback: no test may have seen one."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def make(line: Line, fid: int, name: str, mode: int = 2, perm: str = "0666") -> None:
    line.send(
        f"Twalk tag 1 fid 0 newfid {fid} names []", f"Tcreate tag 1 fid {fid} name {name} perm {perm} mode {mode}"
    )


def open_(line: Line, fid: int, names: str, mode: int = 0) -> None:
    line.send(f"Twalk tag 1 fid 0 newfid {fid} names [{names}]", f"Topen tag 1 fid {fid} mode {mode}")


def ctl(line: Line, text: str) -> None:
    open_(line, 999, "ctl", 1)
    data = text.replace("\n", "\\n")
    line.send(f'Twrite tag 1 fid 999 offset 0 data "{data}"', "Tclunk tag 1 fid 999")
    assert line.replies()[2:] == [f"Rwrite tag 1 count {len(text)}", "Rclunk tag 1"]


# ---------------------------------------------------------------- what is appended is answered


class Slow:
    """A connection to a tree on a slow disk, with a stream open as fid 1 (written) and 2 (read)."""

    def __init__(self) -> None:
        self.store = SlowStore()
        self.tree = Tree(self.store, SystemClock(), owner=ME)
        self.line = Line(self.tree, version="9P2000")
        ctl(self.line, "replay all\n")
        make(self.line, 1, "s", 1)
        open_(self.line, 2, "s")
        assert "Ropen" in self.line.replies()[-1]
        self.store.slow = True


@pytest.fixture
def slow() -> Slow:
    return Slow()


def test_write_is_answered_when_it_is_on_disk(slow: Slow) -> None:
    assert slow.line.ask('Twrite tag 5 fid 1 offset 0 data "x"') == []
    wakes = slow.line.wakes
    slow.store.release()
    assert slow.line.wakes > wakes
    assert slow.line.replies() == ["Rwrite tag 5 count 1"]


def test_appended_write_is_answered_before_its_flush(slow: Slow) -> None:
    slow.line.send('Twrite tag 5 fid 1 offset 0 data "x"', "Tflush tag 6 oldtag 5", "Tflush tag 7 oldtag 5")
    assert slow.line.ask("Tflush tag 8 oldtag 6") == []
    assert slow.line.ask("Tclunk tag 6 fid 2") == ['Rerror tag 6 ename "bad request: tag 6: in use"']
    slow.store.release()
    assert slow.line.replies() == ["Rwrite tag 5 count 1", "Rflush tag 6", "Rflush tag 7", "Rflush tag 8"]
    assert slow.line.session.waiting == 0
    assert slow.line.one("Tread tag 5 fid 2 offset 0 count 9") == 'Rread tag 5 data "x"'


def test_create_opens_when_it_is_on_disk(slow: Slow) -> None:
    make(slow.line, 3, "t")
    assert len(slow.line.replies()) == 1
    slow.store.release()
    assert open_handles(slow.tree) == 2  # from inside the engine nothing is opened
    assert slow.line.replies()[0].startswith("Rcreate tag 1 qid")
    assert open_handles(slow.tree) == 3
    assert slow.line.ask('Twrite tag 1 fid 3 offset 0 data "x"') == []


def test_create_whose_fid_is_clunked_meanwhile(slow: Slow) -> None:
    make(slow.line, 3, "t")
    slow.line.replies()
    assert slow.line.one("Tclunk tag 2 fid 3") == "Rclunk tag 2"
    slow.store.release()
    assert slow.line.replies() == ['Rerror tag 1 ename "bad use of a fid: fid 3: clunked meanwhile"']
    assert open_handles(slow.tree) == 2


def test_clunk_does_not_hide_a_write_from_its_writer(slow: Slow) -> None:
    slow.line.send('Twrite tag 5 fid 1 offset 0 data "x"')
    assert slow.line.one("Tclunk tag 6 fid 1") == "Rclunk tag 6"
    slow.store.release()
    assert slow.line.replies() == ["Rwrite tag 5 count 1"]


@pytest.mark.parametrize("how", ["close", "version"])
def test_what_was_appended_stays_though_nobody_hears_of_it(slow: Slow, how: str) -> None:
    slow.line.send('Twrite tag 5 fid 1 offset 0 data "x"', "Tread tag 6 fid 2 offset 0 count 9")
    assert slow.line.replies() == ['Rread tag 6 data "x"']
    slow.line.send("Tread tag 6 fid 2 offset 1 count 9")
    if how == "close":
        slow.line.session.close()
    else:
        assert slow.line.one("Tversion tag NOTAG msize 8192 version 9P2000").startswith("Rversion")
    assert open_handles(slow.tree) == 0
    assert parked(slow.tree) == 0
    slow.store.release()
    assert slow.line.replies() == []
    other = Line(slow.tree, version="9P2000")
    open_(other, 1, "s")
    other.replies()
    assert other.one("Tread tag 1 fid 1 offset 0 count 9") == 'Rread tag 1 data "x"'


def test_rename_and_chmod_in_one_are_answered_once(slow: Slow) -> None:
    slow.line.send("Twalk tag 1 fid 0 newfid 3 names [s]")
    slow.line.replies()
    both = "type ~ dev ~ qid 0.0.f mode 0600 atime ~ mtime ~ length ~ name t"
    assert slow.line.ask(f'Twstat tag 1 fid 3 stat {{{both} uid "" gid "" muid ""}}') == []
    slow.store.release()
    assert slow.line.replies() == ["Rwstat tag 1"]
    assert " mode 0600 " in slow.line.one("Tstat tag 1 fid 3")
    assert " name t " in slow.line.one("Tstat tag 1 fid 3")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_both(turned: bool, fails: bool) -> None:
    """A step of two is done when both are, and fails when either does."""
    first: Wait[None] = Wait()
    second: Wait[None] = Wait()
    whole = both(first, second)
    assert isinstance(whole, Wait)
    one, other = (second, first) if turned else (first, second)
    one.resolve(None)
    assert not whole.settled
    assert not whole.cancel()
    if fails:
        other.fail(DiskFailed())
        with pytest.raises(DiskFailed):
            whole.result()
    else:
        other.resolve(None)
        assert whole.settled
    assert both(None, first) is first
    assert both(None, None) is None


def test_writer_without_room_that_goes_appends_nothing(tree: Tree) -> None:
    line = Line(tree, version="9P2000")
    ctl(line, "replay all\ndepth 1\nfull block\n")
    make(line, 1, "s", 1)
    line.send('Twrite tag 5 fid 1 offset 0 data "kept"', 'Twrite tag 6 fid 1 offset 0 data "waits"')
    assert line.replies()[-1] == "Rwrite tag 5 count 4"
    assert parked(tree) == 1
    line.session.close()
    assert parked(tree) == 0
    other = Line(tree, version="9P2000")
    ctl(other, "depth 0\n")
    tree.tick()
    open_(other, 1, "s")
    other.replies()
    assert other.one("Tread tag 1 fid 1 offset 0 count 9") == 'Rread tag 1 data "kept"'
    assert other.ask("Tread tag 1 fid 1 offset 4 count 9") == []


# ---------------------------------------------------------------- clients that read until their buffer is full


@pytest.mark.parametrize(
    ("length", "parts"), [(8168, [8168, 0]), (8168 * 2 + 5, [8168, 8168, 5, 0]), (8000, [8000, 0])]
)
def test_clipped_reads(tree: Tree, length: int, parts: list[int]) -> None:
    """A large buffer over small messages: all of one, then the end, once."""
    line = Line(tree, version="9P2000.L")
    ctl_ = tree.open(ME, tree.find(ME, "ctl"), os.O_WRONLY)
    ctl_.write(b"replay all\n")
    ctl_.close()
    line.send("Tmknod tag 1 fid 0 name s mode 0100666 major 0 minor 0 gid 0")
    writer = tree.open(ME, tree.find(ME, "s"), os.O_WRONLY)
    writer.write(bytes(length))
    writer.close()
    line.send("Twalk tag 1 fid 0 newfid 1 names [s]", "Tlopen tag 1 fid 1 flags 0")
    line.replies()
    offset, found = 0, []
    for _ in parts:
        found.append(len(line.value(f"Tread tag 1 fid 1 offset {offset} count 8168").data))
        offset += found[-1]
    assert found == parts
    assert line.ask(f"Tread tag 1 fid 1 offset {offset} count 8168") == []


# ---------------------------------------------------------------- takers


def worker(line: Line, fid: int) -> None:
    """The fid is a consumer's, open for reading and writing."""
    line.send(f"Twalk tag 1 fid 0 newfid {fid} names [.consumers w]", f"Tlopen tag 1 fid {fid} flags 2")


def test_a_message_of_the_size_of_a_clipped_read_is_taken_alone(tree: Tree) -> None:
    line = Line(tree, version="9P2000.L")
    line.send("Tmknod tag 1 fid 0 name s mode 0100666 major 0 minor 0 gid 0")
    line.send("Twalk tag 1 fid 0 newfid 8 names [.consumers]")
    line.send("Tmknod tag 1 fid 8 name w mode 0100666 major 0 minor 0 gid 0")
    writer = tree.open(ME, tree.find(ME, "s"), os.O_WRONLY)
    for length in (8168, 8168 + 5, 3):
        writer.write(b"x" * length)
    writer.close()
    worker(line, 1)
    line.replies()
    offset, found = 0, []
    for _ in range(6):
        found.append(len(line.value(f"Tread tag 1 fid 1 offset {offset} count 8168").data))
        offset += found[-1]
    assert found == [8168, 0, 8168, 5, 0, 3]
    assert line.one('Twrite tag 1 fid 1 offset 0 data "ack 1 2 3\\n"') == "Rwrite tag 1 count 10"


@pytest.mark.parametrize("ack", ["read", "next"])
@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize("sent", [False, True])
def test_what_was_taken_and_never_sent_goes_back(tree: Tree, ack: str, waited: bool, sent: bool) -> None:
    line = Line(tree, version="9P2000")
    ctl(line, f"deliver one\nack {ack}\nretries 0\n")
    make(line, 1, "s")
    line.take()
    writer = tree.open(ME, tree.find(ME, "s"), os.O_WRONLY)
    if not waited:
        writer.write(b"x")
    line.send("Tread tag 1 fid 1 offset 0 count 9")
    if waited:
        writer.write(b"x")
    writer.close()
    before = line.taken
    out = len(line.take())
    line.session.close(before + out if sent else before + out - 1)
    shown = tree.open(ME, tree.find(ME, "s"), os.O_RDONLY)
    assert shown.read(9) == (b"" if sent and ack == "read" else b"x")
    shown.close()


def test_what_was_not_sent_yet_when_the_connection_broke_goes_back(tree: Tree) -> None:
    """The reply was made, and not yet taken."""
    line = Line(tree, version="9P2000")
    ctl(line, "deliver one\n")
    make(line, 1, "s")
    line.send('Twrite tag 1 fid 1 offset 0 data "x"')
    line.take()
    sent = line.taken
    line.send("Tread tag 1 fid 1 offset 0 count 9")
    line.session.close(sent)
    shown = tree.open(ME, tree.find(ME, "s"), os.O_RDONLY)
    assert shown.read(9) == b"x"
    shown.close()


# ---------------------------------------------------------------- limits


def test_reads_above_the_limit_are_refused_and_the_connection_goes_on(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TAGS", 3)
    make(line, 1, "s")
    line.replies()
    line.send(*(f"Tread tag {tag} fid 1 offset 0 count 9" for tag in (10, 11, 12)))
    assert line.ask("Tread tag 13 fid 1 offset 0 count 9") == [
        'Rerror tag 13 ename "limit reached: too many parked requests (expected at most 3 of a connection)"'
    ]
    assert line.ask("Tflush tag 13 oldtag 11") == ["Rflush tag 13"]


def test_writes_above_the_limit_hold_the_connection_up(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TAGS", 3)
    session = slow.line.session
    frames = b"".join(encode(Twrite(tag, 1, 0, b"x"), False) for tag in range(10, 16))
    assert session.receive(frames) is False
    assert session.congested
    assert session.waiting == 4
    slow.store.release()
    assert session.receive() is True
    slow.store.release()
    assert slow.line.replies() == [f"Rwrite tag {tag} count 1" for tag in range(10, 16)]


def test_replies_not_taken_hold_the_connection_up(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLY_BYTES", 1000)
    make(line, 1, "s")
    line.send(f'Twrite tag 1 fid 1 offset 0 data "{"x" * 300}"')
    line.replies()
    frames = b"".join(encode(Twrite(tag, 1, 0, b"y" * 300), False) for tag in range(200))
    sent = 0
    assert line.session.receive(frames) is False
    while line.session.congested:
        sent += len(line.replies())
        line.session.receive()
    assert sent + len(line.replies()) == 200


def test_fids_are_bounded(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FIDS", 3)
    walks = [line.one(f"Twalk tag 1 fid 0 newfid {fid} names []") for fid in (1, 2, 3)]
    assert walks[:2] == ["Rwalk tag 1 qids []"] * 2
    assert walks[2] == 'Rerror tag 1 ename "limit reached: too many fids (expected at most 3 of a connection)"'
    assert "limit reached" in line.one('Tattach tag 1 fid 9 afid NOFID uname "" aname ""')


def test_open_directories_are_bounded(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two holds some 14 names; there is room for 20 more."""
    for fid in (1, 2):
        open_(line, fid, "")
    line.replies()
    memory = line.session.tree.memory
    monkeypatch.setattr(limits, "HELD_BYTES", 2 * (memory.used + 20 * limits.LISTED_BYTES))
    assert line.one("Tread tag 1 fid 1 offset 0 count 8000").startswith("Rread")
    assert "limit reached" in line.one("Tread tag 1 fid 2 offset 0 count 8000")
    assert line.one("Tread tag 1 fid 1 offset 0 count 8000").startswith("Rread")
    line.one("Tclunk tag 1 fid 1")
    assert line.one("Tread tag 1 fid 2 offset 0 count 8000").startswith("Rread")
    line.one("Tclunk tag 1 fid 2")
    assert memory.used == limits.FID_BYTES


def test_no_reply_is_larger_than_was_agreed(tree: Tree) -> None:
    line = Line(tree, version="9P2000")
    ctl(line, "replay all\n")
    make(line, 1, "s", 1)
    body = "x" * (8192 - 24)
    line.send(f'Twrite tag 1 fid 1 offset 0 data "{body}"')
    assert line.replies()[-1] == f"Rwrite tag 1 count {8192 - 24}"
    assert line.one(f'Twrite tag 1 fid 1 offset 0 data "{body}y"').startswith('Rerror tag 1 ename "message too long')
    with pytest.raises(BadFrame):
        line.send(f'Twrite tag 1 fid 1 offset 0 data "{body}yz"')
    other = Line(tree, version="9P2000")
    open_(other, 1, "s")
    other.replies()
    reply = other.value("Tread tag 1 fid 1 offset 0 count 4294967295")
    assert isinstance(reply, Rread)
    assert len(reply.data) == 8192 - 24


def test_large_messages_are_cut_to_the_msize(tree: Tree) -> None:
    line = Line(tree, version="9P2000")
    ctl(line, "replay all\n")
    make(line, 1, "s", 1)
    line.replies()
    stream: Any = tree.find(ME, "s")
    tree.open(ME, stream, os.O_WRONLY).write(bytes(range(256)) * 100)
    other = Line(tree, version="9P2000")
    open_(other, 1, "s")
    other.replies()
    found, offset = b"", 0
    while len(found) < 25_600:
        reply = other.value(f"Tread tag 1 fid 1 offset {offset} count 1000000")
        assert 0 < len(reply.data) <= 8192 - 11
        found += reply.data
        offset += len(reply.data)
    assert found == bytes(range(256)) * 100


# ---------------------------------------------------------------- directories


def entries(data: bytes, unix: bool = False) -> list[Dir]:
    reader, found = Reader(data, 0, len(data), unix), []
    while reader.position < reader.end:
        found.append(reader.entry())
    return found


def test_directory_in_pieces(line: Line) -> None:
    for number in range(50):
        make(line, number + 10, f"s{number:02}")
    line.replies()
    open_(line, 1, "")
    line.replies()
    names: list[str] = []
    offset = 0
    while data := line.value(f"Tread tag 1 fid 1 offset {offset} count 200").data:
        assert len(data) <= 200
        names += [stat.name for stat in entries(data)]
        offset += len(data)
    assert names == sorted([*META, *(f"s{n:02}" for n in range(50))])
    (first, *_) = entries(line.value("Tread tag 1 fid 1 offset 0 count 200").data)
    assert first.name == META[0]


@pytest.mark.parametrize("version", ["9P2000", "9P2000.u"])
@pytest.mark.parametrize("buffer", [200, 500, 1_200])
def test_a_listing_is_read_to_the_end_by_a_client_that_fills_its_buffer(tree: Tree, version: str, buffer: int) -> None:
    """As Linux v9fs does: it asks for what is left of its buffer until that is full or 0 bytes come."""
    line = Line(tree, version=version)
    for number in range(50):
        make(line, number + 10, f"s{number:02}")
    open_(line, 1, "")
    line.replies()
    names: list[str] = []
    offset, filled = 0, 1
    while filled:
        filled = 0
        while data := line.value(f"Tread tag 1 fid 1 offset {offset} count {buffer - filled}").data:
            names += [stat.name for stat in entries(data, version != "9P2000")]
            offset, filled = offset + len(data), filled + len(data)
    assert names == sorted([*META, *(f"s{n:02}" for n in range(50))])


def test_a_buffer_that_no_entry_fits_is_refused_wherever_the_listing_is(line: Line) -> None:
    open_(line, 1, "")
    line.replies()
    offset = len(line.value("Tread tag 1 fid 1 offset 0 count 100").data)
    assert 0 < offset <= 100
    assert "too small for a directory entry" in line.one(f"Tread tag 1 fid 1 offset {offset} count {101 - offset}")


def test_removing_while_reading_skips_none(tree: Tree) -> None:
    line = Line(tree, version="9P2000.L")
    for number in range(20):
        line.send(f"Tmknod tag 1 fid 0 name s{number:02} mode 0100666 major 0 minor 0 gid 0")
    line.send("Twalk tag 1 fid 0 newfid 1 names []", "Tlopen tag 1 fid 1 flags 0")
    line.replies()
    seen: list[str] = []
    offset = 0
    while True:
        reply = line.value(f"Treaddir tag 1 fid 1 offset {offset} count 90")
        assert isinstance(reply, Rreaddir)
        if not reply.entries:
            break
        for entry in reply.entries:
            seen.append(entry.name)
            if entry.name.startswith("s"):
                assert line.one(f"Tunlinkat tag 1 dirfd 0 name {entry.name} flags 0") == "Runlinkat tag 1"
        offset = reply.entries[-1].offset
    assert seen == [".", "..", *META, *(f"s{n:02}" for n in range(20))]
    again = line.value("Treaddir tag 1 fid 1 offset 0 count 8000")
    assert [entry.name for entry in again.entries][-1] == "order"


def test_what_is_attached_is_the_root(line: Line, tree: Tree) -> None:
    make(line, 1, "a", 0, "020000000777")
    line.send("Tclunk tag 1 fid 1", "Twalk tag 1 fid 0 newfid 1 names [a]")
    make_in = "Tcreate tag 1 fid 1 name b perm 020000000777 mode 0"
    line.send(make_in)
    line.replies()
    other = Line(tree, version="9P2000.L")
    other.ask('Tattach tag 1 fid 1 afid NOFID uname "" aname /a/b')
    qid = other.one("Twalk tag 1 fid 1 newfid 2 names [.. ..]")
    own = other.one("Tgetattr tag 1 fid 1 mask 2047").split()[6]
    assert qid == f"Rwalk tag 1 qids [{own} {own}]"
    other.ask("Tlopen tag 1 fid 2 flags 0")
    listed = other.value("Treaddir tag 1 fid 2 offset 0 count 100")
    assert listed.entries[0].qid == listed.entries[1].qid


# ---------------------------------------------------------------- other users


def test_another_user_is_refused_what_the_modes_say(tree: Tree) -> None:
    line = Line(tree, version="9P2000")
    make(line, 1, "s", 2, "0600")
    line.replies()
    stranger = Line(tree, uid=54_321, version="9P2000")
    assert stranger.ask("Twalk tag 1 fid 0 newfid 1 names [s]")[0].startswith("Rwalk")
    for mode in (0, 1, 2, 3):
        assert stranger.one(f"Topen tag 1 fid 1 mode {mode}").startswith('Rerror tag 1 ename "permission denied')
    stranger.ask("Twalk tag 1 fid 0 newfid 2 names []")
    assert "permission denied" in stranger.one("Tcreate tag 1 fid 2 name t perm 0666 mode 1")
    assert "permission denied" in stranger.one("Tremove tag 1 fid 1")
    stranger.ask("Twalk tag 1 fid 0 newfid 1 names [ctl]")
    assert "permission denied" in stranger.one("Topen tag 1 fid 1 mode 1")
    assert "permission denied" in stranger.one("Topen tag 1 fid 1 mode 64")  # ORCLOSE needs w on the group
    assert stranger.one("Topen tag 1 fid 1 mode 0").startswith("Ropen")


@pytest.mark.parametrize("number", ["9" * 5_000, "-" + "9" * 5_000, "4294967295", "4294967294", "\u00b2", "\u0661", ""])
def test_users_and_groups_of_any_number(tree: Tree, number: str) -> None:
    """Taken or refused: never an error of Python's."""
    root = Line(tree, version="9P2000")
    make(root, 1, "s")
    root.replies()
    root.ask("Twalk tag 1 fid 0 newfid 1 names [s]")
    text = json.dumps(number)
    for request in (
        f'Tattach tag 1 fid 2 afid NOFID uname {text} aname ""',
        f'Tauth tag 1 afid 3 uname {text} aname ""',
        f"Twstat tag 1 fid 1 stat {{{UNCHANGED.replace('GID', text)}}}",
    ):
        assert "input/output error" not in root.one(request), request[:80]


UNCHANGED = 'type ~ dev ~ qid 0.0.f mode ~ atime ~ mtime ~ length ~ name "" uid "" gid GID muid ""'


@pytest.mark.root
def test_wstat_is_all_or_nothing(tree: Tree) -> None:
    """Who may rename, but not change the mode, does neither in one Twstat."""
    root = Line(tree, version="9P2000")
    root.ask(FOR_ALL)
    make(root, 1, "s")
    root.replies()
    stranger = Line(tree, uid=54_321, version="9P2000")
    stranger.ask("Twalk tag 1 fid 0 newfid 1 names [s]")
    both = 'type ~ dev ~ qid 0.0.f mode 0600 atime ~ mtime ~ length ~ name t uid "" gid "" muid ""'
    assert stranger.one(f"Twstat tag 1 fid 1 stat {{{both}}}").startswith("Rerror")
    assert " name s " in stranger.one("Tstat tag 1 fid 1")
    only = both.replace("mode 0600", "mode ~")
    assert stranger.one(f"Twstat tag 1 fid 1 stat {{{only}}}") == "Rwstat tag 1"
    assert " name t " in stranger.one("Tstat tag 1 fid 1")


def test_new_files_belong_to_who_made_them(tree: Tree) -> None:
    Line(tree, version="9P2000").ask(FOR_ALL)
    stranger = Line(tree, uid=54_321, version="9P2000.u")
    make(stranger, 1, "s")
    stranger.replies()
    assert stranger.value("Tstat tag 1 fid 1").stat.n_uid == 54_321
    assert isinstance(tree.find(User(54_321, 0), "s").state.uid, int)  # type: ignore[union-attr]


@pytest.mark.parametrize("version", ["9P2000", "9P2000.L"])
def test_mode_of_a_new_file_does_not_bind_its_maker_yet(tree: Tree, version: str) -> None:
    Line(tree, version="9P2000").ask(FOR_ALL)
    stranger = Line(tree, uid=54_321, version=version)
    make_it = "Tcreate tag 1 fid 1 name s perm 0400 mode 1"
    open_it = "Topen tag 1 fid 2 mode 1"
    if version == "9P2000.L":
        make_it = "Tlcreate tag 1 fid 1 name s flags 0101 mode 0400 gid 0"
        open_it = "Tlcreate tag 1 fid 2 name s flags 0101 mode 0400 gid 0"
    stranger.ask("Twalk tag 1 fid 0 newfid 1 names []")
    assert "create tag 1 qid" in stranger.one(make_it)
    assert stranger.one('Twrite tag 1 fid 1 offset 0 data "x"') == "Rwrite tag 1 count 1"
    stranger.ask(f"Twalk tag 1 fid 0 newfid 2 names [{'s' if version == '9P2000' else ''}]")
    assert "error" in stranger.one(open_it)


# ---------------------------------------------------------------- the end


def test_end_of_a_connection_leaves_nothing(tree: Tree) -> None:
    line = Line(tree, version="9P2000.L")
    line.send("Twalk tag 1 fid 0 newfid 1 names []", "Tlcreate tag 1 fid 1 name s flags 0302 mode 0666 gid 0")
    line.send("Tlock tag 1 fid 1 type 1 flags 0 start 0 length 0 proc_id 1 client_id x")
    line.send("Tread tag 5 fid 1 offset 0 count 9", "Tread tag 6 fid 1 offset 0 count 9")
    assert line.replies()[-1] == "Rlock tag 1 status 0"
    assert (len(tree.locks), parked(tree), open_handles(tree)) == (1, 2, 1)
    line.session.close()
    assert (len(tree.locks), parked(tree), open_handles(tree)) == (0, 0, 0)


def test_a_lock_keeps_no_long_name_of_its_client(tree: Tree) -> None:
    line = Line(tree, version="9P2000.L")
    line.send("Twalk tag 1 fid 0 newfid 1 names []", "Tlcreate tag 1 fid 1 name s flags 0302 mode 0666 gid 0")
    lock = "tag 1 fid 1 type {} flags 0 start 0 length 0 proc_id 1 client_id " + "x" * (limits.NAME_BYTES + 1)
    line.send(f"Tlock {lock.format(1)}", f"Tgetlock {lock.format(1)}".replace("flags 0 ", ""))
    assert ["Rlerror" in reply for reply in line.replies()[-2:]] == [True, True]
    assert len(tree.locks) == 0
    line.session.close()


def test_end_of_the_tree_answers_who_waits(tree: Tree, line: Line) -> None:
    make(line, 1, "s")
    line.replies()
    line.send("Tread tag 5 fid 1 offset 0 count 9")
    tree.close()
    assert line.replies() == ['Rread tag 5 data ""']
    line.session.close()


def test_stream_removed_at_close_goes_with_the_connection(tree: Tree) -> None:
    line = Line(tree, version="9P2000")
    make(line, 1, "s", 66)
    line.replies()
    line.session.close()
    other = Line(tree, version="9P2000")
    assert "does not exist" in other.one("Twalk tag 1 fid 0 newfid 1 names [s]")


def test_a_command_longer_than_one_write_is_whole_when_its_last_write_is(line: Line) -> None:
    """A client cuts what is longer than msize - 24 anywhere."""
    text = "".join(f"consumer c{number:04} transient\n" for number in range(800))
    open_(line, 1, "ctl", 1)
    line.replies()
    most = 8192 - 24
    for start in range(0, len(text), most):
        piece = text[start : start + most].removesuffix("transient\n" if start + most >= len(text) else "")
        data = piece.replace("\n", "\\n")
        line.send(f'Twrite tag 1 fid 1 offset {start} data "{data}"')
        while not (replies := line.replies()):
            line.session.tree.run_timers()  # a long one is done in portions
        assert replies == [f"Rwrite tag 1 count {len(piece)}"]
    assert len(line.session.tree.root.consumers) == 800


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("version", ["9P2000", "9P2000.L"])
def test_who_may_not_write_asks_for_no_sync(tree: Tree, version: str, opened: bool) -> None:
    """Each is a wait of the disk, for all others too."""
    make(Line(tree, version="9P2000"), 1, "s")
    line = Line(tree, uid=ME.uid + 1, version=version)
    line.ask("Twalk tag 1 fid 0 newfid 1 names [s]")
    if opened:
        line.ask("Tlopen tag 1 fid 1 flags 0" if version == "9P2000.L" else "Topen tag 1 fid 1 mode 0")
    sync = (
        "Tfsync tag 1 fid 1"
        if version == "9P2000.L"
        else FOR_ALL.replace("fid 0", "fid 1").replace("020000000777", "~")
    )
    refusals = {"9P2000": 'Rerror tag 1 ename "permission denied', "9P2000.L": "Rlerror tag 1 ecode"}
    assert line.one(sync).startswith(refusals[version])
