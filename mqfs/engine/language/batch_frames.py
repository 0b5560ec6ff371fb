"""Frames of `.batch`: `u32 frame bytes · u16 name bytes · u16 header bytes · name · headers · body`.

Numbers are little-endian; the frame bytes count the whole frame. This module checks the frames of clients and packs
them into unsequenced records.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from mqfs import errors, limits
from mqfs.records import batch, headers

HEAD = struct.Struct("<IHH")
_TEXT_BYTES = struct.Struct("<H")
_LOOKED_AT, _LOOKED_AT_BYTES = 64, 4_096  # frames, or their bytes, parsed one by one before bulk is tried again
_NO_ROW = batch.StreamTotal(0, 0, 0, 0)
_EXPECT = headers.key(headers.EXPECT)


class Frame(NamedTuple):
    """One message. `head`: its headers, encoded."""

    name: str
    head: bytes
    body: bytes


class Packing:
    """The packing of the frames of one write into unsequenced records, in portions.

    `known`: the index of each known name; new names get the next indexes. `sender`: the server's own headers, put first
    into the headers of each frame that has any, with `always` of every frame. `admit` is called with each new name as
    soon as it is found, so a refused write is not parsed to its end.
    """

    def __init__(
        self,
        data: bytes,
        known: Mapping[bytes, int],
        sender: bytes,
        always: bool = False,
        admit: Callable[[str], object] = str,
    ) -> None:
        self.data = data
        self._known, self._sender, self._always, self._admit = known, sender, always, admit
        self._began_with = len(known)
        self._more: dict[bytes, int] = {}
        self._fresh: list[str] = []
        self._pieces: list[bytes] = []
        self._rows: dict[int, batch.StreamTotal] = {}
        self._expected: dict[str, int] = {}
        self._at = self._messages = 0
        self._headed = False

    @property
    def outdated(self) -> bool:
        """Whether names were added to `known` since: then the indexes are wrong."""
        return len(self._known) != self._began_with

    def steps(self) -> Iterator[None]:
        """Check and pack, in steps of about a millisecond. Raises BadCommand, TooLong, OverLimit, and as `admit`."""
        while self._at < len(self.data):
            self._add(*(self._in_bulk() or self._one_by_one()))
            yield

    def whole(self) -> batch.EncodedBatch:
        """Pack the rest at once and return all. Raises as `steps`. A short write may be packed without `admit`: its new
        names are in `fresh` for the caller to check."""
        if not self._at and (done := self._in_bulk()) is not None:  # most writes are short
            if done[1] == len(self.data):
                return done[0]
            self._add(*done)
        for _ in self.steps():
            pass
        return batch.EncodedBatch(
            self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces),
            self._messages,
            self._fresh,
            list(self._rows.values()),
            self._headed,
            self._expected,
        )

    def _in_bulk(self) -> tuple[batch.EncodedBatch, int] | None:
        at, stop = self._at, self._at + limits.BATCH_PIECE_BYTES
        return batch.encode_batch(
            self.data, self._known, self._sender, more=self._more, always=self._always, at=at, stop=stop
        )

    def _one_by_one(self) -> tuple[batch.EncodedBatch, int]:
        """Pack some frames, of which the first is unusual or invalid. Returns them and the offset after them."""
        messages, begin = [], self._at
        end = begin
        for name, head, body in islice(parse(self.data, begin, self._messages), _LOOKED_AT):
            end += HEAD.size + len(name.encode()) + len(head) + len(body)
            if _EXPECT in head and headers.EXPECT in (texts := headers.decode(head)):
                merge_expected(self._expected, {name: int(texts.pop(headers.EXPECT))})
                head = headers.encode(texts)
            messages.append((name, self._sender + head if head or self._always else b"", body))
            if end - begin > _LOOKED_AT_BYTES:
                break
        return batch.concatenate(messages, self._known, self._more), end

    def _add(self, done: batch.EncodedBatch, end: int) -> None:
        for name in done.fresh:
            self._admit(name)
            self._more[name.encode()] = self._began_with + len(self._more)
        self._fresh += done.fresh
        self._pieces.append(done.data)
        rows = self._rows
        for place, messages, size, last in done.rows:
            _, before, bytes_before, _ = rows.get(place, _NO_ROW)
            rows[place] = batch.StreamTotal(place, before + messages, bytes_before + size, self._messages + last)
        self._headed = self._headed or done.headed
        self._messages += done.messages
        self._at = end
        if self._messages > limits.UNIT_MESSAGES:
            raise errors.OverLimit(
                f"batch of {self._messages} messages or more (expected at most {limits.UNIT_MESSAGES})"
            )


def parse(data: bytes, at: int = 0, number: int = 0) -> Iterator[Frame]:
    """Yield the frames of one write from offset `at` on, each checked. `number`: of the frames before it, for error
    texts. Raises BadCommand, TooLong."""
    end = len(data)
    known: dict[bytes, str] = {}  # names of earlier frames
    unpack, head_size, most, make = HEAD.unpack_from, HEAD.size, limits.MESSAGE_BYTES, tuple.__new__
    while at < end:
        number += 1
        if end - at > head_size:  # fast path: most frames have no headers and the name of an earlier one
            size, name, head = unpack(data, at)
            body = at + head_size + name
            if not head and size <= end - at and 0 <= at + size - body <= most:
                seen = known.get(data[at + head_size : body])
                if seen is not None:
                    yield make(Frame, (seen, b"", data[body : at + size]))
                    at += size
                    continue
        try:
            size, name, head = _measure(data, at)
            start = at + HEAD.size
            text = data[start : start + name].decode()
            if head:
                check_headers(data[start + name : start + name + head])
        except UnicodeDecodeError:
            raise errors.BadCommand(f"frame {number}: invalid bytes in name or header (expected UTF-8)") from None
        except errors.MqfsError as error:
            raise type(error)(f"frame {number}: {error.detail}") from None
        known[data[start : start + name]] = text
        body = start + name + head
        yield Frame(text, data[start + name : body], data[body : at + size])
        at += size


def _measure(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the (frame, name, header) bytes of the frame at an offset, checked. Raises BadCommand, TooLong."""
    left = len(data) - at
    if left < HEAD.size:
        raise errors.BadCommand(
            f"{left} bytes left (expected at least {HEAD.size}: u32 frame, u16 name, u16 header bytes)"
        )
    size, name, head = HEAD.unpack_from(data, at)
    if size > left:
        raise errors.BadCommand(f"size {size} exceeds the {left} bytes of the write (expected whole frames)")
    body = size - HEAD.size - name - head
    if body < 0:
        raise errors.BadCommand(
            f"size {size} is less than its name and headers (expected at least {HEAD.size + name + head})"
        )
    if not name:
        raise errors.BadCommand("no name (expected that of a stream)")
    if body > limits.MESSAGE_BYTES:
        raise errors.TooLong(f"message of {body} bytes (expected at most {limits.MESSAGE_BYTES})")
    return size, name, head


