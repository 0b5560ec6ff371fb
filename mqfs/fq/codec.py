"""The wire protocol of fq, without I/O: bytes to commands and messages, and back. Numbers are big-endian.

Its layout and its bounds are here. The first four bytes of a connection are its kind.
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
FLAG_PEER, FLAG_TRANSIENT, FLAG_PERMANENT = 0x0001, 0x0100, 0x0110  # of a bind
ILLEGAL = 0xFFFFFFFF  # the route of a program that is none
NAME_BYTES = 127  # of users, exchanges, routes, senders, keys
QUEUE_BYTES, PASSWORD_BYTES = 1_023, 10_240
ID_BYTES = 16
HOP_BYTES = 4
CONFIRM = b"mqfs.confirm"  # the exchange to which a peer acks: how many messages of this connection are safe there

_SHORT, _LONG = struct.Struct(">H"), struct.Struct(">I")
_AUTH, _AUTHENTICATED, _ERROR = 0xAAAA, b"\xaa\x00", b"\xee\xee"
_BEAT, _BEAT_REQUEST, _BIND, _UNBIND, _STATUS = 0xBEA7, 0x4848, 0xB170, 0x071B, 0xC7A7
_BOUND, _UNBOUND, _COUNTS = b"\xb1\x71", b"\x17\x1b", b"\x57\xa7"


class Malformed(Exception):
    """Bytes that break the protocol: they end their connection."""


# ---------------------------------------------------------------- commands


class Auth(NamedTuple):
    user: bytes
    queue: bytes  # its name
    kind: bytes  # its type, and after a colon its parameters
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
    """A sign that the other side lives."""


class Status(NamedTuple):
    """A question for the client's counters."""


Command = Auth | Bind | Unbind | BeatRequest | Beat | Status


class _Incomplete(Exception):
    """More bytes are needed."""


class _Reader:
    """Reads some bytes from their beginning."""

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
    """The commands of one connection, after its first four bytes. The first is Auth, and no other is."""

    def __init__(self) -> None:
        self._reader = _Reader(b"")
        self._known = False

    @property
    def held(self) -> int:
        """Bytes of commands that are not performed yet."""
        return len(self._reader.data) - self._reader.at

    def receive(self, data: bytes) -> Iterator[Command]:
        """The commands that are complete by now, each made as it is asked for: there may be as many as bytes. Raises
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
    """The answer to Auth, and a beat: clients expect one unasked, after the answer and in the same segment."""
    return _AUTHENTICATED + _text(key) + BEAT


def refused(why: str) -> bytes:
    """The answer to what ends the connection."""
    return _ERROR + _text(why.encode()[: limits.ERROR_BYTES])


def bound(route: int) -> bytes:
    return _BOUND + _LONG.pack(route)


def unbound(route: int) -> bytes:
    return _UNBOUND + _LONG.pack(route)


def counts(values: Iterable[tuple[str, int]]) -> bytes:
    """The answer to Status. Counters wrap to 0 after a u32."""
    parts = [_text(name.encode()) + _LONG.pack(value & 0xFFFFFFFF) for name, value in values]
    return _COUNTS + b"".join(parts) + _SHORT.pack(0)


# ---------------------------------------------------------------- messages


class Message(NamedTuple):
    """`sender` and `hops` only where a broker or a peer sends it. Each hop is an IPv4 address."""

    exchange: bytes
    route: bytes
    id: bytes
    payload: bytes
    sender: bytes = b""
    hops: bytes = b""


class MessageParser:
    """The messages of one data connection, after its key. A payload that is too large is skipped and counted.

    `relayed`: they come from a broker or a peer, with sender and hops.
    """

    def __init__(self, *, relayed: bool) -> None:
        self.too_large = 0
        self.malformed: Malformed | None = None  # what came after the messages that were found
        self._relayed = relayed
        self._rest = bytearray()
        self._needed = 0  # bytes of the next message, as far as is known
        self._skip = 0  # bytes of a payload that is read past

    @property
    def held(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._rest)

    def receive(self, data: bytes) -> list[Message]:
        """The messages that are complete by now, those too that came before malformed bytes. Raises Malformed where
        these come first, and at each call after that."""
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
        """Add the message there, if it is complete. Returns where it ends, beyond the data if the rest is to be read
        past; 0: it is not complete. Raises Malformed."""
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
    """An exchange, a route or a sender, with its size before it."""
    return bytes([len(text)]) + text


def hop_list(hops: bytes) -> bytes:
    return bytes([len(hops) // HOP_BYTES]) + hops


def payload(data: bytes) -> bytes:
    return _LONG.pack(len(data)) + data


def relayed(message: Message) -> bytes:
    """A message as a broker, or a peer, sends it."""
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


# ---------------------------------------------------------------- what clients send


def published(message: Message) -> bytes:
    """A message as a client sends it."""
    return name(message.exchange) + name(message.route) + message.id + payload(message.payload)


def auth(user: bytes, queue: bytes, kind: bytes, password: bytes) -> bytes:
    """The first command, with the bytes before it."""
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
    """The beginning of a data connection; with the address of a node that of a peer."""
    return (PEER + node if node else DATA) + _text(key)


class Answer(NamedTuple):
    """`kind`: "key", "error", "beat", "bound", "unbound" or "counts"."""

    kind: str
    text: bytes = b""
    route: int = 0
    counts: tuple[tuple[bytes, int], ...] = ()


class AnswerParser:
    """The answers of a broker on a connection for commands."""

    def __init__(self) -> None:
        self._rest = b""

    def receive(self, data: bytes) -> list[Answer]:
        """Raises Malformed."""
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
