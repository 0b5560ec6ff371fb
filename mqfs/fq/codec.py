"""The wire protocol of fq, without I/O: bytes to commands and messages, and back. Numbers are big-endian.

This module has the layout and the bounds of the protocol. The first four bytes of a connection are its kind.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mqfs import limits

COMMANDS, DATA, PEER, OLD_PEER = b"\xcc\x50\xca\xfe", b"\xcc\x50\xfa\xce", b"\xcc\x50\xfe\xed", b"\xcc\x50\xfa\xde"
HTTP = (b"GET ", b"PUT ", b"POST", b"HEAD")
MAGIC_BYTES = 4
BEAT = b"\xbe\xa7"
FLAG_PEER, FLAG_TRANSIENT, FLAG_PERMANENT = 0x0001, 0x0100, 0x0110  # flags of a bind
ILLEGAL = 0xFFFFFFFF  # the route in the answer to a refused bind or unbind
NAME_BYTES = 127  # users, exchanges, routes, senders, keys
QUEUE_BYTES, PASSWORD_BYTES = 1_023, 10_240
ID_BYTES = 16
HOP_BYTES = 4
CONFIRM = b"mqfs.confirm"  # the exchange of a peer's acks: the payload is how many messages of this connection are safe

_SHORT, _LONG = struct.Struct(">H"), struct.Struct(">I")
_AUTH, _AUTHENTICATED, _ERROR = 0xAAAA, b"\xaa\x00", b"\xee\xee"
_BEAT, _BEAT_REQUEST, _BIND, _UNBIND, _STATUS = 0xBEA7, 0x4848, 0xB170, 0x071B, 0xC7A7
_BOUND, _UNBOUND, _COUNTS = b"\xb1\x71", b"\x17\x1b", b"\x57\xa7"


class Malformed(Exception):
    """A violation of the protocol; it ends the connection."""


# ---------------------------------------------------------------- commands


class Auth(NamedTuple):
    user: bytes
    queue: bytes  # the queue's name
    kind: bytes  # the queue's type, and after a colon its parameters
    password: bytes


class Bind(NamedTuple):
    flags: int
    exchange: bytes
    program: bytes


class Unbind(NamedTuple):
    route: int
    exchange: bytes


class BeatRequest(NamedTuple):
    period_ms: int


class Beat(NamedTuple):
    """A heartbeat of the other side."""


class Status(NamedTuple):
    """A request for the client's counters."""


Command = Auth | Bind | Unbind | BeatRequest | Beat | Status


class _Incomplete(Exception):
    """The end of the data inside of a command or answer."""


