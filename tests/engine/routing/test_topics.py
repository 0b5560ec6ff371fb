"""Patterns: a table after the AMQP specification, and random ones against a matcher that is slow and plainly right."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqfs import limits
from mqfs.errors import BadCommand
from mqfs.syntax.patterns import Patterns, check_pattern, compile_pattern, is_pattern
from tests.support.campaign import size

# Every row: a pattern, names that match it, names that do not. The first two are the specification's own examples.
TABLE = [
    ("*.stock.#", "usd.stock eur.stock.db usd.stock.a.b .stock .stock.", "stock.nasdaq stock usd.stocks a.b.stock"),
    ("usd.*", "usd.stock usd. usd.*", "usd usd.stock.db eur.stock USD.stock"),
    ("usd.stock", "usd.stock", "usd usd.stock. .usd.stock usd.stock.db"),
    ("#", "usd a.b.c . .. * #", ""),
    ("*", "usd * #", "usd.stock . a.b.c"),
    ("*.*", "a.b . a. .b", "a a.b.c .."),
    ("#.stock", "stock usd.stock a.b.stock .stock", "stock.usd stocks usd.stock."),
    ("usd.#", "usd usd.stock usd.a.b usd.", "usds eur.usd"),
    ("#.#", "usd a.b.c .", ""),
    ("#.*", "usd a.b.c . a.", ""),
    ("*.#", "usd a.b.c . a.", ""),
    ("*.#.*", "a.b a.b.c . ..", "a"),
    ("#.a.#", "a b.a a.b b.a.b a.a", "b aa b.b .b"),
    ("a.#.b", "a.b a.c.b a.c.d.b a..b a.b.b a.a.b", "a b a.b.c ab"),
    ("a.*.b", "a.c.b a..b a.*.b", "a.b a.c.d.b"),
    ("a..b", "a..b", "a.b a...b a.c.b"),
    ("a.", "a.", "a a.."),
    ("#.a.#.a.#", "a.a a.b.a b.a.a.b", "a b.a a.b"),
    ("#.a.b", "a.b a.a.b a.b.a.b", "a.b.a b"),
    ("#.a.*", "a.b a.a a.b.a.c", "a b.b.b a.b.c"),
    ("ä.*.π", "ä.ß.π ä.😀.π", "ä.π a.ß.π"),
    ("a+.[b]", "a+.[b]", "aa.b a.b"),
    ("a+.[b].*", "a+.[b].c", "aa.b.c a+.b.c"),
    ("a\nb.*", "a\nb.c a\nb.\n", "a.b.c"),
]  # fmt: skip


def names(said: str) -> list[str]:
    return [name for name in said.split(" ") if name]


@pytest.mark.parametrize(("pattern", "yes", "no"), TABLE)
def test_table(pattern: str, yes: str, no: str) -> None:
    patterns: Patterns[str] = Patterns()
    patterns.add(pattern, "key")
    test = compile_pattern(pattern)
    for name in names(yes):
        assert patterns.match(name) == {"key"}, name
        assert test(name), name
    for name in names(no):
        assert patterns.match(name) == set(), name
        assert not test(name), name


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a*", "column 2: wildcard inside a word (expected between dots)"),
        ("usd.x#.b", "column 6: wildcard inside a word"),
        ("**", "column 1: wildcard"),
        ("a.#*", "column 3: wildcard"),
        ("", "empty (expected words"),
        ("a/b", "has a slash or NUL"),
        ("a\0", "has a slash or NUL"),
        ("\udc80", "(expected UTF-8)"),
        (".".join("a" * 65), "pattern of 65 words: too long (expected at most 64)"),
        ("a" * 513, "513 bytes (expected at most 512)"),
        ("ä" * 257, "514 bytes (expected at most 512)"),
    ],
)
def test_illegal(pattern: str, said: str) -> None:
    patterns: Patterns[int] = Patterns()
    for refuse in (check_pattern, compile_pattern, lambda text: patterns.add(text, 1)):
        with pytest.raises(BadCommand) as caught:
            refuse(pattern)
        assert said in caught.value.detail
    assert len(patterns) == 0


def test_words() -> None:
    assert check_pattern("a..b.*.#") == ("a", "", "b", "*", "#")
    assert check_pattern("#.#.a.#.#.#") == ("#", "a", "#")
    assert check_pattern(".".join("#" * limits.PATTERN_WORDS)) == ("#",)
    assert all(map(is_pattern, ["a.*", "#", "#.b"]))
    assert not any(map(is_pattern, ["a.b", "a*", ""]))


def test_keys() -> None:
    patterns: Patterns[int] = Patterns()
    assert [patterns.add("a.*", 1), patterns.add("a.*", 2), patterns.add("a.b", 1), patterns.add("a.*", 1)] == [
        True, True, True, False,
    ]  # fmt: skip
    assert len(patterns) == 3
    assert patterns.match("a.b") == {1, 2}
    assert not patterns.remove("a.b", 2)
    assert not patterns.remove("a.#", 1)
    assert not patterns.remove("a*", 1)
    assert patterns.remove("a.*", 1)
    assert not patterns.remove("a.*", 1)
    assert patterns.match("a.b") == {1, 2}
    assert patterns.match("a.c") == {2}


def test_two_spellings_of_one_pattern() -> None:
    """Taking back one leaves the other."""
    patterns: Patterns[int] = Patterns()
    assert patterns.add("a.#", 1)
    assert patterns.add("a.#.#", 1)
    assert patterns.remove("a.#", 1)
    assert patterns.match("a.b") == {1}
    assert patterns.remove("a.#.#", 1)
    assert patterns.match("a.b") == set()


def test_what_is_matched_is_the_callers() -> None:
    patterns: Patterns[int] = Patterns()
    patterns.add("a", 1)
    patterns.add("#", 2)
    patterns.match("a").clear()
    assert patterns.match("a") == {1, 2}


WORD = st.one_of(st.sampled_from(["a", "b", "", "ä😀", "a+"]), st.text(st.characters(codec="utf-8"), max_size=3))
NAME = st.lists(WORD.map(lambda word: word.replace(".", "").replace("/", "")), min_size=1, max_size=8).map(".".join)
PART = st.one_of(st.sampled_from(["*", "#", "*", "#", "a", "b", ""]), WORD)


def legal(text: str) -> bool:
    try:
        return bool(check_pattern(text))
    except BadCommand:
        return False


PATTERN = st.lists(PART, min_size=1, max_size=7).map(".".join).filter(legal)


def matches(pattern: list[str], name: list[str]) -> bool:
    """What a pattern means, word for word."""
    if not pattern:
        return not name
    if pattern[0] == "#":
        return matches(pattern[1:], name) or (bool(name) and matches(pattern, name[1:]))
    return bool(name) and pattern[0] in ("*", name[0]) and matches(pattern[1:], name[1:])


def keys(bound: set[tuple[str, int]], name: str) -> set[int]:
    return {key for pattern, key in bound if matches(pattern.split("."), name.split("."))}


@pytest.mark.slow
@settings(max_examples=size(5_000), deadline=None)
@given(st.sets(st.tuples(PATTERN, st.integers(0, 9)), max_size=20), st.lists(NAME.filter(bool), min_size=1))
def test_against_the_reference(bound: set[tuple[str, int]], tried: list[str]) -> None:
    patterns: Patterns[int] = Patterns()
    for pattern, key in bound:
        patterns.add(pattern, key)
    tests = [(key, compile_pattern(pattern)) for pattern, key in bound]
    for name in tried:
        assert patterns.match(name) == keys(bound, name)
        assert {key for key, test in tests if test(name)} == keys(bound, name)


FEW = st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=4).map(".".join)
STEP = st.tuples(st.booleans(), FEW, st.integers(0, 2))


@pytest.mark.slow
@settings(max_examples=size(5_000), deadline=None)
@given(st.lists(STEP, max_size=40), st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(".".join)))
def test_adding_and_removing(steps: list[tuple[bool, str, int]], tried: list[str]) -> None:
    patterns: Patterns[int] = Patterns()
    bound: set[tuple[str, int]] = set()
    for adds, pattern, key in steps:
        changes = ((pattern, key) in bound) is not adds
        assert (patterns.add if adds else patterns.remove)(pattern, key) is changes
        (bound.add if adds else bound.discard)((pattern, key))
        assert len(patterns) == len(bound)
        for name in tried:
            assert patterns.match(name) == keys(bound, name)
    for pattern, key in bound:
        assert patterns.remove(pattern, key)
    assert len(patterns) == 0
    assert patterns._root.empty()  # every node is given back
    assert not patterns._exact


HOSTILE = [".".join("#*" * 32), ".".join("#a" * 32), ".".join("#*" * 31 + "#b"), ".".join("#a" * 31 + "#b")]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_hostile_patterns_are_not_exponential(pattern: str) -> None:
    """The longest name takes some milliseconds; a matcher that tries every way would not end."""
    patterns: Patterns[int] = Patterns()
    patterns.add(pattern, 1)
    test = compile_pattern(pattern)
    name = ".".join("a" * 128)
    start = time.process_time()
    assert patterns.match(name) == ({1} if not pattern.endswith("b") else set())
    assert test(name) is not pattern.endswith("b")
    assert time.process_time() - start < 1


def test_every_node_is_visited_once_for_each_word() -> None:
    """Many hostile patterns cost their nodes × the words of the name, in whatever way they reach each other."""
    patterns: Patterns[str] = Patterns()
    for pattern in ("#.a.#.a.#", "#.*.#.*.#", "#.a.#.*.#", "#.*.#.a.#", "#.a.*.#.a", "#.*.a.#.*"):
        patterns.add(".".join([pattern] * 3), pattern)
    visits = _visits(patterns, ".".join("a" * 100))
    assert visits <= _nodes(patterns) * 101


def _nodes(patterns: Patterns[str]) -> int:
    found, left = 0, [patterns._root]
    while left:
        node = left.pop()
        found += 1
        left += [*node.words.values(), *(child for child in (node.one, node.many) if child)]
    return found


def _visits(patterns: Patterns[str], name: str) -> int:
    """How often a word is looked up: once for each visit of a node."""

    class Counted(dict[str, Any]):
        looked = 0

        def get(self, key: str, default: Any = None) -> Any:
            Counted.looked += 1
            return super().get(key, default)

    left = [patterns._root]
    while left:
        node = left.pop()
        node.words = Counted(node.words)
        left += [*node.words.values(), *(child for child in (node.one, node.many) if child)]
    patterns.match(name)
    return Counted.looked
