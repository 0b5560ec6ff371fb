"""pin against a real mount, on real terminals: sessions that stay, whoever comes and goes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pexpect
import pytest

from tests.support import ROOT
from tests.support.campaign import size
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server
from tests.support.tools import environment, lines, mq_cat, pin, running, say, tools_server

KEY = "\x1c"  # Ctrl-\


@pytest.fixture
def mount(server: Server) -> Iterator[Path]:
    """The mount; what sessions a test leaves are hung up."""
    yield server.path
    remove_sessions(server.path)


def remove_sessions(mount: Path) -> None:
    for out in mount.glob("*/out"):
        host = host_of(out.parent)
        subprocess.run(["rm", "-r", str(out.parent)], check=True)
        if host:
            eventually(ended(host), "the host's end")


def ended(pid: int) -> Callable[[], bool]:
    return lambda: not running_process(pid)


def running_process(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def host_of(session: Path) -> int:
    """The process that has the session's `out` open for writing; 0 if there is none."""
    rows = [json.loads(row) for row in (session / ".who").read_text().splitlines()]
    return next((int(row["pid"]) for row in rows if row["file"] == "out" and "w" in row["mode"]), 0)


def create(mount: Path, id: str, *command: str, **more: object) -> Path:
    result = pin("-c", "-m", mount, id, *(command or ("sh", "-i")), **more)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    return mount / id


@contextmanager
def attached(mount: Path, *arguments: str, **more: object) -> Iterator[pexpect.spawn]:
    """`pin -m MOUNT ARGUMENTS` on a terminal of its own."""
    settings = {
        "env": environment(),
        "timeout": HANG_S,
        "dimensions": (24, 80),
        "cwd": str(ROOT),
        "use_poll": True,
    } | more
    terminal = pexpect.spawn(sys.executable, ["-m", "mq_tools.pin", "-m", str(mount), *arguments], **settings)
    terminal.delaybeforesend = None
    eventually(lambda: not terminal.isalive() or is_raw(terminal.child_fd), "raw mode")
    try:
        yield terminal
    finally:
        terminal.close(force=True)


def is_raw(fd: int) -> bool:
    return not termios.tcgetattr(fd)[3] & (termios.ECHO | termios.ISIG)


def code_of(terminal: pexpect.spawn) -> int:
    """How it ended; what it still says is read."""
    terminal.expect(pexpect.EOF)
    terminal.wait()
    return int(terminal.exitstatus) if terminal.exitstatus is not None else -int(terminal.signalstatus)


def history(session: Path) -> bytes:
    return bytes(mq_cat("-e", "--from", "first", session, "out").stdout)


def shows(session: Path, text: bytes) -> Callable[[], bool]:
    return lambda: text in history(session)


# ---------------------------------------------------------------- sessions


def test_two_attached_see_the_same_session(mount: Path) -> None:
    create(mount, "two")
    with attached(mount, "-a", "two") as one, attached(mount, "-a", "two") as other:
        one.sendline("echo from-$((1))")
        one.expect_exact("from-1\r\n")
        other.expect_exact("from-1\r\n")
        other.sendline("echo from-$((2))")
        one.expect_exact("from-2\r\n")
        other.expect_exact("from-2\r\n")
        one.sendline("exit 7")
        assert code_of(one) == 7
        assert code_of(other) == 7


def test_history_first_then_live_in_exact_order(mount: Path) -> None:
    count = size(50000)
    session = create(mount, "history", "sh", "-c", f"seq {count}; read x; echo live-$x")
    eventually(shows(session, b"\r\n%d\r\n" % count))
    with attached(mount, "-a", "history") as terminal:
        terminal.expect_exact(f"\r\n{count}\r\n")
        assert terminal.before.split(b"\r\n") == [b"%d" % n for n in range(1, count)]
        terminal.sendline("now")
        terminal.expect_exact("live-now\r\n")
        assert code_of(terminal) == 0


