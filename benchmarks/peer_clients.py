"""The clients that `peers.py` compares: a small class for each peer and way to use it, in plain Python.

A `Way` is one end, in a process of its own. A sender has `send_all` (as fast as possible) and `put_all` (each message
or batch is answered before the next); a reader has `hear`; a worker has `take` and `done`. The process of the bench
calls `prepare` and `remove`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, ClassVar

import queue_peers
from queue_peers import Beanstalk, MountAck, MountNext, NinepAck, NinepNext, RedisStream

ROOM = 65_536


def batches(bodies: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    left = iter(bodies)
    while batch := list(islice(left, size)):
        yield batch


class Way:
    """One end of a way (see above). `takers`: the number of receivers; `where`: the server's socket, or a folder."""

    def __init__(self, where: str, name: str, role: str, synced: bool, takers: int = 1) -> None:
        self.where, self.name, self.role, self.synced, self.takers = where, name, role, synced, takers
        if role:
            self.open()

    def open(self) -> None: ...

    def prepare(self) -> None: ...

    def remove(self) -> None: ...

    def send(self, body: bytes) -> None:
        raise NotImplementedError

    def send_all(self, bodies: Iterable[bytes]) -> None:
        send = self.send
        for body in bodies:
            send(body)
        self.settle()

    def settle(self) -> None:
        """Wait until all sent messages are on their way."""

    def put_all(self, bodies: Iterable[bytes], batch: int) -> None:
        if batch == 1:
            for body in bodies:
                self.send(body)
        else:
            for some in batches(bodies, batch):
                self.put_many(some)

    def put_many(self, bodies: list[bytes]) -> None:
        raise NotImplementedError

    def take(self) -> bytes:
        raise NotImplementedError

    def done(self) -> None: ...

    def flush(self) -> None:
        """Send the collected messages."""

    def stream(self) -> Iterator[bytes]:
        """Return an iterator over all messages, without end."""
        return iter(self.take, None)

    def hear(self, count: int) -> tuple[list[bytes], int]:
        """Receive `count` messages. Return the first bytes of each, and the bytes of all."""
        heads: list[bytes] = []
        add, size = heads.append, 0
        for body in islice(self.stream(), count):
            add(body[:8])
            size += len(body)
        return heads, size


# ---------------------------------------------------------------- mqfs


class Library(Way):
    """The library of mqfs."""

    transport = "9p"
    batch = 1

    @property
    def wait(self) -> Any:
        """When a publish returns: on disk if synced, else as soon as others can read the message."""
        return "committed" if self.synced else "published"

    def lines(self) -> list[str]:
        sync = self.synced if isinstance(self.synced, str) else "always" if self.synced else "off"
        return ["replay all", f"sync {sync}"]

    def _group(self) -> Any:
        from mqfs.client import connect

        self.client = connect(f"unix!{self.where}", transport=self.transport)
        return self.client.group(self.name)

    def prepare(self) -> None:
        from mqfs.client import connect

        with connect(f"unix!{self.where}", transport=self.transport) as client:
            client.group(self.name, create=True, ctl=self.lines()).create("s")

    def remove(self) -> None:
        from mqfs.client import connect

        with connect(f"unix!{self.where}", transport=self.transport) as client:
            group = client.group(self.name)
            for consumer in group.consumers():
                group.remove_consumer(consumer)
            group.remove("s")
            client.remove_group(self.name)

    def open(self) -> None:
        group = self._group()
        if self.role == "send":
            self.publish = partial(group.publish, create=False, wait=self.wait)
            self.publish_many = partial(group.publish_many, create=False, wait=self.wait)
        elif self.role == "hear":
            self.reading = group.subscribe("s", existing=True)

    def send(self, body: bytes) -> None:
        self.publish("s", body)

    def send_all(self, bodies: Iterable[bytes]) -> None:
        if self.batch == 1:
            super().send_all(bodies)
        else:
            for some in batches(bodies, self.batch):
                self.put_many(some)

    def put_many(self, bodies: list[bytes]) -> None:
        self.publish_many([("s", body) for body in bodies])

    def take(self) -> bytes:
        body: bytes = self.reading.get().body
        return body

    def stream(self) -> Iterator[bytes]:
        return map(attrgetter("body"), self.reading)


class Library64(Library):
    batch = 64


class LibraryRing(Library):
    transport = "ring"


class LibraryRing64(LibraryRing):
    batch = 64


class LibraryRingOff(LibraryRing):
    """The ring with `replay off`: messages that all readers have read are removed."""

    def lines(self) -> list[str]:
        return ["replay off", "sync off"]


