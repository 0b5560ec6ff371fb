"""The dialect of Durable Streams: the protocol's own tests for servers, and what they do not look at."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs.errors import BadRequest, TooLong
from mqfs.http.cloud_events import elements
from tests.http.node.run import PACKAGES
from tests.http.web import USER, Reply, Web
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port
from tests.support.server import environment, mqfs, short_folder
from tests.support.temp_store import lowered

JSON, TEXT = {"Content_Type": "application/json"}, {"Content_Type": "text/plain"}
RAN = 332, 6  # of the protocol's own tests, and those that are left out: docs/reference/durable-streams.md has both


class Durable(Web):
    """The listener of a server that speaks Durable Streams; `tree`: the one with the whole tree."""

    def __init__(self, folder: Path, *options: str, at: int = 0, **more: Any) -> None:
        self.tree = Web(folder, "--http-durable", f"ds=tcp!127.0.0.1!{at}", *options, **more)
        self.server, self.unix = self.tree.server, self.tree.unix

    @property
    def port(self) -> int:
        found = re.findall(r"Durable Streams of group 'ds' at tcp!127\.0\.0\.1!(\d+)", self.server.text())
        return int(found[-1])

    def create(self, path: str, body: bytes | str = b"", **headers: str) -> Reply:
        return self.ask("PUT", path, body, **{**TEXT, **headers})

    def append(self, path: str, body: bytes | str, **headers: str) -> Reply:
        return self.ask("POST", path, body, **{**TEXT, **headers})

    def produce(self, path: str, body: str, epoch: int, seq: int, **headers: str) -> Reply:
        return self.append(path, body, Producer_Id="p", Producer_Epoch=str(epoch), Producer_Seq=str(seq), **headers)


@pytest.fixture(scope="module")
def ds() -> Iterator[Durable]:
    with short_folder() as folder:
        hasty = (sys.executable, "-m", "tests.http.hasty_server")
        it = Durable(folder, "--http-origin", "https://example.com", program=hasty, HASTE='{"DURABLE_WAIT_S": 1}')
        with it.server:
            yield it


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    return "/s/" + re.sub("[^a-z0-9]", "-", request.node.name)[:200]


# ---------------------------------------------------------------- the protocol's own tests


@pytest.mark.process
@pytest.mark.timeout(900)
def test_its_own_tests(ds: Durable) -> None:
    """All but those of subscriptions, which docs/reference/durable-streams.md names: they run if asked for."""
    command = ["node", str(PACKAGES / "vitest" / "vitest.mjs"), "run", "durable.test.mjs", "--reporter=json"]
    command += ["--retry=2", "--testTimeout=60000"]  # some wait for a second to be over, and no longer than two
    done = subprocess.run(
        [*command, "--no-cache", "--no-isolate", "--pool=threads"],
        cwd=Path(__file__).parent / "node",
        env=environment(PACKAGES=str(PACKAGES), SERVER=ds.url, NODE_PATH=str(PACKAGES)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=2 * HANG_S,
    )
    report = json.loads(done.stdout)
    tests = [test for file in report["testResults"] for test in file["assertionResults"]]
    failed = [f"{test['fullName']}: {test['failureMessages'][0][:500]}" for test in tests if test["status"] == "failed"]
    assert failed == []
    skipped = [test["fullName"] for test in tests if test["status"] not in ("passed", "failed")]
    assert all("subscription" in name for name in skipped), skipped
    assert (report["numPassedTests"], len(skipped)) == RAN


def test_what_differs_from_a_stream_that_is_there_is_named(ds: Durable) -> None:
    """And the errors of the group are the clients' own."""
    assert ds.create("/differs/a", Stream_TTL="60").status == 201
    for more, text in (
        ({"Content_Type": "text/html", "Stream_TTL": "60"}, "content type text/plain"),
        ({"Stream_TTL": "61"}, "another expiry"),
        ({"Stream_Closed": "true"}, "another expiry, no end"),
    ):
        refused = ds.create("/differs/a", **more)
        assert (refused.status, refused.body) == (409, f"stream 'a': is there, with {text}\n".encode())
    assert ds.tree.get("/ds/differs/.errors").body == b""


