"""A file of tokens that is read again: what an edit revoked stays revoked, whatever the rest of the file is, the user
database says, the clock says, and whichever reading ends last."""

from __future__ import annotations

import logging
import pwd
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqfs import limits
from mqfs.errors import Denied, Disconnected, MqfsError
from mqfs.net import tokens
from mqfs.ninep.client import connection
from tests.ring.memory.build import compiler
from tests.server.test_slow_names import Names, Served
from tests.server.test_tokens import ME, command, listed, new, served
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server
from tests.support.tokens import OTHER, SECRET, line_of, secret_of

pytestmark = pytest.mark.process
NEWER = secret_of("0e0f")
DAY_NS = 86_400 * 10**9


def is_known(address: str, secret: str) -> bool:
    """Whether a client with it is served."""

    def ask() -> str:
        try:
            connection.connect(address, token=secret, timeout=HANG_S).close()
        except Denied:
            return "no"
        except Disconnected:  # the token ended just then
            return ""
        return "yes"

    return eventually(ask, "an answer") == "yes"


def token_file(folder: Path, text: str) -> Path:
    file = folder / "tokens"
    file.touch(0o600)
    file.write_text(text)
    return file


def append(file: Path, line: bytes) -> None:
    with open(file, "ab") as out:
        out.write(line)


# ------------------------------------------------------------ an edit that succeeds is in force

# The rest of a file, and whether it is valid.
REST = {
    "nothing": (b"", True),
    "a comment": (b"# \xff\n", True),
    "an expired token": (line_of(ME, OTHER).encode()[:-1] + b" expires=2001-01-01\n", True),
    "an unknown user": (line_of("no-such-user", OTHER).encode(), True),
    "two unknown users": ((line_of("no-such-user", OTHER) + line_of("no-such-1", NEWER)).encode(), True),
    "malformed": (b"words of no meaning\n", False),
    "not UTF-8": (line_of(ME, OTHER).encode()[:-1] + b" note=\xff\n", False),
    "an ID twice": (line_of(ME, OTHER).encode() * 2, False),
    "an ID twice, of an unknown user": ((line_of("no-such-user", OTHER) + line_of(ME, OTHER)).encode(), False),
}


@pytest.mark.parametrize("rest", REST)
def test_a_token_is_revoked_whatever_the_rest_of_the_file_is(tmp_path: Path, rest: str) -> None:
    """Where that is invalid, once it is not any more: until then the command fails, and says so."""
    made, secret = new(tmp_path)
    kept_id, kept = new(tmp_path)
    file, (lines, valid) = tmp_path / "tokens", REST[rest]
    with served(tmp_path) as (_, address):
        append(file, lines)
        left = b"".join(file.read_bytes().splitlines(keepends=True)[1:])
        done = command(tmp_path, "revoke", made)
        assert file.read_bytes() == left
        listing = command(tmp_path, "ls")
        assert (kept_id in listing.stdout, made in listing.stdout) == (True, False)
        if valid:
            assert (done.returncode, done.stderr.count("unknown user")) == (0, lines.count(b"no-such"))
            assert (listing.returncode, listing.stderr) == (0, "")
        else:
            stays = f" (token {made} is removed, but stays in force until the file is valid)\n"
            assert (done.returncode, done.stderr) == (2, listing.stderr.replace("\n", stays))
            assert (listing.returncode, listing.stderr.count("\n")) == (2, 1)
            assert is_known(address, secret)
            assert command(tmp_path, "new", ME).returncode == 2
            assert file.read_bytes() == left
            mend(tmp_path, lines)
        eventually(lambda: not is_known(address, secret), "it is revoked")
        assert is_known(address, kept)


def mend(folder: Path, lines: bytes) -> None:
    """Remove the lines: by their ID, where they have one."""
    if b"sha256:0c0d:" not in lines:
        file = folder / "tokens"
        file.write_bytes(file.read_bytes().replace(lines, b""))
        return
    done = command(folder, "revoke", "0c0d")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_edit_of_a_file_with_an_unknown_user_warns(tmp_path: Path) -> None:
    file = token_file(tmp_path.resolve(), line_of(ME, SECRET) + "# ours\n" + line_of("no-such-user", OTHER))
    for words, number in ((("new", ME), 3), (("revoke", "0a0b"), 2)):
        done = command(tmp_path, *words)
        assert done.returncode == 0
        assert done.stderr == (
            f"mqfs: --token-file {file}, line {number}: unknown user 'no-such-user': its token is not valid unless "
            "it is in force, and a server does not start (expected one of getent passwd)\n"
        )
    assert command(tmp_path, "revoke", "0c0d").stderr == ""
    assert len(listed(tmp_path)) == 1


# ------------------------------------------------------------ a reading that fails is tried again


def test_a_reading_that_failed_is_tried_again(tmp_path: Path) -> None:
    """The file is as it was before: only the server could not open it."""
    made, secret = new(tmp_path)
    with served(tmp_path) as (server, address), connection.connect(address, token=secret):
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, hard))
        assert command(tmp_path, "revoke", made).returncode == 0
        eventually(
            lambda: "Too many open files (expected a readable file); the tokens stay" in server.text(), "it fails"
        )
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (hard, hard))
        eventually(lambda: f"token {made} revoked" in server.text(), "it is read")
        assert not is_known(address, secret)


