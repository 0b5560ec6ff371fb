"""The clients and servers that `queues.py` compares: a small class for each way to a work queue, for both ends.

All clients are plain Python, a process each, over a file or a unix socket. `take` waits for a message; `done`
acknowledges it. Ways "in batches" send, take and acknowledge up to BATCH messages at once; `flush` sends the remaining
ones. Servers are started in a folder of their own, and stopped by their process id.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
ROOM = 4_096  # bytes requested by a read
BATCH = 64


class Client(Protocol):
    """One end of a work queue. The bench's own process calls `prepare` and `remove` to make and remove the queue."""

    def __init__(self, where: str, name: str, role: str, synced: bool) -> None: ...

    def prepare(self) -> None: ...

    def remove(self) -> None: ...

    def send(self, body: bytes) -> None: ...

    def flush(self) -> None: ...

    def take(self) -> bytes: ...

    def done(self) -> None: ...


class Batches:
    """A sender that collects messages for `send_many`."""

    def send(self, body: bytes) -> None:
        self.__dict__.setdefault("unsent", []).append(body)
        if len(self.unsent) == BATCH or len(body) < 8:  # an end mark
            self.flush()

    def flush(self) -> None:
        bodies, self.unsent = self.__dict__.get("unsent", []), list[bytes]()
        if bodies:
            self.send_many(bodies)

    def send_many(self, bodies: list[bytes]) -> None:
        raise NotImplementedError


def settings(synced: bool) -> str:
    return f"deliver one\nack next\nsync {'always' if synced else 'off'}\n"


class MountNext:
    """A file of a `deliver one` group: each read acknowledges the previous message."""

    taken = "s"

    def __init__(self, where: str, name: str, role: str, synced: bool) -> None:
        self.group, self.synced = f"{where}/{name}", synced
        if role == "send":
            self.file = os.open(f"{self.group}/s", os.O_WRONLY)
        if role == "take":
            self.file = os.open(f"{self.group}/{self.taken}", os.O_RDWR)

    def prepare(self) -> None:
        os.mkdir(self.group)
        Path(self.group, "ctl").write_text(settings(self.synced))
        Path(self.group, "s").touch()

    def remove(self) -> None:
        os.unlink(f"{self.group}/s")
        os.rmdir(self.group)

    def send(self, body: bytes) -> None:
        os.write(self.file, body)

    def flush(self) -> None: ...

    def take(self) -> bytes:
        return os.read(self.file, ROOM)

    def done(self) -> None:
        """Do nothing: the next read acknowledges."""


class MountAck(MountNext):
    """A consumer's file: a read claims, and a write of `ack` acknowledges."""

    taken = ".consumers/w"

    def prepare(self) -> None:
        os.mkdir(self.group)
        lines = f"replay off\nsync {'always' if self.synced else 'off'}\nconsumer w\n"
        Path(self.group, "ctl").write_text(lines)
        Path(self.group, "s").touch()

    def remove(self) -> None:
        os.unlink(f"{self.group}/{self.taken}")
        super().remove()

    def done(self) -> None:
        os.write(self.file, b"ack\n")


class NinepNext:
    """`MountNext` over 9P."""

    taken = "s"

    def __init__(self, where: str, name: str, role: str, synced: bool) -> None:
        from mqfs.ninep.client import connection

        self.client, self.group, self.synced = connection.connect(f"unix!{where}"), name, synced
        if role == "send":
            self.file = self.client.open(f"{name}/s", "w")
        if role == "take":
            self.file = self.client.open(f"{name}/{self.taken}", "r+")

    def lines(self) -> str:
        return settings(self.synced)

    def prepare(self) -> None:
        self.client.mkdir(self.group)
        with self.client.open(f"{self.group}/ctl", "w") as ctl:
            ctl.write(self.lines().encode())
        self.client.create(f"{self.group}/s").close()

    def remove(self) -> None:
        self.client.remove(f"{self.group}/s")
        self.client.remove(self.group)

    def send(self, body: bytes) -> None:
        self.file.write(body)

    def flush(self) -> None: ...

    def take(self) -> bytes:
        return self.file.receive(ROOM)

    def done(self) -> None:
        """Do nothing: the next read acknowledges."""


class NinepAck(NinepNext):
    """`MountAck` over 9P."""

    taken = ".consumers/w"

    def lines(self) -> str:
        return f"replay off\nsync {'always' if self.synced else 'off'}\nconsumer w\n"

    def remove(self) -> None:
        self.client.remove(f"{self.group}/{self.taken}")
        super().remove()

    def done(self) -> None:
        self.file.write(b"ack\n")


