"""Publishing over HTTP, beside uvicorn and starlette with a list, and events of one stream to many, in one run.

    python benchmarks/http_server.py [--quick]

One client publishes 100 bytes over a persistent connection. Server and client are pinned to one CPU; otherwise the
scheduler would be measured. The rates are by the CPU time of both together: those of the clock on a CPU without other
processes. The rate of events is by the CPU time of the server alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from processes import TICKS, cpu_s, resident_mb

ROOT = Path(__file__).resolve().parents[1]
CPU = max(os.sched_getaffinity(0))
HEAD = "HTTP/1.1\r\nHost: localhost\r\n"
MQFS = """
import sys
from mqfs import limits
limits.HTTP_CONNECTIONS, limits.HTTP_USER_CONNECTIONS, limits.HTTP_USER_STREAMS = 50_000, 20_000, 20_000
from mqfs.cli.main import main
main()
"""
PEER = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
messages = []
async def publish(request):
    messages.append(await request.body())
    return PlainTextResponse(f"{len(messages)}\\n", 201)
app = Starlette(routes=[Route("/b/s", publish, methods=["POST"])])
uvicorn.run(app, port=int(sys.argv[1]), http="httptools", log_level="error")
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def serving(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", *words], env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def connect(port: int) -> socket.socket:
    for _ in range(600):
        try:
            sock = socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.05)
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    raise SystemExit(f"no server at port {port}")


def ask(sock: socket.socket, request: bytes) -> bytes:
    sock.sendall(request)
    answer = sock.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 20"), answer
    if answer.endswith(b"\r\n\r\n") and b"\r\ncontent-length: " in answer:  # the peer sends the body separately
        answer += sock.recv(65_536)
    return answer


def own_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def publishing(pid: int, sock: socket.socket, count: int) -> float:
    """Return requests per second of the CPU time of client and server."""
    request = f"POST /b/s {HEAD}Content-Length: 100\r\n\r\n".encode() + b"x" * 100
    for _ in range(500):
        ask(sock, request)
    before = cpu_s(pid) + own_s()
    for _ in range(count):
        ask(sock, request)
    return count / (cpu_s(pid) + own_s() - before)


@contextmanager
def mqfs() -> Iterator[tuple[int, int, socket.socket]]:
    port = free_port()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        words = ["serve", "--store", f"{folder}/store", "--http", f"tcp!127.0.0.1!{port}"]
        words += ["--tcp-user", str(os.geteuid())]
        for line in ("sync off", "replay all"):
            words += ["--default", line]
        with serving(MQFS, *words) as process, connect(port) as sock:
            ask(sock, f"PUT /b/ {HEAD}\r\n".encode())
            ask(sock, f"PUT /b/s {HEAD}\r\n".encode())
            yield process.pid, port, sock


@contextmanager
def peer() -> Iterator[tuple[int, int, socket.socket]]:
    port = free_port()
    with serving(PEER, str(port)) as process, connect(port) as sock:
        yield process.pid, port, sock


def events(followers: int, batches: int) -> tuple[float, float]:
    """Return events per second of the server's CPU time, and KiB of its memory per idle follower."""
    rows = "\n".join(json.dumps({"stream": "s", "body": "x" * 100}) for _ in range(100)).encode()
    kind = "Content-Type: application/x-ndjson\r\n"
    request = f"POST /b/.batch {HEAD}{kind}Content-Length: {len(rows)}\r\n\r\n".encode() + rows
    with mqfs() as (pid, port, sock):
        idle = 1_024 * resident_mb(pid)
        socks = [connect(port) for _ in range(followers)]
        for one in socks:
            ask(one, f"GET /b/s?format=sse&since=end {HEAD}\r\n".encode())
            one.setblocking(False)
        size = (1_024 * resident_mb(pid) - idle) / followers
        by_number = {one.fileno(): one for one in socks}
        ready = select.epoll()
        for number in by_number:
            ready.register(number, select.EPOLLIN)
        before, got = cpu_s(pid), 0
        for batch in range(1, batches + 1):
            ask(sock, request)
            while got < batch * 100 * followers:
                got += sum(by_number[number].recv(1 << 20).count(b"\nid: ") for number, _ in ready.poll())
        rate = got / max(cpu_s(pid) - before, 1 / TICKS)
        for one in socks:
            one.close()
        return rate, size


