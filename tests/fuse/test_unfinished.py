"""A last line without its newline, in files of commands: it is carried out at close(2), which says how it went."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest


def say(path: Path, *pieces: bytes) -> int:
    """Write without a newline, in pieces; the errno of close, 0: none."""
    fd = os.open(path, os.O_WRONLY)
    for piece in pieces:
        assert os.write(fd, piece) == len(piece)
    try:
        os.close(fd)
    except OSError as error:
        return error.errno or 0
    return 0


def test_ctl(mq: Path) -> None:
    assert say(mq / "ctl", b"dep", b"th 7") == 0
    assert "depth 7\n" in (mq / "ctl").read_text()
    assert say(mq / "ctl", b"replay all\nreplay so", b"me") == errno.EINVAL
    assert "replay 'some': unknown value" in (mq / ".errors").read_text()
    assert len((mq / ".errors").read_text().splitlines()) == 1


def test_a_program_fails_whose_command_was_refused(mq: Path) -> None:
    for text, code in (("replay last", 0), ("replay some", 1)):
        done = subprocess.run(["sh", "-c", f"/usr/bin/printf '{text}' >ctl"], cwd=mq, capture_output=True, text=True)
        assert (done.returncode, "Invalid argument" in done.stderr) == (code, bool(code))
    assert "replay last\n" in (mq / "ctl").read_text()


def test_cursors_and_consumers(mq: Path) -> None:
    (mq / "s").write_bytes(b"one")
    (mq / ".consumers" / "c").touch()
    for file, command in ((".cursor", b"seek first"), (".consumers/c", b"nack 0s")):
        fd = os.open(mq / file, os.O_RDWR)
        if file != ".cursor":
            assert os.read(fd, 10) == b"one"
        os.write(fd, command)
        os.close(os.dup(fd))
        assert os.read(fd, 10) == b"one"
        os.write(fd, b"seek nowhere")
        with pytest.raises(OSError, match=r"\[Errno 22\]"):
            os.close(os.dup(fd))
        assert b"seek" in os.read(fd, 200)
        os.close(fd)


def test_a_stream_is_left_alone(mq: Path) -> None:
    (mq / "ctl").write_text("data line\n")
    (mq / "s").touch()
    fd = os.open(mq / "s", os.O_WRONLY)
    os.write(fd, b"half ")
    os.close(os.dup(fd))
    os.write(fd, b"a line\n")
    os.close(fd)
    assert (mq / ".kept" / "s").read_bytes() == b"half a line\n"


def commit(mq: Path) -> int:
    try:
        (mq / ".txn" / "ctl").write_bytes(b"commit a.1 p")
    except OSError as error:
        return error.errno or 0
    return 0


def test_a_transaction_has_it_or_is_refused(mq: Path) -> None:
    (mq / "ctl").write_text("data line\n")
    for name in ("s", "gone"):
        (mq / name).touch()
    part = mq / ".txn" / "p"
    part.mkdir()
    lost = os.open(part / "gone", os.O_WRONLY)
    os.write(lost, b"lost")
    (mq / "gone").unlink()
    assert commit(mq) == errno.ENOENT
    os.close(lost)
    assert (commit(mq), part.exists()) == (errno.ENOENT, False)
    part.mkdir()
    fd = os.open(part / "s", os.O_WRONLY)
    os.write(fd, b"half ")
    os.close(os.dup(fd))
    os.write(fd, b"a line")
    assert commit(mq) == 0
    assert (mq / ".kept" / "s").read_bytes() == b"half a line"
    with pytest.raises(OSError, match=r"\[Errno 2\]"):
        os.write(fd, b" and more")
    os.close(fd)
