"""The wire: what is written is read back, in whatever pieces it comes; what is malformed is refused at no cost."""

from __future__ import annotations

import itertools
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs import limits
from mqfs.fq import codec
from mqfs.fq.codec import AnswerParser, CommandParser, Malformed, Message, MessageParser

names = st.binary(min_size=1, max_size=127)
hops = st.integers(0, 32).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n))
messages = st.builds(
    Message,
    names,
    st.binary(max_size=127),
    st.binary(min_size=16, max_size=16),
    st.binary(max_size=300),
    st.just(b""),
    st.just(b""),
)
relayed = st.builds(
    Message, names, st.binary(max_size=127), st.binary(min_size=16, max_size=16), st.binary(max_size=300), names, hops
)


def read(parser: Any, data: bytes, cuts: list[int]) -> list[Any]:
    """What a parser finds in data that comes in pieces."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    pieces = [data[begin:end] for begin, end in itertools.pairwise(places)]
    return [one for piece in pieces for one in parser.receive(piece)]


@given(st.lists(messages, max_size=5), st.lists(st.integers(0, 5_000)))
def test_messages_of_clients(sent: list[Message], cuts: list[int]) -> None:
    data = b"".join(map(codec.published, sent))
    assert read(MessageParser(relayed=False), data, cuts) == sent


@given(st.lists(relayed, max_size=5), st.lists(st.integers(0, 5_000)))
def test_messages_of_brokers(sent: list[Message], cuts: list[int]) -> None:
    data = b"".join(map(codec.relayed, sent))
    assert read(MessageParser(relayed=True), data, cuts) == sent


commands = st.one_of(
    st.builds(codec.Bind, st.integers(0, 0xFFFF), st.binary(max_size=127), st.binary(max_size=4_096)),
    st.builds(codec.Unbind, st.integers(0, 0xFFFFFFFF), st.binary(max_size=127)),
    st.builds(codec.BeatRequest, st.integers(0, 0xFFFF)),
    st.just(codec.Beat()),
    st.just(codec.Status()),
)
WRITTEN = {
    codec.Bind: lambda one: codec.bind(*one),
    codec.Unbind: lambda one: codec.unbind(*one),
    codec.BeatRequest: lambda one: codec.beat_request(*one),
    codec.Beat: lambda one: codec.BEAT,
    codec.Status: lambda one: codec.status() + b"\0\0",
}


@given(st.lists(commands, max_size=5), st.lists(st.integers(0, 5_000)))
def test_commands(sent: list[Any], cuts: list[int]) -> None:
    first = codec.Auth(b"user", b"queue", b"mem:public", b"secret")
    data = codec.auth(*first) + b"".join(WRITTEN[type(one)](one) for one in sent)  # type: ignore[index]
    assert read(CommandParser(), data[codec.MAGIC_BYTES :], cuts) == [first, *sent]


@given(st.lists(st.integers(0, 300)))
def test_answers(cuts: list[int]) -> None:
    data = codec.authenticated(b"k" * 127) + codec.bound(7) + codec.unbound(codec.ILLEGAL)
    data += codec.counts([("routed", 3), ("msgs_in", 1 << 33)]) + codec.refused("no")
    found = read(AnswerParser(), data, cuts)
    assert [one.kind for one in found] == ["key", "beat", "bound", "unbound", "counts", "error"]
    assert (found[0].text, found[2].route, found[3].route) == (b"k" * 127, 7, codec.ILLEGAL)
    assert found[4].counts == ((b"routed", 3), (b"msgs_in", 0))


def test_a_length_bomb_takes_no_memory() -> None:
    parser = MessageParser(relayed=False)
    head = codec.name(b"ex") + codec.name(b"r") + bytes(16)
    assert parser.receive(head + b"\xff\xff\xff\xff" + bytes(1_000)) == []
    assert parser.too_large == 1
    part = bytes(1 << 20)
    for _ in range((0xFFFFFFFF - 1_000) // len(part)):
        assert parser.receive(part) == []
        assert parser.held == 0
    after = Message(b"ex", b"r", bytes(16), b"next")
    rest = bytes((0xFFFFFFFF - 1_000) % len(part))
    assert parser.receive(rest + codec.published(after)) == [after]


def test_the_largest_payload_is_a_message() -> None:
    parser = MessageParser(relayed=False)
    largest = Message(b"ex", b"r", bytes(16), bytes(limits.MESSAGE_BYTES))
    larger = Message(b"ex", b"r", bytes(16), bytes(limits.MESSAGE_BYTES + 1))
    data = codec.published(largest) + codec.published(larger) + codec.published(largest)
    found = [message for at in range(0, len(data), 65_536) for message in parser.receive(data[at : at + 65_536])]
    assert found == [largest, largest]
    assert parser.too_large == 1


def in_pieces_s(size: int) -> float:
    """CPU seconds to parse a message of that size that comes in small pieces; the least of some runs."""
    data = codec.published(Message(b"ex", b"r", bytes(16), bytes(size)))
    times = []
    for _ in range(3):
        parser, began = MessageParser(relayed=False), process_time()
        found = [message for at in range(0, len(data), 64) for message in parser.receive(data[at : at + 64])]
        times.append(process_time() - began)
        assert [len(message.payload) for message in found] == [size]
    return min(times)


def test_small_pieces_of_a_large_message_cost_no_more_each() -> None:
    assert in_pieces_s(1_000_000) < 20 * in_pieces_s(100_000)


MALFORMED = [
    b"\x00", b"\x80", b"\x01e\x80", b"\x01e\x01r" + bytes(16) + b"\x80", b"\x01e\x01r" + bytes(16) + b"\x01s\x21",
]  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_messages(data: bytes) -> None:
    parser = MessageParser(relayed=True)
    for _ in range(2):
        with pytest.raises(Malformed):
            parser.receive(data + bytes(200))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("data", MALFORMED)
def test_messages_before_a_malformed_one_are_found(data: bytes, count: int) -> None:
    parser, message = MessageParser(relayed=True), Message(b"e", b"r", bytes(16), b"1", b"s", bytes(4))
    whole = codec.relayed(message)
    assert parser.receive(whole[:-1]) == []
    assert parser.receive(whole[-1:] + (count - 1) * whole + data + bytes(200)) == count * [message]
    for _ in range(2):
        with pytest.raises(Malformed):
            parser.receive(b"")


@pytest.mark.parametrize(
    "data",
    ["b170", "aaaa0001", "aaaa00000080", "aaaa00000001750400", "aaaa00000001750001712801"],
)
def test_malformed_authentication(data: str) -> None:
    with pytest.raises(Malformed):
        list(CommandParser().receive(bytes.fromhex(data) + bytes(20_000)))


def test_commands_are_made_as_they_are_asked_for() -> None:
    """There may be as many as bytes, and their client may not take the answers."""
    parser = CommandParser()
    auth = codec.auth(b"tester", b"q", b"mem:public", b"")[codec.MAGIC_BYTES :]
    found = parser.receive(auth + 30_000 * codec.status())
    assert isinstance(next(found), codec.Auth)
    assert parser.held == 30_000 * len(codec.status())
    assert sum(1 for _ in found) == 30_000
    assert parser.held == 0
