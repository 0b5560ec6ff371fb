"""The dialect of ntfy: its own clients publish and read, and what it says no to."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mqfs.errors import BadRequest
from mqfs.http.dialects.ntfy import parse_delay
from tests.http.node.run import Events, node
from tests.http.web import USER, Reply, Web
from tests.support.certificates import Authority
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port
from tests.support.server import COMMAND, mqfs, short_folder

pytestmark = pytest.mark.process


class Ntfy(Web):
    """The listener of a server that speaks ntfy; `tree`: the one with the whole tree."""

    def __init__(self, folder: Path, *options: str, at: int = 0, **more: Any) -> None:
        self.tree = Web(folder, "--http-ntfy", f"alerts=tcp!127.0.0.1!{at}", *options, **more)
        self.server, self.unix = self.tree.server, self.tree.unix

    @property
    def port(self) -> int:
        return int(re.findall(r"ntfy of group 'alerts' at tcp!127\.0\.0\.1!(\d+)", self.server.text())[-1])

    def poll(self, topic: str, query: str = "", **headers: str) -> list[Any]:
        reply = self.get(f"/{topic}/json?poll=1{query}", **headers)
        assert reply.status == 200, reply.body
        return reply.lines


@pytest.fixture(scope="module")
def ntfy() -> Iterator[Ntfy]:
    with short_folder() as folder:
        file = folder / "tokens"
        file.touch(0o600)
        authority = Authority(folder)
        more = ["--http-ntfy", "alerts=tls!127.0.0.1!0", "--tls-cert", str(authority.of_server(file="server"))]
        ntfy = Ntfy(folder, "--token-file", str(file), *more)
        with ntfy.server:
            assert ntfy.tree.put("/alerts/").status == 201
            yield ntfy


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """One of its own for each test."""
    return re.sub("[^-_A-Za-z0-9]", "-", request.node.name)[:64]


# ---------------------------------------------------------------- its clients


def apprise(*words: str) -> int:
    """The exit code of its command."""
    return subprocess.run([Path(sys.executable).with_name("apprise"), *words], timeout=HANG_S).returncode


def test_apprise_publishes(ntfy: Ntfy, topic: str) -> None:
    options = "priority=high&tags=warning,skull&click=https://example.org/&mode=private&image=no"
    url = f"ntfy://127.0.0.1:{ntfy.port}/{topic}?{options}"
    assert apprise("-t", "Disk", "-b", "ä is full\nsecond line", url) == 0
    (event,) = ntfy.poll(topic)
    assert event | {"id": "", "time": 0, "tags": sorted(event["tags"])} == {
        "id": "",
        "time": 0,
        "event": "message",
        "topic": topic,
        "title": "Disk",
        "message": "ä is full\nsecond line",
        "priority": 4,
        "tags": ["skull", "warning"],
        "click": "https://example.org/",
    }


def test_apprise_is_refused_without_a_good_token(ntfy: Ntfy, topic: str) -> None:
    assert apprise("-b", "x", f"ntfy://tk_nonsense@127.0.0.1:{ntfy.port}/{topic}?auth=token&mode=private") == 1
    assert ntfy.poll(topic) == []


def test_curl_follows(ntfy: Ntfy, topic: str) -> None:
    command = ["curl", "-sSN", "--max-time", str(int(HANG_S)), f"{ntfy.url}/{topic}/json?since=all"]
    ntfy.post(f"/{topic}", "one")
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        opened, one = (json.loads(process.stdout.readline()) for _ in range(2))
        assert (opened["event"], opened["topic"]) == ("open", topic)
        assert (one["event"], one["message"]) == ("message", "one")
        ntfy.curl("-d", "two", f"/{topic}")
        assert json.loads(process.stdout.readline())["message"] == "two"
    finally:
        process.kill()
        process.wait(HANG_S)
        process.stdout.close()


def test_eventsource_comes_back_behind_what_it_had(tmp_path: Path) -> None:
    with short_folder() as folder:
        ntfy = Ntfy(folder, at=free_port())
        with ntfy.server:
            assert ntfy.tree.put("/alerts/").status == 201
            with node("events.mjs", f"{ntfy.url}/t/sse?since=all") as process:
                events = Events(process)
                ntfy.post("/t", "1")
                assert json.loads(events.message()["data"])["message"] == "1"
                ntfy.server.restart()
                ntfy.post("/t", "2")
                assert json.loads(events.message()["data"])["message"] == "2"


# ---------------------------------------------------------------- publishing


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "expected"),
    [
        ("POST", "", "hello", {}, {"message": "hello"}),
        ("PUT", "", " hello \n", {}, {"message": "hello"}),
        ("POST", "", "", {}, {"message": "triggered"}),
        ("GET", "/publish?message=hi&title=T", None, {}, {"message": "hi", "title": "T"}),
        ("GET", "/send?m=hi&p=max", None, {}, {"message": "hi", "priority": 5}),
        ("GET", "/trigger", None, {}, {"message": "triggered"}),
        ("POST", "", "", {"X_Message": r"a\nb"}, {"message": "a\nb"}),
        ("POST", "", "x", {"TITLE": "T", "ta": "a, b,,"}, {"title": "T", "tags": ["a", "b"]}),
        ("POST", "?title=query", "x", {"x_title": "header"}, {"title": "header"}),
        ("POST", "?TiTlE=query", "x", {}, {"title": "query"}),
        ("POST", "", "x", {"Title": "=?UTF-8?B?w6TDtg==?= =?utf-8?q?=C3=BC?="}, {"title": "äöü"}),
        ("POST", "", "x", {"Title": "=?none?B?w6TDtg==?="}, {"title": "=?none?B?w6TDtg==?="}),
        ("POST", "", "x", {"Priority": "u=4, i"}, {}),
        ("POST", "", "x", {"p": "URGENT"}, {"priority": 5}),
        ("POST", "", "x", {"prio": "min"}, {"priority": 1}),
        ("POST", "", "x", {"X_Priority": "3"}, {}),
        ("POST", "", "x", {"Click": "https://a/", "Icon": "https://b/"}, {"click": "https://a/", "icon": "https://b/"}),
        ("POST", "", "x", {"Actions": '[{"action":"view"}]'}, {"actions": [{"action": "view"}]}),
        ("POST", "", "x", {"md": "yes"}, {"content_type": "text/markdown"}),
    ],
)
def test_forms_of_publishing(
    ntfy: Ntfy, topic: str, method: str, path: str, body: str | None, headers: dict[str, str], expected: dict[str, Any]
) -> None:
    reply = ntfy.ask(method, f"/{topic}{path}", body, **headers)
    assert reply.status == 200, reply.body
    (event,) = ntfy.poll(topic)
    assert event == reply.json
    known = {"title", "message", "priority", "tags", "click", "icon", "actions", "content_type"}
    assert {name: value for name, value in event.items() if name in known} == {"message": "x", **expected}


def test_json(ntfy: Ntfy, topic: str) -> None:
    note = {"topic": topic, "message": "m", "title": "ö", "priority": 2, "tags": ["a"], "actions": [{"action": "view"}]}
    reply = ntfy.post("/", json.dumps({**note, "click": "", "email": None}), X_Title="header", X_Icon="https://i/")
    assert reply.status == 200
    assert {**ntfy.poll(topic)[0], **note, "icon": "https://i/"} == reply.json


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ("x", {"Priority": "6"}, 400),
        ("x", {"Attach": "https://a/b.png"}, 400),
        ("x", {"Filename": "b.png"}, 400),
        ("x", {"Email": "a@example.org"}, 400),
        ("x", {"Call": "yes"}, 400),
        ("x", {"Actions": "view, Open, https://a/"}, 400),
        ("x", {"Actions": "[" * 5_000}, 400),
        ("x", {"Delay": "9s"}, 400),
        ("x", {"Delay": "4d"}, 400),
        ("x", {"Delay": "soon"}, 400),
        ("x", {"Delay": "30m", "Cache": "no"}, 400),
        (b"\xff", {}, 400),
        ("x" * 4_097, {}, 413),
        ("", {"Message": "x" * 4_097}, 413),
    ],
)
def test_what_is_refused(ntfy: Ntfy, topic: str, body: bytes | str, headers: dict[str, str], status: int) -> None:
    reply = ntfy.post(f"/{topic}", body, **headers)
    assert (reply.status, reply.json["http"]) == (status, status)
    assert ntfy.poll(topic) == []


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"topic": 1}',
        '{"topic": "a b"}',
        '{"topic": "ctl"}',
        '{"topic": "a/../b"}',
        '{"topic": "t", "title": {}}',
        '{"topic": "t", "message": "\\ud800"}',
        '{"topic": "t", "tags": [1]}',
        "[" * 8_000,
    ],
)
def test_bad_json(ntfy: Ntfy, body: str) -> None:
    assert ntfy.post("/", body).status == 400


# What Python's json reads or writes and other programs do not.
NO_JSON = ['{"v": NaN}', '{"v": 1e999}', '{"v": [-1e999]}', '{"v": Infinity}', '{"v": -Infinity}', r'{"v": "\ud800"}']
DEEP = [f'{{"v": {"[" * depth}{"]" * depth}}}' for depth in range(700, 1_000, 3)]


def strict(reply: Reply) -> list[Any]:
    """The lines of an answer, as JSON of any program."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert reply.status == 200, reply.body
    return [json.loads(line, parse_constant=refuse) for line in reply.body.decode().splitlines()]