def test_an_ended_session_shows_its_history_and_status(mount: Path) -> None:
    session = create(mount, "ended", "sh", "-c", "echo said; exit 5")
    eventually(lambda: b"exit 5\n" in mq_cat("-e", session, "status").stdout)
    result = pin("-a", "-m", mount, "ended", stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stdout, result.stderr) == (5, b"said\r\n", b"")
    assert refused(1, "-w", "-m", mount, "ended", "x") == "session 'ended' ended: status 5"
    assert refused(1, "-c", "-m", mount, "ended").startswith("session 'ended' ended: status 5 (remove it")


def test_a_command_that_a_signal_ended(mount: Path) -> None:
    create(mount, "signal", "sh", "-c", "kill -TERM $$")
    assert pin("-a", "-m", mount, "signal", stdin=subprocess.DEVNULL).returncode == 128 + signal.SIGTERM


def test_type_words_and_standard_input(mount: Path) -> None:
    session = create(mount, "typed", "cat")
    assert pin("-w", "-m", mount, "typed", "hello", "there  all").returncode == 0
    assert pin("-w", "-m", mount, "typed", input=b"and\nmore\n").returncode == 0
    eventually(lambda: history(session).count(b"more\r\n") == 2)
    assert history(session).count(b"hello there  all\r\n") == 2  # echoed, then printed
    assert pin("-w", "-m", mount, "typed", input=b"\x04").returncode == 0
    assert pin("-a", "-m", mount, "typed", stdin=subprocess.DEVNULL).returncode == 0


def test_much_typed_at_once_arrives_whole(mount: Path) -> None:
    lines = [b"%06d" % n * 10 for n in range(size(20000))]
    session = create(mount, "much", "sh", "-c", "stty -echo; echo ready; cksum; echo done")
    eventually(shows(session, b"ready"))
    data = b"".join(line + b"\n" for line in lines)
    assert pin("-w", "-m", mount, "much", input=data + b"\x04").returncode == 0
    eventually(shows(session, b"done"))
    expected = subprocess.run(["cksum"], input=data, capture_output=True, check=True).stdout.strip()
    assert expected in history(session)


def test_created_and_attached_without_a_flag(mount: Path) -> None:
    with attached(mount, "plain", "sh", "-i") as terminal:
        terminal.sendline("echo first-$((40 + 2))")
        terminal.expect_exact("first-42\r\n")
        terminal.send(KEY)
        assert code_of(terminal) == 0
    with attached(mount, "plain") as terminal:
        terminal.expect_exact("first-42\r\n")
        terminal.sendline("exit 0")
        assert code_of(terminal) == 0


def test_create_and_attach_in_one(mount: Path) -> None:
    with attached(mount, "-ca", "both", "sh", "-c", "echo here; exit 4") as terminal:
        terminal.expect_exact("here\r\n")
        assert code_of(terminal) == 4


def test_create_and_type_in_one(mount: Path) -> None:
    assert pin("-cw", "-m", mount, "cw", "cat", input=b"typed\n\x04").returncode == 0
    result = pin("-a", "-m", mount, "cw", stdin=subprocess.DEVNULL)
    assert result.stdout.count(b"typed\r\n") == 2


def test_the_default_command_is_an_interactive_shell(mount: Path) -> None:
    assert pin("-c", "-m", mount, "shell", env={"SHELL": "/bin/bash"}).returncode == 0
    pin("-w", "-m", mount, "shell", "echo $0 $- $PIN; exit")
    result = pin("-a", "-m", mount, "shell", stdin=subprocess.DEVNULL)
    assert re.search(rb"\n/bin/bash \w*i\w* " + re.escape(bytes(mount / "shell")), result.stdout)


def test_the_session_runs_where_and_as_it_was_made(mount: Path, tmp_path: Path) -> None:
    create(mount, "where", "sh", "-c", "pwd; echo $COLOUR", cwd=tmp_path, env={"COLOUR": "green"})
    result = pin("-a", "-m", mount, "where", stdin=subprocess.DEVNULL)
    assert result.stdout == f"{tmp_path}\r\ngreen\r\n".encode()