class Library:
    """The library: `publish`, and a `with` block for each claim."""

    prefetch = 1

    def __init__(self, where: str, name: str, role: str, synced: bool) -> None:
        import mqfs

        self.client = mqfs.connect(f"unix!{where}", transport="9p" if role == "take" else "auto")
        self.name, self.synced = name, synced
        if role:
            self.group = self.client.group(name)
        if role == "take":
            self.claims = self.group.consume("w", prefetch=self.prefetch)

    def prepare(self) -> None:
        lines = ["replay off", f"sync {'always' if self.synced else 'off'}", "consumer w"]
        self.group = self.client.group(self.name, create=True, ctl=lines)
        self.group.create("s")

    def remove(self) -> None:
        self.group.remove_consumer("w")
        self.group.remove("s")
        self.client.remove_group(self.name)

    def send(self, body: bytes) -> None:
        self.group.publish("s", body)

    def flush(self) -> None: ...

    def take(self) -> bytes:
        self.claim = self.claims.get()
        self.claim.__enter__()
        return self.claim.body

    def done(self) -> None:
        self.claim.__exit__(None, None, None)


class LibraryBatches(Batches, Library):
    """The library: `publish_many`, and claims with prefetch."""

    prefetch = BATCH

    def send_many(self, bodies: list[bytes]) -> None:
        self.group.publish_many([("s", body) for body in bodies])


class Beanstalk:
    """beanstalkd: put, reserve, delete."""

    def __init__(self, where: str, name: str, role: str, synced: bool) -> None:
        import greenstalk

        self.client = greenstalk.Client(f"{where}", encoding=None, use=name, watch=name)

    def prepare(self) -> None: ...

    def remove(self) -> None:
        import greenstalk

        with contextlib.suppress(greenstalk.NotFoundError):
            while True:
                self.client.delete(self.client.peek_ready())

    def send(self, body: bytes) -> None:
        self.client.put(body)

    def flush(self) -> None: ...

    def take(self) -> bytes:
        self.job = self.client.reserve()
        body: bytes = self.job.body
        return body

    def done(self) -> None:
        self.client.delete(self.job)


class BeanstalkBatches(Batches, Beanstalk):
    """beanstalkd, with BATCH requests at once and answers read one by one: its library has no calls for batches."""

    def __init__(self, where: str, name: str, role: str, synced: bool) -> None:
        super().__init__(where, name, role, synced)
        self.socket, self.answers = self.client._sock, self.client._reader
        self.found: list[tuple[bytes, bytes]] = []
        self.dealt_with: list[bytes] = []

    def send_many(self, bodies: list[bytes]) -> None:
        self.socket.sendall(b"".join(b"put 65536 0 60 %d\r\n%b\r\n" % (len(body), body) for body in bodies))
        for _ in bodies:
            assert self.answers.readline().startswith(b"INSERTED")

    def take(self) -> bytes:
        if not self.found:
            self.delete(b"reserve\r\n" + b"reserve-with-timeout 0\r\n" * (BATCH - 1))
            for _ in range(BATCH):
                if (line := self.answers.readline()) != b"TIMED_OUT\r\n":
                    _, number, size = line.split()
                    self.found.append((number, bytes(self.answers.read(int(size) + 2)[:-2])))
            self.found.reverse()
        self.number, body = self.found.pop()
        self.is_last = len(body) < 8
        return body

    def done(self) -> None:
        self.dealt_with.append(b"delete %b\r\n" % self.number)
        if self.is_last:
            self.delete()

    def delete(self, more: bytes = b"") -> None:
        self.socket.sendall(b"".join(self.dealt_with) + more)
        for _ in self.dealt_with:
            assert self.answers.readline() == b"DELETED\r\n"
        self.dealt_with.clear()


class RedisStream:
    """Redis: XADD, XREADGROUP COUNT 1, XACK and, in the same request, XDEL: else the stream would grow without
    bound."""

    def __init__(self, where: str, name: str, role: str, synced: bool) -> None:
        import redis

        self.client, self.name, self.me = redis.Redis(unix_socket_path=where, protocol=2), name, str(os.getpid())

    def prepare(self) -> None:
        self.client.xgroup_create(self.name, "w", mkstream=True)

    def remove(self) -> None:
        self.client.delete(self.name)

    def send(self, body: bytes) -> None:
        self.client.xadd(self.name, {b"b": body})

    def flush(self) -> None: ...

    def take(self) -> bytes:
        found: Any = self.client.xreadgroup("w", self.me, {self.name: ">"}, count=1, block=0)
        self.id, fields = found[0][1][0]
        body: bytes = fields[b"b"]
        return body

    def done(self) -> None:
        both = self.client.pipeline(transaction=False)
        both.xack(self.name, "w", self.id)
        both.xdel(self.name, self.id)
        both.execute()


