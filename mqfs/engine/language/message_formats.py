"""Formats of the messages of cursors and consumers: `format raw|line|nul|each|json|record`, and `info`.

mqfs(4), "Cursors", describes them. This module only encodes: it reads no log and moves no reader.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import lru_cache

from mqfs import errors, limits
from mqfs.model import Record
from mqfs.records import headers
from mqfs.records.record import encode, encode_names
from mqfs.syntax.duration import parse_duration, parse_number
from mqfs.syntax.names import one_line

FORMATS = ("raw", "line", "nul", "each", "json", "record")


def parse_seek(word: str) -> tuple[str, int]:
    """Parse the word after `seek` into (kind, value); times in ns. Raises BadCommand."""
    if word in ("first", "last", "end"):
        return word, 0
    try:
        if word.startswith("@"):
            whole, _, part = word[1:].partition(".")
            return "time", parse_number(whole) * 10**9 + (parse_number(part.ljust(9, "0")[:9]) if part else 0)
        if word.startswith("-") and word[1:].isdigit():
            return "back", parse_number(word[1:])
        if word.startswith("-"):
            return "ago", parse_duration(word[1:])
        return "sequence", parse_number(word)
    except errors.BadCommand:
        raise errors.BadCommand(
            f"seek {word!r}: unknown position (expected first, last, end, a sequence, @UNIXTIME, -N messages or -10m)"
        ) from None


def shape(form: str, record: Record, name: str, deliveries: int = 0) -> bytes:
    """Encode one message in any format but `record`. `deliveries`: the number of its deliveries; 0: not counted."""
    body = record.body
    if form == "line":
        return body if body.endswith(b"\n") else body + b"\n"
    if form == "nul":
        return body + b"\0"
    if form == "json":
        return as_json(record, name, deliveries)
    return body


def as_json(record: Record, name: str, deliveries: int = 0) -> bytes:
    """Encode one message as an object and a newline: with `body`, or `body_base64` if it is not UTF-8."""
    size = len(record.body) + len(record.headers)
    shared = size <= limits.SHARED_JSON_BYTES  # cached, as all readers of a stream get the same
    return (_shared_json if shared else _json)(record, name, deliveries)


def _json(record: Record, name: str, deliveries: int) -> bytes:
    try:
        key, body = "body", json.dumps(record.body.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        key, body = "body_base64", json.dumps(base64.b64encode(record.body).decode())
    stream = json.dumps(name, ensure_ascii=False)
    more = f',"deliveries":{deliveries}' if deliveries else ""
    if record.headers:
        more += f',"headers":{json.dumps(headers.decode(record.headers), ensure_ascii=False)}'
    return (
        f'{{"sequence":{record.sequence},"stream":{stream},"time":{seconds(record.time_ns)}{more},"{key}":{body}}}\n'
    ).encode()


_shared_json = lru_cache(limits.SHARED_JSON)(_json)


def describe(record: Record, name: str, deliveries: int = 0) -> bytes:
    """Encode the answer to `info`: lines of `key value`, and an empty line."""
    lines = [f"sequence {record.sequence}", f"stream {one_line(name)}", f"time {seconds(record.time_ns)}"]
    if deliveries:
        lines.append(f"deliveries {deliveries}")
    for key, value in headers.decode(record.headers).items():
        lines.append(f"{_one_line(key)} {_one_line(value)}")
    return ("\n".join(lines) + "\n\n").encode()


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def seconds(time_ns: int) -> str:
    """Print a time as UNIX seconds with nine decimals."""
    return f"{time_ns // 10**9}.{time_ns % 10**9:09d}"


class SentNames:
    """The stream names that a reader with `format record` has got."""

    def __init__(self) -> None:
        self._sent: dict[int, str] = {}

    def give(self, record: Record, name: str) -> bytes:
        """Encode a record as `wrap` does, and remember the name as sent."""
        data = self.wrap(record, name)
        self._sent[record.stream] = name
        return data

    def wrap(self, record: Record, name: str) -> bytes:
        """Encode a record, after a NAMES record if the reader does not have the stream's name."""
        if self._sent.get(record.stream) == name:
            return encode(*record)
        return self.news(record.sequence, record.time_ns, {record.stream: name}) + encode(*record)

    def news(self, sequence: int, time_ns: int, names: Mapping[int, str]) -> bytes:
        """Encode a NAMES record of the names that the reader does not have; empty if it has all."""
        if len(self._sent) >= limits.NAMES_SENT:  # perhaps most are of removed streams
            self._sent = {}
        news = {number: name for number, name in names.items() if self._sent.get(number) != name}
        return encode_names(sequence, time_ns, news) if news else b""

    def given(self, names: Mapping[int, str]) -> None:
        """Remember names as sent."""
        self._sent.update(names)
