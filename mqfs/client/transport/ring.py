"""The tree of a server on this machine: by 9P, and the messages of its groups through their rings where possible.

The first publish or subscribe of a group attaches to its ring.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mqfs import limits
from mqfs.client.message import Receipt
from mqfs.client.transport.ninep import NinepTransport
from mqfs.client.transport.ring_attachment import LOOK_S, Attached, RingAttachment
from mqfs.client.transport.ring_subscription import NotInRing, RingSubscription
from mqfs.client.types import Filters, Link, Patterns, Subscription
from mqfs.errors import Again, BadRing, Busy, Disconnected, MqfsError, NotFound, Stale, TooLong
from mqfs.model import Kind
from mqfs.net import identity
from mqfs.net.sockets import UnixAddress, parse_address, parse_addresses
from mqfs.ninep.client.connection import Client
from mqfs.ring import EPHEMERAL, MISSING, protocol


def why_not(address: str, user: str) -> str:
    """Return why rings are unavailable; empty if they may be available."""
    if MISSING:
        return f"C extension not built ({MISSING})"
    addresses = parse_addresses(address)
    if len(addresses) > 1:
        return "several servers (expected one address)"
    if not isinstance(addresses[0], UnixAddress):
        return "server not on this machine (expected unix!PATH)"
    if user and identity.user_number(user) != os.geteuid():
        return f"user {user!r} is not the user of this process"
    return ""


class RingLink(NinepTransport):
    """See `Link`."""

    def __init__(
        self,
        address: str,
        *,
        user: str = "",
        aname: str = "",
        timeout: float | None = None,
        reconnect: bool | float = True,
        required: bool = False,
    ) -> None:
        self._required, self._limit = required, reconnect
        self._above = aname.strip("/")
        self._rings = weakref.WeakValueDictionary[str, RingGroup]()
        self._attachments = weakref.WeakSet[RingAttachment]()  # of groups and subscriptions, which may outlive groups
        self._sweep_in = _SWEEP
        self._making = threading.Lock()
        where = parse_address(address)
        assert isinstance(where, UnixAddress)
        self._socket_path = where.path + protocol.SUFFIX
        super().__init__(address, user=user, aname=aname, timeout=timeout, reconnect=reconnect is not False)

    def connection(self, timeout: float | None = None) -> Client:
        """See `NinepTransport`. A connection that was lost unnoticed, while only rings were used, is replaced at
        once."""
        now = super().connection(timeout)
        if now.gone and self._reconnect:
            now.close("the server closed the connection")
            now = super().connection(timeout)
        return now

    def direct(self, path: str) -> RingGroup:
        with self._making:
            self._sweep_in -= 1
            if not self._sweep_in:
                self._sweep_in = max(sum(attachment.release_retired() for attachment in self._attachments), _SWEEP)
            if (group := self._rings.get(path)) is None:
                group = self._rings[path] = self._group(path)
            return group

    def _group(self, path: str) -> RingGroup:
        name = "/".join(filter(None, (self._above, path)))
        attachment = RingAttachment(
            self, self._socket_path, name, required=self._required, reconnect=self._limit, timeout=self._timeout
        )
        self._attachments.add(attachment)
        return RingGroup(self, path, attachment)

    def close(self) -> None:
        with self._making:
            attachments = list(self._attachments)
        for attachment in attachments:
            attachment.close()
        super().close()


# ---------------------------------------------------------------- a group's plain messages through its ring

# A publish is retried over generations of the ring. Messages with options, views, and groups without a ring use the
# files.

_SWEEP = 32  # calls of `direct`, at least, between two checks for rings of removed groups
SLICE_S = 0.1  # of a wait, between two checks whether the client was closed
RETENTION_S = 1.0  # between two questions whether anything retains the messages of a group
ANSWER_S = 5.0  # within which a server that took over a ring has committed its messages
_MESSAGE = int(Kind.MESSAGE)
_new = tuple.__new__  # makes a Receipt from a tuple, at a third of the cost of Receipt.__new__


class RingGroup:
    """The plain messages of a group through its ring. A result of None means that the caller has to use the files."""

    def __init__(self, link: Link, path: str, attachment: RingAttachment) -> None:
        self._link, self._path, self._attachment = link, path, attachment
        self._ask_at = 0.0  # when the server is asked again about streams that retained nothing

    # ------------------------------------------------------------ publishing

    def is_retaining(self, stream: str) -> bool | None:
        """Whether anything retained the messages of a stream when the server was last asked; None: unknown."""
        at = self._attachment.now
        known = None if at is None else at.retained.get(stream)
        if at is not None and known is False and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + RETENTION_S
            with suppress(MqfsError):
                at.number(stream)
                known = at.retained.get(stream)
        return known

    def publish_now(self, stream: str, body: object, committed: bool) -> Receipt | None:
        """Publish as `publish`, but wait for nothing except the commit. Returns None, and has published nothing, if
        that is impossible: the body is not bytes, the stream is unknown here, or the ring is full, for example."""
        at = self._attachment.now
        if at is None or at.is_replaced:
            return None
        try:
            sequence = at.ring.publish_now(at.numbers, stream, body)
        except Stale:
            return None
        if sequence is None:
            return None
        if committed:
            self._wait_committed(at, sequence)
        retained = at.retained.get(stream)
        if retained is False:
            retained = self.is_retaining(stream)
        return _new(Receipt, (sequence, 0, None, False, retained))

    def publish_ephemeral(self, stream: str, body: bytes) -> bool:
        """Publish a message to the ring only, not to the log. Returns False if that is impossible. Raises NotFound."""
        at = self._attachment.usable()
        return at is not None and at.ephemeral and self.publish(stream, body, False, EPHEMERAL) is not None

    def publish(self, stream: str, body: bytes, committed: bool, flags: int = 0) -> int | None:
        """Publish a message, and wait for its commit if `committed`. Returns its sequence, or None. Raises NotFound,
        TooLong, Disconnected."""
        if len(body) > limits.MESSAGE_BYTES:
            raise TooLong(f"message of {len(body)} bytes (expected at most {limits.MESSAGE_BYTES})")
        while True:
            at = self._attachment.now
            if at is None or at.is_replaced:
                at = self._attachment.usable()
                if at is None:
                    return None
            number = at.numbers.get(stream)
            try:
                if number is None:
                    number = self._number(at, stream)
                    if number is None:
                        return None
                with at.publishing:
                    sequence = at.ring.publish(number, body, b"", _MESSAGE, flags, SLICE_S)
            except (Again, Stale, BadRing, Busy) as error:
                self._check_generation(at, error)
            else:
                if committed:
                    self._wait_committed(at, sequence)
                return sequence

    def publish_many(self, messages: Sequence[object], *, known: bool = False) -> tuple[int, Callable[[], None] | None]:
        """Publish pairs of a stream and bytes in order.

        Returns the number of published messages, the rest being for the files, and a function that waits for their
        commit. Errors have that number as `published`, also NotFound where a stream was removed meanwhile. `known`:
        publish none if an item is not such a pair, or its stream was not published to before."""
        done, wait = 0, None
        if known and ((now := self._attachment.now) is None or now.is_replaced):
            return done, wait
        try:
            while done < len(messages) and (at := self._attachment.usable()) is not None:
                rest = messages[done:] if done else messages
                try:
                    last = self._publish_all(at, rest, known)
                except (Again, Stale, BadRing, Busy) as error:
                    done += getattr(error, "published", 0)
                    self._check_generation(at, error)
                else:
                    if last is not None:
                        done, wait = len(messages), partial(self._wait_committed, at, last)
                    break
        except MqfsError as error:
            error.published = done + getattr(error, "published", 0)  # type: ignore[attr-defined]
            raise
        return done, wait

    def _publish_all(self, at: Attached, messages: Sequence[Any], known: bool) -> int | None:
        if not known:
            for stream in {stream for stream, _ in messages}:
                if stream not in at.numbers and self._number(at, stream) is None:
                    return None
        with at.publishing:
            return at.ring.publish_pairs(at.numbers, messages, limits.MESSAGE_BYTES, SLICE_S)

    def _number(self, at: Attached, stream: str) -> int | None:
        """Return the number of a stream; None for a view. Raises NotFound, and Stale if the generation has changed."""
        while True:
            try:
                return at.number(stream)
            except Disconnected:
                if not self._attachment.still_valid(at):
                    raise Stale("server of the ring was restarted") from None

    def _check_generation(self, at: Attached, error: MqfsError) -> None:
        """Return if a failed publish has to be retried, with this generation or the next. Raises Disconnected,
        DiskFailed, DiskFull."""
        self._attachment.require()
        if isinstance(error, Stale | BadRing):
            at.is_replaced = True
            self._attachment.still_valid(at)
        elif at.socket.is_lost:
            self._attachment.still_valid(at)
        elif isinstance(error, Again):
            self._require_log(at)

    def _wait_committed(self, at: Attached, sequence: int) -> None:
        """Wait until a message is as durable as the group's `sync` demands. Raises DiskFailed, DiskFull (the message
        waits in the ring for room), and Disconnected (the outcome is unknown)."""
        look_at = time.monotonic() + LOOK_S
        while not at.ring.wait_committed(sequence, SLICE_S):
            self._attachment.require()
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + LOOK_S
            if not at.socket.is_lost:
                self._require_log(at)
            elif not self._attachment.still_valid(at) and not at.ring.wait_committed(sequence, ANSWER_S):
                raise Disconnected(f"ring of {self._path or '/'} ended: outcome of message {sequence} unknown")

    @staticmethod
    def _require_log(at: Attached) -> None:
        """Raise DiskFailed if the group's log has failed, DiskFull if the disk has no room for it."""
        try:
            at.socket.ask({"stream": ""})  # no such stream: the answer is the error of a publish
        except (Disconnected, NotFound, Stale):
            pass

    # ------------------------------------------------------------ subscribing

    def end(self) -> int:
        """Return the next sequence at present; 0: unknown."""
        at = self._attachment.now
        return 0 if at is None or at.is_replaced else at.next

    def subscribe(
        self, patterns: Patterns, *, existing: bool, filters: Filters, reconnect: bool | float
    ) -> Subscription | None:
        """Return a subscription through the ring; None if there is no ring, or it cannot serve this subscription."""
        attachment = self._attachment
        while (at := attachment.usable()) is not None and at.deliver == "all":
            try:
                return RingSubscription(
                    attachment, at, self._link, self._path, patterns,
                    existing=existing, filters=filters, reconnect=reconnect,
                )  # fmt: skip
            except NotInRing:
                break
            except Stale:
                if not at.is_replaced:
                    break
            except Disconnected:
                if not at.socket.is_lost:
                    raise
                attachment.still_valid(at)
        return None
