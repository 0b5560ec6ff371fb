"""Open consumers: their commands and formats. Which message a reader gets, the consumer decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.delivery.consumer import Claim, Consumer, delivery_count
from mqfs.engine.files.claiming_handle import RECORD_OVERHEAD, ClaimingHandle
from mqfs.engine.files.command_file import CommandFile
from mqfs.engine.files.handle import PartialRead
from mqfs.engine.files.seek import position
from mqfs.engine.language.message_formats import FORMATS, SentNames, describe, parse_seek, shape
from mqfs.engine.language.permissions import R, W, allowed, require
from mqfs.engine.log import multipart
from mqfs.engine.nodes.own_files import TakeFile
from mqfs.engine.routing.message_filter import MessageFilter, select
from mqfs.model import NEVER, Record, User
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.quoting import split
from mqfs.syntax.size import parse_number
from mqfs.wait import Step

if TYPE_CHECKING:
    from mqfs.engine.stream import Stream


class ConsumerHandle(ClaimingHandle, CommandFile):
    """`.consumers/NAME` or `.consumers/.STREAM`, opened for reading and writing, or for writing: then only to command
    it."""

    node: Consumer | TakeFile
    sequential = True

    def __init__(self, node: Consumer | TakeFile, user: User, reads: bool, writes: bool) -> None:
        if isinstance(node, Consumer) and node.state.private and node.receivers:
            raise errors.Busy(f"{node.name} is private, and open already")
        self.format = "raw"
        self.until = NEVER
        self.shown: tuple[Record, int] | None = None  # the last message and its delivery count, for `info`
        self.current: list[int] = []  # what the last read claimed
        self.end_due = False  # `format each`: the 0-byte read that ends the last message
        self.names = SentNames()
        super().__init__(node, user, reads, writes)
        self.selection = MessageFilter(self.group)

    def _consumer(self) -> Consumer:
        return self.node if isinstance(self.node, Consumer) else self.node.stream.own_consumer()

    def admits(self, stream: Stream, sequence: int) -> bool:
        return sequence < self.until and allowed(self.user, stream.state, R) and self.selection.covers(stream)

    # ------------------------------------------------------------ reading

    @property
    def over(self) -> bool:
        return super().over or self.selection.over

    def tell(self, count: int) -> bytes | None:
        return self.take_response(count)

    def at_once(self, count: int, offset: int) -> bytes | None:
        again = self.last.rest(count, 0, sequential=True)
        if again is not None:
            return again
        if self.end_due:
            self.end_due = False
            return b""
        return b"" if self.over or count <= 0 else None

    @property
    def readable(self) -> bool:  # type: ignore[override]
        if self.refusal or self.pending or self.end_due or self.group.log.end.next >= self.until:
            return True
        return super().readable

    def fetch(self, count: int, offset: int) -> bytes | None:
        current: list[int] = []
        pieces: list[bytes] = []
        room = NEVER  # the first message always
        while room > 0 and (record := self.consumer.claim_next(self, most=room)) is not None:
            current.append(record.sequence)
            self.shown = record, delivery_count(self.claims[record.sequence].entry)
            pieces.append(self._shape(record))
            room = count - sum(map(len, pieces)) - RECORD_OVERHEAD if self.format == "record" else 0
        if not pieces:
            return b"" if self.group.log.end.next >= self.until else None
        self.current = current
        self.end_due = self.format == "each"
        if (long := self._long()) is not None:
            return self.last.first_of_many(long, count, 0)
        return self.last.first(b"".join(pieces), count, 0)

    def _long(self) -> multipart.LongBody | None:
        """The message just fetched, where its body is in parts and the format shows all of it."""
        assert self.shown is not None
        record = self.shown[0]
        if not record.headers or self.format in ("record", "json"):
            return None
        end = {"line": b"" if record.body.endswith(b"\n") else b"\n", "nul": b"\0"}.get(self.format, b"")
        return multipart.whole(self.group.log, record, self.claims[record.sequence].entry.first, end)

    def _shape(self, record: Record) -> bytes:
        name = self.group.numbers[record.stream].name
        if self.format == "record":
            return self.names.wrap(record, name, dict)
        assert self.shown is not None
        return shape(self.format, record, name, self.shown[1])

    # ------------------------------------------------------------ commands

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        try:
            if super().over:
                raise errors.Stale(f"{self.node.name} was removed")
            if (data == b"ack\n" or data == b"ack") and len(self.current) == 1 and not self.partial:
                self._acknowledge(self._claims([], set()))
            else:
                spoken: set[int] = set()
                lines = self.lines_of(data).split("\n")
                steps = [step for line in lines if (step := self._line(line, spoken)) is not None]
                for step in steps:
                    step()
        except errors.MqfsError as error:
            self.refused(error)
            raise
        self.group.unblock()
        return self.group.log.after_data_sync(len(data))

    def _line(self, line: str, spoken: set[int]) -> Callable[[], None] | None:
        try:
            words = split(line)
            return self._command(words[0], words[1:], spoken) if words else None
        except errors.BadCommand as error:
            raise errors.BadCommand(f"{line.strip()!r}: {error.detail}") from None

    def _command(self, verb: str, words: list[str], spoken: set[int]) -> Callable[[], None]:
        claiming = {"ack": self._ack, "nack": self._nack, "release": self._release, "dead": self._dead}
        if verb in claiming:
            return claiming[verb](words, spoken)
        if verb == "touch":
            claims = self._claims(words, set())
            return lambda: self._touch(claims)
        if verb == "select":
            return self._select(words)
        if verb not in _USAGE:
            known = " ".join([*claiming, "touch", "info", "seek", "select", "until", "format"])
            raise errors.BadCommand(f"unknown command {verb!r}; there are: {known}")
        if len(words) != _USAGE[verb]:
            raise errors.BadCommand(f"{verb} takes {_USAGE[verb] or 'no'} value{'s' * (_USAGE[verb] != 1)}")
        if verb == "info":
            return self._info
        return {"format": self._format, "until": self._until, "seek": self._seek}[verb](words[0])

    def _claims(self, words: list[str], spoken: set[int]) -> list[Claim]:
        """The claims meant: of these sequences, or of the last read. Raises Stale."""
        sequences = [parse_number(word) for word in words] or self.current
        if not sequences:
            raise errors.Stale("no message is claimed; read one first")
        for sequence in sequences:
            if sequence not in self.claims or sequence in spoken:
                raise errors.Stale(f"message {sequence} is not claimed by this handle, or not any more")
            spoken.add(sequence)
        return [self.claims[sequence] for sequence in sequences]

    def _ack(self, words: list[str], spoken: set[int]) -> Callable[[], None]:
        claims = self._claims(words, spoken)
        return lambda: self._acknowledge(claims)

    def _acknowledge(self, claims: list[Claim]) -> None:
        self.consumer.acknowledge(claims)
        self._drop_unread_rest(claims)

    def _nack(self, words: list[str], spoken: set[int]) -> Callable[[], None]:
        sequences = [word for word in words[:1] if word.isdigit()]
        delays = words[len(sequences) :]
        if len(delays) > 1:
            raise errors.BadCommand("usage: nack [SEQUENCE] [DELAY]")
        delay = parse_duration(delays[0]) if delays else None
        claims = self._claims(sequences, spoken)
        return lambda: self._each(claims, lambda claim: self.consumer.nack(claim, "nack", delay))

    def _release(self, words: list[str], spoken: set[int]) -> Callable[[], None]:
        claims = self._claims(words, spoken)
        return lambda: self._each(claims, self.consumer.release)

    def _dead(self, words: list[str], spoken: set[int]) -> Callable[[], None]:
        sequences = [word for word in words[:1] if word.isdigit()]
        reason = " ".join(words[len(sequences) :])[: limits.REASON_BYTES] or "dead"
        claims = self._claims(sequences, spoken)
        for claim in claims:
            stream = self.group.numbers.get(claim.stream)
            if stream is not None and stream.name == self.group.settings.dead:
                raise errors.BadCommand(f"dead: message {claim.sequence} is a dead letter; ack it to be rid of it")
        return lambda: self._each(claims, lambda claim: self._bury(claim, reason))

    def _bury(self, claim: Claim, reason: str) -> None:
        if not self.consumer.move_to_dead(claim, reason, delivery_count(claim.entry)):
            raise errors.StreamFull(f"message {claim.sequence} could not be put to the dead letters; see .errors")

    def _touch(self, claims: list[Claim]) -> None:
        for claim in claims:
            self.consumer.renew(claim)

    def _each(self, claims: list[Claim], do: Callable[[Claim], None]) -> None:
        self._drop_unread_rest(claims)  # before: what is given back may be handed to this very handle
        for claim in claims:
            do(claim)

    def _drop_unread_rest(self, claims: list[Claim]) -> None:
        """The unread rest of the message goes with it."""
        if any(claim.sequence in self.current for claim in claims):
            self.last, self.end_due = PartialRead(), False

    def _info(self) -> None:
        if self.shown is None:
            raise errors.BadCommand("info: no message was read yet")
        record, deliveries = self.shown
        stream = self.group.numbers.get(record.stream)
        self.pending = describe(record, stream.name if stream else "", deliveries)

    def _format(self, word: str) -> Callable[[], None]:
        if word not in FORMATS:
            raise errors.BadCommand(f"format {word!r}: write {' or '.join(FORMATS)}")

        def do() -> None:
            self.format, self.end_due, self.last = word, False, PartialRead()

        return do

    def _until(self, word: str) -> Callable[[], None]:
        bound = None if word == "end" else parse_number(word) + 1

        def do() -> None:
            self.until = self.group.log.end.next if bound is None else bound
            self.consumer.polling_receivers.add(self)
            if self.waits:
                self.consumer.note_end(self)
            self._rescan()

        return do

    def _select(self, words: list[str]) -> Callable[[], None]:
        if len(words) > limits.CURSOR_NAMES:
            raise errors.OverLimit(f"select: at most {limits.CURSOR_NAMES} names")
        selection = select(self.group, words, lambda s: require(self.user, s.state, R, s.name))

        def do() -> None:
            self.selection = selection
            self.consumer.polling_receivers.add(self)  # what it selected may be removed
            self._rescan()

        return do

    def _seek(self, word: str) -> Callable[[], None]:
        parse_seek(word)
        if isinstance(self.node, TakeFile):
            raise errors.BadCommand("seek: what is taken from a stream has no place that could be moved")
        require(self.user, self.node.state, R | W, self.node.name)
        consumer = self.consumer
        for number in {claim.stream for claim in consumer.claims.values()}:  # which it makes void
            if (stream := self.group.numbers.get(number)) is not None:
                require(self.user, stream.state, R, stream.name)

        def do() -> None:
            streams = [s for s in self.group.numbers.values() if consumer.covers(s) and allowed(self.user, s.state, R)]
            consumer.seek(position(self.group, consumer.selection, word, streams, self._shows))
            self.until, self.end_due, self.last, self.current = NEVER, False, PartialRead(), []
            self._rescan()

        return do

    def _shows(self, record: Record) -> bool:
        stream = self.group.numbers.get(record.stream)
        return stream is not None and self.consumer.matches(stream, record) and stream.kept.visible(record)

    def _rescan(self) -> None:
        """What this handle may have has changed."""
        self.scanned_to = 0
        if self.waits:
            self.consumer.serve()


_USAGE = {"info": 0, "seek": 1, "until": 1, "format": 1}