def test_what_is_wrong_is_logged_once_and_when_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = token_file(tmp_path, line_of(ME, SECRET))
    known = tokens.Tokens(str(file))

    def said(*, asked: bool = False) -> list[str]:
        """What two readings log, the first of which may be asked for."""
        caplog.clear()
        for asks in (asked, False):
            known.replace(known.read(asked=asks))
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    file.unlink()
    assert len(said()) == 1
    assert said() == []
    assert len(said(asked=True)) == 1
    for bad in ("x", "y"):
        token_file(tmp_path, f"{ME} {bad}\n")
        assert len(said()) == 1
    token_file(tmp_path, line_of(ME, SECRET))
    known.replace(known.read(asked=False))
    assert not known.tick()
    assert known.user(SECRET.encode()) is not None


def some_bytes(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    file.chmod(0o600)


INVALID = {
    "malformed": f"{ME} x\n".encode(),
    "not UTF-8": line_of(ME, OTHER).encode()[:-1] + b" note=\xff\n",
    "an ID twice": line_of(ME, OTHER).encode() * 2,
    "too long": b"#" * (limits.TOKEN_FILE_BYTES + 1),
}


@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_file_is_read_again_when_it_changes_and_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Not each second: it has up to 9,000 lines."""
    file = token_file(tmp_path, line_of(ME, SECRET))
    known = tokens.Tokens(str(file))
    some_bytes(file, INVALID[what])
    assert known.tick()
    for after_s, again in ((3600.0, False), (0.0, True)):
        monkeypatch.setattr(limits, "NAMES_S", after_s)
        known.replace(known.read())
        assert known.tick() == again
    monkeypatch.undo()
    known.replace(known.read())
    some_bytes(file, b"# another\n" + INVALID[what])
    assert known.tick()
    known.replace(known.read())
    assert not known.tick()
    some_bytes(file, line_of(ME, OTHER).encode())
    assert known.tick()
    known.replace(known.read())
    assert [known.user(secret.encode()) is not None for secret in (SECRET, OTHER)] == [False, True]
    assert not known.tick()


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("spoil", [Path.unlink, make_folder, lambda file: file.chmod(0o640)])
def test_a_file_that_cannot_be_read_is_looked_at_each_second(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    file = token_file(tmp_path, line_of(ME, SECRET))
    known = tokens.Tokens(str(file))
    spoil(file)
    for _ in range(3):
        assert known.tick()
        known.replace(known.read())


# ------------------------------------------------------------ users that the system does not know

needs_daemon = pytest.mark.skipif("daemon" not in (row.pw_name for row in pwd.getpwall()), reason="no user daemon")


@pytest.fixture
def names(tmp_path: Path) -> Names:
    return Names(tmp_path)


@pytest.fixture
def server(tmp_path: Path, names: Names) -> Iterator[Served]:
    with Served(tmp_path, names, "NAMES_S=0.5 NAMES_WAIT_S=0.2 NAMES_KEPT_S=0.5") as made:
        yield made


EDITS: dict[str, Callable[[Served], object]] = {
    "none": lambda server: None,
    "a comment": lambda server: append(server.folder / "tokens", b"# ours\n"),
    "a new token": lambda server: append(server.folder / "tokens", line_of("root", secret_of("1a1b")).encode()),
    "another's is revoked": lambda server: command(server.folder, "revoke", "0a0b"),
}


@needs_daemon
@pytest.mark.parametrize("edit", EDITS)
def test_tokens_in_force_stay_while_the_system_does_not_know_their_user(
    server: Served, names: Names, edit: str
) -> None:
    """Also without an edit: the file is read again because of another's line."""
    append(server.folder / "tokens", line_of("no-such-user", NEWER).encode())
    eventually(lambda: "unknown user 'no-such-user': token 0e0f is not valid" in server.text(), "a line is left out")
    with connection.connect(server.tcp, token=OTHER, timeout=HANG_S) as client, names.being("away"):
        EDITS[edit](server)
        eventually(lambda: "unknown user 'daemon': token 0c0d" in server.text(), "it is unknown")
        if edit == "another's is revoked":
            eventually(lambda: not is_known(server.tcp, SECRET), "that is in force")
        assert client.list("")
        assert is_known(server.tcp, OTHER)
        assert not is_known(server.tcp, NEWER)
    assert "token 0c0d revoked, changed or expired" not in server.text()


DIGEST = "mq_0c0d_" + "y" * 43  # another secret of the ID of OTHER
CHANGED = {
    "a new one": (line_of("root", SECRET) + line_of("daemon", OTHER) + line_of("daemon", NEWER), NEWER),
    "another secret of an ID": (line_of("root", SECRET) + line_of("daemon", DIGEST), DIGEST),
    "another user of a secret": (line_of("daemon", SECRET), SECRET),
}


@needs_daemon
@pytest.mark.parametrize("what", CHANGED)
def test_a_new_token_is_left_out_while_the_system_does_not_know_its_user(
    server: Served, names: Names, what: str
) -> None:
    file, (text, secret) = server.folder / "tokens", CHANGED[what]
    text += line_of("no-such-user", secret_of("1a1b"))  # so that it is read again
    with names.being("away"):
        file.write_text(text)
        eventually(lambda: f"token {secret[3:7]} is not valid" in server.text(), "its line is left out")
        eventually(lambda: not is_known(server.tcp, secret), "it is not valid")
    eventually(lambda: is_known(server.tcp, secret), "its user is known again, and the file is as it was")


@needs_daemon
def test_an_unknown_user_is_logged_once(tmp_path: Path, names: Names) -> None:
    """Though it is looked up again and again: seen by the token that is valid when it is known."""
    with Served(tmp_path, names, "NAMES_S=0.01 NAMES_WAIT_S=0.2 NAMES_KEPT_S=0.01") as server:
        unknown = "unknown user 'daemon': token 0e0f"
        with names.being("away"):
            append(tmp_path / "tokens", line_of("daemon", NEWER).encode())
            eventually(lambda: unknown in server.text(), "its line is left out")
            for _ in range(3):
                lines = server.text().count("tokens read")
                append(tmp_path / "tokens", b"# another\n")
                eventually(lambda lines=lines: server.text().count("tokens read") > lines, "it is read again")
        eventually(lambda: is_known(server.tcp, NEWER), "it is known")
        assert server.text().count("tokens read") == server.text().count(unknown) + 1


# ------------------------------------------------------------ two readings at once


@needs_daemon
def test_a_reading_that_ends_late_brings_back_no_revoked_token(server: Served, names: Names) -> None:
    """It waits for the user database, while SIGHUP has the file read that was edited since."""
    file = server.folder / "tokens"
    with names.being("slow"):
        file.write_text(file.read_text() + "\n")
        eventually(lambda: names.asked, "the first reading waits")
        file.write_text(line_of("root", NEWER))
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: is_known(server.tcp, NEWER), "the second ends")
        assert not is_known(server.tcp, SECRET)
    file.unlink()
    eventually(lambda: "No such file" in server.text(), "the first has ended: it is looked at the file again")
    assert [is_known(server.tcp, one) for one in (SECRET, OTHER, NEWER)] == [False, False, True]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_readings_are_in_force_in_the_order_in_which_they_began(tmp_path: Path, order: tuple[int, ...]) -> None:
    file = token_file(tmp_path, "")
    known = tokens.Tokens(str(file))
    secrets, readings = (SECRET, OTHER, NEWER), []
    for secret in secrets:
        file.write_text(line_of(ME, secret))
        readings.append(known.read())
    for number in order:
        known.replace(readings[number])
    assert [known.user(secret.encode()) is not None for secret in secrets] == [False, False, True]
    assert not known.tick()