def test_streams_made_at_once_share_the_group_that_is_made_for_them(ds: Durable) -> None:
    with ThreadPoolExecutor(8) as threads:
        for n in range(10):
            made = threads.map(lambda k, n=n: ds.create(f"/at-once-{n}/in/{k}", "1").status, range(8))  # type: ignore[misc]
            assert set(made) == {201}


def test_a_group_that_others_make_at_once_is_used(ds: Durable) -> None:
    assert ds.create("/others/a").status == 201
    with ThreadPoolExecutor(1) as threads:
        answers = []
        for n in range(50):
            made = threads.submit(ds.tree.ask, "PUT", f"/ds/others-{n}/", b"")
            answers.append(ds.create(f"/others-{n}/a", "1"))
            assert made.result().status in {200, 201}
    assert {answer.status for answer in answers} == {201}, Counter(answer.body for answer in answers)


def test_an_append_goes_to_no_other_stream_of_that_name(ds: Durable) -> None:
    """A stream of text and one of JSON are there by turns; what is appended to one is never in the other."""
    path, ends = "/named/a", threading.Event()

    def append(number: int) -> Counter[int]:
        answers = Counter[int]()
        while not ends.is_set():
            answers[ds.append(path, f"text {number}", Content_Type="text/plain").status] += 1
        return answers

    with ThreadPoolExecutor(8) as threads:
        appended = [threads.submit(append, number) for number in range(8)]
        try:
            for _ in range(40):
                assert ds.create(path).status == 201
                eventually(lambda: ds.ask("GET", path).body)
                assert ds.ask("DELETE", path).status == 204
                assert ds.create(path, Content_Type="application/json").status == 201
                assert ds.ask("GET", path).json == []
                assert ds.ask("DELETE", path).status == 204
        finally:
            ends.set()
        answers = sum((one.result() for one in appended), Counter[int]())
    assert set(answers) <= {204, 404, 409}, answers


# ---------------------------------------------------------------- kept


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_changes_nothing(number: int) -> None:
    with short_folder() as folder:
        ds = Durable(folder, at=free_port())
        with ds.server:
            assert ds.create("/a", "1", Stream_TTL="3600").status == 201
            assert [ds.produce("/a", str(n + 2), 5, n).status for n in range(2)] == [200, 200]
            assert ds.append("/a", "4", Stream_Seq="b").status == 204
            at = ds.ask("HEAD", "/a").headers["Stream-Next-Offset"]
            assert ds.create("/b", "5", Stream_Forked_From="/a").status == 201
            assert ds.append("/b", "6", Stream_Closed="true").status == 204
            assert ds.create("/empty", b"", Content_Type="application/json").status == 201
            heads = [dict(ds.ask("HEAD", path).headers) for path in ("/a", "/b", "/empty")]
            ds.server.restart(number)
            again = [dict(ds.ask("HEAD", path).headers) for path in ("/a", "/b", "/empty")]
            assert [head | {"Date": ""} for head in again] == [head | {"Date": ""} for head in heads]
            assert ds.get("/b").body == b"123456"
            assert ds.get(f"/b?offset={at}").body == b"56"
            assert ds.produce("/a", "again", 5, 1).status == 204
            assert ds.produce("/a", "a zombie", 4, 2).status == 403
            assert ds.append("/a", "no", Stream_Seq="a").status == 409
            assert ds.append("/b", "no").headers["Stream-Closed"] == "true"
            assert ds.produce("/a", "7", 5, 2).status == 200
            assert ds.get("/a").body == b"12347"


