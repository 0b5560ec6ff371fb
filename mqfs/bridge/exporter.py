"""Export from the group into the folder: multis by a cursor, and singles that no reader of the group claimed.

The position of the multis is the ack floor of a consumer that is never read: its first unacked message is exported
next. The name of a file depends only on the message, so a repeat writes the same file, or none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import attrs

from mqfs.bridge.folder import MULTI, SINGLE, TOPIC_HEADER, Folder, Origin, Topics, parse
from mqfs.bridge.importer import NAME_HEADER, Selects
from mqfs.bridge.link import GroupLink
from mqfs.client import Claim, Claims, Message
from mqfs.client.large import PIECE_BYTES, LargeMessage
from mqfs.client.subscription import CursorSubscription
from mqfs.client.types import File
from mqfs.errors import BadConfig, BadRequest, Busy, Disconnected, DiskFailed, FellBehind, NotFound, Stale
from mqfs.records.headers import TTL
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.lines import quote_word

log = logging.getLogger("mqfs.bridge")

BATCH = 256  # multis between two acknowledgements
SINGLES = 32  # singles between two; if the bridge is killed before one, workers of both sides may get them
LOOKED_AT = 1_024  # singles examined in one pass over a stream; those that came from a folder are not exported
_MS = 10**6


@attrs.frozen
class Lifetimes:
    """Lifetimes of messages without their own, in ms, as in fsq's options."""

    multi_ms: int
    single_ms: int

    def expires_ms(self, message: Message, kind: str) -> int:
        """Return when a message's file expires, UNIX ms.

        A single without a lifetime may have waited long in the group for a worker. If the default lifetime is over, it
        gets a later end, one to two lifetimes from now. A repeat mostly gets the same one.
        """
        sent_ms, own = message.time_ns // _MS, message.headers.get(TTL)
        if own:
            return sent_ms + parse_duration(own) // _MS
        if kind == MULTI:
            return sent_ms + self.multi_ms
        late_ms = time.time_ns() // _MS - sent_ms
        return sent_ms + self.single_ms * (1 if late_ms < self.single_ms else late_ms // self.single_ms + 2)


class FileWriter:
    """A writer of messages as files. Each thread has its own."""

    def __init__(self, folder: Folder, link: GroupLink, topics: Topics, origin: Origin, lifetimes: Lifetimes) -> None:
        self._folder, self._topics, self._origin, self._lifetimes = folder, topics, origin, lifetimes
        self._stopping = link.stopping
        self._buckets: set[str] = set()  # buckets with files that are not synced

    def write(self, message: Message, kind: str) -> bool:
        """Write a message's file, unless it exists. False: the message has expired. Raises BadRequest if its topic
        cannot be in a file name."""
        expires_ms = self._lifetimes.expires_ms(message, kind)
        if expires_ms <= time.time_ns() // _MS:
            return False
        topic = self._topics.topic_of(message.stream, message.headers.get(TOPIC_HEADER))
        name, rest = self._topics.name(topic, kind, expires_ms, self._origin.unique(message.sequence))
        bucket = self._folder.publish(name, rest, _pieces(message), self._stopping)
        if bucket is not None:
            self._buckets.add(bucket)
        return True

    def remove_leftovers(self) -> None:
        """Remove unfinished files of killed bridges of this group that have expired, so that no bridge will write them
        again."""
        for file in self._folder.staged():
            name = parse(file)
            if name is not None and self._origin.wrote(name) and name.expires_ms <= time.time_ns() // _MS:
                self._folder.unstage(file)

    def settle(self) -> None:
        """Sync all written files to disk, and notify readers."""
        buckets, self._buckets = self._buckets, set()
        if buckets:
            self._folder.settle(buckets)


def _pieces(message: Message) -> Iterator[bytes]:
    if not isinstance(message, LargeMessage):
        yield message.body
        return
    with message.open() as body:
        while piece := body.read(PIECE_BYTES):
            yield piece


def _is_foreign(message: Message) -> bool:
    """Whether the message came from a folder."""
    return NAME_HEADER in message.headers


class MultiExporter:
    """The export of the multis of a group. One bridge exports at a time; the others wait until it ends.

    Its cursor also reads messages that are not exported, as the position must pass them.
    """

    def __init__(self, link: GroupLink, writer: FileWriter, consumer: str, selects: Selects, poll_s: float) -> None:
        self._link, self._writer, self._selects, self._poll_s = link, writer, selects, poll_s
        self._consumer = consumer
        self._next = 0  # sequence

    def run(self) -> None:
        """Export until the bridge stops. Raises Interrupted, MqfsError, OSError."""
        while not self._link.stopping.is_set():
            try:
                with closing(self._open()) as position, closing(self._follow()) as messages:
                    while not self._link.stopping.is_set():
                        self._export(messages, position)
            except Busy:
                self._link.stopping.wait(self._poll_s)  # another bridge exports
            except Disconnected as error:
                log.warning("%s", error)

    def _open(self) -> File:
        """Open the consumer; it is made if it is missing."""
        path = f".consumers/{self._consumer}"
        with suppress(NotFound):
            return self._link.repeat(lambda: self._link.open(path, "r+"))
        self._link.repeat(lambda: self._link.command("ctl", f"consumer {quote_word(self._consumer)} private"))
        return self._link.repeat(lambda: self._link.open(path, "r+"))

    def _follow(self) -> CursorSubscription:
        row = self._link.stats()["consumers"][self._consumer]
        if row["over"]:  # for another purpose: its messages would be acked, and other streams not exported
            raise BadConfig(
                f"consumer {self._consumer!r}: over {row['over']!r} (expected all of the group, or another)"
            )
        self._next = row["low"]
        return self._link.repeat(lambda: self._link.follow(self._next))

    def _export(self, messages: CursorSubscription, position: File) -> None:
        """Export up to BATCH messages, after a wait for the first; then acknowledge them."""
        before = self._next
        with suppress(TimeoutError):
            for number in range(BATCH):
                message = self._get(messages, self._poll_s if number == 0 else 0.0)
                if self._selects(message.stream) and not _is_foreign(message):
                    self._write(message)
                self._next = message.sequence + (message.parts if isinstance(message, LargeMessage) else 1)
        if self._next != before:
            self._writer.settle()
            position.write(f"seek {self._next}\n".encode())

    def _write(self, message: Message) -> None:
        try:
            self._writer.write(message, MULTI)
        except BadRequest as error:
            log.warning("message %d: passed over: %s", message.sequence, error.detail)

    def _get(self, messages: CursorSubscription, timeout: float) -> Message:
        while True:
            try:
                return messages.get(timeout)
            except (FellBehind, DiskFailed) as error:
                if messages.lost(error):
                    raise
                log.warning("%s", error)
            except EOFError:
                raise Disconnected("end of the group (it was removed, or the server stops)") from None


class SinglesExporter:
    """The export of the singles of a group.

    It claims messages from the streams, but never waits for one, so that readers of the group come first.
    """

    def __init__(self, link: GroupLink, writer: FileWriter, selects: Selects) -> None:
        self._link, self._writer, self._selects = link, writer, selects

    def run(self) -> bool:
        """Export waiting singles. Whether there were any."""
        rows = self._link.stats()["streams"].items()
        streams = [name for name, row in rows if self._selects(name) and _has_singles(row)]
        return sum(map(self._drain, streams)) > 0

    def _drain(self, stream: str) -> bool:
        """Export the waiting singles of a stream, at most SINGLES. Whether there were any."""
        try:
            handle = self._link.repeat(lambda: self._link.group.take(stream, create=False, reconnect=False))
            with closing(handle):  # releases claims, uncounted: an error of the folder is not a failed delivery
                return self._export(handle)
        except (NotFound, EOFError, Disconnected, Stale):
            return False

    def _export(self, handle: Claims) -> bool:
        """Export claimed singles, then acknowledge them.

        Claims of messages that came from a folder are released by closing the handle, so it stays open during the
        search. Exported singles are acknowledged after an error, too: workers of the folder may have them already.
        """
        claims: list[Claim] = []
        try:
            with suppress(TimeoutError):
                for _ in range(LOOKED_AT):
                    if len(claims) == SINGLES:
                        break
                    claim = handle.get(0.0)
                    if not _is_foreign(claim.message) and self._write(claim):
                        claims.append(claim)
        finally:
            self._writer.settle()
            for claim in claims:
                claim.ack()
        return bool(claims)

    def _write(self, claim: Claim) -> bool:
        """Write the file of a single. Whether it exists, so that the claim may be acknowledged."""
        try:
            return self._writer.write(claim.message, SINGLE)
        except BadRequest as error:
            log.warning("single %d: dead letter: %s", claim.message.sequence, error.detail)
            claim._give_up(error.detail)
            return False


def _has_singles(row: dict[str, Any]) -> Any:
    own = row.get("consumer")
    return own["waiting"] > own["delayed"] if own is not None else row.get("singles", {}).get("first", 0) > 0
