"""What the shell completes, in a real bash and zsh."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from mq_tools import completion
from mqfs.engine.language import settings
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.server import Server
from tests.support.tools import environment


@pytest.fixture(scope="module")
def bash(server: Server) -> Iterator[pexpect.spawn]:
    """Interactive, beside a mounted group."""
    group = server.group("completed", "consumer mail", "bind both *", streams=["log.web", "log.mail", "it's one"])
    (group / "ctl").write_text("depth 1234\n")
    server.group("terminal-7", streams=["size"])
    path = f"{environment()['PATH']}:{Path(sys.executable).parent}"
    typing = pexpect.spawn(
        "bash",
        ["--norc", "-i"],
        env=environment(PATH=path) | {"PS1": "$ "},
        cwd=group.parent,
        timeout=HANG_S,
        encoding="utf-8",
    )
    typing.sendline(
        'bind "set bell-style none"; bind "set enable-bracketed-paste off"; eval "$(mq completion bash)"; echo re""ady'
    )
    typing.expect("ready")
    yield typing
    typing.close(force=True)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("mq-cat completed log.w\t", r"mq-cat completed log\.web "),
        ("mq-cat completed log.web log.m\t", r"log\.web log\.mail "),
        ("mq-cat completed 'it\t", r"'it's one"),
        ("mq-cat -e completed bo\t", r"completed both "),
        ("mq ctl completed 'replay a\t", r"'replay all' "),
        ("mq ctl completed repl\tl\t", r"'replay last' "),
        ("mq ctl completed dep\t", r"'depth 1234' "),
        ("mq ctl completed rem\t", r"'remove mail' "),
        ("mq ctl completed unb\t", r"'unbind both' "),
        ("mq ctl completed 'clear log.w\t", r"'clear log\.web' "),
        ("mq redrive completed log.m\t", r"redrive completed log\.mail "),
        ("mqfs serve --http-qp\t", r"--http-qpubs "),
        ("mqfs compl\t", r"mqfs completion "),
        ("mqfs check termi\t", r"check terminal-7/"),
        ("mqfs token ls --token-file termi\t", r"--token-file terminal-7/"),
        ("pin -m . ter\t", r"terminal-7 "),
    ],
)
def test_a_line(bash: pexpect.spawn, typed: str, line: str) -> None:
    def completed() -> bool:
        bash.send(f"\x15{typed}")
        return bash.expect([line, pexpect.TIMEOUT], timeout=5) == 0

    eventually(completed)  # a mount that is slow to answer, as on a busy machine, is left out


@pytest.mark.parametrize("way", ["found in $fpath", "evaluated"])
def test_zsh_completes_all_programs_from_one_file(tmp_path: Path, way: str) -> None:
    tools = Path(sys.executable).parent
    script = subprocess.run([tools / "mqfs", "completion", "zsh"], check=True, capture_output=True).stdout
    (tmp_path / "_mq").write_bytes(script)
    path = f"{environment()['PATH']}:{tools}"
    typing = pexpect.spawn(
        "zsh",
        ["-f", "-i"],
        env=environment(PATH=path) | {"TERM": "dumb"},
        cwd=tmp_path,
        timeout=HANG_S,
        encoding="utf-8",
    )
    found = 'fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; echo re""ady'
    evaluated = 'autoload -U compinit; compinit -u -D; eval "$(cat _mq)"; echo re""ady'
    typing.sendline(f"PS1='$ '; unsetopt zle_bracketed_paste; {found if way == 'found in $fpath' else evaluated}")
    typing.expect("ready")
    for typed, line in [
        ("mqfs compl\t", "mqfs completion "),
        ("mq-cat --se\t", "mq-cat --se"),
        ("mq redr\t", "mq redrive "),
    ]:
        typing.send(f"\x15{typed}")
        typing.expect(line)
    typing.close(force=True)


def test_where_nothing_is_mounted(bash: pexpect.spawn) -> None:
    bash.send("\x15mq ctl /nowhere 'replay a\t")
    bash.expect("'replay all' ")
    bash.sendline('\x15mq-cat /nowhere x\t; echo do""ne')
    bash.expect("done")


def test_the_words_are_those_of_the_server() -> None:
    known = {key: " ".join(row.choices) for key, row in settings.SETTINGS.items() if row.choices}
    assert known | {"sync": "always off replica"} == completion.SETTINGS


def test_a_mount_that_does_not_answer_is_left_out_in_time() -> None:
    """The shell waits for no server."""
    began = time.monotonic()
    with pytest.raises(TimeoutError), completion.quickly():
        signal.pause()
    assert time.monotonic() - began < patient(5)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
