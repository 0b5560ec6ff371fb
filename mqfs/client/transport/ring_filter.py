"""The messages of a ring's records that a subscription selects.

Owns the names of streams, by number. Reads no ring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from mqfs.client.message import Message
from mqfs.client.transport.ring_attachment import Attached
from mqfs.errors import BadCommand, BadRing
from mqfs.log import headers
from mqfs.model import Kind, Record
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.patterns import Words, compile_pattern, has_wildcard

_MESSAGE = int(Kind.MESSAGE)
_headers_of = itemgetter(Record._fields.index("headers"))
_new = tuple.__new__  # a Message of a tuple, at a third of the cost of its own

RingRecord = tuple[int, int, int, int, int, bytes, bytes]  # sequence, time, stream, kind, flags, headers, body


class NotInRing(Exception):
    """Only a cursor can read what is asked for."""


class _Names(dict[int, str | None]):
    """The names of selected streams, by number; None: not selected, or unknown."""

    def __init__(self, ask: Callable[[int], str | None], selects: Callable[[str], bool]) -> None:
        self._ask, self._selects = ask, selects

    def __missing__(self, number: int) -> str | None:
        name = self._ask(number)
        selected = self[number] = name if name is not None and self._selects(name) else None
        return selected


class RingFilter:
    """Streams and patterns over one generation of a ring at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: streams and patterns; none: everything."""
        self._selected = names

    def attach(self, at: Attached) -> None:
        """Take numbers of streams from that generation. Raises BadRing for what is no pattern in its group."""
        self._names, self._ttl_ns = _Names(at.name, _selector(self._selected, at.words)), at.ttl_ns

    def messages(self, records: Sequence[RingRecord]) -> list[Message]:
        """Raises Disconnected where a name could not be asked for."""
        if self._ttl_ns or any(map(_headers_of, records)):
            return self._with_headers(records)
        names = self._names
        return [
            _new(Message, (sequence, name, time_ns, body, {}))
            for sequence, time_ns, stream, kind, _, _, body in records
            if (name := names[stream]) is not None and kind == _MESSAGE
        ]

    def _with_headers(self, records: Iterable[RingRecord]) -> list[Message]:
        """Of records that may have expired or be for one receiver only."""
        messages = []
        for sequence, time_ns, stream, kind, _, head, body in records:
            name = self._names[stream] if kind == _MESSAGE else None
            if name is None:
                continue
            more = headers.decode(head) if head else {}
            ttl_ns = parse_duration(more[headers.TTL]) if headers.TTL in more else self._ttl_ns
            if ttl_ns and time_ns + ttl_ns <= time.time_ns():
                continue
            if headers.SINGLE not in more:
                messages.append(Message(sequence, name, time_ns, body, more))
        return messages


def _selector(names: Sequence[str], words: Words) -> Callable[[str], bool]:
    if not names:
        return lambda name: True
    try:
        matches = [compile_pattern(name, words) for name in names if has_wildcard(name, words)]
    except BadCommand as error:
        raise BadRing(str(error)) from None
    plain = frozenset(name for name in names if not has_wildcard(name, words))
    return lambda name: name in plain or any(match(name) for match in matches)


__all__ = ["NotInRing", "RingFilter", "RingRecord"]
