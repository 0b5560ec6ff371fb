"""A broker for dramatiq that keeps messages in mqfs.

    import dramatiq
    from mqfs.dramatiq import MqfsBroker
    dramatiq.set_broker(MqfsBroker())            # as mqfs.connect(): $MQFS_ADDRESS, else ./mqfs.sock

A queue is a stream of a group with `deliver one`. A delayed message waits in the server until it is due; there are no
delay queues. A worker that is killed loses its claims at once, and other workers get its messages. A message that
dramatiq gives up becomes a dead letter of the group; `mq redrive` sends it back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from dramatiq import Broker, Consumer, Message, MessageProxy, Middleware
from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout, QueueNotFound

from mqfs.client import Claim, Claims, Group, connect
from mqfs.client.client import require_queue
from mqfs.errors import Disconnected, DiskFull, MqfsError, Stale, StreamFull
from mqfs.syntax.names import stream_name

GROUP = "dramatiq"
SETTINGS = ("deliver one", "replay off")
_LOOK_S = 0.02
_ORDINARY, _HIGHEST = 5, 9  # priorities of mqfs
log = logging.getLogger("mqfs.dramatiq")


class MqfsBroker(Broker):
    """A broker over a server of mqfs. A forked child makes a connection of its own."""

    def __init__(
        self,
        address: str | None = None,
        *,
        group: str = GROUP,
        token: str = "",
        middleware: list[Middleware] | None = None,
    ) -> None:
        """Connect to a server.

        Args:
            address: See `mqfs.connect`.
            group: The path of the group; it is made if it is missing.
            token: See `mqfs.connect`.
            middleware: See `dramatiq.Broker`.

        Raises:
            Disconnected: No server answers.
            Denied: The user, or the token, is refused.
            Busy: The group is in use without `deliver one`.
        """
        super().__init__(middleware)
        self.actor_options.add("broker_priority")  # 0 to 4, higher ones first
        self._claimed = _Claimed()
        self._dial, self._path = partial(connect, address, token=token), group
        self._lock = threading.Lock()  # held while a forked child connects
        self._connect()

    def _connect(self) -> None:
        self._client = self._dial()
        try:
            self._group = self._client._require(self._path, SETTINGS)
        except BaseException:
            self._client.close()
            raise
        self._process = os.getpid()

    @property
    def group(self) -> Group:
        """The group of its queues. Raises Disconnected in a forked child that cannot connect."""
        if self._process != os.getpid():  # for example, uWSGI loads a program and then forks
            with self._lock:
                if self._process != os.getpid():
                    self._connect()
        return self._group

    def close(self) -> None:
        """Close the connection; messages that its consumers have claimed are requeued."""
        self._client.close()

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> Consumer:
        """Consume a queue.

        Args:
            queue_name: The queue.
            prefetch: The most messages that are claimed and not acknowledged.
            timeout: How long `next` waits for a message, in milliseconds.

        Returns:
            An iterator of messages; None stands for a timeout.

        Raises:
            QueueNotFound: The queue was not declared.
        """
        self._require(queue_name)
        try:
            return MqfsConsumer(self.group.take(queue_name), prefetch, timeout / 1000, self._claimed)
        except Disconnected as error:
            raise ConnectionClosed(str(error)) from error

    def declare_queue(self, queue_name: str) -> None:
        """Make a queue, unless it exists.

        Args:
            queue_name: Its name: any text, except that of the group's stream of dead letters, `dead`.

        Raises:
            BadName: It is the name of the stream of dead letters.
        """
        if queue_name not in self.queues:
            require_queue(self.group, queue_name)
            self.emit_before("declare_queue", queue_name)
            self.group.create(queue_name)
            self.queues[queue_name] = None
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Publish a message.

        Args:
            message: The message.
            delay: How long it is delayed, in milliseconds. None: not at all.

        Returns:
            The message.

        Raises:
            QueueNotFound: The queue was not declared.
            ConnectionClosed: The connection was lost; the outcome is unknown.
        """
        try:
            self._publish(message, delay)
        except BaseException:
            # A retry has the id of its message. dramatiq only logs the error and then acknowledges that message.
            if (claimed := self._claimed.get(message.message_id)) is not None:
                claimed.is_retry_lost = True
            raise
        return message

    def _publish(self, message: Message[Any], delay: int | None) -> None:
        self._require(message.queue_name)
        self.emit_before("enqueue", message, delay)
        level = message.options.get("broker_priority")
        priority = None if level is None else min(_ORDINARY + int(level), _HIGHEST)
        try:
            self.group.publish(
                message.queue_name, message.encode(), delay=delay / 1000 if delay else None, priority=priority
            )
        except Disconnected as error:
            raise ConnectionClosed(str(error)) from error
        self.emit_after("enqueue", message, delay)

    def flush(self, queue_name: str) -> None:
        """Drop the messages of a queue, except delayed ones, which are not in a queue yet.

        Args:
            queue_name: The queue.

        Raises:
            QueueNotFound: The queue was not declared.
        """
        self._require(queue_name)
        self.group.purge(queue_name)

    def flush_all(self) -> None:
        """Drop the messages of all declared queues, except delayed ones."""
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, timeout: int | None = None) -> None:
        """Wait until all messages of a queue are processed, and until the group has no delayed messages, of any queue:
        the server counts these for the whole group only.

        Args:
            queue_name: The queue.
            timeout: The most milliseconds to wait. None: without limit.

        Raises:
            QueueJoinTimeout: The time is over.
            QueueNotFound: The queue was not declared.
        """
        self._require(queue_name)
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        while True:
            stats = self.group.stats()
            stream = stats.streams.get(stream_name(queue_name))  # None: the stream was removed
            consumer = None if stream is None else stream.consumer
            if not stats.held and (consumer is None or not consumer.lag):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise QueueJoinTimeout(queue_name)
            time.sleep(_LOOK_S)

    def _require(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)