def test_where_the_mount_is_taken_from(mount: Path) -> None:
    assert pin("-c", "env", "true", env={"MQFS": str(mount)}).returncode == 0
    assert pin("-c", "here", "true", cwd=mount.parent).returncode == 0
    assert (mount / "env/out").exists()
    assert (mount / "here/out").exists()


def test_a_session_is_its_owners_alone(mount: Path) -> None:
    session = create(mount, "mode", "cat")
    assert session.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in session.iterdir() if path.name in ("in", "out")} == {0o600}


# ---------------------------------------------------------------- terminals


def test_the_detach_key_leaves_the_session_running(mount: Path) -> None:
    session = create(mount, "detach")
    with attached(mount, "-a", "detach") as terminal:
        terminal.sendline("echo before-$((1))")
        terminal.expect_exact("before-1\r\n")
        terminal.send("echo half" + KEY + "gone")
        assert code_of(terminal) == 0
        assert b"pin: detached from detach" in terminal.before
    pin("-w", "-m", mount, "detach", "-way")
    eventually(shows(session, b"\nhalf-way\r\n"))
    assert b"gone" not in history(session)


def test_keys_are_read_while_the_terminal_shows_nothing(mount: Path, tmp_path: Path) -> None:
    """Output comes faster than it shows it: the key that would end that is read all the same."""
    command = f"yes flood | head -c 3000000; read line; echo $line >{tmp_path}/typed; exec cat"
    session = create(mount, "flood", "sh", "-c", command)
    eventually(lambda: (session / ".kept" / "out").stat().st_size > 3_000_000, "all the output")
    with attached(mount, "-a", "flood") as terminal:
        terminal.sendline("stop")
        eventually(lambda: (tmp_path / "typed").exists() and (tmp_path / "typed").read_text() == "stop\n")
        terminal.send(KEY)
        assert code_of(terminal) == 0
        assert b"pin: detached from flood" in terminal.before
        assert len(terminal.before) < 1_000_000, "it went on to show all"


def test_another_detach_key_or_none(mount: Path) -> None:
    create(mount, "keys", "cat", "-v")
    with attached(mount, "-a", "keys", env=environment(PIN_DETACH="^]")) as terminal:
        terminal.sendline("quoted \x16" + KEY)  # Ctrl-V: for the session's terminal, not to be taken as its quit key
        terminal.expect_exact("\r\nquoted ^\\\r\n")
        terminal.send("\x1d")
        assert code_of(terminal) == 0
    with attached(mount, "-a", "keys", env=environment(PIN_DETACH="none")) as terminal:
        terminal.send(KEY)
        assert code_of(terminal) == 128 + signal.SIGQUIT
    assert "PIN_DETACH" in refused(2, "-a", "-m", mount, "keys", env={"PIN_DETACH": "long"})


def test_keys_go_to_the_session(mount: Path) -> None:
    create(mount, "raw")
    with attached(mount, "-a", "raw") as terminal:
        terminal.sendline("trap 'echo caught-it' INT; cat; echo after-$?")
        terminal.expect_exact("after-$?\r\n")
        terminal.sendline("in-cat")
        terminal.expect_exact("in-cat\r\nin-cat\r\n")
        terminal.send("\x03")
        terminal.expect_exact("caught-it")
        terminal.sendline("echo still-$((1))")
        terminal.expect_exact("still-1\r\n")


def test_the_window_size_is_passed_on(mount: Path) -> None:
    create(mount, "size")
    with attached(mount, "-a", "size", dimensions=(40, 100)) as terminal:
        terminal.sendline("stty size")
        terminal.expect_exact("40 100\r\n")
        terminal.sendline("trap 'stty size' WINCH; echo set-$((1))")
        terminal.expect_exact("set-1\r\n")
        terminal.setwinsize(31, 91)
        eventually(lambda: (mq_cat("-e", mount / "size", "size").stdout or b"").endswith(b"31 91\n"))
        terminal.sendline("")
        terminal.expect_exact("31 91\r\n")


