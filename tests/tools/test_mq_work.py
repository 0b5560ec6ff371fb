"""mq-work against a real mount: what each exit code does, what outlives what, and that it never spins."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pexpect
import pytest

from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.server import Server
from tests.support.tools import environment, mq_work, running, say, tools_server

QUICK = ("replay all", "sync off", "backoff 10ms 20ms")


def work(server: Server, name: str, *ctl: str, streams: tuple[str, ...] = ("mail",)) -> tuple[Path, Path]:
    """A new group, and a consumer of it."""
    group = server.group(name, *QUICK, *ctl, streams=streams)
    consumer = group / ".consumers" / "w"
    consumer.touch()
    return group, consumer


def counts(consumer: Path) -> dict[str, Any]:
    stats = json.loads((consumer.parent.parent / ".stats").read_text())
    found: dict[str, Any] = stats["consumers"][consumer.name]
    return found


def done(consumer: Path) -> int:
    return int(counts(consumer)["acknowledged"])


@contextmanager
def worker(*arguments: object, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """mq-work while it runs; ended in order where it still does, so that it leaves no command behind."""
    with running("mq-work", *arguments, **more) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for _ in range(2):
                    process.send_signal(signal.SIGTERM)
                try:
                    process.wait(2)
                except subprocess.TimeoutExpired:
                    pass


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Its exit code, and what it said."""
    code = process.wait(HANG_S)
    assert process.stderr is not None
    return code, process.stderr.read().decode()


# ---------------------------------------------------------------- what a command is given


def test_each_message_is_done_in_order(server: Server) -> None:
    group, consumer = work(server, "in order")
    say(group / "mail", *(f"{number}\n" for number in range(20)))
    result = mq_work("-e", consumer, "--", "cat")
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == b"".join(b"%d\n" % number for number in range(20))
    assert (done(consumer), counts(consumer)["waiting"]) == (20, 0)
    assert mq_work("-e", consumer, "cat").stdout == b""


def test_a_stream_is_worked_from(server: Server) -> None:
    """With `deliver one` its own consumer is `.consumers/.STREAM`, with dead letters as any other."""
    group = server.group("own", "deliver one", "sync off", "retries 1", streams=("mail",))
    say(group / "mail", *(f"{number}\n" for number in range(6)))
    with open(group / "mail", "r+b", buffering=0) as reader:
        assert reader.read(64) == b"0\n"
    result = mq_work("-e", group / ".consumers" / ".mail", "--", "sh", "-c", 'read -r n; [ "$n" != 3 ] && echo "$n"')
    assert (result.returncode, result.stdout) == (0, b"1\n2\n4\n5\n")
    assert (group / ".kept" / "mail").read_bytes() == b""
    assert (group / "dead").read_bytes() == b"3\n"


def test_the_message_in_arguments(server: Server) -> None:
    group, consumer = work(server, "arguments")
    say(group / "mail", "a b\n\n", "x")
    result = mq_work("-e", consumer, "printf", "[%s]", "{}", "<{}{}>")
    assert result.stdout == b"[a b\n][<a b\na b\n>][x][<xx>]"


def test_the_message_in_the_environment(server: Server) -> None:
    group, consumer = work(server, "environment", streams=("e mail",))
    (group / ".put").write_text('{"stream":"e mail","headers":{"a-b":"1 2","lang":"de"}} x')
    before = json.loads(mq_work("-e", consumer, "jq", "-n", "env").stdout)
    assert before["MQ_GROUP"] == str(group)
    assert before["MQ_CONSUMER"] == "w"
    assert before["MQ_STREAM"] == "e mail"
    assert before["MQ_DELIVERIES"] == "1"
    assert re.fullmatch(r"\d+\.\d{9}", before["MQ_TIME"])
    assert abs(float(before["MQ_TIME"]) - time.time()) < 60
    assert (before["MQ_HEADER_a_b"], before["MQ_HEADER_a-b"], before["MQ_HEADER_lang"]) == ("1 2", "1 2", "de")
    assert before["MQ_HEADER_sender"] == str(os.getuid())