class MqfsMessage(MessageProxy):
    """A message with its claim. `free`: the prefetch semaphore of the consumer that claimed it, which may have been
    replaced since."""

    def __init__(self, message: Message[Any], claim: Claim, free: threading.Semaphore) -> None:
        super().__init__(message)
        self.claim, self.free = claim, free
        self.is_retry_lost = False  # whether a retry of it could not be enqueued


_Claimed = weakref.WeakValueDictionary[str, MqfsMessage]  # by id: the messages that the workers of a broker have


class MqfsConsumer(Consumer):
    """A consumer of a queue. One thread iterates, others settle messages."""

    def __init__(self, claims: Claims, prefetch: int, timeout_s: float, claimed: _Claimed) -> None:
        self._claims, self._timeout_s, self._claimed = claims, timeout_s, claimed
        self._free = threading.Semaphore(prefetch)

    def ack(self, message: MessageProxy) -> None:
        assert isinstance(message, MqfsMessage)
        self._settle(message, Claim.nack if message.is_retry_lost else Claim.ack)

    def nack(self, message: MessageProxy) -> None:
        self._settle(message, lambda claim: claim._give_up("dead"))

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        for message in messages:
            with contextlib.suppress(ConnectionClosed):  # then `close` requeues the message
                self._settle(message, Claim.release)

    def _settle(self, message: MessageProxy, how: Callable[[Claim], None]) -> None:
        assert isinstance(message, MqfsMessage)
        try:
            how(message.claim)
        except (Disconnected, Stale) as error:  # the claim is void: a retry by dramatiq could not succeed
            log.warning("message %s was not settled, it is delivered again: %s", message.message_id, error)
        except (DiskFull, StreamFull) as error:  # ConnectionClosed is the only error after which dramatiq retries
            raise ConnectionClosed(str(error)) from error
        message.free.release()

    def __next__(self) -> MqfsMessage | None:
        if not self._free.acquire(timeout=self._timeout_s):
            return None
        message = None
        try:
            message = self._receive()
        finally:
            if message is None:
                self._free.release()
        return message

    def _receive(self) -> MqfsMessage | None:
        """Receive a message; None: no message came in time, or it was not one of dramatiq."""
        try:
            claim = self._claims.get(self._timeout_s)
        except TimeoutError:
            return None
        except Disconnected as error:
            raise ConnectionClosed(str(error)) from error
        except EOFError:
            raise StopIteration from None
        try:
            message = MqfsMessage(Message.decode(claim.body), claim, self._free)
        except DecodeError as error:
            try:
                claim._give_up(f"not a message of dramatiq: {error}")
            except MqfsError as other:
                log.warning("message %d was not given up, it is delivered again: %s", claim.sequence, other)
            return None
        self._claimed[message.message_id] = message
        return message

    def close(self) -> None:
        try:
            self._claims.close()
        except MqfsError as error:
            log.warning("close failed: %s", error)
