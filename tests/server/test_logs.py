"""The log stays readable, whatever clients do."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings, strategies

from mqfs import errors, limits
from mqfs.model import User
from mqfs.net.audit import Audit
from mqfs.ninep.client.connection import connect
from mqfs.server.logs import Handler, JsonLine, OneLine, Sparing, check, leads_to_journal, move_to_syslog
from tests.support.eventually import HANG_S
from tests.support.server import Server

log = logging.getLogger("tests.logs")


def test_what_others_named_reaches_the_log_escaped() -> None:
    text = "group a\x1b[2J\n\u202eb is not served"
    record = logging.makeLogRecord({"msg": "%s", "args": (text,), "levelno": logging.ERROR})
    line = OneLine("mqfs: %(message)s").format(record)
    assert line == "mqfs: group a\\x1b[2J\\n\\u202eb is not served"
    assert str(errors.NotFound(text)) == line[6:]
    assert len(str(errors.BadCommand("\x1b" * 1_000_000))) < 2 * limits.ERROR_BYTES


def repeat(number: int) -> None:
    log.error("connection %d failed", number)


def test_lines_of_a_kind_are_bounded_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.handler.addFilter(Sparing())
    try:
        for number in range(1_000):
            repeat(number)
        log.error("something else")
        assert caplog.messages == [f"connection {n} failed" for n in range(limits.LOG_LINES)] + ["something else"]
        monkeypatch.setattr(limits, "LOG_S", 0.0)
        repeat(7)
        repeat(8)
        left_out = 1_000 - limits.LOG_LINES
        assert caplog.messages[-2:] == [
            f"connection 7 failed ({left_out} such lines left out)", "connection 8 failed"
        ]  # fmt: skip
    finally:
        caplog.handler.filters.clear()


def test_lines_of_a_kind_are_bounded_in_syslog_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those of the audit."""
    audit = logging.getLogger("mqfs.audit")
    for logger in (logging.root, audit):
        monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(audit, "propagate", False)  # as a server has it
    lines: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog, ThreadPoolExecutor(1) as thread:

        def receive() -> None:
            while (line := syslog.recv(1 << 16).rstrip(b"\0").decode().partition("]: ")[2]) != "end":
                lines.append(line)

        syslog.settimeout(HANG_S)
        syslog.bind(str(tmp_path / "log"))
        move_to_syslog(str(tmp_path / "log"))
        received = thread.submit(receive)
        for number in range(2 * limits.LOG_LINES):
            repeat(number)
            audit.error("change %d", number)
        log.error("end")
        received.result()
        for logger in (logging.root, audit):
            logger.handlers[0].close()
    assert [line for line in lines if "failed" in line] == [f"connection {n} failed" for n in range(limits.LOG_LINES)]
    assert [line for line in lines if "change" in line] == [f"change {n}" for n in range(2 * limits.LOG_LINES)]