def test_large_and_binary_messages_are_whole(server: Server) -> None:
    group, consumer = work(server, "large")
    bodies = [b"\xff" + os.urandom(1_044_000), b"x" * 1_044_480, bytes(range(256))]
    say(group / "mail", *bodies)
    result = mq_work("-e", consumer, "sha256sum")
    assert [row.split()[0].decode() for row in result.stdout.splitlines()] == [
        hashlib.sha256(body).hexdigest() for body in bodies
    ]


@pytest.mark.parametrize("deliver", ["all", "one"])
def test_a_body_in_parts_is_whole(server: Server, deliver: str) -> None:
    """The consumer shows its last part; by that all of it is acknowledged."""
    group = server.group(f"parts-{deliver}", "replay all", "sync off", f"deliver {deliver}", "consumer w mail")
    bodies = [b"small", os.urandom(2_000_004), b"x" * 1_500_000, b"small again"]
    with server.connect() as client:
        for body in bodies:
            client.group(group.name).publish("mail", body)
    consumer = group / ".consumers" / ("w" if deliver == "all" else ".mail")
    result = mq_work("-e", consumer, "--", "sh", "-c", 'echo "$MQ_STREAM $(sha256sum)"')
    assert (result.returncode, result.stderr) == (0, b"")
    assert [row.split()[1].decode() for row in result.stdout.splitlines()] == [
        hashlib.sha256(body).hexdigest() for body in bodies
    ]
    assert mq_work("-e", consumer, "cat").stdout == b""


def test_a_body_of_which_a_part_is_missing_is_a_dead_letter(server: Server) -> None:
    group, consumer = work(server, "part missing")
    with server.connect() as client:
        client.group(group.name).publish("mail", b"x" * 2_000_004)
    (group / "ctl").write_text("drop mail 1\n")
    (group / ".put").write_text('{"stream":"mail","headers":{"part":"9/9"}} last of nine')
    say(group / "mail", "whole")
    result = mq_work("-e", consumer, "cat")
    assert (result.returncode, result.stdout) == (0, b"whole")
    assert result.stderr.decode().splitlines() == [
        f"mq-work: mail {sequence}: part {part} of a body that is not complete, now a dead letter"
        for sequence, part in ((2, 2), (3, 3), (4, 9))
    ]
    assert (group / ".kept" / "dead").stat().st_size == 2_000_004 - 1_000_000 + len(b"last of nine")


def test_a_command_inherits_nothing_of_the_tree(server: Server) -> None:
    group, consumer = work(server, "inherits")
    say(group / "mail", "x")
    result = mq_work("-e", "-j", 3, consumer, "sh", "-c", "ls -l /proc/self/fd")
    assert result.returncode == 0
    assert b"0 -> " in result.stdout
    assert str(server.path).encode() not in result.stdout


def test_a_command_that_reads_nothing(server: Server) -> None:
    group, consumer = work(server, "ignores")
    say(group / "mail", "x" * 1_000_000)
    assert mq_work("-e", consumer, "true").returncode == 0
    assert done(consumer) == 1


# ---------------------------------------------------------------- what its exit code says


def test_a_message_that_is_tried_again(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "again")
    say(group / "mail", "x")
    result = mq_work("-n", 3, consumer, "sh", "-c", "echo $MQ_DELIVERIES; [ $MQ_DELIVERIES = 3 ] || exit 75")
    assert result.stdout == b"1\n2\n3\n"
    assert result.stderr.decode().splitlines() == [
        "mq-work: mail 1: exit code 75, will be retried",
        "mq-work: mail 1: exit code 75, will be retried (delivery 2)",
    ]
    assert (done(consumer), counts(consumer)["failed"]) == (1, 2)


