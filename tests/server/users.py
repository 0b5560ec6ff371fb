"""Two users of one server, as programs: `greedy KIND` takes what it can get, `polite` makes round trips when asked.

    python -m tests.server.users ADDRESS UID greedy KIND
    python -m tests.server.users ADDRESS UID polite

Everything is imported before it becomes the user, who may not be able to read the sources. Each prints a line when it
is at work: greedy once, polite for every line "SECONDS PAUSE" that it reads, when each round trip began, when its write
was answered, and when its read was, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from mqfs import limits
from mqfs.errors import MqfsError
from mqfs.ninep.client.connection import Client, connect
from mqfs.ninep.codec.messages import Fcall, Tflush, Tread, Twrite
from mqfs.ninep.codec.wire import Framer, encode

FLUSHED = 109  # the type of Rflush
WAITING = 15_000  # reads of one connection
HANDLES = 4_000
NAMES = 3_000


def send(client: Client, *requests: Fcall) -> None:
    client.socket.sendall(b"".join(encode(request, False) for request in requests))


def settle(client: Client) -> None:
    """Everything sent so far was performed. Nothing else may be asked of this connection from then on."""
    send(client, Tflush(60_000, 60_001))
    framer = Framer(1 << 30)
    while data := client.socket.recv(1 << 20):
        if any(buffer[start + 4] == FLUSHED for buffer, start, _ in framer.frames(data)):
            return


def park(client: Client, count: int) -> None:
    file = client.open("theirs/own/empty")
    send(client, *(Tread(tag, file.channel.fid, 0, 100) for tag in range(100, 100 + count)))
    settle(client)


def parked(reach: Callable[[], Client]) -> Iterator[None]:
    """All the reads that it may have wait; some of them come and go with their connection."""
    held = [reach(), reach()]
    for client in held:
        park(client, WAITING)
    while True:
        with reach() as client:
            park(client, WAITING)
        yield


def handles(reach: Callable[[], Client]) -> Iterator[None]:
    """Thousands of open files, and as many that are opened and closed again."""
    client = reach()
    files = [client.open("theirs/own/empty") for _ in range(HANDLES)]
    for at in itertools.cycle(range(HANDLES)):
        files[at].close()
        files[at] = client.open("theirs/own/empty")
        yield


def replies(reach: Callable[[], Client]) -> Iterator[None]:
    """Asks for much, and takes nothing of it."""
    clients = deque(reach() for _ in range(30))
    while True:
        clients.popleft().close()
        clients.append(client := reach())
        file = client.open("theirs/own/.kept/large")
        send(client, *(Tread(tag, file.channel.fid, 0, 100_000) for tag in range(100, 200)))
        yield


def frames(reach: Callable[[], Client]) -> Iterator[None]:
    """Half a frame on each of many connections."""
    half = encode(Twrite(5, 1, 0, b"x" * 120_000), False)[:-1]
    clients = [reach() for _ in range(200)]
    while True:
        for at, client in enumerate(clients):
            client.socket.sendall(half)
            client.close()
            clients[at] = reach()
            yield


def puts(reach: Callable[[], Client]) -> Iterator[None]:
    """What `.put` refuses, as large as can be."""
    client = reach()
    large = '{"stream":"none","headers":{' + ",".join(['"k":"v"'] * 7_000) + "}}"
    heads = (large, "[" * 60_000, '{"' + "x" * 60_000 + '":1}')
    for head in itertools.cycle(heads):
        with client.open("theirs/own/.put", "w") as put, suppress(MqfsError):
            put.write(head.encode() + b" body")
        yield


def lines(reach: Callable[[], Client]) -> Iterator[None]:
    """Lines without an end, in many handles."""
    client = reach()
    client.mkdir(f"theirs/own/lines-{os.getpid()}")
    group = f"theirs/own/lines-{os.getpid()}"
    with client.open(f"{group}/ctl", "w") as ctl:
        ctl.write(b"data line\n")
    client.create(f"{group}/s").close()
    files = [client.open(f"{group}/s", "w") for _ in range(200)]
    for file in itertools.cycle(files):
        with suppress(MqfsError):
            file.write(b"x" * 100_000)
        yield


def listings(reach: Callable[[], Client]) -> Iterator[None]:
    """The names of a large group, and its counters."""
    client = reach()
    while True:
        client.list("theirs/own")
        with client.open("theirs/own/.stats") as stats:
            stats.receive()
        yield


def programs(reach: Callable[[], Client]) -> Iterator[None]:
    """Programs as deep and as long as can be, those that are refused too."""
    client = reach()
    call = 'route_contains("a")'
    deep, long = "(" * 31 + call + ")" * 31, " || ".join([call] * 150)
    texts = [f'prefix:"" {text}' for text in (deep, long, "(" * 4_000)] + ['prefix:"' + '\\"' * 30_000]
    with client.open("theirs/own/ctl", "w") as ctl:
        for text in itertools.cycle(texts):
            with suppress(MqfsError):
                ctl.write(f"bind view '{text}'\n".encode())
                ctl.write(b"unbind view\n")
            yield


def requests(reach: Callable[[], Client]) -> Iterator[None]:
    """Requests of HTTP, many at once on many connections: small ones, and the names of a large group."""
    path = f"{os.path.dirname(sys.argv[1].removeprefix('unix!'))}/web"
    head = b" HTTP/1.1\r\nHost: localhost\r\n"
    small = b"POST /theirs/own/ctl" + head + b"Content-Length: 11\r\n\r\nreplay all\n"
    burst = small * 50 + b"GET /theirs/own/?count=10000" + head + b"\r\n"
    socks = [socket.socket(socket.AF_UNIX) for _ in range(150)]
    for sock in socks:
        sock.connect(path)
        sock.setblocking(False)
    while True:
        for sock in socks:
            with suppress(BlockingIOError):
                sock.send(burst)
            with suppress(BlockingIOError):
                while sock.recv(1 << 20):
                    pass
        yield


def batches(reach: Callable[[], Client]) -> Iterator[None]:
    """Batches of 16 MB that are wrong at their end, or all over."""
    path = f"{os.path.dirname(sys.argv[1].removeprefix('unix!'))}/web"
    one = b"\x0d\0\0\0\x05\0\0\0empty"
    most = limits.HTTP_BATCH_BYTES
    bodies = (
        (b"application/vnd.mqfs.frames", one * (most // 13)),
        (b"application/vnd.mqfs.frames", one * (most // 26) + b"\0"),
        (b"application/x-ndjson", b"\n" * most),
        (b"application/x-ndjson", b'{"stream":"empty","body":""}\n' * (most // 29) + b"{"),
    )
    for kind, body in itertools.cycle(bodies):
        head = b"POST /theirs/own/.batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
            sock.connect(path)
            sock.sendall(head % (kind, len(body)) + body)
            sock.recv(100)
        yield


def searches(reach: Callable[[], Client]) -> Iterator[None]:
    """Programs that search messages of 1 MB, and a reader that waits for what they select."""
    client = reach()
    text = "a" * 30 + "b"
    with client.open("theirs/own/ctl", "w") as ctl:
        for number in range(64):
            calls = " || ".join(f'payload_contains("{text * 2}{number}{n}")' for n in range(8))
            ctl.write(f'bind view prefix:"" {calls}\n'.encode())
    view = client.open("theirs/own/view")
    send(client, Tread(1, view.channel.fid, 0, 100))
    with connect(sys.argv[1], timeout=limits.HANDSHAKE_S, msize=limits.MSIZE_MOST) as other:
        stream = other.open("theirs/own/empty", "w")
        while True:
            stream.write(text.encode() * 30_000)
            yield


def commands(reach: Callable[[], Client]) -> Iterator[None]:
    """Lines that clear again and again, words without an end, and what a cursor says of many streams."""
    with connect(sys.argv[1], timeout=limits.HANDSHAKE_S, msize=limits.MSIZE_MOST) as client:
        while True:
            with client.open("theirs/own/ctl", "w") as ctl:
                ctl.write(b"clear empty\nclear\n" * 3_000)
            with client.open("theirs/own/.txn/ctl", "w") as txn, suppress(MqfsError):
                txn.write(b"abort " + b"a " * 500_000)
            with client.open("theirs/own/.cursor", "r+") as cursor:
                cursor.write(b"streams\n")
                cursor.receive()
            yield


def places(reach: Callable[[], Client]) -> Iterator[None]:
    """All places of HTTP and 9P that it gets, each with the beginning of a request, and always one more."""
    folder = os.path.dirname(sys.argv[1].removeprefix("unix!"))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    held: deque[socket.socket] = deque()
    for number in itertools.count():
        way, data = ("web", b"GET /") if number % 2 else ("s", b"\x13\0\0\0d")
        sock = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            sock.connect(f"{folder}/{way}")
            sock.send(data)
        held.append(sock)
        if len(held) > 2 * limits.CONNECTIONS:
            held.popleft().close()
            yield


def kept(reach: Callable[[], Client]) -> Iterator[None]:
    """Headers, delayed messages, staged ones, small bodies: as many as its quota has room for. Then it makes room."""
    client, group = reach(), f"theirs/own/kept-{os.getpid()}"
    client.mkdir(group)
    with client.open(f"{group}/ctl", "w") as ctl:
        ctl.write(b"replay all\nsync off\n")
    client.create(f"{group}/s").close()
    client.mkdir(f"{group}/.txn/p")
    put, part, stream = (client.open(f"{group}/{path}", "w") for path in (".put", ".txn/p/s", "s"))
    headers = json.dumps({"stream": "s", "headers": {"a": "x" * 15_000}}).encode()
    for number in itertools.count():
        try:
            put.write(headers + b" ")
            put.write(b'{"stream":"s","delay":"1d"} ' + b"x" * 10_000)
            part.write(b"x" * 10_000)
            for _ in range(100):
                stream.write(b"x")
        except MqfsError:
            if number % 100 == 0:
                with client.open(f"{group}/ctl", "w") as ctl:
                    ctl.write(b"clear\n")
        yield


def everything(reach: Callable[[], Client]) -> Iterator[None]:
    """All of these at once, each again from its beginning where the server refuses to go on."""
    begun = threading.Barrier(len(KINDS))

    def work(kind: Kind) -> None:
        waits: Callable[[], object] = begun.wait
        while True:
            with suppress(MqfsError, OSError):
                for _ in kind(reach):
                    waits()
                    waits = int

    for kind in KINDS.values():
        if kind is not everything:
            threading.Thread(target=work, args=(kind,), daemon=True).start()
    begun.wait()
    while True:
        yield
        time.sleep(1.0)


Kind = Callable[[Callable[[], Client]], Iterator[None]]
KINDS: dict[str, Kind] = {
    one.__name__: one
    for one in (
        parked,
        handles,
        replies,
        frames,
        puts,
        lines,
        listings,
        programs,
        requests,
        batches,
        searches,
        commands,
        places,
        kept,
        everything,
    )
}


def prepare(client: Client) -> None:
    """The greedy user's own group."""
    client.mkdir("theirs/own")
    with client.open("theirs/own/ctl", "w") as ctl:
        ctl.write(b"replay all\n")
    client.create("theirs/own/empty").close()
    with client.create("theirs/own/large") as large:
        for _ in range(30):
            large.write(b"x" * 100_000)
    for number in range(NAMES):
        client.create(f"theirs/own/{number}").close()