@pytest.mark.process
def test_what_was_acknowledged_is_there_once_after_kills() -> None:
    """A producer that repeats what got no answer, over kills of the server in the middle."""
    with short_folder() as folder:
        ds = Durable(folder, at=free_port())
        with ds.server:
            ds.create("/a", Content_Type="application/json")
            for n in range(30):
                if n % 10 == 5:
                    ds.server.stop(signal.SIGKILL)
                    with pytest.raises(OSError):
                        ds.produce("/a", f"[{n}]", 0, n, **JSON)
                    ds.server.start()
                answers = [ds.produce("/a", f"[{n}]", 0, n, **JSON).status for _ in range(1 + (n % 3 == 0))]
                assert answers in ([200], [200, 204])
            assert ds.get("/a").json == list(range(30))


@pytest.mark.process
def test_streams_that_are_gone_do_not_stay_in_the_catalog() -> None:
    with short_folder() as folder:
        ds = Durable(folder, at=free_port())
        with ds.server:
            assert [ds.create(f"/s{n}", "x", Stream_TTL="60").status for n in range(3)] == [201] * 3
            record = ds.tree.get("/ds/__ds?format=json&count=1").lines[0]["body"]
            gone = json.dumps({"stream": "__ds", "body": record.replace('"stream": ', '"stream": 99')}) + "\n"
            nonsense = json.dumps({"stream": "__ds", "body": "nonsense"}) + "\n"
            batch = (gone + nonsense) * 600
            assert ds.tree.post("/ds/.batch", batch, Content_Type="application/x-ndjson").status == 201
            for _ in range(2):
                ds.server.restart()
                assert [ds.ask("HEAD", f"/s{n}").headers["Stream-TTL"] for n in range(3)] == ["60"] * 3
                assert len(ds.tree.get("/ds/__ds?format=json").lines) == 3


@pytest.mark.process
@pytest.mark.parametrize(
    "change",
    [
        {"kind": "text/plain\r\nStream-Closed: true"},
        {"kind": 1},
        {"expires": "2030-01-01\n10:00:00Z"},
        {"expires": "never"},
        {"ttl": 10**400},
        {"ttl": "1"},
        {"source": -1},
        {"source": None},
        {"deleted": 1},
        {"more": 1, "fork": 1.5},
    ],
)
def test_a_catalog_that_others_wrote_to(change: dict[str, Any]) -> None:
    """Whoever may write in the group may write there, too: nothing comes of it that a stream is not made with."""
    with short_folder() as folder:
        ds = Durable(folder, at=free_port())
        with ds.server:
            assert ds.create("/s", "x").status == 201
            record = json.loads(ds.tree.get("/ds/__ds?format=json").lines[0]["body"])
            assert ds.tree.post("/ds/__ds", json.dumps(record | change)).status == 201
            ds.server.restart()
            head = ds.ask("HEAD", "/s").headers
            assert (head["Content-Type"], head["Stream-Closed"], head["Stream-TTL"]) == ("text/plain", None, None)
            assert ds.get("/s").body == b"x"


@pytest.mark.process
def test_forks_of_each_other_end(ds: Durable, path: str) -> None:
    ds.create(path, "x")
    for n in range(64):
        reply = ds.create(f"{path}-{n}", "", Stream_Forked_From=path if not n else f"{path}-{n - 1}")
        assert reply.status == (201 if n < 63 else 400), (n, reply.body)
    assert ds.get(f"{path}-62").body == b"x"


# ---------------------------------------------------------------- the same messages by other doors