class Mount(Way):
    """Files of the mount."""

    def _path(self, *names: str) -> str:
        return os.path.join(os.path.dirname(self.where), "mq", self.name, *names)

    def prepare(self) -> None:
        os.mkdir(self._path())
        with open(self._path("ctl"), "w") as ctl:
            ctl.write(f"replay all\nsync {'always' if self.synced else 'off'}\n")
        open(self._path("s"), "w").close()

    def remove(self) -> None:
        os.unlink(self._path("s"))
        os.rmdir(self._path())

    def open(self) -> None:
        self.file = os.open(self._path("s"), os.O_WRONLY if self.role == "send" else os.O_RDONLY)

    def send(self, body: bytes) -> None:
        os.write(self.file, body)

    def take(self) -> bytes:
        return os.read(self.file, 4_096)


def work(kind: Any, beside: str = "") -> type[Way]:
    """Return a Way that uses a class of queue_peers.py. `beside`: the name of the mount, in the folder of the
    socket."""

    class Work(Way):
        def __init__(self, where: str, name: str, role: str, synced: bool, takers: int = 1) -> None:
            self.takers, self.role = takers, role
            place = os.path.join(os.path.dirname(where), beside) if beside else where
            self.end = kind(place, name, role if role in ("", "send") else "take", synced)
            self.send, self.take, self.done = self.end.send, self.end.take, self.end.done  # type: ignore[method-assign]
            self.prepare, self.remove = self.end.prepare, self.end.remove  # type: ignore[method-assign]
            self.flush = self.end.flush  # type: ignore[method-assign]

    return Work


# ---------------------------------------------------------------- Redis


class RedisPubSub(Way):
    batch = 1

    def open(self) -> None:
        import redis

        self.client = redis.Redis(unix_socket_path=self.where, protocol=2)
        if self.role == "hear":
            self.sub = self.client.pubsub()
            self.sub.subscribe(self.name)
            self.sub.parse_response()

    def send(self, body: bytes) -> None:
        self.client.publish(self.name, body)

    def send_all(self, bodies: Iterable[bytes]) -> None:
        if self.batch == 1:
            super().send_all(bodies)
            return
        for some in batches(bodies, self.batch):
            pipe = self.client.pipeline(transaction=False)
            for body in some:
                pipe.publish(self.name, body)
            pipe.execute()

    def take(self) -> bytes:
        found: Any = self.sub.parse_response()
        body: bytes = found[2]
        return body


class RedisPubSub64(RedisPubSub):
    batch = 64


class RedisAdd(Way):
    """A stream of Redis, used as a log to append to."""

    def open(self) -> None:
        import redis

        self.client = redis.Redis(unix_socket_path=self.where, protocol=2)

    def remove(self) -> None:
        self.open()
        self.client.delete(self.name)

    def send(self, body: bytes) -> None:
        self.client.xadd(self.name, {b"b": body})

    def put_many(self, bodies: list[bytes]) -> None:
        pipe = self.client.pipeline(transaction=False)
        for body in bodies:
            pipe.xadd(self.name, {b"b": body})
        pipe.execute()


# ---------------------------------------------------------------- NATS


class Shared:
    """The event loop of a process, and one connection to each server, as an echo both sends and receives."""

    loop: asyncio.AbstractEventLoop | None = None
    connections: ClassVar[dict[str, Any]] = {}

    @classmethod
    def get(cls, where: str) -> tuple[asyncio.AbstractEventLoop, Any]:
        import nats

        async def silent(error: Exception) -> None:
            """Ignore errors: the server is stopped before its clients."""

        if cls.loop is None:
            cls.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(cls.loop)
        if where not in cls.connections:
            made = nats.connect(where, allow_reconnect=False, error_cb=silent, max_outstanding_pings=1_000)
            cls.connections[where] = cls.loop.run_until_complete(made)
        return cls.loop, cls.connections[where]


