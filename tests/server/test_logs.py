"""The log stays readable, whatever clients do."""

from __future__ import annotations

import logging

import pytest

from mqfs import errors, limits
from mqfs.server.logs import OneLine, Sparing

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
