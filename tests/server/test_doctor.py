"""`mqfs doctor` on this machine, and on one that is made worse: limits, file systems, files of tokens and options."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import mqfs
from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.mount_space import own_mounts
from tests.support.server import Server

pytestmark = pytest.mark.process
LINE = re.compile(r"(?:ok   |warn |bad  )[^:]+: .+")


def doctor(*words: str, before: str = "") -> tuple[int, str]:
    """The status and the lines; `before`: lines of a shell, in a name space of mounts of its own."""
    command = [sys.executable, "-m", "mqfs", "doctor", *words]
    if before:
        command = [*own_mounts(), "sh", "-ec", f'{before}\nexec "$@"', "sh", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.stderr == ""
    assert all(LINE.fullmatch(line) for line in done.stdout.splitlines()), done.stdout
    return done.returncode, done.stdout


def test_this_machine_will_do(tmp_path: Path) -> None:
    status, text = doctor(str(tmp_path / "not" / "there" / "yet"))
    assert status == 0, text
    subjects = [line[5:].partition(":")[0] for line in text.splitlines()]
    assert [s for s in subjects if not s.startswith("fs.fuse")] == [
        "python", "records in C", "rings in C", "fuse", "descriptors", "clock", "disk", "room", "sync",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_replica_is_opened(tmp_path: Path) -> None:
    """Files that are not there are not made: the server does that, as its own user."""
    status, text = doctor("--replica", f"file://{tmp_path}/log")
    assert (status, list(tmp_path.iterdir())) == (0, []), text
    assert f"ok   replica: file://{tmp_path}/log: no log yet, a server makes it\n" in text
    with Server("--store", "store", "--replica", f"file://{tmp_path}/log", "--listen", "unix!s", cwd=tmp_path):
        pass
    status, text = doctor("--replica", f"file://{tmp_path}/log")
    assert status == 0, text
    assert f"ok   replica: file://{tmp_path}/log: every frame is synced to that directory" in text
    status, text = doctor("--replica", "nats://127.0.0.1:1/shop")
    assert status == 1
    assert re.search(r"^bad  replica: nats://127\.0\.0\.1:1/shop: not reachable", text, re.MULTILINE), text
    status, text = doctor("--replica", "ftp://a/b")
    assert (status, "unknown engine" in text) == (1, True)


@pytest.mark.parametrize("name", ["file", "file/store", "loop", "loop/store"])
def test_a_store_that_is_no_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    status, text = doctor(str(tmp_path / name))
    assert status == 1
    assert f"bad  disk: {tmp_path / name.partition('/')[0]}: not a directory" in text


def test_few_descriptors(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    command = [sys.executable, "-m", "mqfs", "doctor"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limit).stdout
    assert "warn descriptors: 256 (expected ulimit -Hn 65536 or LimitNOFILE=65536)\n" in text


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "status", "lines"),
    [
        ("size=32m", 1, ["warn disk: {} is on tmpfs: lost", "bad  room: 32 MiB free"]),
        ("size=200m", 0, ["warn room: 200 MiB free (expected 1024 MiB or more)"]),
        ("size=2g,ro", 1, ["bad  sync: {}: Read-only file system"]),
    ],
)
def test_bad_disks(tmp_path: Path, options: str, status: int, lines: list[str]) -> None:
    found = doctor(str(tmp_path), before=f"mount -t tmpfs -o {options} none {tmp_path}")
    assert found[0] == status
    assert [line for line in lines if line.format(tmp_path) not in found[1]] == [], found[1]


@pytest.mark.root
def test_a_kernel_that_ends_requests(tmp_path: Path) -> None:
    """Such a kernel is newer than this one: its files are laid over those of /proc."""
    for name, seconds in (("default_request_timeout", 0), ("max_request_timeout", 60)):
        (tmp_path / name).write_text(f"{seconds}\n")
    status, text = doctor(before=f"mount --bind {tmp_path} /proc/sys/fs/fuse")
    assert status == 1
    assert "ok   fs.fuse.default_request_timeout: 0\n" in text
    assert (
        "bad  fs.fuse.max_request_timeout: 60 s: a mount in which a read waits longer is aborted "
        "(expected sysctl -w fs.fuse.max_request_timeout=0)\n"
    ) in text


def test_files_of_tokens_and_of_options(tmp_path: Path) -> None:
    tokens, config = tmp_path / "tokens", tmp_path / "mqfs.toml"
    tokens.touch(0o644)
    config.write_text(f'store = "{tmp_path}"\ntoken-file = "{tokens}"\n')
    status, text = doctor("--config", str(config))
    assert status == 1
    assert f"ok   configuration: {config}\n" in text
    assert f"bad  tokens: --token-file {tokens}: open to others" in text
    assert "sync:" in text
    os.chmod(tokens, 0o600)
    assert doctor("--config", str(config))[0] == 0
    config.write_text("stroe = 1\n")
    status, text = doctor("--config", str(config))
    assert status == 1
    assert "bad  configuration: " in text


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe", 0o600)
    status, text = doctor("--token-file", str(pipe))
    assert status == 1
    assert f"bad  tokens: --token-file {pipe}: not a regular file (expected a file of mode 600)\n" in text


def test_the_keeper_of_rings_of_a_killed_server(tmp_path: Path) -> None:
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path) as server:
        with mqfs.connect(f"unix!{tmp_path}/s", transport="ring") as client:
            client.group("g", create=True, ctl=["keep ring"]).publish("s", b"x")
        assert "ok   fd keeper: 1 ring held\n" in doctor(str(server.store))[1]