@pytest.mark.parametrize(("command", "why"), [("exit 1", "exit code 1"), ("kill -9 $$", "killed by SIGKILL")])
def test_a_failure_is_counted_and_becomes_a_dead_letter(server: Server, command: str, why: str) -> None:
    group, consumer = work(server, f"failure {len(command)}", "retries 2")
    say(group / "mail", "x")
    result = mq_work("-n", 2, consumer, "sh", "-c", command)
    assert result.stderr.decode() == f"mq-work: mail 1: {why}\nmq-work: mail 1: {why} (delivery 2)\n"
    assert letters(group) == [("mail", "1", "2", "w")]


def letters(group: Path) -> list[tuple[str, ...]]:
    """Stream, sequence, deliveries and consumer of each dead letter."""
    keys = ("stream", "sequence", "deliveries", "consumer")
    return [tuple(row["headers"][key] for key in keys) for row in dead(group)]


def dead(group: Path) -> list[dict[str, Any]]:
    if not (group / "dead").exists():
        return []
    cursor = os.open(group / ".cursor", os.O_RDWR)
    os.write(cursor, b"select dead\nseek first\nformat json\nuntil end\n")
    rows = []
    while data := os.read(cursor, 1 << 20):
        rows.append(json.loads(data))
    os.close(cursor)
    return rows


def test_never(server: Server) -> None:
    group, consumer = work(server, "never")
    say(group / "mail", "x", "y")
    result = mq_work("-n", 2, consumer, "sh", "-c", "grep -q y || exit 65")
    assert result.stderr == b"mq-work: mail 1: exit code 65, now a dead letter\n"
    assert letters(group) == [("mail", "1", "1", "w")]
    assert "65" in dead(group)[0]["headers"]["reason"]
    assert done(consumer) >= 1


def test_a_dead_letter_cannot_become_one(server: Server) -> None:
    group = server.group("dead letters", *QUICK, "consumer w dead", streams=["dead"])
    consumer = group / ".consumers" / "w"
    say(group / "dead", "x")
    result = mq_work("-n", 2, consumer, "sh", "-c", "[ $MQ_DELIVERIES = 2 ] || exit 65")
    text = "mq-work: dead 1: exit code 65, cannot become a dead letter, will be retried\n"
    assert (result.returncode, result.stderr.decode()) == (0, text)
    assert done(consumer) == 1


@pytest.mark.parametrize("body", [b"a\0b", b"x" * 200_000])
def test_what_no_argument_can_hold(server: Server, body: bytes) -> None:
    group, consumer = work(server, f"unfit {len(body)}")
    say(group / "mail", body, "good")
    result = mq_work("-n", 2, consumer, "echo", "{}")
    assert (result.returncode, result.stdout) == (0, b"good\n")
    assert result.stderr.startswith(b"mq-work: mail 1: message ")
    assert letters(group) == [("mail", "1", "1", "w")]


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (("/etc/passwd",), 126, "/etc/passwd: permission denied, released"),
        (("no-such-command",), 127, "no-such-command: no such file or directory, released"),
    ],
)
def test_a_command_that_cannot_be_run(server: Server, command: tuple[str, ...], code: int, text: str) -> None:
    group, consumer = work(server, f"cannot {command[-1].replace('/', '_')}")
    say(group / "mail", "x")
    result = mq_work(consumer, "--", *command)
    assert (result.returncode, result.stderr.decode()) == (code, f"mq-work: mail 1: {text}\n")
    assert mq_work("-n", 1, consumer, "sh", "-c", "echo $MQ_DELIVERIES").stdout == b"1\n"


@pytest.mark.parametrize("code", [126, 127])
def test_what_a_shell_does_not_find_is_the_message_s_failure(server: Server, code: int) -> None:
    """A shell that a message's content has sent astray ends so, too: it fails, is counted, and stops no one."""
    group, consumer = work(server, f"astray {code}", "retries 2")
    say(group / "mail", "no-such-command" if code == 127 else "/etc/passwd", "true")
    result = mq_work("-n", 3, consumer, "sh", "-c", "{}")
    lines = [line for line in result.stderr.decode().splitlines() if line.startswith("mq-work: ")]
    assert lines == [f"mq-work: mail 1: exit code {code}", f"mq-work: mail 1: exit code {code} (delivery 2)"]
    assert result.returncode == 0
    assert letters(group) == [("mail", "1", "2", "w")]
    assert done(consumer) == 1