class RedisBatches(Batches, RedisStream):
    """Redis: XREADGROUP COUNT 64; XADD, and XACK with XDEL, of up to 64 messages in one request each."""

    def __init__(self, where: str, name: str, role: str, synced: bool) -> None:
        super().__init__(where, name, role, synced)
        self.found: list[Any] = []
        self.dealt_with: list[bytes] = []

    def send_many(self, bodies: list[bytes]) -> None:
        all_of_them = self.client.pipeline(transaction=False)
        for body in bodies:
            all_of_them.xadd(self.name, {b"b": body})
        all_of_them.execute()

    def take(self) -> bytes:
        if not self.found:
            if self.dealt_with:
                both = self.client.pipeline(transaction=False)
                both.xack(self.name, "w", *self.dealt_with)
                both.xdel(self.name, *self.dealt_with)
                both.execute()
                self.dealt_with.clear()
            self.found = self.client.xreadgroup("w", self.me, {self.name: ">"}, count=BATCH, block=0)[0][1][::-1]
        self.id, fields = self.found.pop()
        body: bytes = fields[b"b"]
        return body

    def done(self) -> None:
        self.dealt_with.append(self.id)


WAYS: dict[str, type[Client]] = {
    "mount, ack next": MountNext,
    "mount, consumer": MountAck,
    "9P, ack next": NinepNext,
    "9P, consumer": NinepAck,
    "library": Library,
    "library, in batches": LibraryBatches,
    "beanstalkd": Beanstalk,
    "Redis streams": RedisStream,
    "beanstalkd, in batches": BeanstalkBatches,
    "Redis, in batches": RedisBatches,
}
OURS = 6  # number of ways of mqfs, the first ones

# ---------------------------------------------------------------- servers


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)


def log() -> int | None:
    """Return the standard error of servers: discarded, or under a profiler that of the bench."""
    return None if os.environ.get("MQFS_BENCH_PROFILE") else subprocess.DEVNULL


@contextlib.contextmanager
def running(
    command: list[str], ready: Callable[[], object], environment: dict[str, str] | None = None, seconds: float = 20
) -> Iterator[int]:
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log(), cwd=HERE.parent, env=environment)
    try:
        until(lambda: server.poll() is not None or ready(), seconds)
        assert server.poll() is None, f"{command[0]} ended"
        yield server.pid
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def mqfs_command(*words: str) -> list[str]:
    """Return the command of the server; under a profiler if MQFS_BENCH_PROFILE names a file for its results."""
    profile = os.environ.get("MQFS_BENCH_PROFILE")
    profiler = ["-m", "cProfile", "-o", profile] if profile else []
    return [sys.executable, *profiler, "-m", "mqfs", "serve", *words]


@contextlib.contextmanager
def servers(base: Path, synced: bool, pin: list[str]) -> Iterator[dict[str, tuple[str, int]]]:
    """Run all servers. Yield, by way, the address and the process number of its server."""
    from mqfs.fuse.mount import mounted, unmount

    mount, ninep, bean, red = (str(base / name) for name in ("mq", "9p", "bean", "redis"))
    for folder in (mount, f"{bean}.d", f"{red}.d"):
        os.makedirs(folder)
    ours = mqfs_command("--store", str(base / "store"), "--mount", mount, "--listen", f"unix!{ninep}")
    beanstalkd = ["beanstalkd", "-l", f"unix:{bean}", "-b", f"{bean}.d", *(["-f0"] if synced else ["-F"])]
    redis = ["redis-server", "--port", "0", "--unixsocket", red, "--dir", f"{red}.d", "--save", "", "--daemonize", "no"]
    redis += ["--appendonly", "yes", "--auto-aof-rewrite-percentage", "0"]
    redis += ["--appendfsync", "always" if synced else "no"]
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: mounted(mount) and unmount(mount, lazily=True))
        enter = stack.enter_context
        pid = enter(running([*pin, *ours], lambda: os.path.exists(f"{mount}/ctl") and os.path.exists(ninep)))
        found = {way: (mount if way.startswith("mount") else ninep, pid) for way in WAYS}
        found["beanstalkd"] = bean, enter(running([*pin, *beanstalkd], lambda: os.path.exists(bean)))
        found["Redis streams"] = red, enter(running([*pin, *redis], lambda: os.path.exists(red)))
        found |= {"beanstalkd, in batches": found["beanstalkd"], "Redis, in batches": found["Redis streams"]}
        yield found


def missing() -> list[str]:
    return [name for name in ("beanstalkd", "redis-server", "taskset") if shutil.which(name) is None]
