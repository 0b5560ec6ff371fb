"""Taking messages: the claims of a handle on a consumer, and what becomes of them.

Owns the open `.consumers/NAME` of each `Claims`; which message is next, and when one comes again, the tree decides.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from mqfs.client.large import place_of
from mqfs.client.subscription import Backoff, Patterns, Subscription, names_of
from mqfs.client.types import File, Link
from mqfs.client.waiting import Waiting
from mqfs.client.words import Duration, commands, duration, quote
from mqfs.errors import Denied, Disconnected, Exists, Interrupted, MqfsError, NotFound, Stale
from mqfs.model import Message

REASON_CHARACTERS = 500
_SECOND_NS = 10**9


def _nanoseconds(text: str) -> int:
    """The only numbers with a point in a message's JSON are times."""
    whole, _, part = text.partition(".")
    return int(whole) * _SECOND_NS + int(part.ljust(9, "0")[:9])


def parse(line: bytes) -> tuple[Message, int]:
    """A line of `format json`: the message and how often it was handed out."""
    said: dict[str, Any] = json.loads(line, parse_float=_nanoseconds)
    body = said["body"].encode() if "body" in said else base64.b64decode(said["body_base64"])
    message = Message(said["sequence"], said["stream"], said["time"], body, said.get("headers", {}))
    return message, said.get("deliveries", 1)


class Claim:
    """A message that is this program's for now, to be acknowledged or given back.

    As a context manager: a clean exit acknowledges, an exception is a nack (counted, and raised on). What was said
    already, inside the block, stands.
    """

    def __init__(self, claims: Claims, file: File, message: Message, deliveries: int) -> None:
        self.message, self.deliveries = message, deliveries
        self._sequence = message.sequence
        self.settled = False
        self._claims, self._file = claims, file
        self._renewing: threading.Event | None = None

    @property
    def sequence(self) -> int:
        """The one by which it is claimed: of a body in parts, the last one's."""
        return self._sequence

    @property
    def stream(self) -> str:
        return self.message.stream

    @property
    def time_ns(self) -> int:
        return self.message.time_ns

    @property
    def body(self) -> bytes:
        return self.message.body

    @property
    def headers(self) -> Mapping[str, str]:
        return self.message.headers

    def ack(self) -> None:
        """It is done, and comes no more. Stale: it had been given back already (its lease ran out, the connection was
        lost), and comes again."""
        self._settle("ack")

    def nack(self, delay: Duration | None = None) -> None:
        """It failed: back, counted, after the group's backoff or that delay."""
        self._settle("nack", "" if delay is None else duration(delay))

    def release(self) -> None:
        """Back at once, not counted."""
        self._settle("release")

    def dead(self, reason: str = "") -> None:
        """To the dead-letter stream, at once."""
        self._settle("dead", quote(" ".join(reason.split())[:REASON_CHARACTERS]) if reason.strip() else "")

    def touch(self) -> None:
        """The lease begins anew."""
        self._claims.command(self._file, f"touch {self.sequence}")

    def _settle(self, verb: str, more: str = "") -> None:
        if self.settled:
            raise Stale(f"message {self.sequence} was settled already")
        self._claims.command(self._file, f"{verb} {self.sequence} {more}".rstrip())
        self._claims.settled(self)

    def __enter__(self) -> Claim:
        if self._claims.renew_s and self._renewing is None:
            self._renewing = threading.Event()
            threading.Thread(target=self._renew, args=(self._renewing,), name="mqfs-lease", daemon=True).start()
        return self

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(self._claims.renew_s) and not self.settled:
            try:
                self.touch()
            except MqfsError:
                return  # the acknowledgement will tell

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing is not None:
            self._renewing.set()
        if self.settled:
            return
        if error is None:
            self.ack()
            return
        try:
            self.nack()
        except MqfsError as other:
            error.add_note(f"message {self.sequence} could not be given back: {other}; it comes again all the same")