def test_a_poison_message_stops_nobody_and_never_spins(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "poison", "retries 3")
    runs = tmp_path / "runs"
    say(group / "mail", "poison\n", *(f"{number}\n" for number in range(10)))
    script = f"read word; echo $word >>{runs}; [ $word != poison ]"
    with worker("-j", 2, consumer, "sh", "-c", script) as process:
        eventually(lambda: done(consumer) >= 10 and counts(consumer)["waiting"] == 0, "all but the poison")
        eventually(lambda: letters(group), "the dead letter")
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0
    assert sorted(runs.read_text().split()) == sorted([*map(str, range(10)), *["poison"] * 3])
    assert letters(group) == [("mail", "1", "3", "w")]


# ---------------------------------------------------------------- time


def test_a_command_that_takes_too_long(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "timeout", "retries 1")
    say(group / "mail", "x")
    pids = tmp_path / "pids"
    script = f"trap '' TERM; sh -c 'trap \"\" TERM; echo $$ >>{pids}; sleep 1000' & echo $$ >>{pids}; wait; wait"
    result = mq_work("-n", 1, "--timeout", "0.5", "--grace", "0.2", consumer, "sh", "-c", script)
    assert (result.returncode, result.stderr) == (0, b"mq-work: mail 1: timed out\n")
    eventually(lambda: not any(map(alive, pids.read_text().split())), "the end of all processes")
    assert letters(group) == [("mail", "1", "1", "w")]


def test_what_outlives_a_command_at_its_time_out_is_ended(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "outlives", "retries 1")
    say(group / "mail", "x")
    pids = tmp_path / "pids"
    script = f"sh -c 'trap \"\" TERM; echo $$ >>{pids}; sleep 1000' & until [ -s {pids} ]; do :; done; wait"
    assert mq_work("-n", 1, "--timeout", "0.7", "--grace", "0.2", consumer, "sh", "-c", script).returncode == 0
    eventually(lambda: not any(map(alive, pids.read_text().split())), "the end of all processes")


def test_what_outlives_a_command_at_its_time_out_has_its_grace(server: Server, tmp_path: Path) -> None:
    """The shell, as any wrapper, dies of SIGTERM at once; its child cleans up first, and is waited for."""
    group, consumer = work(server, "grace", "retries 1")
    say(group / "mail", "x")
    began, go, cleaned = tmp_path / "began", tmp_path / "go", tmp_path / "cleaned"
    os.mkfifo(go)
    child = tmp_path / "child"
    child.write_text(f"trap 'read -r _ <{go}; : >{cleaned}; exit' TERM; : >{began}; while :; do sleep 0.01; done")
    script = f"echo $$ >{tmp_path}/shell; sh {child}; :"
    with worker("-n", 1, "--timeout", "2", "--grace", "1h", consumer, "sh", "-c", script) as process:
        eventually(began.exists, "the child")
        shell = (tmp_path / "shell").read_text().strip()
        eventually(lambda: not alive(shell), "the end of the shell")
        with go.open("w") as pipe:
            pipe.write("go\n")
        assert process.wait(HANG_S) == 0
    assert cleaned.exists()
    assert letters(group) == [("mail", "1", "1", "w")]


def test_a_time_out_of_nothing_is_refused(server: Server) -> None:
    group, consumer = work(server, "no time", "retries 1")
    say(group / "mail", "x")
    result = mq_work("-e", "--timeout", "0", consumer, "true")
    assert (result.returncode, result.stderr) == (
        2,
        b"mq-work: --timeout 0: too short (expected a time such as 10s)\n",
    )
    assert counts(consumer)["waiting"] == 1


