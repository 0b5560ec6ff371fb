"""A transport for kombu, with which Celery keeps its tasks in mqfs.

    import mqfs.kombu
    app = Celery(broker_url="mqfs://")           # as mqfs.connect(): $MQFS_ADDRESS, else ./mqfs.sock
    app = Celery(broker_url="mqfs://:TOKEN@host:5640/jobs")
    app = Celery(broker_url="mqfs://:TOKEN@one:5640/jobs;mqfs://:TOKEN@two:5640/jobs")     # a primary and its standby

The data is in three groups below the one in the URL, by default `celery`:

    queues/QUEUE                a work queue, `deliver one`: a delivery is a claim, which ends with the connection
    bindings/EXCHANGE KEY QUEUE a stream for each binding; only if its name is shortened it has a message, with the text
    temporary/QUEUE             for each queue that expires: its newest message has the seconds that it lives without a
                                consumer, and whether it has one; if not, they count from the time of this message

A task with an ETA waits in the server until then; a task that is too large for that is held by a worker. A worker that
is killed loses its claims at once, and other workers execute its tasks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from math import inf
from queue import Empty
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.json import dumps, loads
from kombu.utils.url import parse_url

from mqfs import __version__
from mqfs.client import Claim, Claims, Client, Group, connect
from mqfs.client.client import require_queue
from mqfs.client.large import LargeMessage
from mqfs.errors import (
    BadAddress,
    BadRequest,
    Denied,
    Disconnected,
    FellBehind,
    Interrupted,
    MqfsError,
    NotFound,
    Stale,
    TooLong,
)
from mqfs.syntax.names import is_shortened, stream_name

GROUP = "celery"
EVENTS = "celeryev"  # the exchange for events of workers and tasks
TEMPORARY_S = 60  # life of a queue with `auto_delete` after its last consumer, unless it has `x-expires`
PURGED_AT_ONCE = 1_024  # messages
_QUEUES = ("deliver one", "replay off", "protect off")
_SEPARATOR = "\x1f"  # between the parts of a binding's name
log = logging.getLogger("mqfs.kombu")


class QueueClaims:
    """The claims of a queue that a channel consumes or gets from."""

    def __init__(self, claims: Claims, arrived: threading.Event) -> None:
        self.claims = claims
        self.is_ready = False  # whether `get` returns without a long wait
        self.is_cancelled = False  # whether to close it once its deliveries are settled
        self._is_armed, self._arrived = False, arrived
        self._again_at, self._again_s = inf, 0.0  # while disconnected: when to connect again, and how long to try

    def arm(self) -> float:
        """Begin to claim a message, if no claim is under way. Returns the monotonic time at which `is_ready` has to be
        checked at the latest."""
        if not self._is_armed:
            self._is_armed, self._again_at, self._again_s = True, inf, 0.0
            try:
                away = self.claims._when_ready(self._on_ready)
            except Disconnected:
                self.is_ready = True  # `get` reconnects, or raises it
            else:
                if away is not None:
                    self._again_at, self._again_s = time.monotonic() + away[0], away[1]
        if time.monotonic() >= self._again_at:
            self.is_ready = True
        return self._again_at

    def _on_ready(self) -> None:
        self.is_ready = True
        self._arrived.set()

    def get(self) -> Claim | None:
        """Return a claim that is there, or cancel the one begun by `arm` and return None. Raises EOFError if the queue
        was removed; NotFound if that happened while the connection was lost."""
        wait_s, self._again_s = self._again_s, 0.0
        self._is_armed = self.is_ready = False
        try:
            return self.claims.get(wait_s)
        except (TimeoutError, Interrupted):
            return None
        except Stale:  # an acknowledgement failed: its message is redelivered
            return None

    def give_back(self) -> None:
        """Cancel the claim begun by `arm`, or release the message that it got."""
        with contextlib.suppress(EOFError, NotFound):
            if self._is_armed and (claim := self.get()) is not None:
                claim.release()


class QoS(virtual.QoS):
    """The messages that a channel delivered, each with its claim."""

    def ack(self, delivery_tag: str) -> None:
        self._settle(delivery_tag, Claim.ack)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject a message. Requeueing counts as a failed delivery, so a message that kills its worker each time
        becomes a dead letter."""
        self._settle(delivery_tag, Claim.nack if requeue else lambda claim: claim._give_up("rejected"))

    def _settle(self, delivery_tag: str, how: Callable[[Claim], None]) -> None:
        """Settle a message and forget it. After an error it is forgotten only if its claim was lost."""
        claim = self.channel.claims.get(delivery_tag)
        try:
            if claim is not None:
                how(claim)
        except (Stale, Disconnected):
            self._forget(delivery_tag)
            raise
        self._forget(delivery_tag)

    def _forget(self, delivery_tag: str) -> None:
        super().ack(delivery_tag)
        self.channel.forget(delivery_tag)
        self.channel.connection.arrived.set()  # wake a waiting thread: the prefetch limit may allow another message

    def restore_unacked(self) -> list[Any]:
        """Release all unacknowledged messages. Raises the first error after all were tried."""
        failures = []
        for delivery_tag in list(self.channel.claims):
            try:
                self._settle(delivery_tag, Claim.release)
            except Stale:
                pass  # the server has requeued it
            except MqfsError as error:
                failures.append(error)
        self._flush()
        if failures:
            raise failures[0]
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Do nothing at exit: the server requeues the messages of a closed channel."""
        self._on_collect.cancel()


class Channel(virtual.Channel):
    """A channel: its queues are streams. Acknowledgements may come from any thread."""

    QoS = QoS
    supports_fanout = True
    do_restore = False

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        self.claims: dict[str, Claim] = {}  # claims of unsettled deliveries, by delivery tag
        self._sources: dict[str, QueueClaims] = {}
        self._ending = threading.Lock()  # guards the closing of sources
        self._without_ack: set[str] = set()
        self._turn = 0  # rotates the order in which queues are served
        super().__init__(connection, **kwargs)

    # ------------------------------------------------------------ publishing

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Publish a message. An event while the server is disconnected is dropped: a worker would retry it for ever,
        and could not stop."""
        try:
            super().basic_publish(message, exchange, routing_key, **kwargs)
        except Disconnected as error:
            if exchange != EVENTS:
                raise
            log.info("an event was dropped: %s", error)

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Encode a body. Text stays text, so that people can read it in the stream."""
        if isinstance(body, bytes):
            try:
                return body.decode(), None
            except UnicodeDecodeError:
                return self.codecs["base64"].encode(body), "base64"
        return body, None

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        body, due = dumps(message), _eta(message)
        publish = partial(
            self.connection.queues.publish, queue, body, ttl=_ttl(message), priority=_priority(message), create=False
        )
        try:
            try:
                publish(at=due)
            except TooLong:
                if due is None:
                    raise
                log.warning("queue %r: %d bytes cannot be delayed, a worker holds them until %s", queue, len(body), due)
                publish()
        except NotFound:
            warnings.warn(virtual.UndeliverableWarning(f"no queue {queue!r}: a message was dropped"), stacklevel=2)
            self._unbind(queue)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        for _, _, queue in self.get_table(exchange):
            self._put(queue, message, **kwargs)

    # ------------------------------------------------------------ queues and bindings

    def prepare_queue_arguments(self, arguments: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return dict(to_rabbitmq_queue_arguments(arguments, **kwargs))

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        require_queue(self.connection.queues, queue)
        self.connection.queues.create(queue)
        expires_ms = (kwargs.get("arguments") or {}).get("x-expires")
        if expires_ms or kwargs.get("auto_delete"):
            self._note_use(queue, expires_ms / 1000 if expires_ms else TEMPORARY_S, False)
            self._remove_expired(queue)

    def _note_use(self, queue: str, expires_s: float, is_used: bool) -> None:
        """Record that a queue that expires has a consumer, or has none from now on."""
        self.connection.temporary.publish(queue, json.dumps({"expires_s": expires_s, "used": is_used}))

    def _note_consumer(self, queue: str) -> None:
        """Record that a queue has a consumer, if the queue expires."""
        temporary = self.connection.temporary
        if temporary._link.look_up([f"{temporary.path}/{stream_name(queue)}"])()[0]:
            rows = [message.json() for message in temporary.history(pattern=queue) if message.topic == queue]
            if rows and not rows[-1].get("used"):
                self._note_use(queue, rows[-1]["expires_s"], True)

    def _remove_expired(self, new: str = "") -> None:
        """Remove the queues that have expired without a consumer, but not the queue `new`. Also notices that a queue
        has lost its last consumer, even one that was killed."""
        self.connection.look_at = time.monotonic() + TEMPORARY_S
        self.connection.temporary.publish("", json.dumps({"expires_s": 0}))  # its time gives now by the server's clock
        rows = {message.topic: (message.time_ns, message.json()) for message in self.connection.temporary.history()}
        (now_ns, _), present = rows.pop(""), self.connection.queues.stats().streams
        rows.pop(new, None)
        for queue, (since_ns, row) in rows.items():
            stats = present.get(stream_name(queue))
            is_used = stats is not None and stats.consumer is not None and stats.consumer.handles > 0
            if is_used != row.get("used", False):
                self._note_use(queue, row["expires_s"], is_used)
            elif not is_used and now_ns - since_ns > row["expires_s"] * 1e9:
                self._delete(queue)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return stream_name(queue) in self.connection.queues.stats().streams

    def _size(self, queue: str) -> int:
        stats = self.connection.queues.stats().streams.get(stream_name(queue))
        return 0 if stats is None or stats.consumer is None else stats.consumer.waiting

    def _purge(self, queue: str) -> int:
        """Acknowledge all waiting messages. The stream is not cleared, as messages claimed by consumers have to be
        redelivered if these are killed."""
        count, most = 0, self._size(queue)
        with self.connection.queues.take(queue, create=False, prefetch=PURGED_AT_ONCE) as claims:
            while count < most:
                try:
                    claim = claims.get(0)
                except TimeoutError:
                    break
                with claim:
                    count += 1
        return count

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        if not (if_empty and self._size(queue)):
            self._delete(queue)
            self.state.queue_bindings_delete(queue)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        if (source := self._sources.pop(queue, None)) is not None:
            source.claims.close()
        self._unbind(queue)
        _remove(self.connection.queues, queue)
        _remove(self.connection.temporary, queue)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        if (exchange, routing_key, queue) not in self.connection.table():
            bindings, text = self.connection.bindings, _SEPARATOR.join((exchange, routing_key, queue))
            if is_shortened(stream_name(text)):
                bindings.ctl("replay last")
                bindings.publish(text, b"")  # its topic is the whole text
            else:
                bindings.create(text)
            self.connection.mark()

    def queue_unbind(
        self, queue: str, exchange: str = "", routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        self.state.binding_delete(queue, exchange, routing_key)
        _remove(self.connection.bindings, _SEPARATOR.join((exchange, routing_key, queue)))
        self.connection.mark()

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        for of, routing_key, queue in self.connection.table():
            if of == exchange:
                self.queue_unbind(queue, exchange, routing_key)
        self.state.exchanges.pop(exchange, None)

    def get_table(self, exchange: str) -> list[tuple[str, str | None, str]]:
        """Return the bindings of an exchange, made by any program."""
        if time.monotonic() >= self.connection.look_at:  # events would fill the queue of a worker that was killed
            with contextlib.suppress(Denied):  # this program may only publish
                self._remove_expired()
        prepare = self.typeof(exchange).prepare_bind
        return [prepare(queue, of, key, None) for of, key, queue in self.connection.table() if of == exchange]

    def _unbind(self, queue: str) -> None:
        for exchange, routing_key, of in self.connection.table():
            if of == queue:
                self.queue_unbind(queue, exchange, routing_key)

    # ------------------------------------------------------------ deliveries

    def _source(self, queue: str) -> QueueClaims:
        source = self._sources.get(queue)
        if source is None:
            claims = self.connection.queues.take(queue, create=False)  # a queue made again would have no bindings
            source = self._sources[queue] = QueueClaims(claims, self.connection.arrived)
            self._note_consumer(queue)
        return source

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> None:
        super().basic_consume(queue, no_ack, *args, **kwargs)
        (self._without_ack.add if no_ack else self._without_ack.discard)(queue)
        with self._ending:
            self._source(queue).is_cancelled = False  # from now on the queue is in use

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None and (source := self._sources.get(queue)) is not None:
            source.give_back()
            source.is_cancelled = queue not in self._active_queues
            self._end_cancelled()

    def forget(self, delivery_tag: str) -> None:
        """Forget the claim of a settled message."""
        self.claims.pop(delivery_tag, None)
        self._end_cancelled()

    def _end_cancelled(self) -> None:
        """Close the sources without a consumer tag once their deliveries are settled, so that such queues can
        expire."""
        with self._ending:
            cancelled = {source.claims: queue for queue, source in self._sources.items() if source.is_cancelled}
            if cancelled:
                for claim in [*self.claims.values()]:
                    cancelled.pop(claim._claims, None)
            ended = [self._sources.pop(queue) for queue in cancelled.values()]
        for source in ended:
            source.claims.close()

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        message = super().basic_get(queue, no_ack, **kwargs)
        if message is not None and no_ack:
            self.claims.pop(message.delivery_tag).ack()
        return message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        while (claim := self._claim(queue)) is not None:
            try:
                payload: dict[str, Any] = loads(claim.body.decode())
                properties: dict[str, Any] = payload["properties"]
                tag = properties["delivery_tag"] = f"{self.channel_id}.{queue}.{claim.sequence}"
                properties.setdefault("delivery_info", {})["redelivered"] = claim.deliveries > 1
                if _headers_of_task(payload).get("eta") and not isinstance(claim.message, LargeMessage):
                    payload["headers"]["eta"] = None  # it is past, and a worker's timer could delay the task by 1 s
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                claim._give_up(f"not a message of kombu: {error!r}")
                continue
            self.claims[tag] = claim
            return payload
        raise Empty

    def _claim(self, queue: str) -> Claim | None:
        """Return a claim that is there, or None. Raises Stale if the queue was removed: then the consumer connects and
        declares it again."""
        try:
            return self._source(queue).get()
        except (EOFError, NotFound):
            raise Stale(f"queue {queue!r}: removed under its consumer") from None

    def deliver_next(self, callback: Callable[[dict[str, Any], str], None]) -> float | None:
        """Deliver one message, if there is one, and return None. Else return the monotonic time at which to try again
        at the latest."""
        again_at = inf
        queues = self._active_queues if self.qos.can_consume() else []
        self._turn += 1
        for at in range(len(queues)):
            queue = queues[(at + self._turn) % len(queues)]
            source = self._source(queue)
            again_at = min(again_at, source.arm())
            if source.is_ready:
                try:
                    payload = self._get(queue)
                except Empty:
                    again_at = min(again_at, source.arm())
                    continue
                if queue in self._without_ack:
                    self.claims.pop(payload["properties"]["delivery_tag"]).ack()
                callback(payload, queue)
                if not self.qos.can_consume():  # requeue messages claimed beyond the limit, for other workers
                    for other in self._sources.values():
                        other.give_back()
                return None
        return again_at

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:
        if self.deliver_next(callback or self.connection._deliver) is not None:
            raise Empty

    def close(self) -> None:
        sources, self._sources = [*self._sources.values()], {}
        super().close()
        for source in sources:
            source.claims.close()
        self.claims.clear()


class Transport(virtual.Transport):
    """A connection to a server of mqfs."""

    Channel = Channel
    driver_type, driver_name = "mqfs", "mqfs"
    connection_errors: tuple[Any, ...] = (*virtual.Transport.connection_errors, Disconnected, Stale)
    channel_errors: tuple[Any, ...] = (*virtual.Transport.channel_errors, MqfsError)
    implements = virtual.Transport.implements.extend(
        asynchronous=False, exchange_type=frozenset(("direct", "topic", "fanout")), heartbeats=False
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.arrived = threading.Event()
        self.look_at = 0.0  # monotonic time of the next check for expired queues
        self._tree: Client | None = None
        self._turn = 0
        self._has_ring = True  # whether the group of bindings may have a ring
        self._table: frozenset[tuple[str, ...]] = frozenset()
        self._texts: dict[str, str] = {}  # texts of bindings with shortened names, by name
        self._table_end = 0  # the next sequence of the group of bindings when the table was read

    def establish_connection(self) -> Any:
        info: Any = self.client
        root = (info.virtual_host or "").strip("/") or GROUP
        self._tree = connect(address_of(info), token=info.password if info.port and info.password else "")
        try:
            self.queues = self._tree._require(f"{root}/queues", _QUEUES)
            self.bindings = self._tree._require(f"{root}/bindings", ())
            self.temporary = self._tree._require(f"{root}/temporary", ("replay last",))
            return super().establish_connection()
        except BaseException:
            self._tree.close()
            raise

    def table(self) -> frozenset[tuple[str, ...]]:
        """Return all bindings as (exchange, routing key, queue). They are read again after a `mark`, which shows in the
        end of the log in shared memory."""
        end = self.bindings._origin.end()
        if not end and self._has_ring:  # not attached yet, or a binding was removed
            with contextlib.suppress(Denied):
                self.mark()
            end = self.bindings._origin.end()
            self._has_ring = end > 0
        if not end or end != self._table_end:
            names = {*self.bindings.streams()}
            while any(is_shortened(name) and name not in self._texts for name in names):
                with contextlib.suppress(FellBehind):  # marks were replaced meanwhile
                    self._texts.update((stream_name(one.topic), one.topic) for one in self.bindings.history())
                    break
            texts = (self._texts.get(name, name) for name in names)
            rows = (tuple(text.split(_SEPARATOR)) for text in texts if not is_shortened(text))
            self._table, self._table_end = frozenset(row for row in rows if len(row) == 3), end
        return self._table

    def mark(self) -> None:
        """Publish a message that has all programs read the bindings again."""
        self.bindings.publish("changes", b"")

    def driver_version(self) -> str:
        return __version__

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        if self._tree is not None:
            self._tree.close()

    def drain_events(self, connection: Any, timeout: float | None = None, **kwargs: Any) -> None:
        deadline = inf if timeout is None else time.monotonic() + timeout
        while True:
            self.arrived.clear()
            again_at, channels = deadline, [*self.channels]
            self._turn += 1
            for at in range(len(channels)):
                wait = channels[(at + self._turn) % len(channels)].deliver_next(self._deliver)
                if wait is None:
                    return
                again_at = min(again_at, wait)
            left = again_at - time.monotonic()
            if left <= 0 and time.monotonic() >= deadline:
                raise TimeoutError
            self.arrived.wait(None if left == inf else max(left, 0.0))

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {}


def address_of(info: Any) -> str | None:
    """Return the addresses of the servers in a URL; None: the default one.

    Raises:
        BadAddress: The URL has a host without a port.
    """
    if option := info.transport_options.get("address"):
        return str(option)
    if info.port:
        network = "tls" if info.ssl else "tcp"
        others = [parse_url(url) for url in info.alt]
        hosts = [(info.hostname, info.port), *((one["hostname"], one["port"]) for one in others if one["port"])]
        return ",".join(f"{network}!{host}!{port}" for host, port in dict.fromkeys(hosts))
    if info.hostname not in (None, "", "localhost"):
        raise BadAddress(f"invalid broker URL: host {info.hostname!r} without a port (expected mqfs://HOST:PORT/GROUP)")
    return None


def _remove(group: Group, stream: str) -> None:
    try:
        group.remove(stream)
    except NotFound:
        pass


def _headers_of_task(message: dict[str, Any]) -> dict[str, Any]:
    """Return the headers of a task of Celery; empty for messages of other programs, whose headers may have the same
    names."""
    headers = message.get("headers") or {}
    return headers if "task" in headers else {}


def _eta(message: dict[str, Any]) -> datetime | None:
    """Return when a task of Celery is due, if that is in the future; else None."""
    text = _headers_of_task(message).get("eta")
    if not isinstance(text, str):
        return None
    try:
        due = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"publish failed: header eta {text!r} (expected a time of ISO 8601)") from None
    due = due if due.tzinfo else due.replace(tzinfo=UTC)
    return due if due > datetime.now(UTC) else None


def _ttl(message: dict[str, Any]) -> float | None:
    expiration = message["properties"].get("expiration")
    return int(expiration) / 1000 if expiration else None


def _priority(message: dict[str, Any]) -> int | None:
    """Map a priority of kombu to one of mqfs. 0 is ordinary; 1 to 9 become the four above the ordinary one."""
    priority = message["properties"].get("priority") or 0
    return min(9, 6 + (int(priority) - 1) // 2) if priority > 0 else None


TRANSPORT_ALIASES.setdefault("mqfs", "mqfs.kombu:Transport")
