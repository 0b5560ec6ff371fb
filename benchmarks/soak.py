"""Long load over ring, mount and HTTP at once: memory and descriptors of the server must stay level.

    python benchmarks/soak.py [--minutes 10] [--rate 100000]

Three groups with `replay all` and a bounded depth have a publisher and a reader each. The library over the ring has
eight tenths of the rate, the mount and HTTP one tenth each; HTTP is read as events. If the machine is too slow for the
rate, the reached rate is shown. The ring's reader counts lost messages.

The first third warms up. Level means that the minima of the second and of the last third differ by less than LEVEL_MB,
and the descriptors not at all; descriptors and pages of segments do not count. Exits with 1 if not level. For a test
that each message arrives or is counted as lost, for 30 minutes, beside stopped readers and killed servers:
`MQFS_SOAK=1 script/test -n0 tests/client/test_losses_timed.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from processes import resident_mb  # noqa: E402

import mqfs  # noqa: E402
from mqfs.errors import FellBehind  # noqa: E402
from mqfs.fuse.mount import mounted, unmount  # noqa: E402

SHARES = {"ring": 0.8, "mount": 0.1, "http": 0.1}
BODY = b"x" * 100
DEPTH = 100_000
BATCH = 64
SAMPLE_S = 2.0
LEVEL_MB = 8.0


class Place(NamedTuple):
    folder: str
    port: int


class Counter:
    """The number of messages of a process, printed every second."""

    def __init__(self) -> None:
        self.count = self.lost = 0
        self._next = time.monotonic() + 1

    def add(self, count: int) -> None:
        self.count += count
        if time.monotonic() >= self._next:
            self._next += 1
            self.show()

    def show(self) -> None:
        print(self.count, self.lost, flush=True)


# ---------------------------------------------------------------- the clients, a process each


def paced(rate: float, batch: int, send: Callable[[], object]) -> None:
    """Send batches at a rate, without end. After a delay catch up by at most a tenth of a second."""
    counter, due = Counter(), time.monotonic()
    while True:
        send()
        counter.add(batch)
        due = max(due + batch / rate, time.monotonic() - 0.1)
        if (wait := due - time.monotonic()) > 0:
            time.sleep(wait)


def ring_publisher(place: Place, rate: float) -> None:
    group = mqfs.connect(f"unix!{place.folder}/9p", transport="ring").group("ring")
    rows = [("s", BODY)] * BATCH
    paced(rate, BATCH, lambda: group.publish_many(rows, create=False, wait="published"))


def ring_reader(place: Place, rate: float) -> None:
    counter = Counter()
    messages = mqfs.connect(f"unix!{place.folder}/9p", transport="ring").group("ring").subscribe("s")
    while True:
        try:
            for _ in messages:
                counter.add(1)
        except FellBehind as error:
            counter.lost += error.lost


def mount_publisher(place: Place, rate: float) -> None:
    file = os.open(f"{place.folder}/mq/mount/s", os.O_WRONLY)
    paced(rate, 1, lambda: os.write(file, BODY))


def mount_reader(place: Place, rate: float) -> None:
    counter, file = Counter(), os.open(f"{place.folder}/mq/mount/s", os.O_RDONLY)
    while os.read(file, 4_096):
        counter.add(1)


def http(head: str, body: bytes) -> bytes:
    kind = "Content-Type: application/x-ndjson\r\n"
    return f"{head} HTTP/1.1\r\nHost: localhost\r\n{kind}Content-Length: {len(body)}\r\n\r\n".encode() + body


def http_publisher(place: Place, rate: float) -> None:
    body = "\n".join([json.dumps({"stream": "s", "body": BODY.decode()})] * BATCH).encode()
    sock, whole = socket.create_connection(("127.0.0.1", place.port)), http("POST /http/.batch", body)

    def send() -> None:
        sock.sendall(whole)
        answer = sock.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 20"), answer

    paced(rate, BATCH, send)


def http_reader(place: Place, rate: float) -> None:
    counter = Counter()
    sock = socket.create_connection(("127.0.0.1", place.port))
    sock.sendall(b"GET /http/s?format=sse&since=end HTTP/1.1\r\nHost: localhost\r\n\r\n")
    tail = b""  # the last bytes before: an event may have begun there
    while data := sock.recv(1 << 20):
        counter.add((tail + data).count(b"\nid: "))
        tail = data[-4:]


ROLES = {
    f"{way} {role}": globals()[f"{way}_{role}"] for way in SHARES for role in ("reader", "publisher")
}  # readers are started first

# ---------------------------------------------------------------- the server, and what it uses


def serve(place: Place) -> subprocess.Popen[bytes]:
    os.mkdir(f"{place.folder}/mq")
    words = ["--store", f"{place.folder}/store", "--mount", f"{place.folder}/mq", "--listen", f"unix!{place.folder}/9p"]
    words += ["--http", f"tcp!127.0.0.1!{place.port}", "--tcp-user", str(os.geteuid())]
    for line in ("sync off", "replay all", f"depth {DEPTH}"):
        words += ["--default", line]
    server = subprocess.Popen(
        [sys.executable, "-m", "mqfs", "serve", *words], stderr=subprocess.DEVNULL, cwd=HERE.parent
    )
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{place.folder}/mq/ctl"):
        assert server.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)
    for way in SHARES:
        os.mkdir(f"{place.folder}/mq/{way}")
        Path(f"{place.folder}/mq/{way}/s").touch()
    return server


def usage(pid: int, place: Place) -> tuple[float, int]:
    """Return anonymous memory in MiB, and the number of open descriptors without segments, whose number varies."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return resident_mb(pid, "RssAnon"), sum(not name.startswith(f"{place.folder}/store/buckets/") for name in names)