def test_messages_that_no_command_can_run_for_count(server: Server) -> None:
    group, consumer = work(server, "counted")
    say(group / "mail", "a\0b", "a\0b")
    for _ in range(2):
        (group / ".put").write_text('{"stream":"mail","headers":{"part":"1/2"}} torn')
    say(group / "mail", "whole")
    for number in range(1, 5):
        assert mq_work("-n", 1, consumer, "echo", "{}").returncode == 0
        assert counts(consumer)["dead"] == number


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_time_out_is_a_failure_whatever_the_command_says(server: Server) -> None:
    group, consumer = work(server, "late", "retries 1")
    say(group / "mail", "x")
    script = "trap 'exit 0' TERM; sleep 1000 & wait"
    assert b"timed out" in mq_work("-n", 1, "--timeout", "0.3", consumer, "sh", "-c", script).stderr
    assert letters(group) == [("mail", "1", "1", "w")]


def test_the_lease_is_renewed_while_the_command_runs(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "lease", "lease 600ms")
    say(group / "mail", "x")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with worker(consumer, "sh", "-c", f"echo $MQ_DELIVERIES; read _ <{fifo}") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"1\n"
        with worker(consumer, "cat") as second, pytest.raises(subprocess.TimeoutExpired):
            second.wait(2.5)  # four leases
        assert counts(consumer)["claimed"] == 1
        fifo.write_text("go on\n")
        eventually(lambda: done(consumer) == 1, "the end of the command")
    assert counts(consumer)["failed"] == 0


def test_a_lease_that_ran_out(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "lease ends", "lease 2s")
    say(group / "mail", "x")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with worker(consumer, "sh", "-c", f"echo $MQ_SEQUENCE; [ $MQ_SEQUENCE != 1 ] || read _ <{fifo}") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        process.send_signal(signal.SIGSTOP)
        assert mq_work("-n", 1, consumer, "sh", "-c", "echo $MQ_DELIVERIES").stdout == b"2\n"
        process.send_signal(signal.SIGCONT)
        assert process.stderr is not None
        assert b"lease ran out while the command runs" in process.stderr.readline()
        fifo.write_text("go on\n")
        assert process.stderr.readline() == b"mq-work: mail 1: done, after its lease ran out\n"
        say(group / "mail", "next")  # and it works on
        assert process.stdout.readline() == b"2\n"
        eventually(lambda: done(consumer) == 2, "both")
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "")


def test_rate(server: Server) -> None:
    group, consumer = work(server, "rate")
    say(group / "mail", *("x" for _ in range(11)))
    started = time.monotonic()
    assert mq_work("-j", 4, "--rate", "10/s", "-n", 11, consumer, "true").returncode == 0
    assert 0.9 < time.monotonic() - started < patient(60)
    assert done(consumer) == 11


def test_four_at_a_time_exactly_once(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "four")
    say(group / "mail", *(f"{number}\n" for number in range(200)))
    result = mq_work("-e", "-j", 4, consumer, "cat")
    assert (result.returncode, result.stderr) == (0, b"")
    assert sorted(map(int, result.stdout.split())) == list(range(200))
    assert done(consumer) == 200


def test_so_many_at_a_time(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "at a time")
    say(group / "mail", *("x" for _ in range(6)))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with worker("-j", 4, consumer, "sh", "-c", f"echo; read _ <{fifo}") as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == b"\n"
        assert (counts(consumer)["claimed"], counts(consumer)["waiting"]) == (4, 2)
        with fifo.open("w") as gate:
            gate.write("go\n" * 8)
            gate.flush()
            eventually(lambda: done(consumer) == 6, "all six")


# ---------------------------------------------------------------- ends


def test_it_waits_for_more(server: Server) -> None:
    group, consumer = work(server, "more")
    with worker(consumer, "cat") as process:
        for number in range(3):
            say(group / "mail", f"{number}\n")
            assert process.stdout is not None
            assert process.stdout.readline() == b"%d\n" % number
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_end(server: Server, tmp_path: Path, number: int) -> None:
    group, consumer = work(server, f"ends {number}")
    say(group / "mail", "x", "y")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with worker(consumer, "sh", "-c", f"echo begun; read _ <{fifo}; echo done") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(number)
        fifo.write_text("go on\n")
        assert ended(process) == (0, "")
        assert process.stdout.read() == b"done\n"
    assert (done(consumer), counts(consumer)["waiting"]) == (1, 1)