class Nats(Way):
    many = 1 << 40  # no bound of pending messages

    def open(self) -> None:
        self.loop, self.nc = Shared.get(self.where)
        if self.role == "hear":
            self.heard: asyncio.Queue[bytes] = asyncio.Queue()
            self._run(self._subscribe())

    def _run(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    async def _subscribe(self) -> None:
        async def came(message: Any) -> None:
            self.heard.put_nowait(message.data)

        await self.nc.subscribe(self.name, cb=came, pending_msgs_limit=self.many, pending_bytes_limit=self.many)
        await self.nc.flush()

    def send(self, body: bytes) -> None:
        self._run(self.nc.publish(self.name, body))

    def send_all(self, bodies: Iterable[bytes]) -> None:
        async def run() -> None:
            publish, name = self.nc.publish, self.name
            for body in bodies:
                await publish(name, body)
            await self.nc.flush(60)

        self._run(run())

    def take(self) -> bytes:
        body: bytes = self._run(self.heard.get())
        return body

    def hear(self, count: int) -> tuple[list[bytes], int]:
        heads: list[bytes] = []

        async def run() -> int:
            get, size = self.heard.get, 0
            for _ in range(count):
                body = await get()
                heads.append(body[:8])
                size += len(body)
            return size

        return heads, self._run(run())


class JetStream(Nats):
    """NATS with a log on disk. An answered message is not synced: by default JetStream syncs every two minutes."""

    def prepare(self) -> None:
        self.loop, self.nc = Shared.get(self.where)
        js = self.nc.jetstream()
        self._run(js.add_stream(name=self.name, subjects=[self.name]))
        self._run(js.add_consumer(self.name, durable_name="w", ack_policy="explicit", max_ack_pending=100_000))

    def remove(self) -> None:
        self.loop, self.nc = Shared.get(self.where)
        self._run(self.nc.jetstream().delete_stream(self.name))

    def open(self) -> None:
        self.loop, self.nc = Shared.get(self.where)
        self.js = self.nc.jetstream()
        if self.role != "send":
            self.sub = self._run(self.js.pull_subscribe(self.name, durable="w", stream=self.name))

    def send(self, body: bytes) -> None:
        self._run(self.js.publish(self.name, body))

    def send_all(self, bodies: Iterable[bytes]) -> None:
        async def run() -> None:
            for body in bodies:
                await self.js.publish(self.name, body)

        self._run(run())

    def put_all(self, bodies: Iterable[bytes], batch: int) -> None:
        if batch == 1:
            self.send_all(bodies)
        else:
            super().put_all(bodies, batch)

    def put_many(self, bodies: list[bytes]) -> None:
        async def run() -> None:
            await asyncio.gather(*(self.js.publish(self.name, body) for body in bodies))

        self._run(run())

    def take(self) -> bytes:
        import nats.errors

        while True:
            with contextlib.suppress(nats.errors.TimeoutError, TimeoutError):
                (self.message,) = self._run(self.sub.fetch(1, timeout=30))
                body: bytes = self.message.data
                return body

    def done(self) -> None:
        self._run(self.message.ack())


class JetStream64(JetStream):
    """JetStream with batches of 64: sent, fetched and acknowledged together."""

    batch = 64

    def open(self) -> None:
        super().open()
        self.found: list[Any] = []
        self.dealt_with: list[Any] = []
        self.unsent: list[bytes] = []

    def send(self, body: bytes) -> None:
        self.unsent.append(body)
        if len(self.unsent) == self.batch or len(body) < 8:
            self.flush()

    def flush(self) -> None:
        self.put_many(self.unsent)
        self.unsent = []

    def take(self) -> bytes:
        import nats.errors

        while not self.found:
            self.acknowledge()
            with contextlib.suppress(nats.errors.TimeoutError, TimeoutError):
                self.found = self._run(self.sub.fetch(self.batch, timeout=30))[::-1]
        self.message = self.found.pop()
        body: bytes = self.message.data
        return body

    def done(self) -> None:
        self.dealt_with.append(self.message)
        if not self.found:
            self.acknowledge()

    def acknowledge(self) -> None:
        async def run() -> None:
            await asyncio.gather(*(message.ack() for message in self.dealt_with))

        self._run(run())
        self.dealt_with = []


# ---------------------------------------------------------------- MQTT


class Mqtt(Way):
    """MQTT by paho, with the thread that it starts."""

    qos = 0
    shared = False

    def open(self) -> None:
        from paho.mqtt import client as paho

        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        version = paho.CallbackAPIVersion.VERSION2
        self.client = paho.Client(version, transport="unix", protocol=paho.MQTTv5, manual_ack=self.shared)
        self.client.max_queued_messages_set(0)
        self.client.max_inflight_messages_set(1_000)
        self.client.on_message = lambda client, data, message: self.heard.put(message)
        self.client.on_subscribe = lambda *_: self.heard.put(None)
        self.client.connect(self.where)
        self.client.loop_start()
        while not self.client.is_connected():
            os.sched_yield()
        if self.role != "send":
            self.client.subscribe(f"$share/w/{self.name}" if self.shared else self.name, qos=self.qos)
            assert self.heard.get(timeout=10) is None

    def send(self, body: bytes) -> None:
        self.last = self.client.publish(self.name, body, qos=self.qos)
        if self.role == "send" and self.shared:
            self.last.wait_for_publish()

    def settle(self) -> None:
        self.last.wait_for_publish(60)

    def put_all(self, bodies: Iterable[bytes], batch: int) -> None:
        for some in batches(bodies, batch):
            self.put_many(some)

    def put_many(self, bodies: list[bytes]) -> None:
        for info in [self.client.publish(self.name, body, qos=1) for body in bodies]:
            info.wait_for_publish()

    def take(self) -> bytes:
        self.message = self.heard.get()
        body: bytes = self.message.payload
        return body

    def done(self) -> None:
        self.client.ack(self.message.mid, self.qos)


class Mqtt1(Mqtt):
    qos = 1


class MqttShared(Mqtt):
    """A shared subscription: each message is delivered to one subscriber."""

    qos, shared = 1, True


# ---------------------------------------------------------------- ZeroMQ


class Zmq(Way):
    """ZeroMQ: push and pull between two; with more, publish and subscribe without drops: the publisher waits."""

    def open(self) -> None:
        import zmq

        context = zmq.Context()
        at = f"ipc://{self.where}/{self.name}"
        one = self.takers == 1
        if self.role == "send":
            self.socket = context.socket(zmq.PUSH if one else zmq.XPUB)
            if not one:
                self.socket.setsockopt(zmq.XPUB_NODROP, 1)
                self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            self.socket.bind(at)
            for _ in range(0 if one else self.takers):
                self.socket.recv()  # wait for a subscription
        else:
            self.socket = context.socket(zmq.PULL if one else zmq.SUB)
            if not one:
                self.socket.setsockopt(zmq.SUBSCRIBE, b"")
            self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
            self.socket.connect(at)
        self.send, self.take = self.socket.send, self.socket.recv  # type: ignore[method-assign]


# ---------------------------------------------------------------- RabbitMQ, Celery


class Rabbit(Way):
    """A durable queue by pika. Messages are confirmed, and persistent if synced; prefetch is 1, and each message is
    acknowledged. The blocking client waits for each confirmation."""

    def _connect(self) -> None:
        import pika

        host, _, port = self.where.rpartition(":")
        self.connection = pika.BlockingConnection(pika.ConnectionParameters(host, int(port)))
        self.channel = self.connection.channel()
        self.lasting = pika.BasicProperties(delivery_mode=2 if self.synced else 1)

    def prepare(self) -> None:
        self._connect()
        self.channel.queue_declare(self.name, durable=True)

    def remove(self) -> None:
        self._connect()
        self.channel.queue_delete(self.name)

    def open(self) -> None:
        self._connect()
        if self.role == "send":
            self.channel.confirm_delivery()
        else:
            self.channel.basic_qos(prefetch_count=1)
            self.messages = self.channel.consume(self.name)

    def send(self, body: bytes) -> None:
        self.channel.basic_publish("", self.name, body, self.lasting)

    def take(self) -> bytes:
        self.method, _, body = next(self.messages)
        return bytes(body)

    def done(self) -> None:
        self.channel.basic_ack(self.method.delivery_tag)


class Kombu(Way):
    """Celery's transport on Redis, without its tasks."""

    def open(self) -> None:
        import kombu

        self.connection = kombu.Connection(f"redis+socket://{self.where}")
        self.queue = self.connection.SimpleQueue(self.name, serializer="raw")

    def remove(self) -> None:
        self.open()
        self.queue.queue.delete()

    def send(self, body: bytes) -> None:
        self.queue.put(body, serializer="raw", content_type="application/data", content_encoding="binary")

    def take(self) -> bytes:
        self.message = self.queue.get(block=True)
        return bytes(self.message.body)

    def done(self) -> None:
        self.message.ack()


# ---------------------------------------------------------------- in node: peer_node.js


class Node(Way):
    """A placeholder for a peer in node: its ends are processes of peer_node.js."""

    what = ""


class Disruptor(Node):
    what = "disruptor"


class FsqFiles(Node):
    what = "files"


class FsqDisruptor(Node):
    what = "shared"


WorkMountNext, WorkMountAck = work(MountNext, "mq"), work(MountAck, "mq")
WorkNinepNext, WorkNinepAck = work(NinepNext), work(NinepAck)
WorkBeanstalk, WorkRedis = work(Beanstalk), work(RedisStream)
WorkLibrary, WorkLibrary64 = work(queue_peers.Library), work(queue_peers.LibraryBatches)
WorkBeanstalk64, WorkRedis64 = work(queue_peers.BeanstalkBatches), work(queue_peers.RedisBatches)
