"""The names of qlobber-fsq: `TOPIC@(l|s)+EXPIRES+(s|m|d)+UNIQUE`, and of the streams that its topics become.

Touches no file. A long topic is split: its beginning is in the name, the rest in a file of its own.
"""

from __future__ import annotations

import hashlib
import re
import struct

import attrs

from mqfs import limits
from mqfs.errors import BadRequest
from mqfs.records import headers
from mqfs.syntax.escape import stream_name, text_of

SINGLE, MULTI, DIRECT = "s", "m", "d"
UNIQUE_BYTES = 16
TOPIC_HEADER = headers.TOPIC
_NAME = re.compile(
    r"(?P<topic>.*)@(?P<long>[ls])\+(?P<expires>[0-9a-f]{1,16})\+(?P<kind>[smd])\+(?P<unique>[^+@/]+)", re.S
)
_CUT = re.compile("[\ud800-\udfff]")  # of bytes that are not UTF-8
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
_NUMBER = struct.Struct(">Q")


@attrs.frozen
class Name:
    """The name of a message's file. `topic`: as it is in the name, and where `long` only its beginning."""

    topic: str
    long: bool
    expires_ms: int
    kind: str
    unique: str

    def __str__(self) -> str:
        return f"{self.topic}@{'l' if self.long else 's'}+{self.expires_ms:x}+{self.kind}+{self.unique}"


def parse(text: str) -> Name | None:
    """The name of a file; None: it is no message of qlobber-fsq."""
    match = _NAME.fullmatch(text)
    if match is None or _CUT.search(text):
        return None
    return Name(match["topic"], match["long"] == "l", int(match["expires"], 16), match["kind"], match["unique"])


def id_of(text: str) -> str:
    """A short text of its own for the message of that file: UNIQUE, where that is long enough."""
    unique = text.rpartition("+")[2]
    return unique if len(unique) >= UNIQUE_BYTES else hashlib.sha256(text.encode()).hexdigest()


def bucket_number(name: str, buckets: int) -> int:
    """The bucket in which a writer puts the file of that name."""
    digest = hashlib.md5(name.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big") % buckets


@attrs.frozen
class Origin:
    """A group, from which a bridge writes files. A file of its messages has the same name whoever writes it."""

    store: str
    group: int

    def unique(self, sequence: int) -> str:
        """The sequence and a digest, by which the file is known again."""
        number = _NUMBER.pack(sequence)
        text = f"{self.store}/{self.group}/{sequence}".encode()
        return (number + hashlib.sha256(text).digest()[: UNIQUE_BYTES - len(number)]).hex()

    def wrote(self, name: Name) -> bool:
        """Whether a bridge of this group made the name."""
        digits = 2 * _NUMBER.size
        if len(name.unique) != 2 * UNIQUE_BYTES or not _HEX.fullmatch(name.unique):
            return False
        return name.unique == self.unique(int(name.unique[:digits], 16))


@attrs.frozen
class Topics:
    """The notation of topics in names and in streams.

    `encoded`: hexadecimal in names; else as they are. `split_at`: characters of a name before the rest is in a file.
    `theirs`, `ours`: the separators of topics and of streams; a character that is the other's separator changes places
    with it.
    """

    encoded: bool = True
    split_at: int = 200
    theirs: str = "."
    ours: str = "."

    def name(self, topic: str, kind: str, expires_ms: int, unique: str) -> tuple[Name, str]:
        """A message's name, and what of its topic is in the other file. Raises BadRequest where it is not possible."""
        text = topic.encode().hex() if self.encoded else topic
        name = Name(text[: self.split_at], len(text) > self.split_at, expires_ms, kind, unique)
        if "/" in text or "\0" in text or len(str(name).encode()) > limits.NAME_BYTES:
            raise BadRequest(f"topic {topic[:80]!r}: not the name of a file (expected encoded topics)")
        return name, text[self.split_at :]

    def topic(self, name: Name, rest: str) -> str:
        """The topic of a message. Raises BadRequest where it is not written as is expected."""
        text = name.topic + rest
        if not self.encoded:
            return text
        if not _HEX.fullmatch(text):
            raise BadRequest(f"topic {text[:80]!r}: not hexadecimal (expected --raw-topics)")
        return bytes.fromhex(text).decode(errors="replace")

    def stream(self, topic: str) -> str:
        """The stream of a topic. One whose name is too long is shortened; the header `fsq-topic` has all of it."""
        return stream_name(self._swap(topic))

    def topic_of(self, stream: str, header: str | None) -> str:
        """The topic of a stream's message; `header`: its `fsq-topic`."""
        if header is not None and self.stream(header) == stream:
            return header
        if header is not None and stream_name(header) == stream:  # the library's, with our separators
            return self._swap(header)
        return self._swap(text_of(stream).decode(errors="replace"))

    def _swap(self, text: str) -> str:
        if self.theirs == self.ours:
            return text
        return text.translate({ord(self.theirs): self.ours, ord(self.ours): self.theirs})