def test_ctrl_c_is_for_the_worker_alone(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "ctrl c")
    say(group / "mail", "x")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    words = [str(consumer), "sh", "-c", f"echo begun; read _ <{fifo}; echo done"]
    settings = {"env": environment(), "timeout": HANG_S, "encoding": "utf-8", "use_poll": True}
    terminal = pexpect.spawn("mq-work", words, **settings)
    terminal.expect("begun")
    terminal.sendintr()
    terminal.expect(r"\^C")
    terminal.expect("mq-work: finishing 1 job; Ctrl-C again to give it back\r\n")
    fifo.write_text("go on\n")
    terminal.expect("done")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert (terminal.exitstatus, done(consumer)) == (0, 1)


def test_a_second_signal_gives_back_and_kills(server: Server, tmp_path: Path) -> None:
    group, consumer = work(server, "kills")
    say(group / "mail", "x")
    with worker(consumer, "sh", "-c", "echo $$; trap '' TERM INT; while :; do sleep 1000; done") as process:
        assert process.stdout is not None
        pid = process.stdout.readline().strip().decode()
        process.send_signal(signal.SIGINT)
        eventually(lambda: "SigPnd:\t0000000000000000" in Path(f"/proc/{process.pid}/status").read_text(), "the first")
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (128 + signal.SIGTERM, "mq-work: mail 1: killed, released\n")
        assert not alive(pid)
    assert counts(consumer)["failed"] == 0
    assert mq_work("-n", 1, consumer, "sh", "-c", "echo $MQ_DELIVERIES").stdout == b"1\n"


def test_a_worker_that_is_killed_loses_nothing(server: Server) -> None:
    group, consumer = work(server, "killed")
    say(group / "mail", "x")
    with worker(consumer, "sh", "-c", "echo $$; exec sleep 1000") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        assert mq_work("-n", 1, consumer, "sh", "-c", "echo $MQ_DELIVERIES").stdout == b"2\n"
        os.kill(pid, signal.SIGKILL)


def test_so_many_messages(server: Server) -> None:
    group, consumer = work(server, "count")
    say(group / "mail", "1\n", "2\n", "3\n")
    assert mq_work("-n", 2, "-j", 3, consumer, "cat").stdout in (b"1\n2\n", b"2\n1\n")
    assert mq_work("-n", 0, consumer, "cat").stdout == b""
    assert counts(consumer)["waiting"] == 1


def test_what_was_done_is_told(server: Server) -> None:
    group, consumer = work(server, "told")
    say(group / "mail", "x")
    assert re.fullmatch(rb"mq-work: mail 1: done in \d\.\d\d s\n", mq_work("-v", "-e", consumer, "true").stderr)


@pytest.mark.parametrize("victim", ["worker", "server"])
def test_killed_at_random_nothing_is_lost(tmp_path: Path, victim: str) -> None:
    random_, kills, parallel = random.Random(seed()), size(60, least=3), 2
    with tools_server(tmp_path) as server:
        group, consumer = work(server, "random", "retries 0", "lease 5s")
        runs = tmp_path / "runs"
        runs.touch()
        script = f"read number; echo $number >>{runs}; sleep 0.0$(( number % 9 ))"
        count = 40 * kills
        words = ("-j", parallel, consumer, "sh", "-c", script)
        say(group / "mail", *(f"{number}\n" for number in range(count)))
        with ExitStack() as stack:
            process = stack.enter_context(worker(*words))
            for _ in range(kills):
                before = len(runs.read_text())
                eventually(lambda: len(runs.read_text()) > before, "work")  # noqa: B023
                Event().wait(random_.random() * 0.3)
                if victim == "server":
                    server.stop(signal.SIGKILL)
                    server.start()
                else:
                    process.kill()
                    process = stack.enter_context(worker(*words))
            eventually(lambda: (row := counts(consumer))["waiting"] + row["claimed"] == 0, "all answered for")
        did = Counter(runs.read_text().split())
    assert sorted(map(int, did)) == list(range(count))
    assert did.total() - count <= kills * parallel