@pytest.mark.process
def test_other_programs_read_and_write_the_same_messages(ds: Durable, path: str) -> None:
    ds.create(path, "one\n")
    ds.append(path, "two\n", Stream_Closed="true")
    assert ds.tree.get(f"/ds{path}").body == b"one\ntwo\n"
    assert [line["body"] for line in ds.tree.get(f"/ds{path}?format=json").lines] == ["one\n", "two\n", ""]
    assert ds.tree.post("/ds/s/plain", "by another door").status == 201
    assert ds.get("/s/plain").body == b"by another door"
    assert ds.get("/s/plain").headers["Content-Type"] == "application/octet-stream"
    ds.ask("PUT", f"{path}-json", "[1]", **JSON)
    assert ds.tree.post(f"/ds{path}-json", "no JSON").status == 201
    assert ds.tree.post(f"/ds{path}-json", "{}").status == 201
    assert ds.get(f"{path}-json").json == [1, "no JSON", {}]
    with ds.stream(f"{path}-json?offset=now&live=sse") as lines:
        assert lines.event()["event"] == "control"
        ds.tree.post(f"/ds{path}-json", "3")
        assert lines.event() == {"event": "data", "data": "[3]"}


@pytest.mark.process
def test_what_was_trimmed_is_gone(ds: Durable, path: str) -> None:
    ds.create(path, "one")
    at = ds.append(path, "two").headers["Stream-Next-Offset"]
    ds.append(path, "three")
    name = path.rpartition("/")[2]
    assert ds.tree.post("/ds/s/ctl", f"clear {name}\n").status == 204
    assert ds.append(path, "four").status == 204
    assert ds.get(f"{path}?offset={at}").status == 410
    assert ds.get(f"{path}?offset={at}&live=sse").status == 410
    assert ds.get(path).body == b"four"


@pytest.mark.process
def test_long_answers_are_in_parts(ds: Durable, path: str) -> None:
    ds.create(path)
    for n in range(3):
        ds.append(path, bytes([n]) * 600_000)
    first = ds.get(path)
    assert (len(first.body), first.headers["Stream-Up-To-Date"]) == (1_200_000, None)
    assert "max-age" in first.headers["Cache-Control"]
    rest = ds.get(f"{path}?offset={first.headers['Stream-Next-Offset']}")
    assert (rest.body, rest.headers["Stream-Up-To-Date"]) == (b"\2" * 600_000, "true")
    tag = rest.headers["ETag"]
    assert ds.get(f"{path}?offset={first.headers['Stream-Next-Offset']}", If_None_Match=tag).status == 304


# ---------------------------------------------------------------- refused


@pytest.mark.process
@pytest.mark.parametrize(
    ("method", "where", "headers", "status"),
    [
        ("PUT", "/", {}, 404),
        ("PUT", "/x/", {}, 404),
        ("PUT", "/.x", {}, 400),
        ("PUT", "/s/ctl", {}, 400),
        ("PUT", "/s", {}, 404),
        ("PUT", "/s/is/below", {}, 404),
        ("PUT", "/s/__ds", {}, 501),
        ("PUT", "/__ds/subscriptions/1", {}, 501),
        ("GET", "/__ds/jwks.json", {}, 501),
        ("PUT", "/s/x", {"Content_Type": "ä"}, 400),
        ("PUT", "/s/x", {"Stream_TTL": "9" * 30}, 400),
        ("PUT", "/s/x", {"Stream_Expires_At": "2030-01-01"}, 400),
        ("PUT", "/s/x", {"Stream_Forked_From": "/s/none"}, 404),
        ("PUT", "/s/x", {"Stream_Forked_From": "nonsense"}, 400),
        ("PUT", "/other/x", {"Stream_Forked_From": "/s/is"}, 400),
        ("PUT", "/s/x", {"Stream_Forked_From": "/s/is", "Stream_Fork_Offset": "now"}, 400),
        ("POST", "/s/is", {"Producer_Id": "p"}, 400),
        ("POST", "/s/is", {"Producer_Id": "p" * 300, "Producer_Epoch": "0", "Producer_Seq": "0"}, 400),
        ("POST", "/s/is", {"Stream_Seq": "9" * 300}, 400),
        ("POST", "/s/none", {}, 404),
        ("GET", "/s/is?live=never", {}, 400),
        ("GET", "/s/is?offset=1", {}, 400),
        ("GET", "/s/is?live=sse", {}, 400),
        ("PATCH", "/s/is", {}, 405),
        ("DELETE", "/s/none", {}, 404),
    ],
)
def test_what_is_refused(ds: Durable, method: str, where: str, headers: dict[str, str], status: int) -> None:
    ds.create("/s/is", "x")
    before = ds.tree.get("/ds/s/").json
    body = b"x" if method in ("PUT", "POST") else b""
    reply = ds.ask(
        method, where, body, **{**TEXT, **{name: text.encode().decode("latin-1") for name, text in headers.items()}}
    )
    assert reply.status == status, reply.body
    assert reply.body.strip()
    if where == "/s/none":
        assert reply.body == b"no stream '/s/none' (make it: PUT /s/none)\n"
    assert ds.tree.get("/ds/s/").json == before


