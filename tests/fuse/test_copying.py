"""Programs that let the kernel copy (sendfile, splice, copy_file_range), and those that trust the size of a file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pexpect
import pytest

from tests.fuse.served_by import Child
from tests.support.eventually import HANG_S

TEXTS = ("ctl", ".stats", ".errors")


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def finite(mq: Path) -> Path:
    """A group with files that end: its own, a queue, and what a consumer shows."""
    run("sh", "-c", "mkdir q; echo 'deliver one' >q/ctl; echo job >q/s; : >q/.consumers/w", cwd=mq)
    run("sh", "-c", "echo 'replay some' 2>/dev/null >ctl || :; echo hi >s; : >.consumers/c; echo x >s", cwd=mq)
    return mq


@pytest.mark.parametrize("program", ["cat", "busybox cat"])
def test_cat_prints_a_stream_and_waits(mq: Path, program: str) -> None:
    (mq / "s").write_bytes(b"hi\n")
    words = program.split()
    for file in ("s", "order"):
        cat = pexpect.spawn(words[0], [*words[1:], file], cwd=str(mq), encoding="utf-8", timeout=HANG_S, use_poll=True)
        cat.expect_exact({"s": "hi\r\n", "order": "s\0"}[file])
        (mq / "s").write_bytes(b"hi\n")
        cat.expect_exact({"s": "hi\r\n", "order": "s\0"}[file])
        cat.close(force=True)


@pytest.mark.parametrize("program", ["cat", "busybox cat"])
@pytest.mark.parametrize("file", ["ctl", ".stats", ".errors", ".who", "q/s", ".consumers/c", ".kept/s"])
def test_cat_prints_a_file_that_ends(finite: Path, program: str, file: str) -> None:
    with open(finite / "s", "rb"):
        printed = run(*program.split(), file, cwd=finite)
    assert printed
    if file not in (".stats", ".who"):
        assert printed == (finite / file).read_text()


@pytest.mark.parametrize("program", ["cp", "busybox cp", "busybox dd bs=4096"])
@pytest.mark.parametrize("file", ["ctl", ".errors", ".consumers/c", "q/s", ".kept/s"])
def test_a_copy_is_whole(finite: Path, tmp_path: Path, program: str, file: str) -> None:
    words = program.split()
    to = tmp_path / "copy"
    if "dd" in words:
        subprocess.run([*words, f"if={file}", f"of={to}"], cwd=finite, capture_output=True, check=True, timeout=HANG_S)
    else:
        run(*words, file, str(to), cwd=finite)
    assert to.read_bytes() == (finite / file).read_bytes() != b""


@pytest.mark.parametrize("file", [*TEXTS, ".kept/s"])
@pytest.mark.parametrize("repeated", [1, 2])
def test_shutil_copies_what_has_a_size(finite: Path, tmp_path: Path, file: str, repeated: int) -> None:
    """fstat, then sendfile; and another file of the same name that is open meanwhile."""
    with open(finite / file, "rb") as other:
        for _ in range(repeated):
            shutil.copyfile(finite / file, tmp_path / "copy")
        assert (tmp_path / "copy").stat().st_size
        if file != ".stats":
            assert (tmp_path / "copy").read_bytes() == other.read()


@pytest.mark.parametrize("file", TEXTS)
def test_an_open_text_has_its_size(finite: Path, file: str) -> None:
    fd = os.open(finite / file, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        assert size == len(os.read(fd, 1 << 20)) > 0
        assert os.lseek(fd, 0, os.SEEK_END) == size
    finally:
        os.close(fd)
    assert (finite / file).stat().st_size == 0


def test_texts_that_end_are_read_from_both_ends(finite: Path) -> None:
    lines = (finite / "ctl").read_text().splitlines(keepends=True)
    for words in ([], ["busybox"]):
        assert run(*words, "tail", "-n", "1", "ctl", cwd=finite) == lines[-1]
        assert run(*words, "head", "-n", "1", "ctl", cwd=finite) == lines[0]
    assert run("wc", "-c", "ctl", cwd=finite).split()[0] == str(len("".join(lines)))
    assert json.loads(run("busybox", "cat", ".stats", cwd=finite))


def test_a_stream_has_no_size_and_head_goes_back(mq: Path) -> None:
    (mq / "s").write_bytes(b"1\n2\n3\n")
    assert (mq / "s").stat().st_size == 0
    with open(mq / "s", "rb") as stream:
        assert os.fstat(stream.fileno()).st_size == 0
    assert run("sh", "-c", "{ head -n1; head -n1; busybox head -n1; } <s", cwd=mq) == "1\n2\n3\n"


def test_appending_with_a_bound_on_the_size_of_files(mq: Path) -> None:
    assert run("sh", "-c", "ulimit -f 1; echo hi >>s; echo ho >>s; head -n2 .kept/s", cwd=mq) == "hi\nho\n"


def test_the_kernel_keeps_no_pages_of_a_stream(mq: Path) -> None:
    """A copy in the kernel would keep what a message was at offset 0, for whoever asks there next."""
    (mq / "s").write_bytes(b"one\n")
    program = """
def spliced(fd):
    r, w = os.pipe()
    try:
        return os.splice(fd, w, 100)
    except OSError as error:
        return errno.errorcode[error.errno]
fd = os.open(mq + "/s", os.O_RDONLY)
print(spliced(fd), os.read(fd, 100))
"""
    with Child(mq, program) as child:
        assert child.line() == "EINVAL b'one\\n'"


def test_tar_extracts_into_a_group_and_ends(mq: Path) -> None:
    """A file that is there it unlinks, and makes again; until then it does not stop."""
    run("sh", "-c", "mkdir a b a/.txn/part; echo x >a/s; echo x >a/.txn/part/s", cwd=mq)
    script = "tar cf - -C a . | timeout 10 tar xf - -C b; echo ended $?"
    done = subprocess.run(["sh", "-c", script], cwd=mq, capture_output=True, text=True, timeout=HANG_S)
    assert "ended 2\n" in done.stdout
    names = ("ctl", "order", ".put", ".stats", ".kept/s", ".txn/ctl", ".txn/part/.put", ".txn/part/s")
    assert all(f"{name}: Cannot" in done.stderr for name in names)
    assert (mq / "b" / "s").exists()
    run("rm", "-r", "b", cwd=mq)
    run("rm", "-r", "a", cwd=mq)