# ---------------------------------------------------------------- the tree comes and goes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_outlives_the_server(tmp_path: Path, number: int) -> None:
    with tools_server(tmp_path) as server:
        group, consumer = work(server, "lives", "retries 0")
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        say(group / "mail", "wait\n")
        script = f"read word; echo $word $MQ_DELIVERIES; [ $word != wait ] || read _ <{fifo}"
        with worker(consumer, "sh", "-c", script) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"wait 1\n"
            server.stop(number)
            before = cpu_s(process.pid)
            fifo.write_text("go on\n")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)
            assert cpu_s(process.pid) - before < 0.4, "it spins"
            server.start()
            again = process.stdout.readline()  # not acknowledged, so it comes again; a clean end counted no failure
            assert again == (b"wait 1\n" if number == signal.SIGTERM else b"wait 2\n")
            fifo.write_text("go on\n")
            say(group / "mail", "next\n")
            assert process.stdout.readline() == b"next 1\n"
            eventually(lambda: done(consumer) == 2, "both")
            process.send_signal(signal.SIGTERM)
            code, said = ended(process)
        assert code == 0
        rows = said.splitlines()
        assert "ack failed: " in rows[0]
        assert [row.endswith(("; retrying", ": reconnected")) for row in rows[1:]] == [True, True]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_worker_costs_nothing(server: Server) -> None:
    _, consumer = work(server, "idle")
    with worker("-j", 8, consumer, "true") as process:
        eventually(lambda: counts(consumer)["handles"] == 8, "eight handles")
        before = wakeups(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.5)
        assert wakeups(process.pid) - before < 20


def wakeups(pid: int) -> int:
    found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_consumer_that_is_removed_ends_it(server: Server) -> None:
    _, consumer = work(server, "removed")
    with worker("-j", 2, consumer, "true") as process:
        eventually(lambda: counts(consumer)["handles"] == 2, "the handles")
        consumer.unlink()
        assert ended(process) == (1, f"mq-work: {consumer}: the consumer was removed\n")


# ---------------------------------------------------------------- bad input


def test_what_is_not_there(server: Server) -> None:
    group, _ = work(server, "not there")
    missing = group / ".consumers" / "missing"
    assert refused(missing) == f"mq-work: {missing}: no such consumer (create it: touch {missing})\n"
    assert "a stream (expected GROUP/.consumers/NAME)" in refused(group / "mail")
    assert "is the tree mounted?" in refused(server.path / "nothing" / ".consumers" / "w")
    assert mq_work("-e", "--make", missing, "true").returncode == 0
    assert missing.exists()
    (group / "ctl").write_text("consumer lonely private\n")
    with worker(group / ".consumers" / "lonely", "true"):
        eventually(lambda: counts(group / ".consumers" / "lonely")["handles"] == 1, "the first")
        assert "private" in refused(group / ".consumers" / "lonely")


def refused(consumer: Path) -> str:
    result = mq_work("-e", consumer, "true")
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.count(b"\n") == 1
    return str(result.stderr.decode())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["consumer"],
        ["consumer", "--"],
        ["-j", "0", "c", "true"],
        ["-j", "x", "c", "true"],
        ["--rate", "0/s", "c", "true"],
        ["--rate", "fast", "c", "true"],
        ["--timeout", "soon", "c", "true"],
        ["--bogus", "c", "true"],
    ],
)
def test_what_makes_no_sense(words: list[str]) -> None:
    result = mq_work(*words)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"mq-work: ")
    assert result.stderr.count(b"\n") == 1