def whole(sock: socket.socket, request: bytes) -> bytes:
    """Send a request, and return the body of its answer, of any length."""
    sock.sendall(request)
    head, _, body = sock.recv(1 << 20).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 20"), head
    size = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or 0)
    while len(body) < size:
        body += sock.recv(1 << 20)
    return body


def claiming(batches: int) -> float:
    """Return messages per second of CPU time that are claimed and acknowledged, 100 in each request."""
    rows = "\n".join(json.dumps({"stream": "s", "body": "x" * 100}) for _ in range(100)).encode()
    kind = "Content-Type: application/x-ndjson\r\n"
    with mqfs() as (pid, _, sock):
        ask(sock, f"PUT /b/.consumers/jobs {HEAD}\r\n".encode())
        for _ in range(batches):
            ask(sock, f"POST /b/.batch {HEAD}{kind}Content-Length: {len(rows)}\r\n\r\n".encode() + rows)
        before = cpu_s(pid) + own_s()
        for _ in range(batches):
            lines = whole(sock, f"POST /b/.consumers/jobs/claim?max=100 {HEAD}Content-Length: 0\r\n\r\n".encode())
            tokens = b"\n".join(line[10 : line.index(b'"', 10)] for line in lines.splitlines())
            done = f"POST /b/.consumers/jobs/ack {HEAD}Content-Length: {len(tokens)}\r\n\r\n".encode() + tokens
            ask(sock, done)
        return batches * 100 / (cpu_s(pid) + own_s() - before)


def synchronous(count: int) -> float:
    """Return requests per second, by the clock, of 16 connections under `sync always`."""
    request = f"POST /b/s {HEAD}Content-Length: 100\r\n\r\n".encode() + b"x" * 100
    with mqfs() as (_, port, sock):
        lines = b"sync always"
        ask(sock, f"POST /b/ctl {HEAD}Content-Length: {len(lines)}\r\n\r\n".encode() + lines)
        socks = {one.fileno(): one for one in (connect(port) for _ in range(16))}
        ready = select.epoll()
        for number, one in socks.items():
            ready.register(number, select.EPOLLIN)
            one.sendall(request)
        began, got = time.perf_counter(), 0
        while got < count:
            for number, _ in ready.poll():
                assert socks[number].recv(4_096).startswith(b"HTTP/1.1 201")
                socks[number].sendall(request)
                got += 1
        return got / (time.perf_counter() - began)


def rounds(server: Callable[[], contextmanager], count: int) -> float:  # type: ignore[type-arg,valid-type]
    with server() as (pid, _, sock):  # type: ignore[attr-defined]
        return publishing(pid, sock, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.sched_setaffinity(0, {CPU})
    count = 3_000 if quick else 20_000
    pairs = [(rounds(mqfs, count), rounds(peer, count)) for _ in range(1 if quick else 5)]
    mine, theirs = (median(column) for column in zip(*pairs, strict=True))
    ratio = median(one / other for one, other in pairs)
    print(f"publish, one connection   mqfs {mine:8,.0f} /s   uvicorn + starlette {theirs:8,.0f} /s   {ratio:.2f}")
    print(f"publish, 16 connections, sync always   mqfs {synchronous(count):8,.0f} /s")
    print(f"claim + ack, batches of 100            mqfs {claiming(30 if quick else 300):8,.0f} /s")
    if not quick:
        print(f"10,000 idle followers                  mqfs {events(10_000, 0)[1]:.1f} KiB each")
    followers = 200 if quick else 1_000
    rate, size = events(followers, 5 if quick else 30)
    print(f"events, 1 to {followers:<5}        mqfs {rate:8,.0f} /s   {size:.1f} KiB an idle follower")


if __name__ == "__main__":
    main()
