"""Times and durations: every tool and option takes the same texts, and refuses the others alike."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest

from mq_tools.times import ctl_duration, duration_ns, unix_time
from mqfs.syntax.duration import parse_duration
from tests.support import ROOT
from tests.support.server import Server, mqfs
from tests.support.tools import mq, mq_cat, mq_work

DURATIONS = {
    "0": "0ms", "90": "90000ms", "500ms": "500ms", ".5s": "500ms", "1.5h": "5400000ms", "0.1ms": "1ms", "1.1": "1100ms",
    "5m": "300000ms", "2h": "7200000ms", "7d": "604800000ms",
}  # fmt: skip
NO_DURATIONS = ("soon", "", "1w", "s", ".", "1.", "-1s", "1e3", "1 s", "+1s", "\u0663s", "1" * 5_000, "200000d")
NEW_YEAR = 1_893_474_000.0  # 2030-01-01T00:00 in New York
TIMES = {
    "2030-01-01": NEW_YEAR, "2030-01-01T00:00": NEW_YEAR, "2030-01-01T05:00Z": NEW_YEAR,
    "2030-01-01T06:00+01:00": NEW_YEAR, "@1893474000": NEW_YEAR, "1893474000": NEW_YEAR,
    "@1893474000.5": NEW_YEAR + 0.5, "20300101": NEW_YEAR,
}  # fmt: skip
NO_TIMES = (
    "noon", "", "@", "@noon", "nan", "inf", "-1", "@-1", "1e9", "1960-01-01", "0001-01-01", "9" * 400,
    "@" + "9" * 400, "@@1893474000", "2030-13-01",
)  # fmt: skip


@pytest.fixture
def new_york() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "America/New_York"
    time.tzset()
    yield
    os.environ.pop("TZ")
    if before is not None:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.parametrize("text", DURATIONS)
def test_a_duration_is_the_same_for_tools_and_server(text: str) -> None:
    assert ctl_duration(text) == DURATIONS[text]
    assert 0 <= parse_duration(ctl_duration(text)) - duration_ns(text) < 10**6


@pytest.mark.parametrize("text", TIMES)
def test_a_time_without_a_zone_is_local(new_york: None, text: str) -> None:
    assert unix_time(text) == TIMES[text]


@pytest.mark.parametrize("text", NO_TIMES)
def test_what_is_no_time(text: str) -> None:
    expected = f"bad time {text!r} (expected 2030-01-31T08:00, 2030-01-31T08:00Z or @1900000000)"
    with pytest.raises(ValueError, match=re.escape(expected)):
        unix_time(text)


@pytest.mark.parametrize("text", NO_DURATIONS)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="bad duration") as refused:
        ctl_duration(text)
    assert str(refused.value) == f"bad duration {text!r} (expected 500ms, 30s, 5m, 2h or 7d)"


@pytest.mark.parametrize("text", ["soon", "-1s"])
def test_every_option_refuses_a_bad_duration_alike(server: Server, text: str) -> None:
    group = server.path / "durations"
    if not group.exists():
        server.group("durations", "consumer w", streams=["s"])
    shown = f"bad duration {text!r} (expected 500ms, 30s, 5m, 2h or 7d)".encode()
    for done in (
        mq("put", f"--delay={text}", group / "s", "x"),
        mq("put", f"--ttl={text}", group / "s", "x"),
        mq("top", f"--interval={text}", group),
        mq_cat(f"--idle={text}", group),
        mq_work(f"--timeout={text}", group / ".consumers" / "w", "true"),
        mq_work(f"--grace={text}", group / ".consumers" / "w", "true"),
    ):
        assert (done.returncode, done.stdout) == (2, b""), done.stderr
        assert shown in done.stderr


def test_every_option_takes_a_duration(server: Server) -> None:
    group = server.group("all durations", "replay all", "consumer w", streams=["s"])
    for text in ("0", "90", "500ms", ".5s", "1.5h"):
        for done in (
            mq("put", "--ttl", text, group / "s", "x"),
            mq("put", "--delay", text, group / "s", "x"),
            mq_work("-e", "--timeout", "1h", "--grace", text, group / ".consumers" / "w", "true"),
            mq_cat("-n", 0, "--idle", text, group),
            mq_cat("-e", f"--from=-{text}", group),
        ):
            assert done.returncode == 0, done.stderr
    assert mq("top", "-n", 1, "--interval", ".01s", group).returncode == 0
    assert mq_cat("--from", "end", "--idle", "300ms", group).returncode == 124


def test_a_zone_is_honoured_by_put_and_from(server: Server) -> None:
    group = server.group("zones", "replay all", streams=["s"])
    east = {"TZ": "Asia/Tokyo"}  # nine hours ahead
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 8.5 * 3600))
    assert mq("put", "--at", local, group / "s", "was half an hour ago", env=east).returncode == 0
    assert mq("put", "--at", f"{local}Z", group / "s", "in half a day", env=east).returncode == 0
    assert mq_cat("-e", "--from", "first", group).stdout == b"was half an hour ago\n"
    assert mq_cat("-e", "--from", f"@{local}", group, env=east).stdout == b"was half an hour ago\n"
    assert mq_cat("-e", "--from", f"@{local}Z", group, env=east).stdout == b""


def test_a_bad_start_says_what_is_wrong_with_it(server: Server) -> None:
    group = server.group("starts", streams=["s"])
    for where, text in (
        ("@noon", "bad time 'noon' ("), ("@9999999999999", "bad time '@9999999999999' ("),
        ("@0001-01-01", "bad time '0001-01-01' ("), ("-soon", "bad duration 'soon' ("),
        ("later", "bad start 'later' ("),
    ):  # fmt: skip
        done = mq_cat(f"--from={where}", group)
        assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
        assert text in done.stderr.decode()


def test_spark_refuses_a_bad_time_before_it_starts() -> None:
    done = mqfs("spark", "replay", "x", "--at", "unix!/x", "--since", "noon", cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "bad time 'noon' (expected 2030-01-31T08:00" in done.stderr
