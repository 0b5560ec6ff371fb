"""Every file in examples/ does what its head says, against a real mount."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest

from tests.http.web import Web
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, short_folder
from tests.support.tools import environment, mq, mq_cat, opened, say

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: object, says: str = "", **env: str) -> str:
    """The standard output of an example that succeeds in silence, or says what fits a pattern."""
    result = subprocess.run(
        [str(EXAMPLES / name), *map(str, arguments)],
        env=environment(**env),
        capture_output=True,
        timeout=HANG_S,
        check=False,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (result.returncode, bool(re.fullmatch(says, result.stderr))) == (0, True), result.stderr
    return result.stdout


def refused(folder: Path, name: str, *arguments: str, **env: str) -> list[str]:
    """The lines that an example ends with which cannot do its work, in a folder."""
    python = [sys.executable] if name.endswith(".py") else []
    result = subprocess.run(
        [*python, str(EXAMPLES / name), *arguments],
        cwd=folder, env=environment(**env), capture_output=True, timeout=HANG_S, check=False, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert result.returncode not in (0, 120), result
    return (result.stdout + result.stderr).splitlines()


IN_A_TREE: dict[str, list[str]] = {
    "chat.sh": [],
    "crawler.sh": ["http://127.0.0.1:9/"],
    "cron-log.sh": ["mq/cron", "backup", "echo", "done"],
    "dead-letters.sh": [],
    "fan-out.sh": [],
    "mail-worker.sh": [],
    "shell.sh": [],
    "agents/setup.sh": ["tokens", "ann"],
    "reader.py": ["mq/room", "state"],
}


@pytest.mark.parametrize("name", IN_A_TREE)
@pytest.mark.parametrize("is_there", [False, True])
def test_without_a_server(tmp_path: Path, name: str, is_there: bool) -> None:
    """One line says so, and where a tree is to be mounted nothing is made: the next mount would be refused."""
    if is_there:
        (tmp_path / "mq").mkdir()
    (line,) = refused(tmp_path, name, *IN_A_TREE[name])
    assert re.search("not in a mounted tree|no tree mounted there|is it a group in a mounted tree", line), line
    assert [path.name for path in tmp_path.rglob("*")] == ["mq"] * is_there


WORDS: dict[str, str] = {
    "crawler.sh": "[GROUP] URL",
    "cron-log.sh": "GROUP JOB COMMAND [ARGUMENT]...",
    "agents/setup.sh": "FILE AGENT...",
    "agents/agent.sh": "NAME COMMAND...",
    "reader.py": "GROUP STATEFILE [STREAM]...",
    "pubsub.py": "ADDRESS GROUP",
    "worker.py": "ADDRESS GROUP [HANDLES]",
    "history.py": "ADDRESS GROUP [PATTERN] [--follow]",
    "embedded.py": "STORE TEXT...",
    "spark_words.py": "ADDRESS FROM TO [CHECKPOINT]",
    "spark_join.py": "ADDRESS ORDERS PAYMENTS TO",
    "spark_sqlite.py": "ADDRESS REGEX DATABASE TO",
}


@pytest.mark.parametrize("name", WORDS)
def test_without_arguments(tmp_path: Path, name: str) -> None:
    (line,) = refused(tmp_path, name)
    assert line.startswith("usage: ")
    assert line.endswith(f"{Path(name).name} {WORDS[name]}")


@pytest.mark.parametrize("name", ["pubsub.py", "worker.py", "history.py"])
def test_a_program_whose_server_is_away(tmp_path: Path, name: str) -> None:
    (line,) = refused(tmp_path, name, "unix!mqfs.sock", "g")
    assert line.endswith(f"{name}: unix!mqfs.sock: no such socket")


def test_what_is_refused_over_http_is_in_words(tmp_path: Path) -> None:
    (tmp_path / "tokens").touch(0o600)
    web = Web(tmp_path, "--token-file", f"{tmp_path}/tokens")
    with web.server:
        url = f"http://127.0.0.1:{web.port}"
        assert "no group 'a' (make it: PUT /a/)" in refused(tmp_path, "curl-worker.sh", f"{url}/a/b")
        said = refused(tmp_path, "agents/agent.sh", "ann", "cat", MQFS_TOKEN="mq_no_token", URL=f"{url}/agents")
        assert said[-1].startswith("agent ann: unknown token")


def chat(room: Path, name: str) -> pexpect.spawn:
    script = str(EXAMPLES / "chat.sh")
    settings = {"env": environment(), "timeout": HANG_S, "encoding": "utf-8", "use_poll": True}
    terminal = pexpect.spawn(script, [str(room), name], **settings)
    terminal.delaybeforesend = None
    terminal.setecho(False)
    return terminal


def test_chat_room(server: Server) -> None:
    room = server.path / "room"
    alice = chat(room, "alice")
    eventually(lambda: (room / "alice").exists(), "the room")
    bob = chat(room, "bob smith")
    eventually(lambda: (room / "bob smith").exists() and opened(room, ".cursor", 2)(), "both in the room")
    alice.sendline("hello, bob")
    for terminal in (alice, bob):
        terminal.expect(r"\d\d:\d\d:\d\d\.\d+[+-]\d\d:\d\d alice hello, bob\r\n")
    bob.sendline("hello, alice")
    for terminal in (alice, bob):
        terminal.expect(r"'bob smith' hello, alice\r\n")
    late = chat(room, "carol")
    late.expect(r"alice hello, bob\r\n.*'bob smith' hello, alice\r\n")
    for terminal in (alice, bob, late):
        terminal.sendeof()
        terminal.expect(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == 0
    eventually(lambda: not opened(room, ".cursor")(), "the readers' end")


def test_persistent_shell(server: Server) -> None:
    said = run("shell.sh", "demo", MQFS=str(server.path))
    assert re.search(r"^the answer: 42\r?$", said, re.MULTILINE)
    assert said.endswith("the shell ended with status 3\n")
    assert not (server.path / "demo").exists()


@contextmanager
def started(name: str, *arguments: object, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """An example that runs until it is asked to end, and then ends well."""
    command = [str(EXAMPLES / name), *map(str, arguments)]
    with subprocess.Popen(command, env=environment(**env), stdin=subprocess.DEVNULL) as process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()


def test_mail_worker(server: Server, tmp_path: Path) -> None:
    group = server.path / "outbox"
    mailer = tmp_path / "mailer"
    mailer.write_text(f"#!/bin/sh\nread -r _ to\ncase $to in *@*) echo $to >>{tmp_path}/sent;; *) exit 65;; esac\n")
    mailer.chmod(0o755)
    with started("mail-worker.sh", group, "--rate", "50/s", MAILER=str(mailer)):
        eventually(lambda: (group / "mail").exists(), "the group")
        for to in ("ann@example.org", "nobody", "bob@example.org"):
            mq("put", group / "mail", f"To: {to}")
        sent = tmp_path / "sent"
        eventually(lambda: sent.exists() and len(sent.read_text().splitlines()) == 2, "two mails")
        eventually(lambda: mq("peek", group / "dead").stdout == b"To: nobody\n", "the dead letter")
    assert sorted(sent.read_text().split()) == ["ann@example.org", "bob@example.org"]
    assert mq("peek", group / ".consumers" / "mailer").stdout == b""


def test_crawler(server: Server, tmp_path: Path) -> None:
    links = {"a": ["b", "a"], "b": ["c", "a", "missing"], "c": [], "elsewhere/x": []}
    for name, leads_to in links.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            "".join(f'<a href="{tmp_path}/{to}">\n' for to in leads_to) + "<a href=/etc/passwd>\n"
        )
    group = server.path / "crawl"
    with started("crawler.sh", group, tmp_path / "a", FETCH="cat", RATE="20/s"):
        eventually(lambda: (group / "dead").exists(), "the page that cannot be had")
    pages = [row.splitlines()[0] for row in mq_cat("-e", "-0", group, "pages").stdout.decode().split("\0")[:-1]]
    assert sorted(pages) == [f"{tmp_path}/{name}" for name in "abc"]
    assert mq("peek", group / "dead").stdout.decode() == f"{tmp_path}/missing\n"


def test_fan_out(server: Server) -> None:
    said = run("fan-out.sh", server.path / "shop")
    wanted = {
        "warehouse": "eu.new eu.failed",
        "alarm": "eu.failed payment.failed",
        "archive": "eu.new us.new eu.failed payment.failed",
    }
    expected = ""
    for consumer, names in wanted.items():
        expected += f"{consumer}:\n"
        for name in names.split():
            expected += f"    {name if name.startswith('p') else f'order.{name}'} happened\n"
    assert said == expected


def test_dead_letters(server: Server) -> None:
    said = run("dead-letters.sh", server.path / "orders")
    assert said.splitlines() == [
        "done:",
        "    apples: 3",
        "    plums: 4",
        "given up:",
        "    six pears, after 3 deliveries",
        "again, by a worker that knows words:",
        "    pears: 6",
    ]


def test_logging_from_cron(server: Server) -> None:
    group = server.path / "cron"
    job = 'echo "to output"; echo "to error" >&2; exit 4'
    for name in ("backup", "clean up"):
        run("cron-log.sh", group, name, "sh", "-c", job)
    expected = b"to output\nto error\nexit 4\n"
    assert mq_cat("-e", group).stdout == expected * 2
    assert mq_cat("-e", "-n", 2, group, "clean up").stdout == b"to output\nto error\n"
    assert {"data line", "ttl 7d", "depth 1000"} <= set((group / "ctl").read_text().splitlines())


def test_python_reader_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    group = server.group("work", "replay all", streams=["a", "it's b", "c"])
    say(group / "a", "one\n")
    say(group / "it's b", "two\n")
    say(group / "c", "not asked for\n")
    state = tmp_path / "at"
    first = run("reader.py", group, state, "a", "it's b").splitlines()
    assert [line.split(" ", 1)[1] for line in first] == ["a: one", "it's b: two"]
    assert run("reader.py", group, state, "a", "it's b") == ""
    say(group / "a", "three\n")
    assert run("reader.py", group, state, "a", "it's b").endswith("a: three\n")
    assert [line.split(": ")[1] for line in run("reader.py", group, tmp_path / "other").splitlines()] == [
        "one",
        "two",
        "not asked for",
        "three",
    ]


def test_c_reader(server: Server, tmp_path: Path) -> None:
    program = tmp_path / "reader"
    subprocess.run(
        ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(EXAMPLES / "reader.c")], check=True
    )
    group = server.group("c", "replay all", streams=["a", "b"])
    say(group / "a", "kept\n")
    with server.connect() as client:
        for body in (b"", b"", b"after none"):
            client.group("c").publish("b", body)
    say(group / "ctl", "eof b\neof b\n")
    say(group / "b", "after both\n")
    with subprocess.Popen([program, group / "a", group / "b"], stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{group}/a: kept\n".encode()
            for text in ("", "", "after none", "", "", "after both"):
                assert process.stdout.readline() == f"{group}/b: {text}\n".encode()
            say(group / "b", "no newline")
            assert process.stdout.readline() == f"{group}/b: no newline\n".encode()
            os.unlink(group / "a")
            say(group / "b", "go on\n")
            assert process.stdout.readline() == f"{group}/b: go on\n".encode()
            with server.connect() as client:
                for body in (b"", b"a\0b", b"", b"\0", b"", b"\n", b"", b"last"):
                    client.group("c").publish("b", body)
                    said = body if body.endswith(b"\n") else body + b"\n"
                    assert process.stdout.readline() == f"{group}/b: ".encode() + said
            os.unlink(group / "b")
            assert process.wait(HANG_S) == 0
            assert process.stdout.read() == b""
        finally:
            process.kill()
    missing = subprocess.run([program, group / "not"], capture_output=True, check=False)
    assert missing.returncode == 1
    assert missing.stderr.startswith(b"reader: ")


def test_c_reader_can_be_interrupted(server: Server, tmp_path: Path) -> None:
    subprocess.run(["make", "-s", "-C", str(EXAMPLES), f"OUT={tmp_path}/reader"], check=True)
    group = server.group("c2", streams=["a"])
    with subprocess.Popen([tmp_path / "reader", group / "a"]) as process:
        eventually(opened(group, "a"), "the open")
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == -signal.SIGINT


class Agents:
    """A group over HTTP with two agents, each with a token that reaches it alone."""

    def __init__(self, web: Web, tokens: Path) -> None:
        self.web, self.url, self.path = web, f"{web.url}/agents", web.server.path / "agents"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `mqfs` is
        words = run("agents/setup.sh", tokens, "reviewer", "author", GROUP=str(self.path), PATH=path).split()
        self.tokens = dict(zip(words[::2], words[1::2], strict=True))
        assert list(self.tokens) == ["reviewer", "author"]
        (self.path / "ctl").write_text("backoff 1ms 1ms\n")
        self.mine = {"Authorization": f"Bearer {self.tokens['author']}"}
        eventually(lambda: web.get("/agents/", **self.mine).status == 200, "the server has read the new tokens")

    def work(self, name: str, *command: str, jobs: int = 1, says: str = "", **more: str) -> str:
        """`says`: the pattern of what it says of failures."""
        environ = {"URL": self.url, "MQFS_TOKEN": self.tokens[name], "JOBS": str(jobs), **more}
        return run("agents/agent.sh", name, *command, says=says, **environ)

    def ask(self, job: bytes | str, **headers: str) -> None:
        assert self.web.post("/agents/reviewer", job, **self.mine, **headers).status == 201

    def counts(self) -> tuple[int, int, int]:
        """Jobs of the reviewer: those that wait, that failed, and that were acknowledged."""
        row = self.web.get("/agents/.stats", **self.mine).json["consumers"]["reviewer"]
        return row["waiting"], row["failed"], row["acknowledged"]


@pytest.fixture(scope="module")
def served_agents() -> Iterator[Agents]:
    with short_folder() as folder:
        tokens = folder / "tokens"
        tokens.touch(0o600)
        web = Web(folder, "--token-file", str(tokens), "--require-token", mount=True)
        with web.server:
            yield Agents(web, tokens)


@pytest.fixture
def agents(served_agents: Agents) -> Iterator[Agents]:
    """Each test leaves no job."""
    yield served_agents
    assert served_agents.counts()[0] == 0


FAILS_ONCE = """#!/bin/sh
case $* in *touch*) if mkdir "$ONCE" 2>/dev/null; then {how}; fi ;; esac
exec {curl} "$@"
"""
HOW = {"fails": "exit 7", "is not answered": 'exec {curl} --connect-to "::127.0.0.1:$SILENT" "$@"'}


@pytest.mark.parametrize("renewal", ["", *HOW])
def test_an_agent_keeps_a_job_that_takes_longer_than_the_lease(agents: Agents, tmp_path: Path, renewal: str) -> None:
    """Also where one renewal fails, or is not answered."""
    agents.ask("long")
    _, failed, acknowledged = agents.counts()
    go, once, more = tmp_path / "go", tmp_path / "once", dict[str, str]()
    lease_s = 12 if renewal == "is not answered" else 6
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as silent:
        if renewal:
            (curl := tmp_path / "curl").write_text(
                FAILS_ONCE.replace("{how}", HOW[renewal]).format(curl=shutil.which("curl"))
            )
            curl.chmod(0o755)
            path, port = f"{tmp_path}:{os.environ['PATH']}", silent.getsockname()[1]
            more = {"PATH": path, "ONCE": str(once), "SILENT": str(port)}
        work = ["sh", "-c", f"touch {tmp_path}/begun; until [ -e {go} ]; do sleep .1; done"]
        done = pool.submit(agents.work, "reviewer", *work, LEASE=str(lease_s), **more)
        try:
            eventually((tmp_path / "begun").exists, "the work has begun")
            other = agents.web.post(f"/agents/.consumers/reviewer/claim?wait={2 * lease_s}s", **agents.mine)
            assert other.status == 204, other.body
        finally:
            go.touch()
        done.result()
    assert agents.counts() == (0, failed, acknowledged + 1)
    assert once.exists() == bool(renewal)


@pytest.mark.parametrize("lease", ["0", "2", "08", "010", "+9", "-1", "1m", "x"])
def test_an_agent_refuses_a_lease_that_it_cannot_renew_in_time(agents: Agents, lease: str) -> None:
    words = [EXAMPLES / "agents/agent.sh", "reviewer", "cat"]
    environ = environment(URL=agents.url, MQFS_TOKEN=agents.tokens["reviewer"], LEASE=lease, JOBS="1")
    done = subprocess.run(words, env=environ, capture_output=True, timeout=HANG_S, text=True, stdin=subprocess.DEVNULL)
    said = f"agent reviewer: LEASE '{lease}' (expected a number of seconds, at least 3)\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_the_job_of_an_agent_that_is_killed_goes_to_another(agents: Agents, tmp_path: Path) -> None:
    agents.ask("killed")
    begun = tmp_path / "begun"
    command = [
        EXAMPLES / "agents/agent.sh",
        "reviewer",
        "sh",
        "-c",
        f"touch {begun}; while [ -e {begun} ]; do sleep .1; done",  # it outlives its agent, and ends with the folder
    ]
    environ = environment(URL=agents.url, MQFS_TOKEN=agents.tokens["reviewer"], LEASE="3")
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL) as process:
        try:
            eventually(begun.exists, "the work has begun")
        finally:
            process.kill()
    try:
        (claim,) = agents.web.post(f"/agents/.consumers/reviewer/claim?wait={HANG_S:.0f}s", **agents.mine).lines
        assert (claim["body"], claim["deliveries"]) == ("killed", 2)
        assert agents.web.post("/agents/.consumers/reviewer/ack", claim["token"], **agents.mine).status == 204
    finally:
        begun.unlink()


@pytest.mark.parametrize("to", ["reply.gone", "no/such", "..", ".stats"])
def test_an_agent_continues_where_a_reply_cannot_be_sent(agents: Agents, to: str) -> None:
    """The job is a dead letter: its work was done, and its answer is lost."""
    agents.ask("for a receiver that is gone", Mqfs_H_reply_to=to)
    agents.ask("for me", Mqfs_H_reply_to="author")
    agents.work("reviewer", "cat", jobs=2, says=r"curl: .*\n")
    *_, dead = agents.web.get("/agents/dead?format=json", **agents.mine).lines
    assert (dead["body"], dead["headers"]["reason"]) == ("for a receiver that is gone", "no reply sent")
    assert agents.work("author", "cat") == ""


@pytest.mark.parametrize("job", [b"a\xffb", b"a\0b\n\n", b"\n", "ä".encode(), b"null"])
def test_a_job_and_its_answer_are_any_bytes(agents: Agents, tmp_path: Path, job: bytes) -> None:
    agents.ask(job, Mqfs_H_reply_to="author")
    agents.work("reviewer", "tee", str(tmp_path / "job"))
    assert (tmp_path / "job").read_bytes() == job
    agents.work("author", "tee", str(tmp_path / "answer"))
    assert (tmp_path / "answer").read_bytes() == job


def test_agents_work_for_each_other(agents: Agents, tmp_path: Path) -> None:
    """Each token reaches their group alone; a job that always fails is a dead letter."""
    web, mine = agents.web, agents.mine
    agents.ask("look at parser.c", Mqfs_H_reply_to="author")
    agents.work("reviewer", "sed", "s/look at/looked at/")
    assert agents.work("author", "tee", str(tmp_path / "answer")) == ""
    assert (tmp_path / "answer").read_text() == "looked at parser.c"
    agents.ask("nonsense")
    for _ in range(3):
        agents.work("reviewer", "false")
    *_, dead = web.get("/agents/dead?format=json", **mine).lines
    assert (dead["body"], dead["headers"]["stream"]) == ("nonsense", "reviewer")
    assert web.put("/elsewhere/").status == 401
    assert web.ask("PUT", "/elsewhere/", **mine).status == 403
