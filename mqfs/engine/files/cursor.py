"""`.cursor`: every open is a private reader of the group's log that can be positioned, narrowed and shaped.

The commands and formats are those of mqfs(4), ".cursor". A cursor claims no messages, and retains none beyond a small
slack.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from typing import Any

from mqfs import errors, limits
from mqfs.engine.core.portions import Work
from mqfs.engine.delivery.waiting import WaitList
from mqfs.engine.files.handle import LongResponses, to_tell_of
from mqfs.engine.files.readers import Searcher, fell_behind
from mqfs.engine.files.seek import WalkBack, position
from mqfs.engine.files.status import places
from mqfs.engine.language.message_formats import FORMATS, SentNames, describe, parse_seek, shape
from mqfs.engine.language.permissions import R, allowed
from mqfs.engine.language.settings import parse_depth
from mqfs.engine.nodes import Meta
from mqfs.engine.retention.retained import bound_after_start
from mqfs.engine.routing import MessageFilter, commands_of, cover, select
from mqfs.engine.stream import Stream
from mqfs.errors import unknown
from mqfs.model import NEVER, Kind, Record, Step, User
from mqfs.syntax.duration import parse_number

_WALKED = 32  # messages, between two looks at the clock


class Cursor(LongResponses, Searcher):
    """An open `.cursor`."""

    node: Meta
    sequential = True

    def __init__(self, node: Meta, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        self.format = "raw"
        self.selection = MessageFilter(self.group)
        self.walk: WalkBack | None = None  # to the position that a seek asked for
        self.until: int | None = None  # reads end at this sequence
        self.shown: Record | None = None  # the last message given, for `info`
        self.end_due = False  # `format each`: the 0-byte read that ends the last message
        self.names = SentNames()  # `format record`: names that the reader has
        self.cuts: dict[int, int] = {}
        self.cuts_seen = -1
        self.lost = 0  # lost messages beyond the slack of a `replay off` group, not reported yet
        self._epoch, self._streams = -1, {}  # type: int, dict[int, Stream]
        replay = self.group.settings.replay
        if replay != "off":
            self._seek("last" if replay == "last" else "first")
        else:
            self._skip_past_loss_reports()

    def on_opened(self) -> None:
        super().on_opened()
        self.group.fanout.cursors.add(self)

    # ------------------------------------------------------------ visible streams

    def streams(self) -> Mapping[int, Stream]:
        """The selected streams that the user may read, by number."""
        group = self.group
        if self.selection.everything and self.user.uid == 0:
            return group.numbers
        if self._epoch != group.catalog_version:
            covers = self.selection.covers
            some: Any = self.selection.candidates()
            self._streams = {s.number: s for s in some if covers(s) and allowed(self.user, s.state, R)}
            self._epoch = group.catalog_version
        return self._streams

    @property
    def over(self) -> bool:
        """Whether its group, or every stream it selected, was removed: reads get end-of-file."""
        return self.group.removed or self.selection.over

    # ------------------------------------------------------------ commands

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        try:
            # All commands are parsed before the first is carried out.
            for step in commands_of(self.lines_of(data), self._command):
                step()
        except errors.MqfsError as error:
            self.refused(error)
            raise
        finally:
            if reads := self.waits.take_out(self):  # these search from the new position on
                self.look_again(reads)
            self.group.fanout.pollers.wake_one(self)
        self.group.unblock()
        return len(data)

    def _command(self, verb: str, arguments: list[str]) -> Callable[[], None]:
        """Return the call that carries out a command. Raises BadCommand, NotFound, Denied, OverLimit."""
        if verb in ("select", "cover"):
            if len(arguments) > limits.CURSOR_NAMES:
                raise errors.OverLimit(f"{verb}: {len(arguments)} names (expected at most {limits.CURSOR_NAMES})")
            if verb == "cover":
                covered = cover(self.group, arguments)
                return lambda: self._select(covered)
            selection = select(self.selection, arguments, self.user)
            return lambda: self._select(selection)
        usage = {"seek": 1, "until": 1, "format": 1, "info": 0, "measure": 1, "streams": 0, "selected": 0}
        if verb not in usage:
            raise errors.BadCommand(unknown("command", verb, ["select", "cover", *usage]))
        if len(arguments) != usage[verb]:
            raise errors.BadCommand(f"{verb}: {len(arguments)} values (expected {usage[verb]})")
        if verb == "info":
            return self._info
        if verb in ("streams", "selected"):
            return self._selected if verb == "selected" else lambda: self.respond(places(self.group, self.user))
        word = arguments[0]
        if verb == "format":
            if word not in FORMATS:
                raise errors.BadCommand(unknown("format", word, FORMATS))
            return lambda: self._format(word)
        if verb == "measure":
            bounds = parse_depth(word)
            return lambda: self._measure(bounds.messages or NEVER, bounds.size or NEVER)
        if verb == "until":
            bound = None if word == "end" else parse_number(word) + 1
            return lambda: self._until(bound)
        parse_seek(word)
        return lambda: self._seek(word)

    def _select(self, selection: MessageFilter) -> None:
        selection.follow(self.selection)
        self.selection, self._epoch = selection, -1
        self.cuts_seen = -1  # newly selected streams may have lost unread messages

    def _format(self, word: str) -> None:
        self.format, self.end_due = word, False
        self._drop_rest()

    def _drop_rest(self) -> None:
        self.names = SentNames()  # the dropped rest may have names, as may bytes that a mount did not pass on
        self.last.drop()

    def _until(self, bound: int | None) -> None:
        self.until = self.group.log.end.next if bound is None else bound

    def _info(self) -> None:
        record = self.shown
        if record is None:
            raise errors.BadCommand("info: no message was read yet")
        stream = self.group.numbers.get(record.stream)
        self.pending = describe(record, stream.name if stream else "")

    def _selected(self) -> None:
        group, names = self.group, self.selection.names
        views = [name for name in names if name in group.views]
        answer = {"next": group.log.end.next, "views": views, "words": group.settings.words.listed}
        self.pending = (json.dumps(answer, ensure_ascii=False) + "\n").encode()

    def _measure(self, messages: int, size: int) -> None:
        """Answer the next read with points that split the selected messages from the position on. Between two points
        are at most `messages` messages and about `size` bytes."""
        group, streams = self.group, self.streams()
        end = group.log.end.next if self.until is None else self.until
        chosen = None if len(streams) == len(group.numbers) else frozenset(streams)
        self.respond(self._measured(self.walk, self.position, end, chosen, messages, size))

    def _measured(
        self, walk: WalkBack | None, position: int, end: int, chosen: Set[int] | None, messages: int, size: int
    ) -> Work[bytes]:
        """Return the split points as text, from the end of the walk, or from the position."""
        while walk is not None and not walk.go_on(_WALKED):
            yield
        begin = position if walk is None else walk.found
        found = self.group.log.metrics.split_points(begin, end, chosen, messages, size)
        return "".join(f"{one.end} {one.messages} {one.size}\n" for one in found).encode() + b"\n"

    def _seek(self, word: str) -> None:
        self.comes_now()
        selection = self.selection  # a later `select` does not change this position
        place = position(
            self.group, selection, word, lambda: self.streams().values(), lambda one: self._shows(one, selection)
        )
        self.until, self.end_due, self.lost = None, False, 0
        self._drop_rest()
        self.walk = place if isinstance(place, WalkBack) else None
        self.position = place.found if isinstance(place, WalkBack) else place
        self._skip_past_loss_reports()

    def arrive(self) -> bool:
        """Continue the walk of a `seek` a little; return whether it has ended. Raises DiskFailed."""
        if self.walk is not None:
            if not self.walk.go_on(limits.PASSED_MESSAGES):
                return False
            self.position, self.walk = self.walk.found, None
            self._skip_past_loss_reports()
        return True

    def _skip_past_loss_reports(self) -> None:
        """Mark all evictions up to now as reported: they are no loss for a new position."""
        retention = self.group.retention
        self.cuts_seen, self.cuts = retention.evictions, {}
        if self.position < retention.evicted_before:
            ranges = (stream.kept for stream in self.group.numbers.values())
            self.cuts = {kept.number: kept.evicted_before for kept in ranges if kept.evicted_before}

    # ------------------------------------------------------------ reading

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        told = self.take_response(count)
        if told is not None:
            return told
        if self.making is not None:
            return self.await_response(count)
        data = None
        if self in self.waits.readers:
            data = self.rest(count)
        elif not self.searching:
            data = self.take(count)
        return self.wait(count) if data is None else data

    def wait_list(self) -> WaitList:
        return self.group.fanout.cursor_waits

    def rest(self, count: int, offset: int = 0) -> bytes | None:
        rest: bytes | None = self.last.rest(count, 0, sequential=True)
        if rest is not None:
            return rest
        if self.end_due:
            self.end_due = False
            return b""
        return b"" if self.over or count <= 0 else None

    def take(self, count: int, offset: int = 0) -> bytes | None:
        self.passed = 0
        data = self.rest(count)
        if data is not None:
            return data
        if self.group.tree.memory.over:
            self.require_memory()
        if self.walk is not None and not self.arrive():
            self.passed = limits.PASSED_MESSAGES
            return None
        if self.format == "record":
            data = self._take_records(count)
        elif (record := self._next()) is not None:
            data = self._give(record, count)
        elif self.has_ended:
            data = b""
        if data is not None:
            self.group.unblock()
        return data

    def _give(self, record: Record, count: int) -> bytes:
        self.shown = to_tell_of(record)
        self.group.counts.read += 1
        self.end_due = self.format == "each"
        return self.last.first(shape(self.format, record, self.group.numbers[record.stream].name), count, 0)

    def _next(self) -> Record | None:
        """Return the next message to show, and move the position past it. None: there is none, or the look is
        `unfinished`."""
        self._look_for_losses()
        most = limits.PASSED_MESSAGES
        while self.passed < most and (self.until is None or self.position < self.until):
            if self.position < self.since and not self.knows_newest():
                return None
            try:
                record = self.selection.find(self.position, limits.SCANNED_MESSAGES)
            except errors.Damaged as error:
                self.position = error.sequence + 1
                raise
            if record is None or (self.until is not None and record.sequence >= self.until):
                # No message for it lies before the end (or `until`): move there.
                end = self.group.log.end.next
                self.position = max(self.position, end if self.until is None else min(end, self.until))
                return None
            shown = self._shows(record, self.selection)  # may count it as lost, unless the position is past it
            self.position = record.sequence + 1
            if shown:
                return record
            self.pass_over(record)
        return None

    def _shows(self, record: Record, selection: MessageFilter) -> bool:
        if not self._admits(record, selection):
            return False
        stream = self.group.numbers[record.stream]
        if record.sequence < self.since and self.leaves_out(record, stream):
            return False
        return stream.kept.visible(record)

    def _admits(self, record: Record, selection: MessageFilter) -> bool:
        """Whether the message is for this cursor under that selection, retained or not."""
        if record.kind != Kind.MESSAGE and self.format != "record":
            return False
        if record.headers and self.group.ranks.is_hidden(record):
            return False
        stream = self.group.numbers.get(record.stream)
        return stream is not None and selection.selects(stream, record) and allowed(self.user, stream.state, R)

    def _look_for_losses(self) -> None:
        group = self.group
        if self.lost:
            streams = self.streams().values()
            for stream in streams:
                stream.kept.update_low_watermark()  # messages trimmed now are counted, too
            self.position = max(self.position, min((s.state.floor for s in streams), default=self.position))
            lost, self.lost = self.lost, 0
            group.counts.lost += lost
            self._tell(f"{lost} messages")
        if group.retention.evictions != self.cuts_seen:
            self.cuts_seen = group.retention.evictions
            if self.position >= group.retention.evicted_before:
                return
            behind = fell_behind(self.position, self.cuts, self.streams().values())
            if behind:
                self._tell(f"messages of {behind}")

    def _tell(self, what: str) -> None:
        self.group.counts.fell_behind += 1
        raise errors.FellBehind(f"{what} were lost (expected a larger 'depth' or faster reads)")

    # ------------------------------------------------------------ formats

    def _take_records(self, count: int) -> bytes | None:
        """Return as many whole records as fit, after the names that were not sent yet; the first record always."""
        if (many := self._take_span(count)) is not None:
            return many
        pieces: list[bytes] = []
        size = 0
        while True:
            before = self.position
            try:
                record = self._next()
            except errors.MqfsError:
                if not pieces:
                    raise
                self.cuts_seen, self.position = -1, before
                break
            if record is None:
                break
            name = self.group.numbers[record.stream].name
            piece = self.names.wrap(record, name)
            if pieces and size + len(piece) > count:
                self.position = before
                break
            self.names.given({record.stream: name})
            self.shown = to_tell_of(record)
            self.group.counts.read += 1
            pieces.append(piece)
            size += len(piece)
            if size >= count:
                break
        if pieces:
            return self.last.first(b"".join(pieces), count, 0)
        return b"" if self.has_ended else None

    def _take_span(self, count: int) -> bytes | None:
        """As `_take_records`, but straight from the log. None: the caller must check each message, as not only its
        stream decides whether it is shown, or few messages are there, or one is damaged."""
        group, streams = self.group, self.streams()
        if (
            group.retention.lapsed
            or group.state.dropped
            or not self.selection.by_stream
            or self.has_ended
            or not streams
            or self.position < max(self.since, group.retention.tail)
        ):
            return None
        self._look_for_losses()
        first = max(self.position, group.retention.expiry.expired_before())
        end = group.log.end.next if self.until is None else self.until
        reader, headed = group.log.reader, group.ranks.is_complete and not group.ranks
        found = reader.read_run(first, end, count, streams.keys(), headed)
        if found is None:
            return None
        for stream in map(streams.__getitem__, found.streams):
            bound_after_start(stream.kept)
            if stream.shared or stream.state.floor > first:
                return None
        names = {number: streams[number].name for number in found.streams}
        head = self.names.news(first, group.log.end.last_ns, names)
        if head and len(head) + sum(map(len, found.pieces)) > count:
            found = reader.read_run(first, end, count - len(head), streams.keys(), headed)
            if found is None:
                return None
        self.names.given(names)
        self.position, self.shown = found.last + 1, found.newest._replace(body=b"")
        group.counts.read += found.messages
        return self.last.first(b"".join((head, *found.pieces) if head else found.pieces), count, 0)

    # ------------------------------------------------------------ waiting

    @property
    def has_ended(self) -> bool:
        """Whether `until` was reached."""
        return self.until is not None and self.position >= self.until

    def deliver(self, record: Record, count: int, offset: int) -> bytes | None:
        if record.sequence < self.position:
            return None
        if self.has_ended or (self.until is not None and record.sequence >= self.until):
            return b""
        self.position = record.sequence + 1
        if not self._admits(record, self.selection):
            return b"" if self.has_ended else None
        if self.format != "record":
            return self._give(record, count)
        self.shown = to_tell_of(record)
        name = self.group.numbers[record.stream].name
        return self.last.first(self.names.give(record, name), count, 0)

    @property
    def readable(self) -> bool:  # type: ignore[override]
        last = self.last
        if self.refusal or self.pending or self.end_due or last.can_push_back or last.given < len(last.body):
            return True
        if self.over or self.walk is not None or self.has_ended or self.lost:
            return True
        return self.has_next(lambda most: self.selection.find(self.position, most))

    def watch(self, then: Callable[[], None] | None) -> None:
        self.group.fanout.pollers.watch(self, then)

    def _end(self) -> None:
        self.stop_making()
        self.group.fanout.pollers.watch(self, None)
        self.end()
        self.group.fanout.cursors.discard(self)
        self.selection.end()
        self.group.retention.note_change()
        self.group.unblock()