def test_the_first_size_is_the_makers(mount: Path) -> None:
    with attached(mount, "-c", "made", "sh", "-c", "stty size", dimensions=(33, 77)) as terminal:
        assert code_of(terminal) == 0
    assert pin("-a", "-m", mount, "made", stdin=subprocess.DEVNULL).stdout == b"33 77\r\n"
    create(mount, "none", "stty", "size", stdin=subprocess.DEVNULL)
    assert pin("-a", "-m", mount, "none", stdin=subprocess.DEVNULL).stdout == b"24 80\r\n"


def leave_by_key(terminal: Terminal) -> int:
    os.write(terminal.master, KEY.encode())
    return 0


def leave_by_end(terminal: Terminal) -> int:
    os.write(terminal.master, b"exit 3\r")
    return 3


def leave_by(number: int) -> Callable[[Terminal], int]:
    def leave(terminal: Terminal) -> int:
        terminal.process.send_signal(number)
        return 128 + number

    return leave


def leave_by_removal(terminal: Terminal) -> int:
    subprocess.run(["rm", "-r", str(terminal.session)], check=True)
    return 1


class Terminal:
    """A pseudo-terminal whose settings can be looked at, with an attached pin on it."""

    def __init__(self, session: Path) -> None:
        self.session = session
        self.master, self.slave = os.openpty()
        self.found = termios.tcgetattr(self.slave)
        command = [sys.executable, "-m", "mq_tools.pin", "-a", "-m", str(session.parent), session.name]
        self.process = subprocess.Popen(
            command, stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment(), cwd=ROOT
        )

    @property
    def settings(self) -> list[object]:
        return termios.tcgetattr(self.slave)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