@pytest.mark.parametrize("action", NO_JSON)
def test_actions_that_are_no_json_are_refused(ntfy: Ntfy, topic: str, action: str) -> None:
    in_json = json.dumps({"topic": topic}).replace("}", f', "actions": [{action}]}}')
    for reply in (ntfy.post(f"/{topic}", "x", Actions=f"[{action}]"), ntfy.post("/", in_json)):
        assert (reply.status, reply.json["error"].split(":")[0]) == (400, "actions")
    assert ntfy.poll(topic) == []


def test_a_topic_is_read_whatever_actions_its_messages_have(ntfy: Ntfy, topic: str) -> None:
    """Published by any front end."""
    actions = [f"[{action}]" for action in (*NO_JSON, *DEEP)] + ["{}", "1", "[1]", "x", "[" * 1_000]
    for text in actions:
        assert ntfy.post(f"/{topic}", "x", Actions=text).status in (200, 400)
        assert ntfy.tree.post(f"/alerts/{topic}", "x", Mqfs_H_Actions=text).status == 201
    ntfy.post(f"/{topic}", "last", Actions='[{"v": 1e300}]')
    assert len(ntfy.get(f"/{topic}/raw?poll=1").body.split()) > len(actions)
    *_, last = strict(ntfy.get(f"/{topic}/json?poll=1"))
    assert (last["message"], last["actions"]) == ("last", [{"v": 1e300}])