@pytest.mark.process
def test_a_group_that_would_lose_messages_is_refused(ds: Durable) -> None:
    ds.tree.put("/ds/")
    ds.tree.put("/ds/off/")
    ds.tree.post("/ds/off/ctl", "replay off\n")
    reply = ds.create("/off/x", "lost")
    assert (reply.status, b"expected replay all" in reply.body) == (409, True)
    assert ds.tree.get("/ds/off/").json["entries"] == []


@pytest.mark.process
def test_rights_are_those_of_the_tree() -> None:
    with short_folder() as folder:
        file = folder / "tokens"
        file.touch(0o600)
        words = "token", "new", USER, "--token-file", str(file), "--scope"
        reads, writes, makes = (
            {"Authorization": f"Bearer {mqfs(*words, scope, cwd=folder).stdout.strip()}"}
            for scope in ("read", "write", "admin")
        )
        ds = Durable(folder, "--token-file", str(file))
        with ds.server:
            assert ds.create("/s", "1", Authorization="Bearer nonsense").status == 401
            assert [ds.create("/s", "1", **one).status for one in (reads, writes, makes)] == [403, 403, 201]
            assert [ds.append("/s", "2", **one).status for one in (reads, writes)] == [403, 204]
            assert [ds.ask("DELETE", "/s", **one).status for one in (reads, writes)] == [403, 403]
            assert ds.append("/s", "3", Stream_Closed="true", **reads).status == 403
            assert ds.get("/s", **reads).body == b"12"
            assert ds.ask("HEAD", "/s", **reads).headers["Stream-Closed"] is None


# ---------------------------------------------------------------- arrays


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(VALUES), st.sampled_from([None, 1, 3]))
def test_the_elements_of_an_array_are_those_that_json_has(values: list[object], indent: int | None) -> None:
    text = json.dumps(values, indent=indent)
    found = list(elements(text.encode()))
    assert [json.loads(one) for one in found] == values
    assert all(one in text for one in found)


@given(st.text(alphabet='[]{},:"0 \\a', max_size=12))
def test_what_json_refuses_is_refused(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        with pytest.raises(BadRequest):
            list(elements(text.encode()))
        return
    assert len(list(elements(text.encode()))) == (len(value) if isinstance(value, list) else 1)


@pytest.mark.parametrize(
    "text", ["NaN", "[1, Infinity]", "[" * 100_000, '{"a":' * 100_000, "[1 2]", "[1,]", "", "[", "1 2", "[1] 2"]
)
def test_no_json(text: str) -> None:
    with pytest.raises(BadRequest):
        list(elements(text.encode()))


def test_an_element_is_bounded_before_it_is_parsed() -> None:
    with lowered(HTTP_JSON_BYTES=100):
        many = json.dumps([{"n": n} for n in range(1_000)])
        assert len(list(elements(many.encode()))) == 1_000
        for long in ('["' + "x" * 300 + '"]', "[" + "1" * 300 + "]", '"' + "x" * 300 + '"', "[1," + "[" * 400 + "]"):
            with pytest.raises(TooLong):
                list(elements(long.encode()))
