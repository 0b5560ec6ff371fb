"""Claims: the messages in flight to a handle on a consumer, and their acknowledgement.

A `Claims` has its `.consumers/NAME` open. The server chooses the next message, and redelivers.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mqfs import limits
from mqfs.client.large import place_of
from mqfs.client.message import Message, RecordDecoder
from mqfs.client.prefetch import LEASE_AGE_S, DeferredAcks, Lease, SentAcks, ranges
from mqfs.client.subscription import CursorSubscription, names_of
from mqfs.client.types import Duration, File, Link, Patterns, read_whole, write_lines
from mqfs.client.waiting import Waiting
from mqfs.errors import Denied, Disconnected, Exists, FellBehind, Interrupted, MqfsError, NotFound, Stale
from mqfs.records import headers
from mqfs.syntax.duration import format_duration
from mqfs.syntax.lines import command_lines, quote_word, split

log = logging.getLogger("mqfs.client")

REASON_CHARACTERS = 500
RENEWALS = 3  # of a claim within one lease
_AT_ONCE = 1_024  # claims of one command, which is at most 64 KiB


class OfMessage:
    """The attributes of a claim's message.

    Attributes:
        message: The message. For a body in parts `message.sequence` is the first part's.
        deliveries: How often the message was delivered, from 1 on.
    """

    message: Message
    deliveries: int

    @property
    def stream(self) -> str:
        """The name of the message's stream."""
        return self.message.stream

    @property
    def time_ns(self) -> int:
        """When the message was written, UNIX nanoseconds."""
        return self.message.time_ns

    @property
    def body(self) -> bytes:
        """The message's body."""
        return self.message.body

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers by name."""
        return self.message.headers

    @property
    def size(self) -> int:
        """The body's size in bytes."""
        return self.message.size

    @property
    def topic(self) -> str:
        """The text that `mqfs.escape` turned into the stream's name; else the name."""
        return self.message.topic

    def json(self) -> Any:
        """Parse the body as JSON.

        Returns:
            The value that was passed to `Group.publish_json`.

        Raises:
            ValueError: The body is not JSON.
        """
        return self.message.json()