@pytest.mark.parametrize("path", ["/a.b", "/ä", "/" + "x" * 65, "/a,,b/json", "/x/none", "/x/json/y", "/x/", "/.ctl"])
def test_what_is_no_topic(ntfy: Ntfy, path: str) -> None:
    assert ntfy.post(path.replace("ä", "%C3%A4"), "x").status == 404
    assert not ntfy.tree.get("/alerts/?count=10000").json["entries"] or path not in ntfy.server.text()


@pytest.mark.parametrize("name", ["ctl", "order"])
def test_files_of_the_group_are_no_topics(ntfy: Ntfy, name: str) -> None:
    before = ntfy.tree.get("/alerts/ctl").body
    assert ntfy.post(f"/{name}", "depth 1").status == 400
    assert ntfy.get(f"/{name}/json?poll=1").status == 400
    assert ntfy.tree.get("/alerts/ctl").body == before


def test_a_page_of_another_site_publishes_nothing(ntfy: Ntfy, topic: str) -> None:
    for method, path in (("GET", f"/{topic}/publish?message=x"), ("POST", f"/{topic}")):
        assert ntfy.ask(method, path, Sec_Fetch_Site="cross-site").status == 403
    assert ntfy.get(f"/{topic}/publish", Sec_Fetch_Site="same-origin").status == 200
    assert len(ntfy.poll(topic)) == 1