WAYS = {
    "key": leave_by_key,
    "end": leave_by_end,
    "removal": leave_by_removal,
    "TERM": leave_by(signal.SIGTERM),
    "HUP": leave_by(signal.SIGHUP),
    "INT": leave_by(signal.SIGINT),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_terminal_is_restored(mount: Path, way: str) -> None:
    terminal = Terminal(create(mount, f"restored-{way}"))
    try:
        eventually(lambda: terminal.settings != terminal.found, "raw mode")
        code = WAYS[way](terminal)
        assert terminal.process.wait(HANG_S) == code
        assert terminal.settings == terminal.found
    finally:
        terminal.close()


@pytest.mark.parametrize("way", ["key", "TERM", "HUP", "INT"])
def test_a_terminal_that_takes_nothing_is_left(mount: Path, way: str) -> None:
    terminal = Terminal(create(mount, f"stuck-{way}"))
    try:
        eventually(lambda: terminal.settings != terminal.found, "raw mode")
        fd = os.open(os.ttyname(terminal.slave), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with suppress(BlockingIOError):
            while True:
                os.write(fd, b"x")
        os.close(fd)
        assert WAYS[way](terminal) == terminal.process.wait(HANG_S)
        assert terminal.settings == terminal.found
    finally:
        terminal.close()


def test_stopped_and_continued_it_is_raw_again(mount: Path) -> None:
    terminal = Terminal(create(mount, "stopped"))
    try:
        eventually(lambda: terminal.settings != terminal.found, "raw mode")
        raw = terminal.settings
        terminal.process.send_signal(signal.SIGSTOP)
        termios.tcsetattr(terminal.slave, termios.TCSANOW, terminal.found)  # as a shell does
        terminal.process.send_signal(signal.SIGCONT)
        eventually(lambda: terminal.settings == raw, "raw mode again")
    finally:
        terminal.close()


# ---------------------------------------------------------------- who goes and what stays


def test_the_session_survives_the_terminal_that_started_it(mount: Path) -> None:
    with attached(mount, "-ca", "survivor", "sh", "-i") as terminal:
        terminal.sendline("echo pid-$$")
        terminal.expect(rb"pid-(\d+)\r\n")
        shell = int(terminal.match.group(1))
        terminal.close(force=True)  # closes the terminal: SIGHUP for all on it
    assert running_process(shell)
    pin("-w", "-m", mount, "survivor", "echo alive-$$")
    eventually(shows(mount / "survivor", b"\nalive-%d\r\n" % shell))


def test_an_attached_one_that_is_killed_disturbs_nobody(mount: Path) -> None:
    create(mount, "killed")
    with attached(mount, "-a", "killed") as one, attached(mount, "-a", "killed") as other:
        one.sendline("echo both-$((1))")
        one.expect_exact("both-1\r\n")
        one.kill(signal.SIGKILL)
        assert code_of(one) == -signal.SIGKILL
        other.sendline("echo one-$((1))")
        other.expect_exact("one-1\r\n")


def test_a_session_whose_host_is_gone_is_dead(mount: Path) -> None:
    session = create(mount, "dead", "cat")
    with attached(mount, "-a", "dead") as terminal:
        terminal.sendline("seen")
        terminal.expect_exact("seen\r\nseen\r\n")
        os.kill(host_of(session), signal.SIGKILL)
        assert code_of(terminal) == 1
        assert b"session 'dead' has lost its host" in terminal.before
    assert "has lost its host" in refused(1, "-w", "-m", mount, "dead", "x")
    assert "has lost its host" in refused(1, "-c", "-m", mount, "dead")
    result = pin("-a", "-m", mount, "dead", stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stdout) == (1, b"seen\r\nseen\r\n")


def test_a_host_that_is_asked_to_end_hangs_up(mount: Path) -> None:
    session = create(mount, "asked", "cat")
    os.kill(host_of(session), signal.SIGTERM)
    assert pin("-a", "-m", mount, "asked", stdin=subprocess.DEVNULL).returncode == 128 + signal.SIGHUP


def test_removing_the_group_hangs_up(mount: Path) -> None:
    session = create(mount, "rm", "sh", "-c", "echo $$; exec cat")
    eventually(shows(session, b"\n"))
    program, host = int(history(session)), host_of(session)
    with attached(mount, "-a", "rm") as terminal:
        terminal.expect_exact("\r\n")
        subprocess.run(["rm", "-r", str(session)], check=True)
        assert code_of(terminal) == 1
        assert b"pin: session 'rm' was removed" in terminal.before
    eventually(lambda: not running_process(program) and not running_process(host), "the end of program and host")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_of_the_server_loses_nothing(tmp_path: Path, number: int) -> None:
    with tools_server(tmp_path) as server:
        session = create(server.path, "long", "sh", "-c", COUNTER, env={"MQ_TEST": str(tmp_path)})
        with attached(server.path, "-a", "long") as terminal:
            terminal.sendline("1")
            terminal.expect_exact("got 1\r\n")
            server.stop(number)
            assert code_of(terminal) == 1
            assert re.search(
                rb"pin: lost the tree at \S+ \(once it is served again: pin -a long\)\r\n", terminal.before
            )
        (tmp_path / "go").touch()
        eventually(lambda: (tmp_path / "gone").exists(), "output while the server is away")
        server.start()
        with attached(server.path, "-a", "long") as terminal:
            terminal.expect_exact("away\r\n")
            terminal.sendline("2")
            terminal.expect_exact("got 2\r\n")
            terminal.sendline("quit")
            assert code_of(terminal) == 9
        seen = history(session).split(b"\r\n")
        assert [row for row in seen if row.startswith(b"got")] == [b"got 1", b"got 2", b"got quit"]
        remove_sessions(server.path)


COUNTER = """
( while [ ! -e "$MQ_TEST/go" ]; do sleep 0.01; done; echo away; touch "$MQ_TEST/gone" ) &
while read -r line; do echo "got $line"; [ "$line" = quit ] && exit 9; done
"""


def test_output_goes_on_over_kills_of_the_server(tmp_path: Path) -> None:
    count = size(3000, least=300)
    program = f"i=0; while [ $i -lt {count} ]; do echo n$i; i=$((i + 1)); sleep 0.005; done; exit 3"
    with tools_server(tmp_path) as server:
        session = create(server.path, "counting", "sh", "-c", program)
        for part in (1, 2):
            eventually(shows(session, b"\r\nn%d\r\n" % (count * part // 4)))
            server.stop(signal.SIGKILL)
            server.start()
        assert pin("-a", "-m", server.path, "counting", stdin=subprocess.DEVNULL).returncode == 3
        numbers = [int(row[1:]) for row in history(session).split(b"\r\n")[:-1]]
        assert list(dict.fromkeys(numbers)) == list(range(count))  # what was under way at a kill may be there twice
        assert len(numbers) <= count + 10
        remove_sessions(server.path)


# ---------------------------------------------------------------- what is refused


def refused(code: int, *arguments: object, **more: object) -> str:
    """The one line on standard error, without the program's name."""
    result = pin(*arguments, **({"stdin": subprocess.DEVNULL} | more))
    text = result.stderr.decode()
    assert (result.returncode, result.stdout) == (code, b""), text
    assert text.startswith("pin: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    return str(text[5:-1])


def test_what_makes_no_sense(mount: Path) -> None:
    assert "ID" in refused(2)
    assert "both given" in refused(2, "-aw", "x")
    assert "-a and COMMAND" in refused(2, "-a", "x", "ls")
    assert "-z" in refused(2, "-z", "x")
    bad = {"": ": empty", "a/b": "'/'", ".x": ": reserved", "ctl": ": reserved", "x" * 256: "255"}
    bad["a\x1b"] = "control"
    for id, why in bad.items():
        assert why in refused(2, "-c", "-m", mount, id)
    assert "UTF-8" in refused(2, "-c", "-m", mount, os.fsdecode(b"\xff"))
    assert pin("--help").returncode == 0


def test_what_is_not_there(mount: Path, tmp_path: Path) -> None:
    assert refused(1, "-c", "-m", tmp_path, "x") == (
        f"{tmp_path}: no tree mounted there (start a server, or set -m or $MQFS)"
    )
    assert refused(1, "-a", "-m", mount, "not") == f"no session 'not' in {mount} (create it: pin -c not)"
    assert "no session 'not'" in refused(1, "-w", "-m", mount, "not", "x")
    (mount / "room").mkdir()
    assert refused(1, "-a", "-m", mount, "room") == f"{mount}/room: not a session: no stream 'in' in it"
    assert "not a session" in refused(1, "-c", "-m", mount, "room")
    create(mount, "twice", "cat")
    assert refused(1, "-c", "-m", mount, "twice") == "session 'twice' exists (attach: pin -a twice)"


def test_a_command_that_cannot_be_run_leaves_nothing(mount: Path) -> None:
    assert refused(1, "-c", "-m", mount, "bad", "/no/such/program") == "/no/such/program: no such file or directory"
    assert not (mount / "bad").exists()


def test_attached_to_itself_is_refused(mount: Path) -> None:
    create(mount, "self", "pin", "-a", "-m", str(mount), "self")
    result = pin("-a", "-m", mount, "self", stdin=subprocess.DEVNULL)
    assert (result.returncode, b"cannot attach session 'self' to itself" in result.stdout) == (1, True)


def test_attached_to_itself_by_another_path_is_refused(mount: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(mount)
    create(mount, "self2", "pin", "-a", "-m", str(tmp_path / "other"), "self2")
    result = pin("-a", "-m", mount, "self2", stdin=subprocess.DEVNULL)
    assert (result.returncode, b"cannot attach session 'self2' to itself" in result.stdout) == (1, True)


def test_input_that_is_lost_is_said(mount: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    session = create(
        mount, "flood", "sh", "-c", f"stty raw -echo; echo raw; read x <{tmp_path}/go; exec cat >/dev/null"
    )
    eventually(shows(session, b"raw"))
    (session / "ctl").write_text("depth 64K\n")
    assert pin("-w", "-m", mount, "flood", input=b"x" * 1_000_000).returncode == 0
    (tmp_path / "go").write_text("go\n")
    eventually(shows(session, b"[pin: input was lost"), "the line of the host")


@pytest.mark.parametrize("is_file", [True, False])
def test_the_rest_of_refused_input_is_there(mount: Path, tmp_path: Path, is_file: bool) -> None:
    """After a pipe the error tells where it begins."""
    session = create(mount, "full", "sh", "-c", "stty raw -echo; exec cat >/dev/null")
    (session / "ctl").write_text("full reject\ndepth 100000B\n")
    data = b"".join(b"%07d\n" % number for number in range(20_000))
    (tmp_path / "data").write_bytes(data)
    script = '{ pin -w -m "$1" full; cat >"$2/rest"; }' + (' <"$2/data"' if is_file else "")
    if not is_file:
        script = f'cat "$2/data" | {script}'
    words = ["sh", "-c", script, "sh", str(mount), str(tmp_path)]
    done = subprocess.run(words, env=environment(), capture_output=True, timeout=HANG_S, stdin=subprocess.DEVNULL)
    typed = len((session / ".kept" / "in").read_bytes())
    assert 0 < typed < 100_000
    expected = f"pin: {session}/in: no space left on device (typed: {typed} bytes of standard input)\n"
    assert done.stderr.decode() == expected
    if is_file:
        assert (tmp_path / "rest").read_bytes() == data[typed:]


@pytest.mark.parametrize(
    ("ctl", "why"),
    [("full reject\ndepth 2\n", "no space left on device"), ("full reject\ndepth 1B\n", "message too long")],
)
def test_an_attachment_that_cannot_type_says_why(mount: Path, ctl: str, why: str) -> None:
    """Not that the tree is lost, which is still served."""
    session = create(mount, "narrow", "sh", "-c", "stty raw -echo; exec cat >/dev/null")
    for word in ("a", "b"):
        assert pin("-w", "-m", mount, "narrow", word).returncode == 0
    (session / "ctl").write_text(ctl)
    done = pin("-a", "-m", mount, "narrow", input=b"more\n")
    assert (done.returncode, done.stderr.decode()) == (1, f"pin: {session}/in: {why}\n")


def test_what_is_typed_does_not_reach_a_session_of_another_user(mount: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("not root: cannot give a session to another user")
    session = create(mount, "lookalike", "sh", "-c", "echo Password:; read x; echo got $x")
    os.chown(session / "in", 65534, 65534)
    with running("pin", "-a", "-m", mount, "lookalike", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"secret\n")
        process.stdin.close()
        assert lines(process.stdout, 1) == [b"Password:\r\n"]
        say(session / "in", "other\n")
        assert lines(process.stdout, 2) == [b"other\r\n", b"got other\r\n"]
        assert process.wait(HANG_S) == 0
        assert lines(process.stderr, 1) == [
            b"pin: session 'lookalike' belongs to another user (expected you or root); read-only\n"
        ]
    session = create(mount, "typed", "cat")
    os.chown(session / "in", 65534, 65534)
    assert "belongs to another user" in refused(1, "-w", "-m", mount, "typed", "secret")


def test_looking_on_without_permission_to_type(mount: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("not root: cannot become another user")
    session = create(mount, "watched", "sh", "-c", "echo shown; read x; echo $x")
    session.chmod(0o755)
    (session / "out").chmod(0o644)
    (session / "status").chmod(0o644)
    nobody = {"user": "nobody", "group": "nogroup", "extra_groups": [], "cwd": "/"}
    with running("pin", "-a", "-m", mount, "watched", stdin=subprocess.PIPE, **nobody) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"shown\r\n"
        process.stdin.write(b"not typed\n")
        say(session / "in", "typed\n")
        assert process.stdout.readline() == b"typed\r\n"
        assert process.stdout.readline() == b"typed\r\n"
        assert process.wait(HANG_S) == 0