def last_line(path: Path) -> tuple[int, int]:
    lines = path.read_text().splitlines()
    count, lost = lines[-1].split() if lines else (0, 0)
    return int(count), int(lost)


def clients(place: Place, rate: float) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    for role in ROLES:
        out = Path(place.folder) / role.replace(" ", "-")
        words = [sys.executable, __file__, "--client", json.dumps([role, *place, rate * SHARES[role.split()[0]]])]
        with out.open("wb") as file:
            yield role, subprocess.Popen(words, stdout=file), out
        if role.endswith("reader"):
            time.sleep(1)  # so that it receives the first message, too


def watch(server: subprocess.Popen[bytes], place: Place, minutes: float, rate: float) -> bool:
    samples: list[tuple[float, int]] = []
    running: list[tuple[str, subprocess.Popen[bytes], Path]] = []
    try:
        for client in clients(place, rate):
            running.append(client)
        began = time.monotonic()
        while (passed := time.monotonic() - began) < minutes * 60:
            time.sleep(SAMPLE_S)
            ended = [role for role, process, _ in running if process.poll() is not None]
            assert not ended, f"{ended} ended"
            assert server.poll() is None, "the server ended"
            samples.append(usage(server.pid, place))
            if len(samples) % 15 == 1:
                click.echo(f"{passed:6.0f} s  {samples[-1][0]:7.1f} MB  {samples[-1][1]} descriptors")
        return judge(samples, {role: last_line(out) for role, _, out in running}, passed)
    finally:
        for _, process, _ in running:
            process.kill()
            process.wait()


def judge(samples: list[tuple[float, int]], counts: dict[str, tuple[int, int]], seconds: float) -> bool:
    """Show the figures. Whether memory and descriptors were level."""
    for role, (count, lost) in counts.items():
        click.echo(f"{role:16} {count / seconds:10,.0f} a second" + f"   {lost:,} counted as lost" * bool(lost))
    total = sum(count for role, (count, _) in counts.items() if role.endswith("publisher"))
    click.echo(f"{'published':16} {total / seconds:10,.0f} a second")
    third = len(samples) // 3
    assert third, "too few samples (expected a longer run)"
    second, last = samples[third : 2 * third], samples[2 * third :]
    memory = min(row[0] for row in second), min(row[0] for row in last)  # minima: without short-lived memory
    descriptors = min(row[1] for row in second), min(row[1] for row in last)
    level = abs(memory[1] - memory[0]) < LEVEL_MB and descriptors[0] == descriptors[1]
    for name, resident, count in zip(("second third", "last third"), memory, descriptors, strict=True):
        click.echo(f"{name:16} {resident:10,.1f} MB   {count:g} descriptors")
    click.echo("level" if level else "not level")
    return level


@click.command(help=__doc__)
@click.option("--minutes", default=10.0)
@click.option("--rate", default=100_000.0, help="Messages a second, of all three ways together.")
@click.option("--client", hidden=True)
def main(minutes: float, rate: float, client: str | None) -> None:
    if client is not None:
        role, folder, port, rate = json.loads(client)
        ROLES[role](Place(folder, port), rate)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = Place(tempfile.mkdtemp(prefix="mqfs-bench-", dir="/var/tmp"), port)
    server = None
    try:
        server = serve(place)
        level = watch(server, place, minutes, rate)
    finally:
        if server is not None:
            server.terminate()
            server.wait()
        if mounted(f"{place.folder}/mq"):
            unmount(f"{place.folder}/mq", lazily=True)
        shutil.rmtree(place.folder, ignore_errors=True)
    sys.exit(0 if level else 1)


if __name__ == "__main__":
    main()
