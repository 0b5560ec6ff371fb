"""Open consumers: their commands and formats. The consumer decides which message a reader gets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from mqfs import errors, limits
from mqfs.engine.core import multipart
from mqfs.engine.core.portions import Work
from mqfs.engine.delivery.consumer import Claim, Consumer
from mqfs.engine.files.claiming import RECORD_OVERHEAD, ClaimingHandle
from mqfs.engine.files.handle import FREE_BYTES, CommandFile, to_tell_of
from mqfs.engine.files.seek import WalkBack, position
from mqfs.engine.language.message_formats import FORMATS, SentNames, describe, parse_seek, shape
from mqfs.engine.language.permissions import ADMIN, R, W, allowed, require, require_scope
from mqfs.engine.nodes import TakeFile
from mqfs.engine.routing import FEW, MessageFilter, commands_of, select
from mqfs.engine.stream import Stream
from mqfs.errors import unknown
from mqfs.model import NEVER, Record, Step, User, Wait
from mqfs.records.record import encode_deliveries
from mqfs.syntax.duration import parse_duration, parse_number

Command = Callable[[], Work[None] | None]  # of a line; a command that searches does so in steps
_WALKED = 32  # messages, between two looks at the clock
_FEW = 4  # messages; fewer are looked up one by one
_AT_ONCE = 256  # messages claimed by one record: about a millisecond
_NAMES_BYTES = 40 + FEW * (6 + limits.NAME_BYTES)  # for the names of a run's streams, which are few


class ConsumerHandle(ClaimingHandle, CommandFile):
    """`.consumers/NAME` or `.consumers/.STREAM`, opened for reading and writing, or only for writing commands."""

    node: Consumer | TakeFile
    sequential = True

    def __init__(self, node: Consumer | TakeFile, user: User, reads: bool, writes: bool) -> None:
        if isinstance(node, Consumer) and node.state.private and node.receivers:
            raise errors.Busy(f"consumer {node.name!r}: private, and open already")
        self.format = "raw"
        self.end_sequence = NEVER
        self.shown: tuple[Record, int] | None = None  # the last message and its delivery count, for `info`
        self.current: list[int] = []  # the sequences that the last read claimed
        self.end_due = False  # `format each`: the 0-byte read that ends the last message
        self.names = SentNames()
        self.prefetch = limits.PREFETCH  # `format record`: messages that a read claims at most
        self._named = 0  # messages named by the commands of a write so far
        self.selects = False  # whether only some streams and views are selected
        self.failed: errors.MqfsError | None = None  # the next read raises it, as the failed read returned messages
        super().__init__(node, user, reads, writes)
        self.selection = MessageFilter(self.group)

    def _consumer(self) -> Consumer:
        return self.node if isinstance(self.node, Consumer) else self.node.stream.own_consumer()

    def may_receive(self, stream: Stream, sequence: int) -> bool:
        if sequence >= self.end_sequence or not allowed(self.user, stream.state, R):
            return False
        if not self.selects:
            return True
        selection = self.selection
        return selection.has_all_of(stream) or (selection.covers(stream) and self._is_selected(stream, sequence))

    def may_receive_all(self, stream: Stream) -> bool:
        return allowed(self.user, stream.state, R) and (not self.selects or self.selection.has_all_of(stream))

    def _end(self) -> None:
        self.selection.end()
        super()._end()

    def _is_selected(self, stream: Stream, sequence: int) -> bool:
        """Whether a program selects that message."""
        record = self.group.log.reader.find(stream.number, sequence)
        if record is None or record.sequence != sequence:
            return False
        self.group.waiting.left -= len(record.body) // limits.PASSED_BYTES
        return self.selection.selects(stream, record)

    # ------------------------------------------------------------ reading

    @property
    def has_ended(self) -> bool:
        return self.consumer.removed or self.group.removed or (self.selects and self.selection.over)

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        if self.reads and (self.refusal is not None or self.pending is not None):
            return self.take_response(count) or b""
        return super().read(count, offset)

    def at_once(self, count: int, offset: int) -> Step[bytes] | None:
        last = self.last
        if last.can_push_back or last.given < len(last.body):
            rest: Step[bytes] | None = last.rest(count, 0, sequential=True)
            return rest
        if self.end_due:
            self.end_due = False
            return b""
        if self.failed is not None:
            error, self.failed = self.failed, None
            raise error
        return b"" if self.has_ended or count <= 0 else None

    @property
    def readable(self) -> bool:  # type: ignore[override]
        if self.refusal or self.pending or self.end_due or self.failed or self.group.log.end.next >= self.end_sequence:
            return True
        return super().readable

    def fetch(self, count: int, offset: int) -> Step[bytes] | None:
        current: list[int] = []
        pieces: list[bytes] = []
        room, used = NEVER, 0  # the first message may have any size
        try:
            while room > 0 and (record := self.consumer.claim_next(self, room)) is not None:
                current.append(record.sequence)
                self.shown = record, self.claims[record.sequence].deliveries
                pieces.append(record.body if self.format == "raw" else self._shape(record))
                room = 0
                if self.format == "record" and len(current) < self.prefetch:
                    used += len(pieces[-1])
                    used += self._add_behind(record, count - used, current, pieces)
                    room = count - used - RECORD_OVERHEAD if len(current) < self.prefetch else 0
        except errors.MqfsError as error:
            if not pieces:
                raise
            self.failed = error
        if not pieces:
            log, end = self.group.log, self.end_sequence
            return b"" if log.end.next >= end and self.consumer.dispatcher.has_looked(self, end) else None
        self.current = current
        self.end_due = self.format == "each"
        assert self.shown is not None
        record, deliveries = self.shown
        if len(record.body) > FREE_BYTES:  # rarely so, and this runs for each claim
            self.shown = to_tell_of(record), deliveries
        if record.headers and (long := self._long(record)) is not None:
            return self.last.first_of_many(long, count, 0)
        return self.last.first(b"".join(pieces), count, 0)

    def _add_behind(self, record: Record, room: int, current: list[int], pieces: list[bytes]) -> int:
        """Claim messages that fit into `room` bytes after `record`, just claimed. Return the bytes added to
        `pieces`."""
        before = len(pieces)
        most = min(self.prefetch - len(current), _AT_ONCE)
        is_run = most > _FEW and not record.headers  # those with headers are examined one by one: perhaps all have some
        found = self.consumer.claim_run(self, record.sequence, most, room - _NAMES_BYTES) if is_run else None
        if found is not None:
            run, sequences = found
            names = {number: self.group.numbers[number].name for number in run.streams}
            pieces += (self.names.news(record.sequence, record.time_ns, names), *run.pieces)
            self.names.given(names)
            current += sequences
            self.shown = run.newest, 1
            return sum(map(len, pieces[before:]))
        for behind in self.consumer.claim_behind(self, record, most, room, RECORD_OVERHEAD):
            current.append(behind.sequence)
            self.shown = behind, 1
            pieces.append(self._shape(behind))
        return sum(map(len, pieces[before:]))

    def claim_behind(self, messages: int, size: int) -> list[Record]:
        """Claim the messages that reads in `format raw` would return next, after the last read message: up to
        `messages` ordinary ones, of at most `size` bytes of headers and bodies. Empty: each must be read by itself."""
        if self.shown is None or self.waits or self.one_by_one or self.has_ended:
            return []
        found = self.consumer.claim_behind(self, self.shown[0], messages, size)
        if found:
            self.shown = found[-1], 1
            self.current = [*self.current, *(record.sequence for record in found)]
            self.group.unblock()
        return found

    def _long(self, record: Record) -> multipart.LongBody | None:
        """Return the body of the message just claimed, if it has several parts and the format shows all of them; else
        None."""
        if self.format in ("record", "json"):
            return None
        end = {"line": b"" if record.body.endswith(b"\n") else b"\n", "nul": b"\0"}.get(self.format, b"")
        return multipart.whole(self.group, record, self.claims[record.sequence].entry.first, end)

    def _shape(self, record: Record) -> bytes:
        assert self.shown is not None
        name, deliveries = self.group.numbers[record.stream].name, self.shown[1]
        if self.format == "record":
            data = self.names.give(record, name)
            return encode_deliveries(record.sequence, record.time_ns, deliveries) + data if deliveries > 1 else data
        return shape(self.format, record, name, deliveries)

    # ------------------------------------------------------------ commands

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        if not self.writes:
            self.require(reading=False)
        self.group.waiting.left = limits.PASSED_MESSAGES
        try:
            if self.consumer.removed or self.group.removed:
                raise errors.Stale(f"consumer {self.node.name!r}: removed")
            one = None if self.partial else _ONE_ACK(data)
            if one is not None and (one[1] or len(self.current) == 1):
                claim = self.claims.get(sequence := int(one[1] or self.current[0]))
                if claim is None:
                    raise _not_claimed(sequence)
                self.consumer.ack((claim,))
                if sequence in self.current:
                    if self.last.given < len(self.last.body):
                        self._drop_rest()
                    self.last.drop()
                    self.end_due = False
            else:
                rest = iter(self._commands(self.lines_of(data)))
                for command in rest:
                    if (work := command()) is not None:
                        step = self.group.portions.run(self._go_on(work, rest), may_be_cancelled=False)
                        if isinstance(step, Wait):
                            return self._performed(step, len(data))
        except errors.MqfsError as error:
            self.refused(error)
            raise
        self.group.unblock()
        return self.group.log.after_data_sync(len(data))

    def _go_on(self, work: Work[None], rest: Iterator[Command]) -> Work[None]:
        """Finish a `seek` that searches for its position, then carry out the commands after it. In steps."""
        yield from work
        for command in rest:
            if (work_behind := command()) is not None:
                yield from work_behind

    def _performed(self, step: Wait[None], size: int) -> Wait[int]:
        """Return a wait that ends when all commands of the write are done. It cannot be cancelled: with O_NONBLOCK the
        write would fail each time, after its first commands."""
        wait: Wait[int] = Wait()

        def end(step: Wait[None]) -> None:
            try:
                step.result()
            except errors.MqfsError as error:
                self.refused(error)
                wait.fail(error)
            except Exception as error:
                wait.fail(error)
            else:
                self.group.unblock()
                wait.follow(self.group.log.after_data_sync(size))

        step.subscribe(end)
        return wait

    def _commands(self, text: str) -> list[Command]:
        """Return the commands of all lines, none carried out yet. Raises BadCommand, Stale, NotFound, Denied,
        OverLimit."""
        self._named, named = 0, set[int]()
        return commands_of(text, lambda verb, words: self._command(verb, words, named))

    def _command(self, verb: str, words: list[str], named: set[int]) -> Command:
        if verb == "ack":
            return partial(self._acknowledge, self._claims(words, named))
        if verb == "nack":
            return self._nack(words, named)
        if verb == "release":
            return partial(self._release, self._claims(words, named))
        if verb == "dead":
            return self._dead(words, named)
        if verb == "touch":
            return partial(self._touch, self._claims(words, set()))
        if verb == "select":
            return self._select(words)
        if verb not in _USAGE:
            raise errors.BadCommand(unknown("command", verb, [*_OTHERS, *_USAGE]))
        if len(words) != _USAGE[verb]:
            raise errors.BadCommand(f"{verb}: {len(words)} values (expected {_USAGE[verb]})")
        if verb == "info":
            return self._info
        return {"format": self._format, "until": self._until, "seek": self._seek, "prefetch": self._prefetch}[verb](
            words[0]
        )

    def _claims(self, words: list[str], named: set[int]) -> list[Claim]:
        """Return the claims of these sequences, or without `words` those of the last read. Raises Stale, OverLimit."""
        claims: list[Claim] = []
        for numbers in map(_numbers, words) if words else [self.current]:
            self._named += min(len(numbers), len(self.claims) + 1)
            if self._named > limits.PREFETCH:
                raise errors.OverLimit(
                    f"commands name more than {limits.PREFETCH} messages (expected fewer in a write)"
                )
            for sequence in numbers:  # the first unclaimed one ends the loop: a range costs no more than its claims
                if sequence not in self.claims or sequence in named:
                    raise _not_claimed(sequence)
                named.add(sequence)
                claims.append(self.claims[sequence])
        if not claims:
            raise errors.Stale("no message is claimed (read one first)")
        return claims

    def _acknowledge(self, claims: list[Claim]) -> None:
        if valid := self._valid(claims):
            self.consumer.ack(valid)
        self._drop_unread_rest(claims)

    def _valid(self, claims: list[Claim]) -> list[Claim]:
        """Return the claims that a `seek` in the same write has not ended."""
        return [claim for claim in claims if self.claims.get(claim.sequence) is claim]

    def _nack(self, words: list[str], named: set[int]) -> Callable[[], None]:
        sequences = [word for word in words[:1] if word.isdigit()]
        delays = words[len(sequences) :]
        if len(delays) > 1:
            raise errors.BadCommand(f"nack: unexpected word {delays[1]!r} (expected nack [SEQUENCE] [DELAY])")
        delay = parse_duration(delays[0]) if delays else None
        claims = self._claims(sequences, named)
        return lambda: self._each(claims, lambda claim: self.consumer.redelivery.nack(claim, "nack", delay))

    def _release(self, claims: list[Claim]) -> None:
        self._drop_unread_rest(claims)  # first: this handle may get the requeued messages
        self.consumer.redelivery.release_all(self._valid(claims))

    def _dead(self, words: list[str], named: set[int]) -> Callable[[], None]:
        sequences = [word for word in words[:1] if word.isdigit()]
        reason = " ".join(words[len(sequences) :])[: limits.REASON_BYTES] or "dead"
        claims = self._claims(sequences, named)
        for claim in claims:
            stream = self.group.numbers.get(claim.stream)
            if stream is not None and stream.name == self.group.settings.dead:
                raise errors.BadCommand(f"dead: message {claim.sequence} is a dead letter (ack it to remove it)")
        return lambda: self._each(claims, lambda claim: self._bury(claim, reason))

    def _bury(self, claim: Claim, reason: str) -> None:
        if not self.consumer.redelivery.move_to_dead(claim, reason):
            raise errors.StreamFull(f"dead: message {claim.sequence} was not moved to the dead letters (see .errors)")

    def _touch(self, claims: list[Claim]) -> None:
        for claim in self._valid(claims):
            self.consumer.deadlines.renew(claim, self.group.settings.lease)

    def _each(self, claims: list[Claim], do: Callable[[Claim], None]) -> None:
        self._drop_unread_rest(claims)  # first: this handle may get the requeued messages
        for claim in self._valid(claims):
            do(claim)

    def _drop_unread_rest(self, claims: list[Claim]) -> None:
        """Drop the unread rest of a message whose claim ends, if the last read claimed it."""
        if any(claim.sequence in self.current for claim in claims):
            self._drop_rest()

    def _drop_rest(self) -> None:
        if self.last.given < len(self.last.body):
            self.names = SentNames()  # the dropped rest may have names
        self.last.drop()
        self.end_due = False

    def _info(self) -> None:
        if self.shown is None:
            raise errors.BadCommand("info: no message was read yet")
        record, deliveries = self.shown
        stream = self.group.numbers.get(record.stream)
        self.pending = describe(record, stream.name if stream else "", deliveries)

    def _format(self, word: str) -> Callable[[], None]:
        if word not in FORMATS:
            raise errors.BadCommand(unknown("format", word, FORMATS))

        def do() -> None:
            self.format = word
            self._drop_rest()

        return do

    def _prefetch(self, word: str) -> Callable[[], None]:
        most = parse_number(word)
        if not 1 <= most <= limits.PREFETCH:
            raise errors.BadCommand(f"prefetch {word}: out of range (expected 1 to {limits.PREFETCH})")

        def do() -> None:
            self.prefetch = most

        return do

    def _until(self, word: str) -> Callable[[], None]:
        bound = None if word == "end" else parse_number(word) + 1

        def do() -> None:
            self.end_sequence = self.group.log.end.next if bound is None else bound
            self.consumer.reads.polling.add(self)
            if self.waits:
                self.consumer.reads.note_end(self)
            self._rescan()

        return do

    def _select(self, words: list[str]) -> Callable[[], None]:
        if len(words) > limits.CURSOR_NAMES:
            raise errors.OverLimit(f"select: {len(words)} names (expected at most {limits.CURSOR_NAMES})")
        selection = select(self.selection, words, self.user)

        def do() -> None:
            selection.follow(self.selection)
            self.selection, self.selects = selection, bool(words)
            self.consumer.reads.polling.add(self)  # its selected streams may be removed
            self._rescan()

        return do

    def _seek(self, word: str) -> Command:
        parse_seek(word)
        if isinstance(self.node, TakeFile):
            raise errors.BadCommand("seek: not for a stream's default consumer")
        require_scope(self.user, ADMIN, f"seek of {self.node.name}")
        require(self.user, self.node.state, R | W, self.node.name)
        consumer = self.consumer
        for number in {claim.stream for claim in consumer.claims.values()}:  # the seek ends these claims
            if (stream := self.group.numbers.get(number)) is not None:
                require(self.user, stream.state, R, stream.name)

        def streams() -> list[Stream]:
            covers, numbers = consumer.coverage.covers, self.group.numbers
            return [s for s in numbers.values() if covers(s) and allowed(self.user, s.state, R)]

        def do() -> Work[None]:
            place = position(self.group, consumer.coverage.filter, word, streams, self._shows)
            if isinstance(place, WalkBack):
                while not place.go_on(_WALKED):
                    yield
                    if consumer.removed or self.group.removed:
                        raise errors.Stale(f"consumer {consumer.name!r}: removed")
                place = place.found
            consumer.seek(place)
            self.end_sequence, self.current = NEVER, []
            self._drop_rest()
            self.audit("seek", word)
            self._rescan()

        return do

    def _shows(self, record: Record) -> bool:
        stream = self.group.numbers.get(record.stream)
        if stream is None or not allowed(self.user, stream.state, R):
            return False
        return self.consumer.coverage.matches(stream, record) and stream.kept.visible(record)

    def _rescan(self) -> None:
        """Restart the search for this handle: other messages than before are for it."""
        self.scanned_to, self.own_heap = 0, None
        if self.waits:
            self.consumer.reads.serve()


def _not_claimed(sequence: int) -> errors.Stale:
    return errors.Stale(f"message {sequence}: not claimed by this open file, or no longer")


def _numbers(word: str) -> Sequence[int]:
    """Parse a sequence, or a range of sequences: `7`, `5-80`. Raises BadCommand."""
    first, dash, last = word.partition("-")
    begin = parse_number(first)
    end = parse_number(last) if dash else begin
    if end < begin:
        raise errors.BadCommand(f"range {word!r}: ends before it begins (expected FIRST-LAST)")
    return range(begin, end + 1)


_ONE_ACK = re.compile(rb"ack(?: (\d{1,18})\n|\n?)").fullmatch  # most writes, not parsed further
_OTHERS = ("ack", "nack", "release", "dead", "touch", "select")  # commands of any number of words
_USAGE = {"info": 0, "seek": 1, "until": 1, "format": 1, "prefetch": 1}