def test_a_head_publishes_nothing(ntfy: Ntfy, topic: str) -> None:
    """A monitor of addresses asks so."""
    for verb in ("publish", "send", "trigger"):
        reply = ntfy.ask("HEAD", f"/{topic}/{verb}?message=x")
        assert (reply.status, reply.headers["Allow"]) == (405, "GET"), verb
    assert ntfy.ask("HEAD", "/v1/health").status == 200
    assert ntfy.poll(topic) == []


def test_a_priority_is_that_of_claims(ntfy: Ntfy) -> None:
    for priority in (1, 2, 3, 4, 5):
        assert ntfy.post("/claimed", "x", P=str(priority)).status == 200
    rows = ntfy.tree.get("/alerts/claimed?format=json").lines
    assert [int(row.get("headers", {}).get("priority", 5)) for row in rows] == [1, 3, 5, 7, 9]


# ---------------------------------------------------------------- delays

NOW = datetime(2026, 11, 23, 12, 0)  # a Monday


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("10s", NOW + timedelta(seconds=10)),
        ("30min", NOW + timedelta(minutes=30)),
        ("2 days", NOW + timedelta(days=2)),
        ("1h30m", NOW + timedelta(minutes=90)),
        ("tomorrow, 10am", datetime(2026, 11, 24, 10)),
        ("Tomorrow at 12:30 pm", datetime(2026, 11, 24, 12, 30)),
        ("today 17:30", datetime(2026, 11, 23, 17, 30)),
        ("9am", datetime(2026, 11, 24, 9)),
        ("1pm", datetime(2026, 11, 23, 13)),
        ("tuesday, 12am", datetime(2026, 11, 24, 0)),
        (str(int((NOW + timedelta(hours=1)).timestamp())), NOW + timedelta(hours=1)),
    ],
)
def test_delays(text: str, due: datetime) -> None:
    assert parse_delay(text, NOW.timestamp()) == due.timestamp()


AN_HOUR_LATER = """
import time
now = time.time_ns
time.time_ns = lambda: now() + 3_600 * 10**9
from mqfs.cli.main import main
main()
"""


def test_the_answer_has_the_time_of_the_message() -> None:
    """A clock that was set back is behind the group's messages, whose times never go back."""
    with short_folder() as folder:
        ntfy = Ntfy(folder, program=(sys.executable, "-c", AN_HOUR_LATER, "serve"))
        with ntfy.server as server:
            ntfy.tree.put("/alerts/")
            ntfy.post("/t", "before")
            server.program = (*COMMAND, "serve")
            server.restart()
            sent = ntfy.post("/t", "after").json
            before, after = ntfy.poll("t")
            assert before["time"] <= after["time"] == sent["time"]
            assert sent["time"] > time.time() + 1_800


