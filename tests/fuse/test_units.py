"""Batches and transactions through the mount: a shell, frames made with printf, programs that walk over everything."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fuse.served_by import WRITE, Child, Served, calls
from tests.support.eventually import HANG_S, eventually

FRAME = r"""
frame() {  # STREAM BODY
  local size=$((8 + ${#1} + ${#2}))
  printf "$(printf '\\x%x\\x%x\\0\\0\\x%x\\0\\0\\0' $((size & 255)) $((size >> 8)) ${#1})%s%s" "$1" "$2"
}
"""


def bash(mq: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", FRAME + script], cwd=mq, capture_output=True, text=True, timeout=HANG_S)


def log(mq: Path) -> list[tuple[str, str]]:
    fd = os.open(mq / ".cursor", os.O_RDWR)
    try:
        os.write(fd, b"seek first\nuntil end\nformat json\n")
        rows = []
        while line := os.read(fd, 2 << 20):
            rows.append(json.loads(line))
        return [(row["stream"], row["body"]) for row in rows]
    finally:
        os.close(fd)


def test_a_shell_and_printf(mq: Path) -> None:
    script = 'touch s t; { frame s one; frame t two; frame s "$(seq -s, 100)"; } | dd of=.batch bs=1M iflag=fullblock'
    assert bash(mq, script).returncode == 0
    assert log(mq) == [("s", "one"), ("t", "two"), ("s", ",".join(map(str, range(1, 101))))]
    refused = bash(mq, "printf '\\x20\\0\\0\\0\\x01\\0\\0\\0sx' >.batch")
    assert "Invalid argument" in refused.stderr
    assert "size 32 exceeds the 10 bytes of the write" in (mq / ".errors").read_text()


def test_a_transaction_in_a_shell(mq: Path) -> None:
    script = """
    set -e
    touch s t
    mkdir .txn/p
    echo one >.txn/p/s
    echo two >>.txn/p/t
    frame s three >.txn/p/.batch
    ls -A .txn/p
    cat s >/dev/null & reader=$!
    cat .txn/ctl
    echo commit job.1 p >.txn/ctl
    echo commit job.1 p >.txn/ctl
    cat .txn/ctl
    kill $reader
    """
    done = bash(mq, script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [".batch", ".put", "s", "t", "part p 0 3 120", "committed job.1"]
    assert log(mq) == [("s", "one\n"), ("t", "two\n"), ("s", "three")]


def test_why_it_was_refused(mq: Path) -> None:
    script = "touch s; exec 3<>.txn/ctl; echo commit job.1 p >&3; head -c 200 <&3; mkdir .txn/p; echo x >.txn/p/u"
    done = bash(mq, script)
    assert "no part 'p'" in done.stdout
    assert "write error: No such file or directory" in done.stderr
    assert ".txn/p/u: No such file or directory" in done.stderr


def test_rm_and_rmdir(mq: Path) -> None:
    done = bash(
        mq, "touch s; mkdir .txn/p .txn/q; echo x >.txn/p/s; rmdir .txn/q; rm -r .txn/p; ls .txn; cd ..; rm -r $OLDPWD"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ctl\n", "")
    assert not mq.exists()
    mq.mkdir()


LOOKERS = [
    "find . -ls",
    "find . -type f -print0 | xargs -0 stat",
    "grep -r nothing s ctl .txn .batch .kept",
    "tar cf /dev/null s ctl .txn .batch .kept --warning=no-file-changed",
    "ls -laR; du -a .txn",
]


@pytest.mark.parametrize("script", LOOKERS, ids=lambda script: script.split()[0])
def test_whoever_only_looks_changes_nothing(mq: Path, script: str) -> None:
    bash(mq, "touch s t; echo kept >s; mkdir .txn/p; echo x >.txn/p/s")
    before = (mq / ".txn" / "ctl").read_text(), log(mq)
    script = script.replace(" s ", " t ")
    (mq / "ctl").write_text("eof t\n")
    bash(mq, script)
    assert ((mq / ".txn" / "ctl").read_text(), log(mq)) == before
    bash(mq, "echo commit x.1 p >.txn/ctl")
    assert log(mq) == [("s", "kept\n"), ("s", "x\n")]


def test_numbers_of_files(mq: Path) -> None:
    bash(mq, "touch s; mkdir .txn/p; echo x >.txn/p/s")
    paths = [".txn", ".txn/ctl", ".txn/p", ".txn/p/s", ".txn/p/.batch", "s", ".batch"]
    numbers = [(mq / path).stat().st_ino for path in paths]
    assert len(set(numbers)) == len(paths)
    with os.scandir(mq / ".txn" / "p") as listed:
        assert {entry.name: entry.inode() for entry in listed}["s"] == numbers[3]
    with pytest.raises(OSError, match="Permission denied"):
        os.open(mq / ".txn" / "p" / "s", os.O_RDONLY)
    with pytest.raises(OSError) as told:
        os.rename(mq / ".txn" / "p", mq / ".txn" / "q")
    assert told.value.errno == errno.EPERM


WRITER = """
fd = os.open(mq + "/.txn/ctl", os.O_WRONLY)
print("ready", flush=True)
input()
print(os.write(fd, b"commit job.1 p"), flush=True)
"""


def test_a_commit_that_waits_for_room(mq: Path) -> None:
    (mq / "ctl").write_text("depth 1\nfull block\n")
    bash(mq, "touch s; echo x >s; mkdir .txn/p; echo y >.txn/p/s")
    with Child(mq, WRITER) as child:
        assert child.line() == "ready"
        child.tell()
        eventually(lambda: calls(child.process.pid, WRITE))
        (mq / "ctl").write_text("clear s\n")
        assert child.line() == "14"
    assert log(mq) == [("s", "y\n")]


def test_after_a_restart(serve: Any, tmp_path: Path) -> None:
    first: Served = serve()
    (first.path / "g").mkdir()
    mq = first.path / "g"
    (mq / "ctl").write_text("replay all\n")
    bash(mq, "touch s; mkdir .txn/p .txn/q; echo x >.txn/p/s; echo y >.txn/q/s; echo commit job.1 p >.txn/ctl")
    assert first.stop() == 0
    second: Served = serve()
    mq = second.path / "g"
    assert (mq / ".txn" / "ctl").read_text() == "committed job.1\n"
    assert log(mq) == [("s", "x\n")]