class Claims(Waiting[Claim]):
    """One handle on a consumer, or one that takes from a stream: an iterator of claims. Any number of threads may share
    it; each claim is one's.

    At the end of the `with` block claims that nobody spoke about are released, not counted; if it ends by an exception
    they are counted as failed.
    """

    def __init__(
        self,
        link: Link,
        path: str,
        make: Callable[[], File] | None,
        *,
        patterns: Patterns = (),
        renew_s: float = 0.0,
        reconnect: bool | float = False,
    ) -> None:
        super().__init__()
        self.renew_s = renew_s
        self._link, self._path, self._make = link, path, make
        self._names, self._reconnect = names_of(patterns), reconnect if link.can_be_lost else False
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._shut = False
        self._open_claims: set[Claim] = set()
        self._refusals: list[bytes] = []
        self._begun = b""  # of a line whose end was not read yet
        self._file = self._open()

    def _open(self) -> File:
        file = self._link.open(self._path, "r+") if self._make is None else self._make()
        try:
            select = ("select " + " ".join(map(quote, self._names)),) if self._names else ()
            file.write(commands("format json", *select))
        except BaseException:
            file.close()
            raise
        return file

    def _reopen(self) -> None:
        patience = Backoff(self._reconnect, self._closed, self._link.where)
        while True:
            try:
                file = self._open()
            except Disconnected as error:
                patience.wait(error)
            else:
                with self._lock:
                    self._file, self._refusals, self._begun = file, [], b""
                return

    # ------------------------------------------------------------ commands

    def command(self, file: File, line: str) -> None:
        """Say something about a claim made through `file`. Raises Stale where that handle is gone, and its claims."""
        if file is not self._file:
            raise Stale("the connection was lost since it was claimed: it comes again")
        try:
            file.write(commands(line))
        except Disconnected:
            raise
        except MqfsError as error:
            with self._lock:
                self._refusals = [*self._refusals[-15:], f"{error}\n".encode()]  # the next read repeats it
            raise

    def settled(self, claim: Claim) -> None:
        claim.settled = True
        with self._lock:
            self._open_claims.discard(claim)

    # ------------------------------------------------------------ claims

    def get(self, timeout: float | None = None) -> Claim:
        """The next message, claimed. Raises EOFError at the end (closed, or the consumer removed), TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._turn:
            while True:
                line = self._line(deadline)
                if line is not None:
                    claim = Claim(self, self._file, *parse(line))
                    claim.message = self._whole(claim.message)
                    with self._lock:
                        self._open_claims.add(claim)
                    return claim

    def _line(self, deadline: float | None) -> bytes | None:
        """A whole line of JSON; None: ask again."""
        if self._over or self._closed.is_set():
            raise EOFError
        try:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            data = self._file.read(timeout=left)
            if not data:
                self._ended()
            elif self._is_refusal(data) if self._begun else data[:1] != b"{":
                pass  # why a command was refused: it was raised already
            elif data.endswith(b"\n"):
                line, self._begun = self._begun + data, b""
                return line
            else:
                self._begun += data
        except Interrupted as error:
            self._interrupted(error)
        except Disconnected as error:
            self._away(error)
            self._reopen()
        return None

    def _whole(self, message: Message) -> Message:
        """A body in parts is claimed as its last one: read those before it."""
        number, total = place_of(message)
        if total < 2 or number != total:
            return message
        first = message.sequence - total + 1
        group = self._path.rpartition("/.consumers/")[0]
        until = str(message.sequence)
        with Subscription(self._link, group, message.stream, start=str(first), until=until) as reading:
            found = next(reading, message)
        return found if found.sequence == first else message

    def _is_refusal(self, data: bytes) -> bool:
        with self._lock:
            return data in self._refusals

    def _ended(self) -> None:
        """An end of file: the consumer was removed, or the server stops."""
        make, self._make = self._make, None
        try:
            if self._reconnect is False:
                raise NotFound
            self._reopen()
            self._make = make
        except NotFound:
            self._over = True

    # ------------------------------------------------------------ ends

    def finish(self) -> None:
        """Claim nothing more: whoever waits gets the end; claims can still be settled."""
        self._closed.set()
        self._file.interrupt()

    def close(self, release: bool = True) -> None:
        """End it, whoever waits in it. Claims nobody spoke about are released, or left to be counted as failed."""
        self.finish()
        with self._turn:
            if self._shut:
                return
            self._shut = True
            with self._lock:
                left = [str(claim.sequence) for claim in self._open_claims if claim._file is self._file]
            try:
                if release and left:
                    self.command(self._file, f"release {' '.join(left)}")
            except MqfsError:
                pass  # some were given back already; the others go back with the handle
            self._file.close()

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(release=error is None)


def consumer_opener(link: Link, group: str, name: str, over: str, private: bool, transient: bool) -> Callable[[], File]:
    """What opens a consumer and makes it if there is none. With options that is for the group's owner: they stand in
    its ctl; others are content with the one there is."""
    path = f"{group}/.consumers/{name}"

    def by_ctl() -> File:
        words = [quote(name), *([quote(over)] if over else [])]
        words += ["private"] * private + ["transient"] * transient
        with suppress(Denied):
            file = link.open(f"{group}/ctl", "w")
            try:
                file.write(commands(f"consumer {' '.join(words)}"))
            finally:
                file.close()
        return link.open(path, "r+")

    return by_ctl if over or private or transient else opener(link, path, path)


def opener(link: Link, path: str, missing: str) -> Callable[[], File]:
    """What opens a file, and makes `missing`, by which it is there, if it is not."""

    def plainly() -> File:
        try:
            return link.open(path, "r+")
        except NotFound:
            with suppress(Exists):
                link.create(missing)
            return link.open(path, "r+")

    return plainly
