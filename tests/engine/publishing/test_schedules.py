"""Schedules: `.put` with `every` or `cron`, on a clock moved by hand."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from mqfs import errors, limits
from mqfs.engine.language.put_request import parse_cron
from mqfs.model import User, Wait
from tests.engine.core.test_shown import Copied
from tests.support.clock import SECOND, MachineClock, RunningClock
from tests.support.hand import ANNA, BERT, ROOT
from tests.support.queues import Queues

START = 1_700_000_000  # 2023-11-14T22:13:20Z


def ids(q: Queues, stream: str = "s") -> list[str]:
    """The ids of what was published, without the date."""
    return [row["headers"]["id"].replace("2023-11-14T", "") for row in q.kept(stream)]


def schedules(q: Queues, user: User = ROOT) -> dict[str, Any]:
    return dict(json.loads(q.text(".stats", user))["schedules"])


def plan(q: Queues, text: bytes, user: User) -> None:
    handle = q.at(".put", os.O_WRONLY, user)
    try:
        handle.write(text)
    finally:
        handle.close()


# ------------------------------------------------------------------ every


def test_it_is_published_in_its_rhythm() -> None:
    q = Queues("replay all")
    held = q.put(b"tick", every="10s", id="t", headers={"k": "v"}, priority=7, ttl="1h")
    q.pass_time(9)
    assert q.kept() == []
    q.pass_time(21)
    assert ids(q) == ["t@22:13:30Z", "t@22:13:40Z", "t@22:13:50Z"]
    first = q.kept()[0]
    assert first["body"] == "tick"
    assert first["headers"] == {
        "k": "v", "priority": "7", "ttl": "1h", "sender": "0", "id": "t@22:13:30Z".replace("@", "@2023-11-14T"),
        "held": str(held),
    }  # fmt: skip
    assert json.loads(q.text(".stats"))["held"] == 1


def test_the_first_time_may_be_given() -> None:
    q = Queues("replay all")
    q.put(b"a", every="1h", id="a", delay="2s")
    q.put(b"b", every="1h", id="b", at=START + 3)
    q.pass_time(3)
    assert ids(q) == ["a@22:13:22Z", "b@22:13:23Z"]


@pytest.mark.parametrize(
    ("keys", "runs"),
    [
        ({"at": START - 3}, ["27", "37"]), ({"at": START - 3.5}, ["26", "36"]),
        ({"at": START - 30}, ["20", "30", "40"]),
        ({"at": 0}, ["20", "30", "40"]), ({"at": START}, ["20", "30", "40"]), ({"at": START + 25}, ["45"]),
        ({"delay": "0"}, ["20", "30", "40"]), ({"delay": "1s"}, ["21", "31", "41"]), ({}, ["30", "40"]),
    ],
)  # fmt: skip
def test_a_first_time_that_is_past_sets_the_rhythm(keys: dict[str, Any], runs: list[str]) -> None:
    q = Queues("replay all")
    q.put(b"a", every="10s", id="a", **keys)
    q.tree.run_timers()
    q.pass_time(25)
    assert ids(q) == [f"a@22:13:{second}Z" for second in runs]


def test_readers_that_wait_get_it() -> None:
    q = Queues()
    q.put(b"tick", every="1s", id="t")
    wait = q.at("s").read(64, 0)
    q.pass_time(1)
    assert wait.result() == b"tick"


def test_what_was_missed_is_one(tmp_path: Path) -> None:
    q = Queues("replay all", path=tmp_path / "store")
    q.put(b"tick", every="10s", id="t")
    q.restart(while_down=lambda: q.clock.forward(35))
    q.pass_time(5)
    assert ids(q) == ["t@22:13:30Z", "t@22:14:00Z"]


@pytest.mark.parametrize("clean", [True, False])
def test_it_goes_on_after_a_restart(tmp_path: Path, clean: bool) -> None:
    q = Queues("replay all", path=tmp_path / "store")
    q.put(b"tick", every="10s", id="t")
    for _ in range(3):
        q.pass_time(10)
        q.restart(clean=clean)
    assert ids(q) == ["t@22:13:30Z", "t@22:13:40Z", "t@22:13:50Z"]
    assert list(schedules(q)) == ["t"]


def test_no_step_of_the_wall_clock_moves_it() -> None:
    q = Queues("replay all")
    q.put(b"tick", every="10s", id="t")
    for step_s in (-3600, 7200, -5):
        q.clock.wall += step_s * SECOND
        q.pass_time(10)
    assert ids(q) == ["t@22:13:30Z", "t@22:13:40Z", "t@22:13:50Z"]


# ------------------------------------------------------------------ its name


def test_the_same_name_takes_its_place() -> None:
    q = Queues("replay all")
    q.stream("t")
    q.put(b"old", every="10s", id="t")
    held = q.put(b"new", "t", every="3s", id="t")
    assert schedules(q) == {"t": {"stream": "t", "every": "3s", "next": START + 3, "sequence": held, "uid": 0}}
    q.pass_time(20)
    assert q.kept() == []
    assert len(q.kept("t")) == 6


def test_the_very_same_changes_nothing() -> None:
    q = Queues("replay all")
    keys: dict[str, Any] = {"every": "10s", "id": "t", "headers": {"k": "v"}}
    held = q.put(b"tick", **keys)
    q.pass_time(7)
    assert q.put(b"tick", **keys) == held
    handle = q.at(".put", os.O_RDWR)
    handle.write(json.dumps({"stream": "s", "kept": True, **keys}).encode() + b" tick")
    assert handle.read(100) == b"%d %d 0 1 1\n" % (held, (START + 10) * SECOND)
    q.pass_time(3)
    assert ids(q) == ["t@22:13:30Z"]


def test_it_ends_with_its_message_or_its_stream() -> None:
    q = Queues("replay all")
    q.stream("t")
    held = q.put(b"tick", every="1s", id="a")
    q.put(b"tick", "t", every="1s", id="b")
    q.ctl(f"drop s {held}")
    q.tree.unlink(ROOT, q.group, "t")
    assert schedules(q) == {}
    q.pass_time(2)
    assert json.loads(q.text(".stats"))["held"] == 0
    assert q.kept() == []


def test_unschedule(tmp_path: Path) -> None:
    q = Queues("replay all", path=tmp_path / "store")
    q.put(b"tick", every="1s", id="a b")
    q.put(b"tick", every="1s", id="c")
    with pytest.raises(errors.NotFound, match="no schedule 'd' in group 'g'"):
        q.ctl("unschedule c", "unschedule d")
    q.ctl("protect on")
    with pytest.raises(errors.NotPermitted):
        q.ctl("unschedule c")
    q.ctl("protect off", "unschedule 'a b'")
    q.restart(clean=False)
    assert list(schedules(q)) == ["c"]
    q.pass_time(2)
    q.ctl("unschedule c")
    assert ids(q) == ["c@22:13:21Z", "c@22:13:22Z"]
    assert json.loads(q.text(".stats"))["held"] == 0


def test_a_name_is_its_makers_and_the_owners() -> None:
    q = Queues("replay all")
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o666)
    plan(q, b'{"stream":"s","every":"1s","id":"t"} a', ANNA)
    with pytest.raises(errors.NotPermitted, match="schedule 't': another user's"):
        plan(q, b'{"stream":"s","every":"1s","id":"t"} b', BERT)
    plan(q, b'{"stream":"s","every":"2s","id":"t"} c', ANNA)
    q.put(b"d", every="3s", id="t")
    assert schedules(q)["t"]["every"] == "3s"


def test_a_group_has_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SCHEDULES", 4)
    q = Queues()
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o666)
    for name in "ab":
        plan(q, b'{"stream":"s","every":"1h","id":"%s"} x' % name.encode(), ANNA)
    with pytest.raises(errors.OverLimit, match="too many schedules"):
        plan(q, b'{"stream":"s","every":"1h","id":"c"} x', ANNA)
    plan(q, b'{"stream":"s","every":"2h","id":"a"} x', ANNA)
    q.put(b"x", every="1h", id="d")


def test_only_who_sees_the_stream_sees_its_schedules() -> None:
    q = Queues()
    q.put(b"x", every="1h", id="t")
    q.tree.setattr(ROOT, q.group, mode=0o711)
    q.tree.setattr(ROOT, q.group.streams["s"], mode=0o600)
    assert schedules(q, ANNA) == {}


# ------------------------------------------------------------------ cron


def times(text: str, begin: datetime, count: int) -> list[str]:
    """The times of a cron expression, in UTC."""
    schedule, at, found = parse_cron(text), int(begin.timestamp()) * SECOND, []
    for _ in range(count):
        at = schedule.next_ns(at)
        found.append(datetime.fromtimestamp(at // SECOND, UTC).strftime("%d %H:%M"))
    return found


def test_an_hour_that_a_zone_skips() -> None:
    """02:30 does not exist on March 31, 2024 in Berlin: it is the end of that hour."""
    begin = datetime(2024, 3, 30, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    assert times("30 2 * * * Europe/Berlin", begin, 3) == ["31 01:00", "01 00:30", "02 00:30"]
    assert times("*/30 * * * * Europe/Berlin", datetime(2024, 3, 31, 0, tzinfo=UTC), 4) == [
        "31 00:30", "31 01:00", "31 01:30", "31 02:00",
    ]  # fmt: skip


def test_an_hour_that_comes_twice() -> None:
    """02:30 comes twice on October 27, 2024 in Berlin: it is the first."""
    begin = datetime(2024, 10, 26, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    assert times("30 2 * * * Europe/Berlin", begin, 3) == ["27 00:30", "28 01:30", "29 01:30"]
    assert times("0 * * * * Europe/Berlin", datetime(2024, 10, 26, 23, 30, tzinfo=UTC), 3) == [
        "27 00:00", "27 01:00", "27 02:00",
    ]  # fmt: skip


def test_cron_is_due_by_the_wall_clock() -> None:
    q = Queues("replay all")
    q.put(b"tick", cron="15 22 * * *", id="t")
    q.put(b"tick", cron="14-16 22 * * * UTC", id="u")
    q.pass_time(3600)
    assert ids(q) == ["u@22:14:00Z", "t@22:15:00Z", "u@22:15:00Z", "u@22:16:00Z"]
    assert schedules(q)["t"]["next"] == START - 22 * 3600 - 13 * 60 - 20 + 86400 + 22 * 3600 + 15 * 60


RUNNING: list[dict[str, Any]] = [
    {"cron": "* * * * *", "id": "t"},
    {"every": "60s", "id": "t"},
    {"delay": "60s", "id": "t"},
]


@pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("keys", RUNNING, ids=["cron", "every", "delay"])
def test_it_is_published_while_the_clocks_run(tmp_path: Path, keys: dict[str, Any], again: bool) -> None:
    """The engine's clock has gone on whenever it is looked at again."""
    q = Queues("replay all", path=tmp_path / "store", clock=RunningClock())
    q.put(b"tick", **keys)
    if again:
        q.restart(clean=True)
    q.clock.forward(65)
    for _ in range(10):
        q.tree.run_timers()
    assert [row["body"] for row in q.kept()] == ["tick"]
    due_ns = q.tree.timers.next_due_ns
    assert due_ns is None or due_ns > q.clock.engine_ns(), "nothing is to be done before the next time"
    q.close()