class _Reader:
    """A reader of bytes from their beginning."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise _Incomplete
        part, self.at = self.data[self.at : end], end
        return part

    def short(self) -> int:
        return int(_SHORT.unpack(self.take(2))[0])

    def long(self) -> int:
        return int(_LONG.unpack(self.take(4))[0])

    def text(self, most: int, what: str) -> bytes:
        size = self.short()
        if size > most:
            raise Malformed(f"{what} of {size} bytes (expected at most {most})")
        return self.take(size)


class CommandParser:
    """A parser of the commands of one connection, after its first four bytes. Only the first command is Auth."""

    def __init__(self) -> None:
        self._reader = _Reader(b"")
        self._known = False

    @property
    def held(self) -> int:
        """Bytes of commands that are not parsed yet."""
        return len(self._reader.data) - self._reader.at

    def receive(self, data: bytes) -> Iterator[Command]:
        """Yield the complete commands, each parsed on demand, as there may be nearly as many as bytes. Raises
        Malformed."""
        self._reader = reader = _Reader(self._reader.data[self._reader.at :] + data)
        while reader.at < len(reader.data):
            begin = reader.at
            try:
                command = self._next(reader)
            except _Incomplete:
                reader.at = begin
                return
            if command is not None:
                yield command

    def _next(self, reader: _Reader) -> Command | None:
        code = reader.short()
        if not self._known:
            if code != _AUTH or reader.short() != 0:
                raise Malformed("a command before authentication")
            command = self._auth(reader)
            self._known = True
            return command
        if code == 0:  # the npm client sends one after each request for counters
            return None
        if code == _BEAT:
            return Beat()
        if code == _BEAT_REQUEST:
            return BeatRequest(reader.short())
        if code == _BIND:
            flags, exchange = reader.short(), reader.text(NAME_BYTES, "an exchange")
            return Bind(flags, exchange, reader.text(limits.PROGRAM_BYTES, "a program"))
        if code == _UNBIND:
            return Unbind(reader.long(), reader.text(NAME_BYTES, "an exchange"))
        if code == _STATUS:
            return Status()
        raise Malformed(f"unknown command {code:04x}")

    def _auth(self, reader: _Reader) -> Auth:
        user = reader.text(NAME_BYTES, "a user")
        queue, _, kind = reader.text(QUEUE_BYTES, "a queue").partition(b"\0")
        return Auth(user, queue, kind, reader.text(PASSWORD_BYTES, "a password"))


def _text(data: bytes) -> bytes:
    return _SHORT.pack(len(data)) + data


def authenticated(key: bytes) -> bytes:
    """Encode the answer to Auth with a heartbeat, which clients expect unasked, in the same segment."""
    return _AUTHENTICATED + _text(key) + BEAT


def refused(why: str) -> bytes:
    """Encode the error that precedes the end of a connection."""
    return _ERROR + _text(why.encode()[: limits.ERROR_BYTES])


def bound(route: int) -> bytes:
    return _BOUND + _LONG.pack(route)


def unbound(route: int) -> bytes:
    return _UNBOUND + _LONG.pack(route)


def counts(values: Iterable[tuple[str, int]]) -> bytes:
    """Encode the answer to Status. Counters wrap to 0 after a u32."""
    parts = [_text(name.encode()) + _LONG.pack(value & 0xFFFFFFFF) for name, value in values]
    return _COUNTS + b"".join(parts) + _SHORT.pack(0)


# ---------------------------------------------------------------- messages


class Message(NamedTuple):
    """A message. `sender` and `hops` are set only if a broker or a peer sends it. Each hop is an IPv4 address."""

    exchange: bytes
    route: bytes
    id: bytes
    payload: bytes
    sender: bytes = b""
    hops: bytes = b""


class MessageParser:
    """A parser of the messages of one data connection, after its key. Too large messages are skipped and counted.

    `relayed`: the messages come from a broker or a peer, with sender and hops.
    """

    def __init__(self, *, relayed: bool) -> None:
        self.too_large = 0
        self.malformed: Malformed | None = None  # set if malformed bytes followed the last messages
        self._relayed = relayed
        self._rest = bytearray()
        self._needed = 0  # bytes of the next message; 0: not known yet
        self._skip = 0  # remaining bytes of a payload to skip

    @property
    def held(self) -> int:
        """Bytes of an incomplete message."""
        return len(self._rest)

    def receive(self, data: bytes) -> list[Message]:
        """Return the complete messages, also those before malformed bytes. Raises Malformed if there are none before
        these, and at each later call."""
        if self.malformed is not None:
            raise self.malformed
        if self._skip:
            passed = min(self._skip, len(data))
            self._skip -= passed
            data = data[passed:]
        found: list[Message] = []
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return found
            data = bytes(self._rest)
        at, end = 0, len(data)
        try:
            while at < end and (stop := self._next(data, at, found)):
                if stop > end:
                    self._skip = stop - end
                    stop = end
                at = stop
        except Malformed as error:
            self.malformed = error
            if not found:
                raise
        self._rest = bytearray(data[at:])
        return found

    def _next(self, data: bytes, at: int, found: list[Message]) -> int:
        """Add the message at an offset to `found`, if it is complete, and return its end; 0: it is incomplete. An end
        beyond the data is that of a message to skip. Raises Malformed."""
        end = len(data)
        route = at + 1 + _size(data, at, "an exchange")
        if route >= end:
            return 0
        id = route + 1 + _size(data, route, "a route", 0)
        size = id + ID_BYTES
        sender = hops = b""
        if self._relayed:
            if size >= end:
                return 0
            first = size + 1 + _size(data, size, "a sender", 0)
            if first >= end:
                return 0
            if data[first] > limits.FQ_HOPS:
                raise Malformed(f"{data[first]} hops (expected at most {limits.FQ_HOPS})")
            sender, size = data[size + 1 : first], first + 1 + HOP_BYTES * data[first]
            hops = data[first + 1 : size]
        body = size + 4
        if body > end:
            return 0
        stop = int(body + _LONG.unpack_from(data, size)[0])
        if stop - body > limits.MESSAGE_BYTES:
            self.too_large += 1
            return stop
        if stop > end:
            self._needed = stop - at
            return 0
        self._needed = 0
        head = data[at + 1 : route], data[route + 1 : id], data[id : id + ID_BYTES]
        found.append(Message(*head, data[body:stop], sender, hops))
        return stop


def _size(data: bytes, at: int, what: str, least: int = 1) -> int:
    size = data[at]
    if not least <= size <= NAME_BYTES:
        raise Malformed(f"{what} of {size} bytes (expected {least} to {NAME_BYTES})")
    return size


def name(text: bytes) -> bytes:
    """Encode an exchange, a route or a sender: its size and its bytes."""
    return bytes([len(text)]) + text


def hop_list(hops: bytes) -> bytes:
    return bytes([len(hops) // HOP_BYTES]) + hops


def payload(data: bytes) -> bytes:
    return _LONG.pack(len(data)) + data


def relayed(message: Message) -> bytes:
    """Encode a message as a broker or a peer sends it."""
    return b"".join(
        (
            name(message.exchange),
            name(message.route),
            message.id,
            name(message.sender),
            hop_list(message.hops),
            payload(message.payload),
        )
    )


# ---------------------------------------------------------------- encoding for clients


def published(message: Message) -> bytes:
    """Encode a message as a client sends it."""
    return name(message.exchange) + name(message.route) + message.id + payload(message.payload)


def auth(user: bytes, queue: bytes, kind: bytes, password: bytes) -> bytes:
    """Encode the beginning of a command connection: its kind, and Auth."""
    head = COMMANDS + _SHORT.pack(_AUTH) + _SHORT.pack(0)
    return head + _text(user) + _text(queue + b"\0" + kind) + _text(password)


def bind(flags: int, exchange: bytes, program: bytes) -> bytes:
    return _SHORT.pack(_BIND) + _SHORT.pack(flags) + _text(exchange) + _text(program)


def unbind(route: int, exchange: bytes) -> bytes:
    return _SHORT.pack(_UNBIND) + _LONG.pack(route) + _text(exchange)


def beat_request(period_ms: int) -> bytes:
    return _SHORT.pack(_BEAT_REQUEST) + _SHORT.pack(period_ms)


def status() -> bytes:
    return _SHORT.pack(_STATUS)


def data(key: bytes, node: bytes = b"") -> bytes:
    """Encode the beginning of a data connection; with the address of a node that of a peer."""
    return (PEER + node if node else DATA) + _text(key)


class Answer(NamedTuple):
    """An answer of a broker. `kind`: "key", "error", "beat", "bound", "unbound" or "counts"."""

    kind: str
    text: bytes = b""
    route: int = 0
    counts: tuple[tuple[bytes, int], ...] = ()


class AnswerParser:
    """A parser of a broker's answers on a command connection."""

    def __init__(self) -> None:
        self._rest = b""

    def receive(self, data: bytes) -> list[Answer]:
        """Return the complete answers. Raises Malformed."""
        reader = _Reader(self._rest + data)
        found: list[Answer] = []
        while reader.at < len(reader.data):
            begin = reader.at
            try:
                found.append(_answer(reader))
            except _Incomplete:
                reader.at = begin
                break
        self._rest = reader.data[reader.at :]
        return found


def _answer(reader: _Reader) -> Answer:
    code = reader.take(2)
    if code == BEAT:
        return Answer("beat")
    if code == _AUTHENTICATED:
        return Answer("key", reader.text(NAME_BYTES, "a key"))
    if code == _ERROR:
        return Answer("error", reader.take(reader.short()))
    if code == _BOUND:
        return Answer("bound", route=reader.long())
    if code == _UNBOUND:
        return Answer("unbound", route=reader.long())
    if code != _COUNTS:
        raise Malformed(f"unknown answer {code.hex()}")
    values = []
    while text := reader.take(reader.short()):
        values.append((text, reader.long()))
    return Answer("counts", counts=tuple(values))
