"""Names of files, topics and streams: what is made is parsed, here and by fsq itself."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs.bridge.folder import DIRECT, MULTI, SINGLE, Folder, Name, Origin, Topics, bucket_number, id_of, parse
from mqfs.bridge.link import GroupLink
from mqfs.errors import BadRequest
from mqfs.syntax.names import check_name
from tests.bridge.rig import Make, rig
from tests.support.eventually import eventually

KINDS = st.sampled_from([SINGLE, MULTI, DIRECT])
UNIQUE = st.binary(min_size=16, max_size=16).map(bytes.hex)
EXPIRES = st.integers(0, 1 << 48)
TOPIC = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
WORDS = st.lists(st.sampled_from(["a", "b.c", "é", "/", "", "ctl", "%", "@", "+", "x" * 60]), max_size=9).map(".".join)


@given(st.one_of(TOPIC, WORDS), KINDS, EXPIRES, UNIQUE)
def test_a_name_that_is_made_is_parsed(topic: str, kind: str, expires: int, unique: str) -> None:
    topics = Topics()
    name, rest = topics.name(topic, kind, expires, unique)
    assert name.long == bool(rest)
    assert parse(str(name)) == name
    assert topics.topic(name, rest) == topic
    assert len(str(name).encode()) <= 255


@given(st.one_of(TOPIC, WORDS), UNIQUE)
def test_a_raw_topic_is_parsed_or_refused(topic: str, unique: str) -> None:
    topics = Topics(encoded=False)
    try:
        name, rest = topics.name(topic, MULTI, 1, unique)
    except BadRequest:
        assert "/" in topic or "\0" in topic or len(topic.encode()) > 180
        return
    assert parse(str(name)) == name
    assert topics.topic(name, rest) == topic


@given(st.one_of(TOPIC, WORDS), st.sampled_from([(".", "."), ("/", "."), (":", "-")]))
def test_a_topic_is_a_stream_and_comes_back(topic: str, separators: tuple[str, str]) -> None:
    topics = Topics(True, 200, *separators)
    stream = topics.stream(topic)
    assert check_name(stream) == stream
    assert topics.topic_of(stream, topic) == topic
    assert "%~" in stream or topics.topic_of(stream, None) == topic


@given(TOPIC, TOPIC)
def test_two_topics_are_two_streams(one: str, other: str) -> None:
    topics = Topics(True, 200, "/", ".")
    assert (topics.stream(one) == topics.stream(other)) == (one == other)


def test_words_of_topics_are_words_of_streams() -> None:
    assert Topics().stream("a.b.c") == "a.b.c"
    assert Topics(True, 200, "/", ".").stream("a/b.c") == "a.b%2Fc"
    assert Topics().topic_of("100%", None) == "100%"


@pytest.mark.parametrize(
    "text",
    ["", "note.txt", "a@s+1+m", "a@s+1+m+u+v", "a@x+1+m+u", "a@s+1g+m+u", "a@s+1+x+u", "a@s+1+m+", "\udcff@s+1+m+u"],
)
def test_foreign_files_are_no_messages(text: str) -> None:
    assert parse(text) is None


def test_the_last_at_sign_separates_the_topic() -> None:
    assert parse("a@b@s+ff+d+u") == Name("a@b", False, 255, DIRECT, "u")


@given(st.uuids(), st.integers(0, 1 << 20), st.integers(0, (1 << 62) - 1), UNIQUE)
def test_a_group_knows_its_own_names(store: object, group: int, sequence: int, other: str) -> None:
    origin = Origin(str(store), group)
    name = Name("61", False, 1, MULTI, origin.unique(sequence))
    assert origin.wrote(name)
    assert not Origin(str(store), group + 1).wrote(name)
    assert not origin.wrote(Name("61", False, 1, MULTI, other))
    assert id_of(str(name)) == name.unique


def test_a_short_unique_part_is_no_id() -> None:
    assert id_of("61@s+1+m+ab") == hashlib.sha256(b"61@s+1+m+ab").hexdigest()


@pytest.mark.process
@pytest.mark.slow
def test_fsq_parses_names_and_finds_their_buckets_as_we_do() -> None:
    choose = random.Random(7)
    alphabet = "abc.@+%/é\u4e2d\U0001f600 "
    later = int(time.time() * 1000) + 3_600_000
    with rig() as r:
        node = r.node()
        folder = Folder(str(r.folder))
        topics, names = Topics(), {}
        for number in range(120):
            topic = "".join(choose.choice(alphabet) for _ in range(choose.choice([1, 5, 40, 120])))
            kind = choose.choice([SINGLE, MULTI])
            name, rest = topics.name(topic, kind, later + number, choose.randbytes(16).hex())
            names[str(name)] = {"topic": topic, "expires": later + number, "single": kind == SINGLE, "direct": False}
            if rest:
                (r.folder / "topics" / "00" / str(name)).write_text(rest)
        node.tell("parse", names=list(names), expected=len(names))
        assert eventually(lambda: node.of("parsed"), "fsq's parse")[0]["names"] == names
        for topic in ["a", "b" * 150, "é\u4e2d"]:
            file = node.publish(topic, "x", ttl=60_000)
            assert parse(file) is not None
            assert (r.folder / "messages" / folder.bucket_of(file) / file).exists()
            assert folder.buckets[bucket_number(file, 256)] == folder.bucket_of(file)


@pytest.mark.process
@pytest.mark.parametrize("end", ["\x85", "\u2028"], ids=ascii)
def test_a_name_with_what_ends_a_line_elsewhere(make: Make, end: str) -> None:
    r = make(f"bind v 'a{end}replay off{end}b'")
    name = f"a{end}replay off{end}b"
    r.group.publish(name, "1")
    link = GroupLink(r.server.address, r.name, user="", token="", stopping=threading.Event())
    with closing(link):
        assert list(link.stats()["streams"]) == [name]
        assert link.settings()["replay"] == "all"