@pytest.mark.parametrize(
    "text",
    ["9s", "3d1m", "today, 9am", "monday 10am", "10", "tomorrow", "13pm", "25:00", "9:60am", "", "m", "1x", "²s"],
)
def test_delays_that_are_none(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_delay(text, NOW.timestamp())


def test_a_delayed_message_is_scheduled(ntfy: Ntfy, topic: str) -> None:
    ntfy.post(f"/{topic}", "now")
    sent = ntfy.post(f"/{topic}", "later", In="30 min", T="title", P="5").json
    assert 1_790 < sent["time"] - time.time() < 1_810
    assert [event["message"] for event in ntfy.poll(topic)] == ["now"]
    later, now = ntfy.poll(topic, "&scheduled=1")
    assert (now["message"], later | {"time": 0}) == ("now", sent | {"time": 0})
    assert abs(later["time"] - sent["time"]) <= 1
    assert ntfy.poll(topic, "&sched=1&title=other") == []


# ---------------------------------------------------------------- subscribing


def test_json_sse_and_raw(ntfy: Ntfy, topic: str) -> None:
    ntfy.post(f"/{topic}", "a\nb")
    with ntfy.stream(f"/{topic}/json?since=all") as lines:
        assert [json.loads(lines.line())["event"] for _ in range(2)] == ["open", "message"]
    with ntfy.stream(f"/{topic}/sse?since=all") as lines:
        opened, message = lines.event(), lines.event()
        assert (opened["event"], "id" in opened) == ("open", False)
        assert ("event" in message, message["id"]) == (False, json.loads(message["data"])["id"])
    with ntfy.stream(f"/{topic}/raw?since=all") as lines:
        assert [lines.line(), lines.line()] == [b"\n", b"a b\n"]


def test_only_what_comes_without_since(ntfy: Ntfy, topic: str) -> None:
    ntfy.post(f"/{topic}", "before")
    with ntfy.stream(f"/{topic}/raw") as lines:
        assert lines.line() == b"\n"
        ntfy.post(f"/{topic}", "behind")
        assert lines.line() == b"behind\n"


def test_to_subscribe_makes_nothing(ntfy: Ntfy, topic: str) -> None:
    """A topic that is not there is waited for, beside one that is."""
    before = ntfy.tree.get("/alerts/?count=1000").json["entries"]
    for form in ("json", "sse", "raw"):
        assert ntfy.get(f"/{topic}-1,{topic}-2/{form}?poll=1").status == 200
        with ntfy.stream(f"/{topic}-3/{form}") as lines:
            assert lines.line()
    with ntfy.stream(f"/{topic},{topic}-there/json") as lines:
        assert json.loads(lines.line())["event"] == "open"
        assert ntfy.tree.get("/alerts/?count=1000").json["entries"] == before
        for name in (f"{topic}-there", topic):
            assert ntfy.post(f"/{name}", name).status == 200
        assert [json.loads(lines.line())["message"] for _ in range(2)] == [f"{topic}-there", topic]


def test_several_topics(ntfy: Ntfy, topic: str) -> None:
    one, two = f"{topic[:60]}-1", f"{topic[:60]}-2"
    with ntfy.stream(f"/{one},{two}/json") as lines:
        assert json.loads(lines.line())["topic"] == f"{one},{two}"
        for name in (one, f"{topic[:60]}-3", two):
            ntfy.post(f"/{name}", "x")
        assert [json.loads(lines.line())["topic"] for _ in range(2)] == [one, two]
    assert ntfy.post(f"/{one},{two}", "x").status == 404


def test_since(ntfy: Ntfy, topic: str) -> None:
    ids = [ntfy.post(f"/{topic}", text).json["id"] for text in "abc"]

    def texts(query: str, **headers: str) -> str:
        return "".join(event["message"] for event in ntfy.poll(topic, query, **headers))

    assert all(re.fullmatch("[0-9a-z]{12}", id) for id in ids)
    assert texts("") == texts("&since=all") == texts("&since=10m") == texts("&since=1h30m") == "abc"
    assert texts(f"&since={ids[0]}") == texts(f"&si={ids[0]}") == texts("", Last_Event_ID=ids[0]) == "bc"
    assert texts("", X_Since=ids[1]) == "c"
    assert texts("&since=latest") == "c"
    assert texts("&since=none") == texts(f"&since={int(time.time()) + 1_000}") == ""
    assert texts(f"&since={int(time.time()) - 1_000}") == "abc"
    assert texts("&since=zzzzzzzzzzzz") == "abc"  # not known: of another store
    assert ntfy.get(f"/{topic}/json?since=x").status == 400


def test_filters(ntfy: Ntfy, topic: str) -> None:
    first = ntfy.post(f"/{topic}", "a", T="t", P="5", Ta="x,y").json["id"]
    ntfy.post(f"/{topic}", "b", Ta="x")
    ntfy.post(f"/{topic}", "c", P="1")

    def texts(query: str, **headers: str) -> str:
        return "".join(event["message"] for event in ntfy.poll(topic, query, **headers))

    assert texts(f"&id={first}") == texts("&message=a") == texts("&title=t") == texts("", X_Title="t") == "a"
    assert texts("&priority=max,min") == "ac"
    assert texts("&p=3") == "b"
    assert (texts("&tags=x"), texts("&tags=x,y")) == ("ab", "a")
    assert texts("&tags=x&priority=3") == "b"
    assert ntfy.get(f"/{topic}/json?poll=1&priority=x").status == 400


def test_what_is_not_kept(ntfy: Ntfy, topic: str) -> None:
    with ntfy.stream(f"/{topic}/json") as lines:
        assert json.loads(lines.line())["event"] == "open"
        ntfy.post(f"/{topic}", "x", Cache="no")
        event = json.loads(lines.line())
        assert (event["message"], event["expires"] > event["time"]) == ("x", True)
    assert ntfy.poll(topic) == []


def test_messages_of_others(ntfy: Ntfy, topic: str) -> None:
    ntfy.tree.post(f"/alerts/{topic}", b"\xff")
    ntfy.tree.post(f"/alerts/{topic}?h-actions=x&h-tags=,&priority=0", "y")
    binary, text = ntfy.poll(topic)
    assert (binary["message"], binary["encoding"]) == ("/w==", "base64")
    assert (text["message"], text["priority"], "actions" in text, text["tags"]) == ("y", 1, False, [])


def test_keepalives() -> None:
    program: Any = [COMMAND[0], "-m", "tests.http.hasty_server"]
    with short_folder() as folder:
        ntfy = Ntfy(folder, program=program)
        with ntfy.server:
            assert ntfy.tree.put("/alerts/").status == 201
            with ntfy.stream("/t/json") as lines, ntfy.stream("/t/raw") as raw:
                assert [json.loads(lines.line())["event"] for _ in range(3)] == ["open", "keepalive", "keepalive"]
                assert [raw.line() for _ in range(3)] == [b"\n"] * 3


# ---------------------------------------------------------------- the rest


def test_health_and_stats(ntfy: Ntfy, topic: str) -> None:
    assert ntfy.get("/v1/health").json == {"healthy": True}
    before = ntfy.get("/v1/stats").json["messages"]
    ntfy.post(f"/{topic}", "x")
    assert ntfy.get("/v1/stats").json["messages"] == before + 1


def test_nothing_of_the_tree_is_there(ntfy: Ntfy) -> None:
    for path in ("/alerts/", "/.health", "/", "/alerts/ctl", "/../alerts"):
        assert ntfy.get(path).status in (400, 404, 405), path


def test_without_its_group(tmp_path: Path) -> None:
    with short_folder() as folder:
        ntfy = Ntfy(folder)
        with ntfy.server:
            reply: Reply = ntfy.post("/t", "x")
            assert (reply.status, "alerts" in reply.json["error"]) == (404, True)


def test_credentials(ntfy: Ntfy, topic: str) -> None:
    folder = ntfy.server.folder
    file = folder / "tokens"
    done = mqfs("token", "new", USER, "--token-file", str(file), "--scope", "read", cwd=folder)
    secret = done.stdout.strip()
    ntfy.post(f"/{topic}", "first")  # who may only read makes no topic
    basic = "Basic " + base64.b64encode(f":{secret}".encode()).decode()
    for given in (f"Bearer {secret}", basic):
        _until_known(ntfy, given)
        assert ntfy.post(f"/{topic}", "x", Authorization=given).status == 403
    reply = ntfy.post(f"/{topic}", "x", Authorization="Bearer nonsense")
    assert (reply.status, reply.json["code"]) == (401, 40101)
    coded = base64.urlsafe_b64encode(basic.encode()).decode().rstrip("=")
    assert ntfy.get(f"/{topic}/json?poll=1&auth={coded}").status == 403  # not encrypted
    assert ntfy.get(f"/{topic}/json?poll=1&auth={coded}", X_Forwarded_Proto="https").status == 403
    port = re.findall(r"ntfy of group 'alerts' at tls!127\.0\.0\.1!(\d+)", ntfy.server.text())[-1]
    over_tls = ("--cacert", os.path.relpath(folder / "ca.pem"), f"https://127.0.0.1:{port}/{topic}")
    assert ntfy.curl(*over_tls, "-d", "x").status == 200
    command = [*over_tls[:2], f"{over_tls[2]}/json?poll=1&auth={coded}"]
    assert [line["message"] for line in ntfy.curl(*command).lines] == ["first", "x"]
    assert ntfy.curl(*over_tls[:2], f"{over_tls[2]}/publish?auth={coded}").status == 403
    assert ntfy.curl(*over_tls[:2], f"{over_tls[2]}/json?poll=1&auth=%21").status == 401


@pytest.mark.parametrize("scope", ["read", "write", "admin"])
@pytest.mark.parametrize("path", ["/", "/alerts", "/alerts/{}", "/alerts/other", "/elsewhere"])
def test_what_a_token_of_a_part_of_the_tree_learns(ntfy: Ntfy, topic: str, scope: str, path: str) -> None:
    """`auth` says what a subscription does, and `stats` what `.stats` does."""
    folder = ntfy.server.folder
    where = ("--path", path.format(topic)) if path != "/" else ()
    options = ("--token-file", str(folder / "tokens"), "--scope", scope, *where)
    secret = mqfs("token", "new", USER, *options, cwd=folder).stdout.strip()
    given = {"Authorization": f"Bearer {secret}"}
    ntfy.post(f"/{topic}", "x")
    eventually(lambda: ntfy.get("/v1/health", **given).status != 401)
    read = ntfy.get(f"/{topic}/json?poll=1", **given).status
    assert ntfy.get(f"/{topic}/auth", **given).status == read == (200 if path in ("/", "/alerts") else 403)
    assert ntfy.get("/v1/stats", **given).status == ntfy.tree.get("/alerts/.stats", **given).status == read


def _until_known(ntfy: Ntfy, given: str) -> None:
    eventually(lambda: ntfy.get("/known/auth", Authorization=given).status == 200)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("alerts", "no group (expected GROUP=ADDRESS)"),
        ("alerts=http://x", "unknown network"),
        ("=tcp!127.0.0.1!0", "empty"),
        ("a/.b=tcp!127.0.0.1!0", "reserved"),
        ("alerts=tls!127.0.0.1!0", "no certificate"),
    ],
)
def test_options_that_are_none(tmp_path: Path, text: str, why: str) -> None:
    done = mqfs("serve", "--http-ntfy", text, cwd=tmp_path)
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr


@pytest.mark.process
@pytest.mark.parametrize("full", ["reject", "drop-new"])
def test_a_topic_whose_first_message_is_refused_is_not_made(full: str) -> None:
    with short_folder() as folder:
        haste = json.dumps({"GROUP_BYTES": 256 << 10})
        ntfy = Ntfy(folder, program=(sys.executable, "-m", "tests.http.hasty_server"), HASTE=haste)
        with ntfy.tree.server:
            assert ntfy.tree.put("/alerts/").status == 201
            assert ntfy.post("/old", "x").status == 200
            assert ntfy.tree.post("/alerts/ctl", "full reject").status == 204
            while (status := ntfy.tree.post("/alerts/old", bytes(4_000)).status) == 201:
                pass
            assert status == 507
            assert ntfy.tree.post("/alerts/ctl", f"full {full}").status == 204
            assert ntfy.post("/new", "x" * 4_000).status == 507
            assert [entry["name"] for entry in ntfy.tree.get("/alerts/").json["entries"]] == ["old"]
