"""`words` in ctl: the separator and the wildcards of a group's patterns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqfs
from mqfs.engine.core.portions import exhaust
from mqfs.engine.files import status
from mqfs.engine.language.settings import parse_settings
from mqfs.errors import BadCommand, Busy, MqfsError
from mqfs.model import Wait
from mqfs.syntax.patterns import DOTTED, Patterns, Words, compile_pattern, has_wildcard, is_pattern
from tests.support.hand import ROOT, Hand

MQTT, NATS, CHARACTERS = Words(":", "+", "#"), Words(".", "*", ">"), Words("", "?", "*")
QPUBS = Words(".", "+", "#", "*")


def read(handle: object) -> list[bytes]:
    got: list[bytes] = []
    while not isinstance(step := handle.read(4096), Wait):  # type: ignore[attr-defined]
        got.append(step)
    assert step.cancel()
    return got


@pytest.mark.parametrize(
    ("words", "pattern", "matches", "others"),
    [
        (MQTT, "a:+:c", ["a:b:c", "a:b.x:c"], ["a:b", "a:b:d:c", "a.b.c"]),
        (MQTT, "a:#", ["a", "a:b", "a:b:c"], ["ab", "b"]),
        (MQTT, "*", ["*"], ["a"]),
        (NATS, "a.>", ["a", "a.b", "a.b.c"], ["b", "a#"]),
        (CHARACTERS, "*.log", [".log", "a.log", "a.b.log", "\n.log"], ["log", "a.logs"]),
        (CHARACTERS, "a?c*", ["abc", "a.cde"], ["ac", "abd"]),
        (QPUBS, "a.*", ["a.b", "a.b.c", "a."], ["a", "b.a", ".a", "ab"]),
        (QPUBS, "*.a", ["b.a", "c.b.a", ".a"], ["a", "a.", "a.b", "ba"]),
        (QPUBS, "*", ["a", "a.b", "*"], []),
        (QPUBS, "a.*.b", ["a.x.b", "a.x.y.b", "a.b.b"], ["a.b", "a.x", "a.x.b.c"]),
        (QPUBS, "*.*", ["a.b", "a.b.c"], ["a"]),
        (QPUBS, "#.*.#", ["a", "a.b", "a.b.c"], []),
        (QPUBS, "a.+.*", ["a.b.c", "a.b.c.d"], ["a", "a.b"]),
        (Words("", "?", "*", "+"), "a+", ["ab", "abc", "a+"], ["a", "ba"]),
    ],
)
def test_a_pattern_of_other_words(words: Words, pattern: str, matches: list[str], others: list[str]) -> None:
    trie: Patterns[bool] = Patterns(words)
    trie.add(pattern, True)
    one = compile_pattern(pattern, words)
    for name in [*matches, *others]:
        assert one(name) is bool(trie.match(name)) is (name in matches), name
    assert trie.remove(pattern, True)
    assert not any(map(trie.match, matches))


@given(st.text("ab.*#", min_size=1, max_size=6), st.text("ab.", min_size=1, max_size=6), st.sampled_from([MQTT, NATS]))
def test_it_is_the_same_language_in_other_letters(pattern: str, name: str, words: Words) -> None:
    """A name of the three characters themselves is not compared: there it is another name."""
    there = str.maketrans("".join(DOTTED), "".join(words))
    assert is_pattern(pattern) is is_pattern(pattern.translate(there), words)
    assert has_wildcard(pattern) is has_wildcard(pattern.translate(there), words)
    try:
        expected = compile_pattern(pattern)(name)
    except BadCommand:
        with pytest.raises(BadCommand):
            compile_pattern(pattern.translate(there), words)
    else:
        assert compile_pattern(pattern.translate(there), words)(name.translate(there)) is expected


@pytest.mark.parametrize(
    "line",
    ["words", "words .", "words . *", "words . * * ", "words . . '#'", "words '' ab '#'", "words / + '#'",
     "words :: + -", "words . ' ' '#'", "words . * '#' x y", "words . * '#' *",
     "words . * '#' ab", "words . * '#' ' '", "words . '' '#'", "words . * '\x07'"],
)  # fmt: skip
def test_bad_words(hand: Hand, line: str) -> None:
    with pytest.raises(BadCommand, match="words"):
        hand.ctl(line)
    assert "words . * '#'" in hand.text("ctl").splitlines()


def test_defaults_are_printed_and_not_written_to_the_log(hand: Hand) -> None:
    """A group that never sets them has the log that it had before there were any: older servers read it, too."""
    assert "words . * '#'" in hand.text("ctl").splitlines()
    assert not any(line.startswith("words") for line in parse_settings(["ttl 5s"]).lines(given=True))
    hand.ctl("words : + #")
    assert "words : + '#'" in hand.text("ctl").splitlines()
    assert parse_settings(hand.group.settings.lines(given=True)).words == MQTT
    hand.ctl("words . * #")
    assert not any(line.startswith("words") for line in hand.group.settings.lines(given=True))


def test_views_cursors_and_consumers_have_the_words_of_their_group(hand: Hand) -> None:
    hand.ctl("words : + #", "bind v a:+", "bind v c.*")
    for name in ("a:1", "a:1:2", "a.1", "c.*", "c.x"):
        hand.stream(name)
        hand.write(name, name.encode())
    seen = [b"a:1", b"c.*"]
    assert read(hand.cursor("seek first", "select v")) == seen
    assert read(hand.cursor("seek first", "select a:+ c.*")) == seen, "c.* is a stream"
    assert read(hand.cursor("seek first", "select a:#")) == [b"a:1", b"a:1:2"]
    hand.ctl("consumer c")
    worker = hand.tree.open(ROOT, hand.tree.find(ROOT, "g/.consumers/c"), os.O_RDWR)
    worker.write(b"select a:+\n")
    hand.write("a.1", b"no")
    hand.write("a:1", b"yes")
    assert worker.read(64) == b"a:1"
    worker.write(b"ack\n")
    assert worker.read(64) == b"yes"


def test_what_ctl_prints_makes_another_group_like_it(hand: Hand) -> None:
    hand.ctl("words : + -", "bind v a:-", "bind v 'prefix:\"a*\"'")
    other = hand.mkdir("h")
    hand.group, first = other, hand.group
    text = exhaust(status.ctl(first, ROOT))
    hand.ctl(*text.splitlines())
    assert exhaust(status.ctl(other, ROOT)) == text


def test_patterns_that_are_bound_keep_the_words(hand: Hand) -> None:
    """They would come to mean something else; one write may take them away and bind others."""
    hand.ctl("bind v a.*", "bind w 'prefix:\"b\"'")
    before = hand.text("ctl")
    for lines in (["words : + #"], ["words : + #", "unbind v"], ["unbind v", "bind x a", "words : + #"]):
        with pytest.raises(Busy, match=r"view '[vx]' is bound"):
            hand.ctl(*lines)
        assert hand.text("ctl") == before
    hand.ctl("words . * #", "ttl 5s")  # as they are
    hand.ctl("unbind v", "words : + #", "bind v a:+", "consumer c v")
    hand.stream("a:1")
    hand.write("a:1", b"x")
    assert read(hand.cursor("seek first", "select v")) == [b"x"]
    hand.ctl("unbind v a:+")
    hand.ctl("words . * #")
    hand.ctl("bind v *")
    assert read(hand.cursor("seek first", "select v")) == [b"x"]


def test_a_cursor_keeps_what_it_selected(hand: Hand) -> None:
    hand.stream("a:1")
    hand.write("a:1", b"x")
    cursor = hand.cursor("select *", "seek first")
    hand.ctl("words : + #")
    assert read(cursor) == [b"x"]
    with pytest.raises(MqfsError, match="no stream"):
        cursor.write(b"select *\n")


def test_they_survive_a_restart(tmp_path: Path) -> None:
    with mqfs.open(tmp_path / "store") as client:
        group = client.group("g", create=True, ctl=["replay all", "words : + #"])
        group.bind("v", "a:+")
        group.publish("a:1", b"x")
    with mqfs.open(tmp_path / "store") as client:
        group = client.group("g")
        assert group.settings().words == (":", "+", "#")
        for pattern in ("v", "a:+", "#"):
            assert [message.body for message in group.history(pattern=pattern)] == [b"x"]