def check_headers(data: bytes) -> None:
    """Check a table of encoded headers from a client. Raises BadCommand, UnicodeDecodeError."""
    if len(data) > limits.HEADER_BYTES:
        raise errors.BadCommand(f"headers of {len(data)} bytes (expected at most {limits.HEADER_BYTES})")
    at, end = 0, len(data)
    seen = set()
    while at < end:
        value = at + 1 + data[at]
        if value + 2 > end or (stop := value + 2 + _TEXT_BYTES.unpack_from(data, value)[0]) > end:
            raise errors.BadCommand("incomplete header (expected u8 key bytes, key, u16 value bytes, value)")
        key = data[at + 1 : value].decode()
        text = data[value + 2 : stop].decode()
        check_value(key, text)
        if key == headers.EXPECT and not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 1 << 63):
            raise errors.BadCommand(f"header 'expect': {text[:40]!r} (expected the sequence of a message, or 0)")
        if not key or key in seen:
            raise errors.BadCommand(f"header {key!r}: given twice" if key else "header without a name")
        if key in headers.RESERVED and key != headers.EXPECT:
            raise errors.BadCommand(f"header {key!r}: set by the server (expected another name)")
        seen.add(key)
        at = stop


def merge_expected(all_expected: dict[str, int], more: Mapping[str, int]) -> None:
    """Add `expect` conditions, by stream. Raises BadCommand if a stream gets two different ones."""
    for name, sequence in more.items():
        if all_expected.setdefault(name, sequence) != sequence:
            raise errors.BadCommand(f"expect: {all_expected[name]} and {sequence} of stream {name!r} (expected one)")


def check_value(key: str, text: str) -> None:
    """Check the value of a client's header that has a meaning to the server: `part`, `key`. Raises BadCommand."""
    if key == headers.KEY and not 0 < len(text.encode()) <= limits.KEY_BYTES:
        raise errors.BadCommand(f"header 'key': {len(text.encode())} bytes (expected 1 to {limits.KEY_BYTES})")
    if key == headers.PART and headers.parse_part(text) == (0, 0):
        raise errors.BadCommand(f"header 'part': invalid place {text[:40]!r} (expected a number, such as 3 or 17/17)")