class Claim(OfMessage):
    """A message in flight to this program, to be acknowledged or requeued.

    As a context manager: a clean exit acknowledges, an exception is a nack and propagates. A claim settled inside the
    block stays settled. A clean exit sends the acknowledgement and does not wait for the answer: if it fails, the next
    `Claims.get` or `Claims.close` raises the error. With `prefetch` it is sent within some 10 ms, and before the
    program waits for more messages. `ack` waits.

    Attributes:
        settled: Whether the message was acknowledged, requeued, or made a dead letter.
    """

    def __init__(self, claims: Claims, file: File, message: Message, deliveries: int) -> None:
        self.message, self.deliveries = message, deliveries
        self._sequence = message.sequence
        self.settled = False
        self._claims, self._file = claims, file
        self._found: bool | None = None  # see `Claims._look_up`
        self._asked_at = 0.0  # when `_found` was asked for, of time.monotonic()
        self._renewing: threading.Event | None = None

    def __repr__(self) -> str:
        state = "settled" if self.settled else "void" if self._file is not self._claims._file else "open"
        return f"<mqfs claim {self.sequence} of {self.stream!r} by {self._claims.name!r}, {state}>"

    @property
    def sequence(self) -> int:
        """The sequence of the claim; for a body in parts, the last part's."""
        return self._sequence

    @property
    def _is_acked_later(self) -> bool:
        """Whether a clean exit of `with claim:` only queues the acknowledgement, which is written with others."""
        return self._claims._prefetch > 1

    def ack(self) -> None:
        """Acknowledge the message, which is then not redelivered.

        Raises:
            Stale: The claim is settled already; or its lease has expired or its connection was lost, and the message is
                redelivered.
        """
        self._settle("ack")

    def nack(self, delay: Duration | None = None) -> None:
        """Requeue the message as failed.

        Args:
            delay: The wait before its redelivery: seconds, "30s" or a timedelta. None: the group's `backoff`.

        Raises:
            Stale: See `ack`.
        """
        self._settle("nack", "" if delay is None else format_duration(delay))

    def release(self) -> None:
        """Requeue the message at once, not counted as failed.

        Raises:
            Stale: See `ack`.
        """
        self._settle("release")

    def dead(self, reason: str = "") -> None:
        """Move the message to the dead-letter stream.

        Args:
            reason: The text of its header `reason`, of which 500 characters are kept. Empty: none.

        Raises:
            Stale: See `ack`.
        """
        self._settle("dead", quote_word(" ".join(reason.split())[:REASON_CHARACTERS]) if reason.strip() else "")

    def _give_up(self, reason: str) -> None:
        """Make the message a dead letter, or requeue it as failed if that is refused, by a full log, for example. A
        library of jobs makes no later call for it. Raises Stale, Disconnected, and the error of a failed requeue."""
        try:
            self.dead(reason)
        except (Stale, Disconnected):
            raise
        except MqfsError as error:
            log.warning("message %d of %s: requeued, not a dead letter: %s", self.sequence, self.stream, error)
            self.nack()

    def touch(self) -> None:
        """Renew the lease.

        Raises:
            Stale: See `ack`.
        """
        self._command("touch")

    def _settle(self, verb: str, more: str = "") -> None:
        if self.settled:
            raise Stale(f"cannot {verb} message {self.sequence}: the claim is settled")
        self._command(verb, more)
        self._claims._settled(self)

    def _command(self, verb: str, more: str = "") -> None:
        try:
            self._claims._command(self._file, f"{verb} {self.sequence} {more}".rstrip())
        except Stale:
            self._claims._open_claims.discard(self)
            raise

    def __enter__(self) -> Claim:
        if self._claims._renews and self._renewing is None:
            self._renewing = threading.Event()
            threading.Thread(target=self._renew, args=(self._renewing,), name="mqfs-lease", daemon=True).start()
        return self

    def _renew(self, ended: threading.Event) -> None:
        """Renew the claim in time for the group's present lease, which may be changed while the claim is open."""
        claims, renewed_at = self._claims, time.monotonic()
        while True:
            claims._lease.now()
            due_s = renewed_at + claims.renew_s - time.monotonic() if claims.renew_s else LEASE_AGE_S
            if ended.wait(max(min(due_s, LEASE_AGE_S), 0.0)) or self.settled:
                return
            if claims.renew_s and time.monotonic() >= renewed_at + claims.renew_s:
                renewed_at = time.monotonic()
                try:
                    self.touch()
                except MqfsError:
                    return  # the acknowledgement will raise the error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._renewing is not None:
            self._renewing.set()
        if self.settled:
            return
        if error is None:
            self._claims._ack_soon(self)
            return
        try:
            self.nack()
        except MqfsError as other:
            error.add_note(f"nack of message {self.sequence} failed: {other} (it is redelivered all the same)")