def test_a_run_that_waits_for_room_waits_for_its_time_where_the_clock_is_set_back() -> None:
    q = Queues("replay all", "depth 1", "full reject")
    q.write("s", b"old")
    q.put(b"tick", cron="0 0 * * *", id="t")
    q.clock.forward(2 * 3600)  # past midnight
    q.pass_time(1)
    assert q.errors(), "it waits"
    q.clock.wall -= 5 * 3600 * SECOND
    q.pass_time(3)
    due_ns = q.tree.timers.next_due_ns
    q.tree.run_timers()
    assert due_ns is not None
    assert due_ns > q.clock.engine_ns() + SECOND // 100, "not at once, again and again"
    q.ctl("depth 2")
    q.pass_time(3)
    assert len(q.kept()) == 1
    q.clock.forward(5 * 3600)
    q.pass_time(1)
    assert [row["body"] for row in q.kept()] == ["old", "tick"]


def test_a_wall_clock_that_is_set_ahead_makes_it_due_once() -> None:
    q = Queues("replay all")
    q.put(b"tick", cron="*/10 * * * *", id="t")
    q.clock.wall += 3600 * SECOND
    q.pass_time(2)
    assert ids(q) == ["t@22:20:00Z"]
    assert schedules(q)["t"]["next"] == START - 200 + 3600 + 600