def test_a_syslog_that_receives_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has no room for is lost; later lines are not, also where it was away."""
    audit = logging.getLogger("mqfs.audit")
    for logger in (logging.root, audit):
        monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(audit, "propagate", False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        syslog.bind(str(tmp_path / "log"))
        move_to_syslog(str(tmp_path / "log"))
        try:
            writer = Thread(target=lambda: [audit.error("change %d", number) for number in range(5_000)], daemon=True)
            writer.start()
            writer.join(HANG_S)
            assert not writer.is_alive()
            syslog.setblocking(False)
            found = [b"change 0\0" in syslog.recv(1 << 16)]
            with suppress(BlockingIOError):
                while syslog.recv(1 << 16):
                    found.append(False)
            assert found[0]
            assert len(found) < 5_000
            audit.error("later")
            assert b"later" in syslog.recv(1 << 16)
            syslog.close()
            (tmp_path / "log").unlink()
            audit.error("lost")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as again:
                again.bind(str(tmp_path / "log"))
                audit.error("again")
                assert b"again" in again.recv(1 << 16)
        finally:
            syslog.close()
            for logger in (logging.root, audit):
                logger.handlers[0].close()


# ---------------------------------------------------------------- JSON, and the journal


def as_json(message: str, *args: object, level: int = logging.INFO, **more: object) -> str:
    record = logging.makeLogRecord({"name": "mqfs.x", "msg": message, "args": args, "levelno": level, **more})
    record.levelname = logging.getLevelName(level)
    return JsonLine().format(record)


def test_a_line_of_json() -> None:
    line = as_json("group %s\n\u202e", "a\x1b", level=logging.WARNING, created=1_700_000_000.5)
    assert line.isascii()
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.500Z", "level": "warning", "logger": "mqfs.x", "message": "group a\x1b\n\u202e",
    }  # fmt: skip


def test_the_words_of_an_audit_line_are_fields_of_json(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mqfs.audit"):
        Audit("changes").note(User(7, 7, where="9p unix 1"), "mkdir", "/a b", status="refused")
    assert 'audit user="7"' in caplog.messages[0]
    line = json.loads(JsonLine(timed=False).format(caplog.records[0]))
    assert line == {
        "level": "info", "logger": "mqfs.audit", "message": "audit", "user": "7", "token": "", "from": "9p unix 1",
        "method": "mkdir", "path": "/a b", "status": "refused", "detail": "",
    }  # fmt: skip


@settings(max_examples=100)
@given(strategies.text(max_size=50), strategies.integers(0, 1_000))
def test_a_line_of_json_is_bounded(text: str, times: int) -> None:
    """Whatever is in it; what is short stays whole."""
    try:
        raise ValueError(text * times)
    except ValueError:
        line = as_json("%s", text * times, exc_info=sys.exc_info())
    assert len(line) <= limits.LOG_LINE_BYTES
    found = json.loads(line)
    assert found["logger"] == "mqfs.x"
    if len(json.dumps(text * times)) < 2_000:
        assert found["message"] == text * times
        assert "ValueError" in found["exception"]


def test_lines_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A priority in front of each, also of a traceback's; no time and no name, which the journal has."""
    with open(tmp_path / "log", "w+") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        for form in ("text", "json"):
            handler = Handler(stream, form)
            handler.handle(logging.makeLogRecord({"msg": "ready", "levelno": logging.INFO, "levelname": "INFO"}))
            try:
                raise ValueError("x")
            except ValueError:
                wrong = {"msg": "failed", "levelno": logging.ERROR, "exc_info": sys.exc_info()}
                handler.handle(logging.makeLogRecord(wrong))
        stream.seek(0)
        lines = stream.read().splitlines()
    assert lines[0] == "<6>ready"
    assert lines[1] == "<3>failed"
    assert all(line.startswith("<3>") for line in lines[2:-2])
    assert json.loads(lines[-2].removeprefix("<6>")) == {"level": "info", "logger": None, "message": "ready"}
    assert "ValueError: x" in json.loads(lines[-1].removeprefix("<3>"))["exception"]
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
    assert not leads_to_journal(sys.stderr)


def test_unknown_words_of_the_log_are_refused() -> None:
    with pytest.raises(errors.BadConfig, match=r"--log-level 'loud': unknown \(expected one of debug, info"):
        check("loud", "text")
    with pytest.raises(errors.BadConfig, match=r"--log-format 'xml': unknown \(expected one of text, json"):
        check("info", "xml")


def test_a_server_logs_json(tmp_path: Path) -> None:
    """Every line of it, and no body of a message or secret, even at level debug."""
    options = ("--log-format", "json", "--log-level", "debug", "--audit", "all")
    with Server("--listen", "unix!s", *options, cwd=tmp_path) as server, connect(f"unix!{tmp_path}/s") as client:
        client.mkdir("a")
        with client.create("a/s") as stream:
            stream.write(b"the body of it")
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.text().splitlines()]
    assert {"ready", "audit"} <= {line["message"] for line in lines}
    assert "the body" not in json.dumps(lines)
