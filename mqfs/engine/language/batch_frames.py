"""`.batch` and what a part is made of: `u32 frame bytes · u16 name bytes · u16 header bytes · name · headers · body`.

Owns that layout, little-endian, and the checking of what a client sends in it. The frame bytes count the whole frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mqfs import errors, limits
from mqfs.log import batch, headers

HEAD = struct.Struct("<IHH")
_TEXT_BYTES = struct.Struct("<H")


class Frame(NamedTuple):
    """One message. `head`: its headers, encoded."""

    name: str
    head: bytes
    body: bytes


def packed(data: bytes, known: Mapping[bytes, int], sender: bytes, always: bool = False) -> batch.EncodedBatch:
    """The frames of one write as blanks, each checked; `known`: the places of names. Headers begin with the server's
    own; a frame without headers is a plain message, without a sender unless `always`. Raises BadCommand, TooLong."""
    done = batch.encode_batch(data, known, sender) if not always else None
    if done is not None:
        return done
    frames = parse(data)  # tells what is wrong, if anything is
    return batch.concatenate(((f.name, sender + f.head if f.head or always else b"", f.body) for f in frames), known)


def count(data: bytes) -> int:
    """The frames of one write, unchecked."""
    at = frames = 0
    while at + HEAD.size <= len(data) and (size := HEAD.unpack_from(data, at)[0]) >= HEAD.size:
        at, frames = at + size, frames + 1
    return frames


def parse(data: bytes) -> Iterator[Frame]:
    """The frames of one write, each checked. Raises BadCommand, TooLong."""
    at, number, end = 0, 0, len(data)
    known: dict[bytes, str] = {}  # names that came before
    unpack, head_size, most, make = HEAD.unpack_from, HEAD.size, limits.MESSAGE_BYTES, tuple.__new__
    while at < end:
        number += 1
        if end - at > head_size:  # most have no headers and a name that came before: a shorter way
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
            raise errors.BadCommand(f"frame {number}: names and headers are valid UTF-8") from None
        except errors.MqfsError as error:
            raise type(error)(f"frame {number}: {error.detail}") from None
        known[data[start : start + name]] = text
        body = start + name + head
        yield Frame(text, data[start + name : body], data[body : at + size])
        at += size


def _measure(data: bytes, at: int) -> tuple[int, int, int]:
    """(frame, name, header) bytes of the frame there."""
    left = len(data) - at
    if left < HEAD.size:
        raise errors.BadCommand(f"a frame begins with {HEAD.size} bytes: u32 frame, u16 name, u16 header bytes")
    size, name, head = HEAD.unpack_from(data, at)
    if size > left:
        raise errors.BadCommand(f"it says {size} bytes and {left} are there; a write is whole frames")
    body = size - HEAD.size - name - head
    if body < 0:
        raise errors.BadCommand(
            f"it says {size} bytes, of them {name} of the name and {head} of the headers; with its own {HEAD.size} "
            "fewer than none are left for the body"
        )
    if not name:
        raise errors.BadCommand("the name is empty (expected the name of a stream)")
    if body > limits.MESSAGE_BYTES:
        raise errors.TooLong(f"{body} bytes; a message has at most {limits.MESSAGE_BYTES}")
    return size, name, head


def check_headers(data: bytes) -> None:
    """Raises BadCommand where it is no whole table of headers that a client may set, UnicodeDecodeError."""
    if len(data) > limits.HEADER_BYTES:
        raise errors.BadCommand(f"at most {limits.HEADER_BYTES} bytes of headers")
    at, end = 0, len(data)
    seen = set()
    while at < end:
        value = at + 1 + data[at]
        if value + 2 > end or (stop := value + 2 + _TEXT_BYTES.unpack_from(data, value)[0]) > end:
            raise errors.BadCommand("headers are u8 key bytes, key, u16 value bytes, value; the last one is not whole")
        key = data[at + 1 : value].decode()
        check_part(key, data[value + 2 : stop].decode())
        if not key or key in seen:
            raise errors.BadCommand(f"the header {key!r} comes twice" if key else "a header has a name")
        if key in headers.RESERVED:
            raise errors.BadCommand(f"the header {key!r} is set by the server")
        seen.add(key)
        at = stop


def check_part(key: str, text: str) -> None:
    """Raises BadCommand where a header is `part` and no place in a body."""
    if key == headers.PART and headers.parse_part(text) == (0, 0):
        raise errors.BadCommand(f"bad header 'part': {text[:40]!r} (expected a place, such as 3 or 17/17)")