def test_a_wall_clock_that_is_set_back_brings_the_times_before() -> None:
    q = Queues("replay all")
    q.put(b"tick", cron="*/10 * * * *", id="t")
    q.clock.wall -= 3600 * SECOND
    q.pass_time(900)
    assert ids(q) == ["t@21:20:00Z"]
    q.pass_time(3600)
    assert ids(q)[1:] == ["t@21:30:00Z", "t@21:40:00Z", "t@21:50:00Z", "t@22:00:00Z", "t@22:10:00Z", "t@22:20:00Z"]


def restarted(q: Queues, seconds: float) -> None:
    """The clock is set while the server is down, after a kill."""

    def set_clock() -> None:
        q.clock.wall += int(seconds * SECOND)

    q.restart(clean=False, while_down=set_clock)
    q.pass_time(2)


def stepped(q: Queues, seconds: float) -> None:
    q.clock.wall += int(seconds * SECOND)
    q.pass_time(2)


DAY = 86_400
CRONS = {"* * * * *": 60, "*/10 * * * *": 600, "0 * * * *": 3600, "0 5 * * *": DAY, "0 5 1 * *": 31 * DAY}


@pytest.mark.parametrize("set_clock", [stepped, restarted])
@pytest.mark.parametrize("cron", CRONS)
@pytest.mark.parametrize("ahead", [3 * DAY, 365 * DAY, 3 * 365 * DAY])
@pytest.mark.parametrize("stays", [2, 2 * DAY])
def test_a_wall_clock_that_was_wrong_once_silences_nothing(
    tmp_path: Path, set_clock: Any, cron: str, ahead: int, stays: int
) -> None:
    """Once it is set back: runs come at the next times, but for the one at which it ran early."""
    q = Queues("replay all", path=tmp_path / "store")
    q.put(b"job", id="t", cron=cron)
    set_clock(q, ahead)
    for _ in range(stays // 600):
        q.clock.forward(600)
        q.tree.tick()
        q.tree.run_timers()
    ran = len(q.kept())
    set_clock(q, -ahead)
    now, period = q.clock.wall / SECOND, CRONS[cron]
    assert now < schedules(q)["t"]["next"] <= now + 2 * period
    step = 60 if period < DAY else 3600
    for _ in range(4 * period // step):
        q.clock.forward(step)
        q.tree.tick()
        q.tree.run_timers()
    found = [row["headers"]["id"] for row in q.kept()]
    assert len(found) >= ran + 2
    unique = found if stays == 2 else found[ran:]
    assert len(set(unique)) == len(unique)


@pytest.mark.parametrize("set_clock", [stepped, restarted])
@pytest.mark.parametrize("back", [1, 59, 60, 600, 3600, 3 * 3600 - 5])
@pytest.mark.parametrize("cron", CRONS)
def test_no_time_comes_twice_where_the_clock_is_set_back_a_little(
    tmp_path: Path, set_clock: Any, cron: str, back: int
) -> None:
    q = Queues("replay all", path=tmp_path / "store")
    q.clock.wall = START * SECOND - (START % 3600) * SECOND + 6 * 3600 * SECOND + 1_800 * SECOND
    q.put(b"job", id="t", cron=cron)
    while not q.kept():
        q.clock.forward(max(schedules(q)["t"]["next"] - q.clock.wall / SECOND, 0.001))
        q.tree.tick()
        q.tree.run_timers()
    set_clock(q, -back)
    for _ in range(5 * 60):
        q.clock.forward(60)
        q.tree.tick()
        q.tree.run_timers()
    found = [row["headers"]["id"] for row in q.kept()]
    assert len(found) == len(set(found))
    assert found == sorted(found)
    assert len(found) > 1 or CRONS[cron] >= DAY


def test_cron_after_a_reboot(tmp_path: Path) -> None:
    q = Queues("replay all", path=tmp_path / "store", clock=MachineClock())
    q.put(b"tick", cron="*/10 * * * *", id="t")
    q.restart(while_down=lambda: q.clock.reboot(3600))
    q.pass_time(2)
    assert ids(q) == ["t@22:20:00Z"]
    q.pass_time(600)
    assert len(q.kept()) == 2


# ------------------------------------------------------------------ what is refused

BAD: list[tuple[dict[str, Any], str]] = [
    ({"every": "0", "id": "t"}, "too short"),
    ({"every": "999ms", "id": "t"}, "too short"),
    ({"every": "soon", "id": "t"}, "invalid duration"),
    ({"every": 5, "id": "t"}, "invalid value"),
    ({"every": "1s"}, 'no key "id"'),
    ({"cron": "* * * * *"}, 'no key "id"'),
    ({"every": "1s", "cron": "* * * * *", "id": "t"}, "both given"),
    ({"every": "1s", "id": "t", "expect": 0}, "expect: not with every"),
    ({"cron": "* * * * *", "id": "t", "delay": "1s"}, "cron: not with delay"),
    ({"cron": "* * * *", "id": "t"}, "4 fields"),
    ({"cron": "* * * * * * *", "id": "t"}, "7 fields"),
    ({"cron": "61 * * * *", "id": "t"}, "bad minute"),
    ({"cron": "*/0 * * * *", "id": "t"}, "bad minute"),
    ({"cron": "a b c d e", "id": "t"}, "bad"),
    ({"cron": "0 0 30 2 *", "id": "t"}, "bad day-of-month"),
    ({"cron": "0 0 29 2 1#5 UTC", "id": "t", "priority": 5}, ""),
    ({"cron": "* * * * * Berlin", "id": "t"}, "unknown zone 'Berlin'"),
    ({"cron": "* * * * * ../../etc/passwd", "id": "t"}, "unknown zone"),
    ({"cron": "* * * * * Europe", "id": "t"}, "unknown zone"),
    ({"cron": "* * * * * " + "x" * 300, "id": "t"}, "expected at most 256"),
    ({"cron": "", "id": "t"}, "invalid value"),
    ({"cron": "0 0 */29 2 1#5", "id": "t"}, "never due"),
    ({"every": "1s", "id": "x" * 256}, "expected at most"),
    ({"every": "1s", "id": "x" * 235}, "expected at most"),
    ({"headers": {"every": "1s"}}, "set by the server"),
]


@pytest.mark.parametrize(("keys", "text"), BAD)
def test_what_is_no_schedule(keys: dict[str, Any], text: str) -> None:
    q = Queues()
    if not text:  # unusual, and sound
        q.put(b"x", **keys)
        return
    with pytest.raises(errors.BadCommand) as caught:
        q.put(b"x", **keys)
    assert text in str(caught.value)
    assert schedules(q) == {}


def test_not_in_a_part_of_a_transaction() -> None:
    q = Queues()
    folder: Any = q.tree.find(ROOT, "g/.txn")
    q.tree.mkdir(ROOT, folder, "p", 0o755)
    with pytest.raises(errors.BadCommand, match="not in a part"):
        q.at(".txn/p/.put", os.O_WRONLY).write(b'{"stream":"s","every":"1s","id":"t"} x')


# ------------------------------------------------------------------ a replica


def test_a_standby_goes_on_with_it(tmp_path: Path) -> None:
    u = Copied(tmp_path, "replay all", "sync replica")
    handle = u.at(".put", os.O_RDWR)
    assert isinstance(handle.write(b'{"stream":"s","every":"10s","id":"t"} tick'), Wait)
    u.confirm()
    u.pass_time(10)
    assert u.kept() == []  # not shown before the replica has it
    u.confirm()
    assert ids(u) == ["t@22:13:30Z"]
    new = u.taken_over()
    new.pass_time(10)
    assert list(schedules(new)) == ["t"]
    new.ctl("sync off")
    assert ids(new) == ["t@22:13:30Z", "t@22:13:40Z"]
    new.close()
    u.tree.close()
    u.store.close()
