"""Commands of root over files of the server's user, who can use what they make."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mqfs
from tests.support import ROOT
from tests.support.anyone import NOBODY, python_for_anyone
from tests.support.server import Server, short_folder
from tests.support.server import mqfs as run

pytestmark = [pytest.mark.process, pytest.mark.root]
THEIR_ID = 65534


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A directory of the server's user."""
    with short_folder() as folder:
        (folder / "theirs").mkdir()
        os.chown(folder / "theirs", THEIR_ID, THEIR_ID)
        yield folder / "theirs"


@contextmanager
def served(folder: Path, *options: str, store: str = "store") -> Iterator[mqfs.Client]:
    """A client of a server of that user."""
    python, packages = python_for_anyone()
    words = ("--store", f"{folder}/{store}", "--listen", f"unix!{folder}/s", *options)
    program = (*NOBODY, python, "-m", "mqfs", "serve")
    with Server(*words, cwd=folder, program=program, PYTHONPATH=packages) as server, server.connect() as client:
        yield client


def fill(folder: Path, *options: str) -> None:
    with served(folder, *options) as client:
        group = client.group("g", create=True, ctl=["replay all"])
        for number in range(300):
            group.publish("s", b"message %d" % number)


def owners(folder: Path) -> set[int]:
    return {path.lstat().st_uid for path in folder.rglob("*") if path.name != "server.log"}


@pytest.mark.parametrize("damaged", [False, True])
def test_a_repaired_store_is_served(theirs: Path, damaged: bool) -> None:
    """A sound one, too: a start and a stop end the repair. It writes a log, the label and a folder."""
    fill(theirs)
    store = theirs / "store"
    if damaged:
        with open(max((store / "buckets/02/2").glob("*.log")), "r+b") as log:
            log.seek(6_000)
            log.write(b"\xff\xfe\xfd")
        (store / "mqfs").unlink()
        (store / "staging").rmdir()
    done = run("check", "--fix", str(store), cwd=theirs)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert ("3 problems, repaired" in done.stdout) == damaged
    assert owners(theirs) == {THEIR_ID}
    with served(theirs) as client:
        group = client.group("g")
        found = [message.body for message in group.history()]
        assert found[0] == b"message 0"
        assert len(found) > 290
        group.publish("s", b"new")


def test_a_store_open_to_others_is_left_as_it_is(theirs: Path) -> None:
    """A repair ends with a start, which refuses it: it is refused before."""
    fill(theirs)
    store = theirs / "store"
    store.chmod(0o777)
    (store / "staging").rmdir()
    done = run("check", "--fix", str(store), cwd=theirs)
    assert (done.returncode, done.stderr) == (
        1, f"mqfs: {store}: open to other users (expected the server's user, mode 700)\n"
    )  # fmt: skip
    assert not (store / "staging").exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_restored_store_is_served(theirs: Path, there: bool) -> None:
    """Made in a directory of that user, or as one of his that is empty."""
    with Server.at(theirs.parent, "--replica", f"file://{theirs}/log") as server, server.connect() as client:
        client.group("g", create=True, ctl=["replay all"]).publish("s", b"hello")
    subprocess.run(["chown", "-R", str(THEIR_ID), theirs], check=True)
    folder = theirs
    if there:
        folder = theirs.parent / "roots"
        (folder / "again").mkdir(parents=True)
        os.chown(folder / "again", THEIR_ID, THEIR_ID)
    done = run("restore", f"file://{theirs}/log", "again", cwd=folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert owners(folder) == {THEIR_ID}
    (folder / "again").rename(theirs / "restored")
    with served(theirs, store="restored") as client:
        assert [message.body for message in client.group("g").history()] == [b"hello"]


def doctor(folder: Path, *words: str) -> tuple[int, list[str]]:
    """The status, and the lines but those of the machine and of the disk."""
    done = run("doctor", *words, cwd=folder)
    wanted = ("user", "configuration", "tokens", "fd keeper", "replica")
    assert done.stderr == ""
    return done.returncode, [line for line in done.stdout.splitlines() if line[5:].partition(":")[0] in wanted]


def test_doctor_looks_as_the_user_of_the_server(theirs: Path) -> None:
    """Each file as readable for that user, not for root; and what is missing is not made."""
    names = ("c.toml", "tokens", "log")
    config, tokens, log = (theirs / name for name in names)
    config.write_text(f'store = "{theirs}/store"\ntoken-file = "{tokens}"\nreplica = "file://{log}"\n')
    tokens.touch()
    log.mkdir()
    for path in (config, tokens, log):
        path.chmod(0o700 if path == log else 0o600)
    assert doctor(theirs, "--config", str(config)) == (
        1,
        [
            f"ok   user: nobody, as of {theirs}/store",
            f"bad  configuration: --config {config}: Permission denied (expected a readable TOML file)",
            f"bad  tokens: --token-file {tokens}: Permission denied (expected a readable file)",
            f"bad  replica: file://{log}: {log}: not writable (expected a directory that this user may write to)",
        ],
    )
    log.rmdir()
    for path in (config, tokens):
        os.chown(path, THEIR_ID, THEIR_ID)
    assert doctor(theirs, "--config", str(config)) == (
        0,
        [
            f"ok   user: nobody, as of {theirs}/store",
            f"ok   configuration: {config}",
            f"ok   tokens: 0 in {tokens}",
            f"ok   replica: file://{log}: no log yet, a server makes it",
        ],
    )
    assert sorted(path.name for path in theirs.iterdir()) == sorted(set(names) - {"log"})
    assert doctor(theirs, "--token-file", str(tokens))[0] == 0


def test_doctor_finds_the_rings_of_another_user(theirs: Path) -> None:
    with served(theirs), mqfs.connect(f"unix!{theirs}/s", transport="ring") as other:
        other.group("g", create=True, ctl=["keep ring"]).publish("s", b"x")
        assert doctor(theirs, str(theirs / "store")) == (
            0, [f"ok   user: nobody, as of {theirs}/store", "ok   fd keeper: 1 ring held"]
        )  # fmt: skip


@pytest.mark.parametrize("guide", ["tokens.md", "tls-and-tokens.md"])
def test_the_tokens_of_a_guide_are_read(theirs: Path, guide: str) -> None:
    """By a service of another user: what the guide has root type, for that user and at another path."""
    lines = (ROOT / "docs" / "howto" / guide).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if "mqfs token new" in line)
    tokens = theirs.parent / "mqfs.tokens"
    for line in lines[first : first + 2]:
        line = line.replace("/etc/mqfs.tokens", str(tokens)).replace("new ann", f"new {THEIR_ID}")
        line = line.replace("mqfs:mqfs", f"{THEIR_ID}:{THEIR_ID}")
        words = shlex.split(line, comments=True)
        if words[0] == "chown":
            subprocess.run(words, check=True)
        elif words[:2] == ["mqfs", "token"]:
            assert run(*words[1:], cwd=theirs).returncode == 0
    with served(theirs, "--listen", "tcp!127.0.0.1!0", "--token-file", str(tokens)):
        pass