# ------------------------------------------------------------ a clock that is wrong for a moment


@contextmanager
def served_by_a_clock(folder: Path) -> Iterator[tuple[Server, str, Path]]:
    """A server, its address, and the file that has the nanoseconds by which its wall clock is wrong."""
    preload, clock = folder / "wrong_clock.so", folder / "clock"
    compiler("-O2", "-shared", "-fPIC", ROOT / "tests/replica/wrong_clock.c", "-o", preload)
    clock.write_bytes(bytes(8))
    options = ("--listen", "tcp!127.0.0.1!0", "--token-file", "tokens")
    with Server(*options, cwd=folder, LD_PRELOAD=str(preload), MQFS_WRONG_CLOCK=str(clock)) as server:
        address = server.text().split("9P at ")[1].split()[0]
        yield server, address, clock


def test_a_token_that_expired_by_a_wrong_clock_is_valid_when_it_is_right(tmp_path: Path) -> None:
    _, forever = new(tmp_path)
    made, secret = new(tmp_path, "--expires", "300d")
    later, longer = new(tmp_path, "--expires", "600d")
    with served_by_a_clock(tmp_path) as (server, address, clock):

        def be_wrong(days: int) -> None:
            with open(clock, "r+b") as file:
                file.write(struct.pack("<q", days * DAY_NS))

        for days, valid in ((400, (True, False, True)), (700, (True, False, False)), (400, (True, False, True))):
            be_wrong(days)
            eventually(
                lambda valid=valid: tuple(is_known(address, one) for one in (forever, secret, longer)) == valid,
                f"the clock is {days} days ahead",
            )
        be_wrong(0)
        eventually(lambda: is_known(address, secret), "the clock is right")
        with connection.connect(address, token=secret, timeout=HANG_S) as client:
            client.mkdir("g")
            count = server.text().count(f"token {made} revoked, changed or expired")
            be_wrong(400)
            eventually(lambda: server.text().count(f"token {made} revoked, changed or expired") > count, "it expires")
            with pytest.raises((MqfsError, ConnectionError)):
                client.mkdir("h")
        assert later in {row[0] for row in listed(tmp_path)}
