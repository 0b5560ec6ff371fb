"""`/.metrics`, read by promtool and by Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from urllib.request import urlopen

import pytest

from mqfs.ninep.client import connection
from tests.http.hasty_server import HASTE
from tests.http.web import USER, Web
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.server import COMMAND, mqfs, short_folder

GUIDE = ROOT / "docs" / "howto" / "monitor"

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="prometheus is missing (Debian: prometheus)"
)
OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
OF_STATS = {
    "messages_written_total": "written",
    "bytes_written_total": "written_bytes",
    "messages_read_total": "read",
    "discarded_total": "discarded",
    "cut_total": "cut",
    "fell_behind_total": "fell_behind",
    "lost_total": "lost",
    "refused_total": "refused",
    "log_bytes": "log_bytes",
    "delayed": "held",
    "damaged": "damaged",
    "read_only": "read_only",
    "disk_full": "disk_full",
}
OF_CONSUMER = ("waiting", "claimed", "delayed", "handles")
SINCE_START = ("delivered", "acknowledged", "failed", "dead")


def scrape(web: Web, query: str = "", **headers: str) -> dict[str, float]:
    """The value of each series, by its name and labels as they are written."""
    reply = web.get(f"/.metrics{query}", **headers)
    assert reply.status == 200, reply.body
    lines = [line for line in reply.body.decode().split("\n") if line and not line.startswith("#")]
    values = dict(line.rsplit(" ", 1) for line in lines)
    assert len(values) == len(lines), "a series came twice"
    return {name: float(value) for name, value in values.items()}


def at_one_moment(web: Web, group: str) -> tuple[dict[str, float], Any] | None:
    """The metrics, and `.stats` if it was the same before and after."""
    before, values = web.get(f"{group}/.stats").json, scrape(web)
    return (values, before) if web.get(f"{group}/.stats").json == before else None


def busy_group(web: Web) -> str:
    """A group in which something of everything has happened."""
    group = web.group("retries 1", "dead dead", "backoff 10ms 10ms")
    for name in ("jobs", "dead"):
        web.put(f"{group}/{name}")
    mail = f"{group}/.consumers/mail"
    web.put(f"{mail}?over=jobs")
    for body in ("one", "two", "three", "four", "five"):
        assert web.post(f"{group}/jobs", body).status == 201
    assert web.post(f"{group}/jobs?delay=1h", "later").status == 201
    tokens = [row["token"] for row in web.post(f"{mail}/claim?max=3&lease=1h").lines]
    assert web.post(f"{mail}/ack", tokens[0]).status == 204
    assert web.post(f"{mail}/nack?after=0", tokens[1]).status == 204
    assert web.post(f"{mail}/dead?reason=no", tokens[2]).status == 204
    assert len(web.post(f"{mail}/claim?lease=1h").lines) == 1
    assert web.post(f"{group}/ctl", "depth many").status == 400
    assert len(web.get(f"{group}/jobs").body) > 0
    return group


@pytest.fixture(scope="module")
def busy(web: Web) -> str:
    return busy_group(web)


def promtool(*words: str, stdin: bytes = b"") -> None:
    done = subprocess.run(["promtool", *words], input=stdin, capture_output=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, b""), done.stdout + done.stderr


# ---------------------------------------------------------------- what it says


def test_it_says_what_stats_says(web: Web, busy: str) -> None:
    values, stats = eventually(lambda: at_one_moment(web, busy))
    shown = {name: values[f'mqfs_{name}{{group="{busy}"}}'] for name in OF_STATS}
    assert shown == {name: stats[key] for name, key in OF_STATS.items()}
    assert min(shown[f"{name}_total"] for name in ("messages_written", "messages_read", "refused")) > 0
    mail, row = f'{{group="{busy}",consumer="mail"}}', stats["consumers"]["mail"]
    assert {name: values[f"mqfs_consumer_{name}{mail}"] for name in OF_CONSUMER} == {
        name: row[name] for name in OF_CONSUMER
    }
    assert {name: values[f"mqfs_consumer_{name}_total{mail}"] for name in SINCE_START} == {
        name: row[name] for name in SINCE_START
    }
    assert min(row[name] for name in (*OF_CONSUMER[:2], *SINCE_START)) > 0
    assert 0 < values[f"mqfs_consumer_oldest_seconds{mail}"] < HANG_S


def test_a_consumer_of_many_streams_and_one_of_none(web: Web) -> None:
    group = web.group("bind odd '*.odd'")
    for consumer, over in (("all", ""), ("some", "?over=odd"), ("idle", "?over=odd")):
        assert web.put(f"{group}/.consumers/{consumer}{over}").status == 201
    for number in range(9):
        web.post(f"{group}/{number}.{'odd' if number % 2 else 'even'}", "x")
    web.post(f"{group}/.consumers/idle/seek", "end")
    values = scrape(web)
    for consumer, waiting in (("all", 9), ("some", 4), ("idle", 0)):
        text = f'{{group="{group}",consumer="{consumer}"}}'
        assert values[f"mqfs_consumer_waiting{text}"] == waiting
        assert (values[f"mqfs_consumer_oldest_seconds{text}"] > 0) == (waiting > 0)


def test_streams_only_where_asked_for(web: Web, busy: str) -> None:
    group = web.group("deliver one")
    for name in ("eu.mail", "us.mail", "eu.fax"):
        web.post(f"{group}/{name}", "xy")
    web.post(f"{group}/eu.mail/take")
    assert not [name for name in scrape(web) if 'stream="' in name]
    values = scrape(web, "?streams=*.mail")
    mine = [name for name in values if name.startswith("mqfs_stream_messages") and f'"{group}"' in name]
    assert mine == [f'mqfs_stream_messages{{group="{group}",stream="{name}.mail"}}' for name in ("eu", "us")]
    stats = web.get(f"{group}/.stats").json["streams"]
    for name in ("eu.mail", "us.mail"):
        text, row = f'{{group="{group}",stream="{name}"}}', stats[name]
        assert values[f"mqfs_stream_messages{text}"] == row["messages"]
        assert values[f"mqfs_stream_bytes{text}"] == row["bytes"]
        assert values[f"mqfs_stream_written_total{text}"] == row["written"] == 1
        assert values[f"mqfs_stream_waiting{text}"] == row["consumer"]["waiting"] == (name == "us.mail")
        assert values[f"mqfs_stream_acknowledged_total{text}"] == row["consumer"]["acknowledged"]
    assert values["mqfs_streams_omitted"] == 0
    assert values[f'mqfs_consumer_waiting{{group="{busy}",consumer="mail"}}'] > 0
    assert web.get("/.metrics?streams=a*").status == 400
    assert web.get("/.metrics?stream=a").status == 400


def test_the_server_itself(web: Web, busy: str) -> None:
    before = scrape(web)
    web.put(f"{busy}/synced")
    with web.stream(f"{busy}/jobs?follow&since=end"):
        values = scrape(web)
        assert values["mqfs_http_streams"] == before["mqfs_http_streams"] + 1
        assert values["mqfs_parked"] > 0
    asked = 'mqfs_http_requests_total{method="GET",code="200"}'
    assert values[asked] >= before[asked] + 2  # the stream, and itself
    syncs = [values[name] for name in values if name.startswith("mqfs_sync_seconds_bucket")]
    assert syncs == sorted(syncs)
    assert values["mqfs_sync_seconds_count"] == syncs[-1] > before["mqfs_sync_seconds_count"]
    assert values["mqfs_sync_seconds_sum"] > before["mqfs_sync_seconds_sum"]
    pid = web.server.pid
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = int(re.search(r"btime (\d+)", Path("/proc/stat").read_text())[1])  # type: ignore[index]
    assert values["process_start_time_seconds"] == pytest.approx(boot + ticks / 100, abs=2)
    assert values["process_resident_memory_bytes"] < values["process_virtual_memory_bytes"]
    assert 0 < values["process_open_fds"] < values["process_max_fds"]
    assert values["process_cpu_seconds_total"] >= before["process_cpu_seconds_total"] > 0


def test_names_are_escaped(web: Web) -> None:
    name = 'a"b\\c ü'
    assert web.put(f"/{quote(name)}/").status == 201
    escaped = r"/a\"b\\c ü"
    assert f'mqfs_read_only{{group="{escaped}"}}' in scrape(web)
    assert web.ask("DELETE", f"/{quote(name)}/").status == 204
    assert f'mqfs_read_only{{group="{escaped}"}}' not in scrape(web)


@pytest.fixture(scope="module")
def narrow() -> Iterator[Web]:
    """With low limits, and another user over TCP than the one who made the groups."""
    program: Any = [COMMAND[0], "-m", "tests.http.hasty_server"]
    with short_folder() as folder:
        tokens = folder / "tokens"
        tokens.touch(0o600)
        web = Web(folder, "--tcp-user", "nobody", "--token-file", str(tokens), "--audit", "changes", program=program)
        with web.server, connection.connect(web.server.address) as client:
            for path in ("open", "open/in", "listed", "listed/in", "closed", "closed/in"):
                client.mkdir(path)
            for number in range(HASTE["HTTP_METRIC_LINES"]):
                client.create(f"open/in/{number:02}").close()
            client.chmod("open", 0o711)  # to be passed, not read
            client.chmod("listed", 0o744)  # the other way round
            client.chmod("closed", 0o700)
            yield web


def groups_in(values: dict[str, float]) -> list[str]:
    return [name.split('"')[1] for name in values if name.startswith("mqfs_read_only")]


def test_groups_that_a_user_may_not_read_are_left_out(narrow: Web) -> None:
    assert sorted(groups_in(scrape(narrow))) == ["/", "/listed", "/open/in"]
    token = mqfs("token", "new", USER, "--scope", "read", "--path", "/closed", "--token-file", "tokens",
                 cwd=narrow.server.folder)  # fmt: skip
    authorization = f"Bearer {token.stdout.strip()}"
    eventually(lambda: narrow.get("/.metrics", Authorization=authorization).status == 200)
    assert sorted(groups_in(scrape(narrow, Authorization=authorization))) == ["/closed", "/closed/in"]
    assert "status=refused" not in narrow.server.text()


def test_lines_of_streams_have_a_bound(narrow: Web) -> None:
    room = HASTE["HTTP_METRIC_LINES"]
    values = scrape(narrow, "?streams=%23")
    shown = [name for name in values if name.startswith("mqfs_stream_")]
    assert room - 3 < len(shown) <= room
    assert values["mqfs_streams_omitted"] == room - len(shown) / 3


# ---------------------------------------------------------------- formats


def test_openmetrics_where_it_is_asked_for(web: Web, busy: str) -> None:
    reply = web.get("/.metrics", Accept=OPEN_METRICS)
    assert reply.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    text = reply.body.decode()
    assert text.endswith("\n# EOF\n")
    assert text.count("# EOF") == 1
    counters = re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE)
    assert counters
    for name in counters:
        assert not name.endswith("_total")
        assert re.search(rf"^# HELP {name} .*\n# TYPE {name} counter\n({name}_total[ {{]|# )", text, re.MULTILINE)
    plain = web.get("/.metrics", Accept="text/plain")
    assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# EOF" not in plain.body


@needs_prometheus
def test_promtool_finds_nothing_wrong(web: Web, busy: str) -> None:
    web.put("/a%22b%5Cc/")
    promtool("check", "metrics", stdin=web.get("/.metrics?streams=%23").body)
    web.ask("DELETE", "/a%22b%5Cc/")


class Prometheus:
    """A server of its own, and its HTTP interface."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log
        self._url = eventually(self._address, "Prometheus")

    def _address(self) -> str:
        text = self._log.read_text()
        assert self._process.poll() is None, text
        found = re.search(r'msg="Listening on" address=(127\.0\.0\.1:\d+)', text)
        return f"http://{found[1]}/api/v1/" if found and "Server is ready" in text else ""

    def ask(self, what: str, **query: str) -> Any:
        with urlopen(f"{self._url}{what}?{urlencode(query)}", timeout=HANG_S) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success"
        return answer["data"]

    def value(self, query: str) -> float | None:
        found = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None


