"""`mqfs bench` as a real process, with real servers and mounts: what it finds, shows and writes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import HANG_S, eventually
from tests.support.forked import ROOMS
from tests.support.server import COMMAND, Server, environment, mqfs, run, short_folder, start
from tests.support.spark_pythons import forked_python

FORKED: dict[str, str] = {}  # the environment of a bench whose processes are forked
LATENCIES = ["count", "p50", "p90", "p99", "p99.9", "max"]


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """Fork the processes of a bench: a short one takes a second of a processor for what they import."""
    with forked_python(*ROOMS) as program:
        yield program


@pytest.fixture(autouse=True)
def forks(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORKED, "FORKED_PYTHON", python)


def bench(*arguments: str, cwd: Path) -> dict[str, Any]:
    """A run that is to succeed; its JSON."""
    done = mqfs("bench", "--json", "-", *arguments, cwd=cwd, **FORKED)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["checked"] == {"lost": 0, "twice": 0, "out_of_order": 0, "damaged": 0, "unacknowledged": 0}
    return found


@pytest.mark.parametrize("transport", ["9p", "file", "embedded", "auto", "ring"])
@pytest.mark.parametrize("takers", [("--consumers", "2"), ("--workers", "2")], ids=["consumers", "workers"])
def test_every_message_comes(transport: str, takers: tuple[str, str], tmp_path: Path) -> None:
    arguments = ("--transport", transport, "--producers", "2", "--messages", "501", "--sync", "off", *takers)
    found = bench(*arguments, "--round-trips", "20", cwd=tmp_path)
    assert found["published"]["messages"] == 501
    received = 501 if takers[0] == "--workers" else 1_002
    assert found["received"]["messages"] == received
    assert found["latency_us"]["delivery"]["count"] == received
    assert found["latency_us"]["round trip"]["count"] == 20


@pytest.mark.parametrize("transport", ["9p", "embedded", "auto"])
def test_workers_claim_together(transport: str, tmp_path: Path) -> None:
    arguments = ("--transport", transport, "--messages", "2000", "--sync", "off", "--workers", "3", "--prefetch", "64")
    found = bench(*arguments, "--round-trips", "1", cwd=tmp_path)
    assert found["received"]["messages"] == 2_000
    assert found["processor_s"]["bench"] > 0
    assert (found["processor_s"]["server"] is None) == (transport == "embedded")


def test_published_is_enough(tmp_path: Path) -> None:
    """In a ring, in batches; all come all the same."""
    arguments = ("--transport", "ring", "--wait", "published", "--batch", "64", "--messages", "10000")
    found = bench(*arguments, "--consumers", "2", "--producers", "2", cwd=tmp_path)
    assert found["received"]["messages"] == 20_000


def test_what_is_told(tmp_path: Path) -> None:
    """The shape of the JSON, and that its figures hang together."""
    options = ("--messages", "640", "--batch", "64", "--size", "1000", "--sync", "10ms", "--round-trips", "50")
    found = bench(*options, cwd=tmp_path)
    keys = [
        "mqfs",
        "options",
        "interrupted",
        "published",
        "received",
        "checked",
        "processor_s",
        "latency_us",
        "histogram_us",
    ]
    assert list(found) == keys
    assert (found["options"]["batch"], found["options"]["transport"], found["interrupted"]) == (64, "auto", False)
    for name in ("published", "received"):
        row = found[name]
        assert row["rate"] == pytest.approx(row["messages"] / row["seconds"])
        assert row["mb_per_s"] == pytest.approx(row["rate"] * 1000 / 1e6)
    for name, counted in (("publish", 10), ("delivery", 640), ("round trip", 50)):
        row = found["latency_us"][name]
        assert list(row) == LATENCIES
        assert row["count"] == counted == sum(count for _, count in found["histogram_us"][name])
        assert 0 < row["p50"] <= row["p90"] <= row["p99"] <= row["p99.9"] <= row["max"]


def test_a_rate_is_kept(tmp_path: Path) -> None:
    found = bench("--rate", "400", "--seconds", "1", "--producers", "2", "--round-trips", "0", cwd=tmp_path)
    assert 40 <= found["published"]["messages"] <= 400  # without it: thousands; on a busy machine some are not due yet
    assert "round trip" not in found["latency_us"]


def test_a_rate_is_not_waited_for_beyond_the_end(tmp_path: Path) -> None:
    for rate in ("0.001", "1e-12", "1e-310"):
        options = ("--rate", rate, "--seconds", "1", "--producers", "2", "--round-trips", "0")
        assert bench(*options, cwd=tmp_path)["published"]["messages"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--messages", "1000", "--ctl", "depth 100", "--ctl", "full block"), "no message moved for 3 s"),
        (("--messages", "100", "--ctl", "depth 1", "--ctl", "full drop-new"), "99 lost, no message moved for 3 s"),
        (
            ("--consumers", "0", "--messages", "100", "--ctl", "depth 1", "--ctl", "full drop-new"),
            "no round trip for 3 s",
        ),
    ],
    ids=["publishing", "receiving", "round trips"],
)
@pytest.mark.parametrize("transport", ["9p", "file", "embedded"])
def test_what_stands_still_is_ended(tmp_path: Path, transport: str, arguments: tuple[str, ...], said: str) -> None:
    """By one line, and with the figures so far: whatever waits, for room or for what was discarded."""
    begin = "from mqfs import limits; limits.BENCH_STALL_S = 3.0; from mqfs.cli.main import main; main()"
    command = [sys.executable, "-c", begin, "bench", "--sync", "off", "--transport", transport, *arguments]
    done = run(command, cwd=tmp_path, env=environment(), text=True)
    assert (done.returncode, done.stderr) == (1, f"mqfs: check failed: {said}\n")
    assert re.search(r"published +100 ", done.stdout), done.stdout


def test_a_table_and_a_file(tmp_path: Path) -> None:
    arguments = ("--messages", "100", "--round-trips", "10", "--json", "found.json")
    done = mqfs("bench", *arguments, cwd=tmp_path, **FORKED)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("64 bytes, 1 publishing, 1 receiving all; auto, sync always\n")
    for wanted in (r"published +100 ", r"received +100 ", r"p50 +p90 +p99 +p99.9 +max", r"round trip.* +\d"):
        assert re.search(wanted, done.stdout), wanted
    assert re.search(
        r"^processor: \S+ .s of the bench, \S+ .s of the server for each message published$", done.stdout, re.M
    )
    assert "none lost, doubled, out of order or damaged" in done.stdout
    assert json.loads((tmp_path / "found.json").read_text())["published"]["messages"] == 100


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_costs_no_figures(tmp_path: Path, option: str) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    file = "full.json" if option == "--json" else "full.png"
    (tmp_path / file).symlink_to("/dev/full")
    done = mqfs("bench", "--messages", "10", "--round-trips", "0", option, file, cwd=tmp_path, **FORKED)
    assert (done.returncode, done.stderr) == (1, f"mqfs: {file}: No space left on device\n")
    assert "checked: none lost" in done.stdout


def test_a_server_that_runs_is_left_as_it_was(tmp_path: Path) -> None:
    """Over 9P and through its mount; the groups of the bench are gone afterwards."""
    with short_folder() as folder:
        mount = folder / "mq"
        mount.mkdir()
        address = f"unix!{folder / 'socket'}"
        with Server("--store", str(folder / "store"), "--listen", address, cwd=folder, mount=mount):
            before = os.listdir(mount)
            for place in (("--at", address), ("--mount", str(mount))):
                for takers in ("--consumers", "--workers"):
                    found = bench(*place, "--messages", "100", "--round-trips", "5", takers, "2", cwd=tmp_path)
                    assert found["published"]["messages"] == 100
                bench(*place, "--messages", "9", "--ctl", "protect on", "--round-trips", "5", cwd=tmp_path)
            done = mqfs("bench", "--at", address, "--sync", "replica", cwd=tmp_path)
            assert (done.returncode, done.stderr.count("\n")) == (1, 1)
            assert "sync replica: the server has no replica" in done.stderr
            assert os.listdir(mount) == before


@pytest.mark.parametrize("way", ["at", "mount"])
def test_a_group_that_cannot_be_removed_is_named(tmp_path: Path, way: str) -> None:
    """And the figures are there all the same."""
    with short_folder() as folder:
        mount = folder / "mq"
        mount.mkdir()
        address = f"unix!{folder / 'socket'}"
        with Server("--listen", address, cwd=folder, mount=mount), ThreadPoolExecutor(1) as threads:
            before, place = os.listdir(mount), ("--at", address) if way == "at" else ("--mount", str(mount))
            options = ("--seconds", "2", "--rate", "50", "--round-trips", "0")
            running = threads.submit(mqfs, "bench", *place, *options, cwd=tmp_path)
            [group] = eventually(lambda: [name for name in os.listdir(mount) if name.startswith("bench-")])
            eventually(lambda: (mount / group / "bench").exists(), "its stream")
            (mount / group / "mine").touch()  # another stream, which the bench does not remove
            done = running.result(HANG_S)
            assert (done.returncode, done.stderr.count("\n")) == (1, 1)
            assert f"cannot remove group '{group}'" in done.stderr
            assert re.search("received +[1-9]", done.stdout)
            assert sorted(os.listdir(mount)) == sorted([*before, group])


def test_its_own_store_is_below_the_directory_and_gone_afterwards(tmp_path: Path) -> None:
    process = started(tmp_path, "--store", str(tmp_path), "--seconds", "60", "--round-trips", "0")
    try:
        eventually(lambda: any(tmp_path.glob("mqfs-bench-*/store/mqfs")), "its store is there")
    finally:
        end(process)
    assert list(tmp_path.iterdir()) == []


def started(cwd: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    return start(
        [*COMMAND, "bench", *arguments],
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[str, str]:
    """By a signal, sent to all of its session as a terminal does."""
    os.killpg(process.pid, number)
    return process.communicate(timeout=HANG_S)


@pytest.mark.parametrize("takers", ["--consumers", "--workers"])
@pytest.mark.parametrize("transport", ["9p", "file", "embedded", "ring"])
def test_ctrl_c_shows_what_was_measured(transport: str, takers: str, tmp_path: Path) -> None:
    arguments = ("--transport", transport, takers, "2", "--rate", "2000", "--sync", "off", "--json", "-")
    process = started(tmp_path, *arguments, "--seconds", "1000", "--store", str(tmp_path), **FORKED)
    try:
        eventually(lambda: grown(tmp_path), "it publishes")
        said, wrong = end(process)
    finally:
        process.kill()
    assert (process.returncode, wrong) == (0, "")
    found = json.loads(said)
    assert found["interrupted"]
    assert found["published"]["messages"] > 100
    assert found["checked"]["lost"] == 0
    assert found["received"]["messages"] == found["published"]["messages"] * (2 if takers == "--consumers" else 1)


def grown(folder: Path) -> bool:
    """Whether some messages are in the store below. Its other folders may go while they are listed."""
    logs = folder.glob("mqfs-bench-*/store/buckets/*/*/*.log")
    return any(log.read_bytes().count(b"quick brown") > 200 for log in logs)


def test_progress_where_somebody_looks(tmp_path: Path) -> None:
    """On a terminal a line changes; nothing of it is in the output."""
    ours, theirs = pty.openpty()
    command = [*COMMAND, "bench", "--seconds", "1", "--round-trips", "0"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(TERM="xterm"), stdin=theirs, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + HANG_S
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.05)[0]:
            try:
                seen += os.read(ours, 65_536)
            except OSError:
                break
    assert process.wait(HANG_S) == 0
    os.close(ours)
    assert re.search(rb"published [1-9][\d,]*   received [1-9]", seen), seen[-500:]
    assert process.stdout is not None
    with process.stdout as out:
        assert b"Ctrl-C" not in out.read()


def test_a_picture(tmp_path: Path) -> None:
    done = mqfs("bench", "--messages", "200", "--plot", "found.png", cwd=tmp_path, **FORKED)
    assert (done.returncode, done.stderr) == (0, "")
    picture = (tmp_path / "found.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000
    from matplotlib.image import imread

    pixels = imread(tmp_path / "found.png")
    assert pixels.shape[:2] == (540, 1320)
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[2])[::7]}) > 10  # not a blank sheet


def test_without_matplotlib(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "matplotlib"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError\n")
    path = f"{hidden.parent}:{environment()['PYTHONPATH']}"
    done = mqfs("bench", "--plot", "a.png", cwd=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--plot: matplotlib is missing (install it: pip install matplotlib)\n" in done.stderr


WRONG = [
    (("--size", "15"), "--size 15: out of range (expected 16 to 1,044,480)"),
    (("--producers", "0"), "--producers 0: out of range (expected 1 to 256)"),
    (("--workers", "65"), "--workers 65: out of range (expected 0 to 64)"),
    (("--batch", "0"), "--batch 0: out of range (expected 1 to 4,096)"),
    (("--seconds", "0"), "--seconds 0: out of range (expected above 0, up to 86,400)"),
    (("--seconds", "nan"), "--seconds nan: out of range (expected above 0, up to 86,400)"),
    (("--rate", "-1"), "--rate -1: out of range (expected messages a second, more than 0)"),
    (("--messages", "1", "--seconds", "1"), "--messages and --seconds: both given (expected one)"),
    (
        ("--workers", "1", "--consumers", "1"),
        "consumers receive all (expected one of both)",
    ),
    (("--transport", "pigeon"), "--transport 'pigeon': unknown (expected auto, ring, 9p, file, embedded)"),
    (
        ("--at", "nowhere"),
        "--at: invalid address 'nowhere': unknown network "
        "(expected unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT)",
    ),
    (("--at", "unix!x", "--transport", "file"), "--at: not with --transport file (expected auto, ring or 9p)"),
    (("--at", "unix!x", "--store", "."), "--at, --mount and --store: more than one given"),
    (("--mount", "."), "--mount '.': no tree mounted there (expected a file ctl in it)"),
    (("--store", "missing"), "--store 'missing': cannot write there"),
    (("--transport", "file", "--batch", "2"), "--batch: not with files, where a write is one message"),
    (("--workers", "1", "--prefetch", "0"), "--prefetch 0: out of range (expected 1 to"),
    (("--prefetch", "2"), "--prefetch: for --workers of the library (expected --workers, and not files)"),
    (("--wait", "never"), "--wait 'never': unknown (expected committed or published)"),
    (("--transport", "file", "--wait", "published"), "--wait published: not with files"),
    (("--sync", "sometimes"), "--sync: invalid time 'sometimes' (expected always, off, replica, or a duration"),
    (("--ctl", "replay everything"), "--ctl: replay 'everything': unknown value (expected off, last, key or all)"),
    (("--json", "missing/x"), "--json 'missing/x': cannot write there"),
    (("--plot", "x.jpg"), "--plot 'x.jpg': not a PNG file (expected a name ending in .png)"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_mistakes(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """One line, before anything is started."""
    done = mqfs("bench", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mqfs: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nobody_answers(tmp_path: Path) -> None:
    done = mqfs("bench", "--at", f"unix!{tmp_path}/socket", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, f"mqfs: unix!{tmp_path}/socket: no such socket\n")


def test_the_server_dies(tmp_path: Path) -> None:
    """One line, and no process is left."""
    with short_folder() as folder, Server("--listen", f"unix!{folder}/s", cwd=folder) as server:
        process = started(tmp_path, "--at", f"unix!{folder}/s", "--seconds", "1000", "--sync", "off")
        eventually(lambda: len(children(process.pid)) == 2, "its processes run")
        eventually(lambda: bool(server.text()) and cpu(children(process.pid)) > 0.5, "they are at work")
        parts = children(process.pid)
        server.kill()
        _, wrong = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert wrong.count("\n") == 1
    assert wrong.startswith("mqfs: unix!")
    assert [part for part in parts if Path(f"/proc/{part}").exists()] == []


def test_killed_it_leaves_no_process(tmp_path: Path) -> None:
    with short_folder() as folder:
        arguments = ("--seconds", "1000", "--store", str(tmp_path), "--sync", "off")
        process = started(tmp_path, *arguments, TMPDIR=str(folder))  # where its socket is left
        eventually(lambda: len(children(process.pid)) == 3, "its server and its processes run")
        eventually(lambda: grown(tmp_path), "they are at work")
        left = children(process.pid)
        process.kill()
        process.communicate()
        eventually(lambda: not any(running(pid) for pid in left), "all have ended")


def running(pid: int) -> bool:
    """Whether the process runs: not gone, and not a zombie that no process has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sigterm_is_as_ctrl_c(tmp_path: Path) -> None:
    process = started(tmp_path, "--seconds", "1000", "--store", str(tmp_path), "--sync", "off", "--json", "-")
    eventually(lambda: grown(tmp_path), "it is at work")
    process.terminate()
    said, wrong = process.communicate(timeout=HANG_S)
    assert (process.returncode, wrong) == (0, "")
    assert json.loads(said)["interrupted"]
    assert list(tmp_path.iterdir()) == []


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu(pids: list[int]) -> float:
    """Seconds that all have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_nothing_of_the_current_folder_is_run(tmp_path: Path) -> None:
    for module in ("click", "trio", "attrs"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    program = [str(Path(sys.executable).with_name("mqfs")), "bench", "--messages", "10", "--json", "-"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "ran").exists()