class Claims(Waiting[Claim]):
    """A handle on a consumer or a stream's default consumer: an iterator of claims. Any number of threads may share it.

    A clean exit of the `with` block releases its open claims; an exception counts them as failed.
    """

    def __init__(
        self,
        link: Link,
        path: str,
        make: Callable[[], File] | None,
        *,
        patterns: Patterns = (),
        lease: Lease,
        renew: bool = False,
        reconnect: bool | float = False,
        prefetch: int = 1,
    ) -> None:
        """`make`: opens a consumer and makes a missing one; None: only an existing one is opened. `lease`: the group's.
        `renew`: whether `with claim:` renews its claim. `prefetch`: the most messages claimed by one read."""
        super().__init__()
        self._lease, self._renews = lease, renew
        self._link, self._path, self._make = link, path, make
        self._names, self._reconnect = names_of(patterns), reconnect if link.can_be_lost else False
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._shut = self._has_ended = False  # `close` was called; it has settled all claims
        self._has_begun = False  # a read was begun before its `receive`
        self._open_claims: set[Claim] = set()
        self._ready: deque[Claim] = deque()  # claimed, not returned yet
        self._prefetch = prefetch
        self._refusals: list[bytes] = []
        self._look_up = ""  # a file to look up with each read: `Claim._found` has whether it exists, None: unknown
        self._file = self._open()
        self._acks = DeferredAcks(self, lease) if prefetch > 1 else SentAcks(self)  # last: `close_all` can now see it

    @property
    def renew_s(self) -> float:
        """Seconds after which `with claim:` renews its claim, by the last known lease. 0: never."""
        return self._lease.seconds / RENEWALS if self._renews else 0.0

    @property
    def name(self) -> str:
        """The consumer's name; for a stream's default consumer, `.` and the stream."""
        return self._path.rpartition("/")[2]

    def __repr__(self) -> str:
        state = "closed" if self._shut else "ended" if self._at_end else "finished" if self._closed.is_set() else "open"
        group = self._path.rpartition("/.consumers/")[0] or "/"
        return f"<mqfs claims of {self.name!r} in group {group!r} at {self._link.label}, {state}>"

    def _open(self) -> File:
        self._decoder = RecordDecoder()
        file = self._link.open(self._path, "r+") if self._make is None else self._make()
        try:
            select = ("select " + " ".join(map(quote_word, self._names)),) if self._names else ()
            file.write(command_lines("format record", f"prefetch {self._prefetch}", *select))
        except BaseException:
            file.close()
            raise
        return file

    def _reopen(self, deadline: float | None) -> None:
        file = self._retry(self._open, deadline)
        with self._lock:
            self._file, self._refusals = file, []
        if self._interrupt_requested:  # requested meanwhile
            file.interrupt()
        self._ready.clear()  # the server requeued these claims when the old file was lost,
        self._open_claims.clear()  # and these

    # ------------------------------------------------------------ commands

    def _command(self, file: File, line: str) -> None:
        """Write a command about a claim made through `file`. Raises Stale if that file, and so its claims, are lost."""
        if file is not self._file:
            raise Stale("claim is void: connection lost (the message is redelivered)")
        if self._has_ended:
            raise Stale("claim is void: its handle was closed (the message is redelivered)")
        try:
            file.write(command_lines(line))
        except Disconnected:
            raise
        except MqfsError as error:
            self._note_refusal(error)
            raise

    def _note_refusal(self, error: MqfsError) -> None:
        with self._lock:
            self._refusals = [*self._refusals[-15:], f"{error}\n".encode()]  # the next read returns it, too

    def _settled(self, claim: Claim) -> None:
        claim.settled = True
        self._open_claims.discard(claim)

    def _reopened(self, claim: Claim) -> None:
        claim.settled = False
        self._open_claims.add(claim)

    def _ack_soon(self, claim: Claim) -> None:
        if self._acks.add(claim):
            self._settled(claim)
        else:
            claim.ack()

    def _settle_all(self, verb: str, claims: Sequence[Claim]) -> list[tuple[Claim, MqfsError]]:
        """Settle claims by one command, or by one each if that is refused. Returns the refused claims with the
        errors."""
        refused: list[tuple[Claim, MqfsError]] = []
        most = _AT_ONCE if len({claim._file for claim in claims}) == 1 else 1
        for at in range(0, len(claims), most):
            part = claims[at : at + most]
            try:
                self._command(part[0]._file, f"{verb} {' '.join(ranges(claim.sequence for claim in part))}")
            except MqfsError as error:
                if isinstance(error, Disconnected):
                    self._ready.clear()  # these claims are void, too
                if len(part) == 1 or isinstance(error, Disconnected):
                    refused += [(claim, error) for claim in part]
                else:
                    refused += [row for claim in part for row in self._settle_all(verb, [claim])]
        return refused

    # ------------------------------------------------------------ claims

    def get(self, timeout: float | None = None) -> Claim:
        """Claim the next message.

        Args:
            timeout: The most seconds to wait. None: without limit.

        Returns:
            The claim.

        Raises:
            TimeoutError: No message came in time.
            EOFError: The handle was closed, or the consumer was removed.
            Interrupted: `interrupt` was called.
            Disconnected: The server is disconnected, and `reconnect` does not wait for it.
            Stale: A claim was lost before its block ended, so that its acknowledgement failed; the message is
                redelivered, and the next call continues.
        """
        return super().get(timeout)

    def _next_item(self, deadline: float | None) -> Claim:
        self._acquire_turn(deadline)
        try:
            while True:
                if self._closed.is_set():
                    raise EOFError
                try:
                    claim = self._ready.popleft()
                except IndexError:
                    self._fill(deadline)
                    continue
                self._open_claims.add(claim)
                try:
                    if claim.message.headers and not self._assemble(claim):
                        continue
                except Disconnected as error:
                    self._require_reconnect(error)
                    self._ready.clear()  # claims of the lost connection
                    self._reopen(deadline)
                    continue
                return claim
        finally:
            self._turn.release()

    def _fill(self, deadline: float | None) -> None:
        """Wait for claims and receive them. A call may return without any; callers repeat it until a claim is ready.
        Raises the errors of `get`."""
        if self._at_end:
            self._acks.send(deadline)
            self._acks.raise_failure()
            raise EOFError
        try:
            asked_at, answer = time.monotonic(), self._begin_look_up() if self._look_up else None
            try:
                self._acks.before_read(deadline)
                self._acks.raise_failure()
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                self._has_begun = False
                data = self._file.receive(limits.MESSAGE_BYTES, timeout=left)
            finally:
                found = None
                with suppress(MqfsError):  # the answer stays unknown
                    found = answer() if answer is not None else None
            if not data:
                self._on_end_of_file(deadline)
            elif not self._is_refusal(data):  # the text of an error that `_command` has raised
                self._receive(data, found, asked_at)
        except Interrupted as error:
            self._interrupted(error)
        except Disconnected as error:
            self._require_reconnect(error)
            self._reopen(deadline)

    def _begin_look_up(self) -> Callable[[], bool | None]:
        self._has_begun = True
        return self._file.look_up(self._look_up)

    def _receive(self, data: bytes, found: bool | None = None, asked_at: float = 0.0) -> None:
        deliveries = self._decoder.deliveries
        messages = self._decoder.feed(data)
        if messages:
            self._acks.received()
        for message in messages:
            claim = Claim(self, self._file, message, deliveries.pop(message.sequence, 1))
            claim._found, claim._asked_at = found, asked_at
            self._ready.append(claim)

    def _assemble(self, claim: Claim) -> bool:
        """Read the parts of a body, which is claimed by its last part. If a read fails, the claim is requeued as
        failed, and the error is raised. Returns False if parts were removed; the claim is settled then."""
        number, total = place_of(claim.message)
        if total < 2 or number != total:
            return True
        first = claim.sequence - total + 1
        try:
            found = self._read_parts(claim, first)
        except BaseException:
            with suppress(MqfsError):
                claim.nack()
            raise
        if found is not None and found.sequence == first:
            claim.message = found
            return True
        try:
            with suppress(Stale):
                if found is None or found.sequence < claim.sequence:  # the last part expired, was purged or evicted
                    claim.ack()
                else:
                    claim._give_up("parts are missing")
        except BaseException:
            self._give_back(claim)  # by a full disk, for example: the next `get` tries again
            raise
        return False

    def _read_parts(self, claim: Claim, first: int) -> Message | None:
        """Return the body from its first part on; if parts are missing, the last remaining part, if any."""
        group, found = self._path.rpartition("/.consumers/")[0], None
        until = str(claim.sequence)
        with CursorSubscription(self._link, group, claim.stream, start=str(max(first, 1)), until=until) as parts:
            while True:
                try:
                    found = parts.get()
                except EOFError:
                    return found
                except FellBehind:
                    pass  # parts were removed: read the remaining ones

    def _begin_read(self) -> None:
        self._has_begun = True
        self._file.begin_read()

    def _is_refusal(self, data: bytes) -> bool:
        """Whether received data is the error text of a refused command. As the size of a record it would be above
        2^24."""
        if not self._decoder.has_part:
            return len(data) < 4 or data[3] > 0
        with self._lock:
            return data in self._refusals

    def _on_end_of_file(self, deadline: float | None) -> None:
        """Handle an end of file: the consumer was removed, or the server stops. After a restart a transient consumer is
        made again."""
        file, make, self._make = self._file, self._make, None
        try:
            if self._reconnect is False:
                raise NotFound
            self._reopen(deadline)
        except NotFound:
            self._at_end = self._reconnect is False or make is None or not file.is_lost  # else `_open` makes it again
        finally:
            self._make = make

    # ------------------------------------------------------------ ends

    def finish(self) -> None:
        """Claim no more messages: waiting threads get the end. Open claims can still be settled."""
        self._closed.set()
        if self._is_of_parent:
            return
        self._file.interrupt()
        self._wake()

    def close(self, release: bool = True) -> None:
        """Close the handle; waiting threads get the end.

        Args:
            release: Whether open claims are requeued uncounted; else they count as failed.

        Raises:
            Stale: A claim was lost before its block ended; the message is redelivered.
        """
        self.finish()
        if self._is_of_parent:
            return
        with self._turn:
            if self._shut:
                return
            self._shut = True
            self._take_begun()
            self._acks.stop()
            self._acks.send()
            left = [*self._ready]  # never returned, so they do not count as failed
            self._ready.clear()
            if release:
                left += [claim for claim in [*self._open_claims] if claim._file is self._file]
            self._settle_all("release", left)  # the server has requeued refused ones already
            self._has_ended = True
            self._file.close()
            if release:
                self._acks.raise_failure()

    def _take_begun(self) -> None:
        """Receive the claims of a read that was begun without a `receive`, and the rest of a partly received record."""
        if self._has_begun or self._decoder.has_part:
            with suppress(MqfsError, TimeoutError):
                while data := self._file.receive(limits.MESSAGE_BYTES, timeout=0.0):
                    if not self._is_refusal(data):
                        self._receive(data)
                    if not self._decoder.has_part:
                        break

    def _next_ahead(self) -> Claim | None:
        """Return a prefetched claim without waiting, for async programs; None if there is none, or its body has parts
        to read."""
        with suppress(IndexError):
            if not self._closed.is_set():
                claim = self._ready.popleft()
                if headers.PART not in claim.message.headers:
                    self._open_claims.add(claim)
                    return claim
                self._ready.appendleft(claim)
        return None

    def _give_back(self, claim: Claim) -> None:
        """Put back a claim that no caller got: it is prefetched again."""
        self._open_claims.discard(claim)
        self._ready.appendleft(claim)

    def _when_ready(self, call: Callable[[], None]) -> tuple[float, float] | None:
        if self._ready:
            call()
            return None
        self._has_begun = True
        return super()._when_ready(call)

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(release=error is None)