@pytest.fixture(scope="module")
def prometheus(web: Web, busy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    config = (GUIDE / "prometheus.yml").read_text()
    for old, new in (
        ("127.0.0.1:8080", f"127.0.0.1:{web.port}"), ("15s", "100ms"), ("alerts.yml", str(GUIDE / "alerts.yml"))
    ):  # fmt: skip
        assert old in config
        config = config.replace(old, new)
    (folder / "prometheus.yml").write_text(config)
    command = [
        "prometheus",
        "--config.file=prometheus.yml",
        "--web.listen-address=127.0.0.1:0",
        "--storage.tsdb.path=.",
    ]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield Prometheus(process, folder / "log")
    finally:
        process.kill()
        process.wait(HANG_S)


@needs_prometheus
@pytest.mark.process
def test_prometheus_scrapes_it(web: Web, busy: str, prometheus: Prometheus) -> None:
    asked = f'mqfs_messages_written_total{{group="{busy}"}}'
    eventually(lambda: prometheus.value(asked) is not None, asked)
    assert prometheus.value(asked) == scrape(web)[asked]
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    web.post(f"{busy}/jobs", "one more")
    after = scrape(web)[asked]
    eventually(lambda: prometheus.value(asked) == after, "the next scrape")
    assert prometheus.ask("metadata", metric="mqfs_sync_seconds")["mqfs_sync_seconds"][0]["type"] == "histogram"


# ---------------------------------------------------------------- what the guide has


def expressions() -> list[str]:
    """The expressions of the dashboard, with its variables replaced, and of the alerts."""
    board = json.loads((GUIDE / "mqfs.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found += re.findall(r"expr: (.*)", (GUIDE / "alerts.yml").read_text())
    return [text.replace("$group", ".*").replace("$__rate_interval", "1m") for text in found]


def test_the_guide_names_what_there_is(web: Web, busy: str) -> None:
    there = {re.split(r"[{ ]", name)[0] for name in scrape(web)}
    named = {name for text in expressions() for name in re.findall(r"\b(?:mqfs|process)_\w+", text)}
    assert len(named) > 10
    assert named <= there


@needs_prometheus
def test_the_alerts_are_sound() -> None:
    done = subprocess.run(["promtool", "check", "rules", GUIDE / "alerts.yml"], capture_output=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, b""), done.stdout + done.stderr


@needs_prometheus
@pytest.mark.process
def test_prometheus_takes_each_expression(prometheus: Prometheus) -> None:
    eventually(lambda: prometheus.value("mqfs_read_only") == 0)
    for text in expressions():
        prometheus.ask("query", query=text)
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert "MqfsDeadLetters" in [rule["name"] for rule in rules]
    assert not [rule for rule in rules if rule.get("lastError")]