def greedy(reach: Callable[[], Client], kind: str) -> None:
    """For ever: once round, then tell that it is at work."""
    with reach() as client:
        prepare(client)
    work = KINDS[kind](reach)
    next(work)
    print("at work", flush=True)
    for _ in work:
        pass


LEAST_TRIPS = 500  # so that of several runs together one in a hundred says something


def polite(reach: Callable[[], Client]) -> None:
    client = reach()
    reader, writer = client.open("ours/s"), client.open("ours/s", "w")
    for line in sys.stdin:
        seconds, pause_s = map(float, line.split())
        times, end = [], time.monotonic() + seconds
        for number in itertools.count():
            if (began := time.monotonic()) >= end and (pause_s or number >= LEAST_TRIPS):
                break
            writer.write(b"%d" % number)
            written = time.monotonic()
            assert reader.receive() == b"%d" % number
            times.append((began, written, time.monotonic()))
            if pause_s:
                time.sleep(pause_s)
        print(json.dumps(times), flush=True)


def main() -> None:
    address, uid, role, *kind = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))

    def reach() -> Client:
        return connect(address, timeout=limits.HANDSHAKE_S)

    if role == "greedy":
        greedy(reach, *kind)
    else:
        polite(reach)


if __name__ == "__main__":
    main()