def consumer_opener(
    link: Link, group: str, name: str, over: str, private: bool, transient: bool, on_made: Callable[[], None]
) -> Callable[[], File]:
    """Return a function that opens a consumer, and makes a missing one.

    With options the consumer is made through ctl, if the user may write that; an existing one keeps its options, and
    missing ones are added. `on_made` is called for a new consumer that is not transient."""
    path = f"{group}/.consumers/{name}"
    options = ["private"] * private + ["transient"] * transient

    def by_ctl() -> File:
        with suppress(Denied):
            rows = map(split, re.findall(r"^consumer .*", read_whole(link, f"{group}/ctl").decode(), re.MULTILINE))
            now = next((words for words in rows if words[:2] == ["consumer", name]), None)
            if now is None or (over and now[2:3] != [over]):  # the server refuses another `over`
                write_ctl("consumer", name, *([over] if over else []), *options)
            elif missing := [word for word in options if word not in now[2:]]:
                write_ctl(*now, *missing)  # the line sets all options
            if now is None and not transient:
                on_made()
        return link.open(path, "r+")

    def write_ctl(*words: str) -> None:
        write_lines(link, f"{group}/ctl", " ".join(map(quote_word, words)))

    return by_ctl if options or over else opener(link, path, path, on_made)


def opener(link: Link, path: str, missing: str, on_made: Callable[[], None] = lambda: None) -> Callable[[], File]:
    """Return a function that opens a file. If the file is not found, it first creates `missing`, which makes the file
    exist; `on_made` is called if the creation succeeded."""

    def plainly() -> File:
        try:
            return link.open(path, "r+")
        except NotFound:
            with suppress(Exists):
                link.create(missing)
                on_made()
            return link.open(path, "r+")

    return plainly
