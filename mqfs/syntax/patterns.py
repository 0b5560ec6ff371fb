"""Topics as in AMQP: which patterns a stream's name matches.

A name is words separated by dots; a word may be empty. In a pattern the word `*` stands for exactly one word, `#` for
zero or more. A group may have other characters for these three, its Words, and a fourth for one or more words. This
module checks patterns, and matches one or many. It knows nothing of streams or views.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

from mqfs import limits
from mqfs.errors import BadCommand

K = TypeVar("K", bound=Hashable)


class Words(NamedTuple):
    """The characters of patterns. Without a separator every character of a name is a word."""

    separator: str = "."
    one: str = "*"
    many: str = "#"
    some: str = ""  # one or more words; by default there is none

    @property
    def listed(self) -> tuple[str, ...]:
        """The characters for a listing: three if there is no fourth, so that older clients can read them."""
        return self if self.some else self[:3]

    def split(self, text: str) -> list[str]:
        return text.split(self.separator) if self.separator else list(text)


DOTTED = Words()


def check_words(words: Words) -> Words:
    """Return these characters. Raises BadCommand if patterns cannot be made of them."""
    separator, one, many, some = words
    if len(one) != 1 or len(many) != 1 or len(separator) > 1 or len(some) > 1:
        raise BadCommand(
            f"words {' '.join(map(repr, words))[:80]}: not one character each (expected a separator, 2 or 3 wildcards)"
        )
    used = "".join(words)
    if len(set(used)) < len(used):
        raise BadCommand(f"words {' '.join(words.listed)}: one character twice (expected different ones)")
    if not used.isprintable() or any(c in used for c in " /"):
        raise BadCommand(f"words {used!r}: blank, slash or control character (expected others)")
    return words


def check_pattern(text: str, words_of: Words = DOTTED) -> tuple[str, ...]:
    """Return the words of a legal pattern, with consecutive `#` merged. Raises BadCommand, which names the column."""
    if not text or "/" in text or "\0" in text:
        raise BadCommand(
            f"pattern {text!r}: {'has a slash or NUL' if text else 'empty'} (expected words, such as log.*.error)"
        )
    check_size(text, limits.PATTERN_BYTES, "a pattern")
    words, plain = words_of.split(text), _plain(text, words_of)
    if len(plain) > limits.PATTERN_WORDS:
        raise BadCommand(f"pattern of {len(plain)} words: too long (expected at most {limits.PATTERN_WORDS})")
    column = 1
    for word in words:
        if len(word) > 1 and (wild := re.search(f"[{re.escape(words_of.one + words_of.many + words_of.some)}]", word)):
            between = "dots" if words_of.separator == "." else f"{words_of.separator!r}"
            raise BadCommand(
                f"pattern {text!r}, column {column + wild.start()}: wildcard inside a word (expected between {between})"
            )
        column += len(word) + 1
    return plain


def check_size(text: str, most: int, what: str) -> None:
    """Check the size of a text. Raises BadCommand if it has more than `most` bytes, or UTF-8 cannot encode it."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise BadCommand(f"{what}: invalid bytes (expected UTF-8)") from None
    if size > most:
        raise BadCommand(f"{what}: {size} bytes (expected at most {most})")


def is_pattern(text: str, words_of: Words = DOTTED) -> bool:
    """Whether a word of the text is a wildcard: then it does not name one stream."""
    words = words_of.split(text)
    return words_of.one in words or words_of.many in words or bool(words_of.some and words_of.some in words)


def has_wildcard(text: str, words_of: Words = DOTTED) -> bool:
    """Whether the text has a wildcard character: then it is a pattern, or check_pattern refuses it, and no future
    stream has this name."""
    return words_of.one in text or words_of.many in text or bool(words_of.some and words_of.some in text)


def compile_pattern(pattern: str, words_of: Words = DOTTED) -> Callable[[str], bool]:
    """Return a test whether a name matches this pattern. Raises BadCommand.

    The cost grows with words of the name × words of the pattern: after each `#` the earliest fitting place is final (an
    atomic group), as a later one could not match more.
    """
    if not is_pattern(pattern, words_of):
        check_pattern(pattern, words_of)
        return pattern.__eq__
    separator = words_of.separator
    behind = re.escape(separator)  # a separator follows every word, also the last of a name
    word = f"[^{behind}]*{behind}" if separator else "(?s:.)"
    first, *others = _between_many(check_pattern(pattern, words_of), words_of, word, behind)
    expression = first
    for number, part in enumerate(others, 1):
        ending = rf"{part}\Z" if number == len(others) else part
        expression += rf"(?>(?:{word})*?{ending})"
    match = re.compile(expression).fullmatch
    return lambda name: match(name + separator) is not None


def compile_selection(names: Collection[str], words_of: Words = DOTTED) -> Callable[[str], bool]:
    """Return a test whether a name is one of `names`, or matches a pattern among them; without `names` each name does.
    Raises BadCommand."""
    if not names:
        return lambda name: True
    plain = frozenset(name for name in names if not has_wildcard(name, words_of))
    matches = [compile_pattern(name, words_of) for name in names if name not in plain]
    return lambda name: name in plain or any(match(name) for match in matches)


def _plain(pattern: str, words_of: Words) -> tuple[str, ...]:
    """Return the words of a pattern, with `* #` for one or more words, and consecutive `#` merged."""
    words, many = words_of.split(pattern), words_of.many
    if words_of.some:
        words = [plain for word in words for plain in ((words_of.one, many) if word == words_of.some else (word,))]
    return tuple(word for at, word in enumerate(words) if word != many or not at or words[at - 1] != many)


def _between_many(words: tuple[str, ...], words_of: Words, any_word: str, behind: str) -> list[str]:
    """Return the regular expressions of the parts before, between and after the `#`."""
    parts = [""]
    for word in words:
        if word == words_of.many:
            parts.append("")
        else:
            parts[-1] += any_word if word == words_of.one else re.escape(word) + behind
    return parts


_NOTHING: dict[Any, Any] = {}  # shared by all nodes without words or keys, which are most


class _Node(Generic[K]):
    """A common prefix of some patterns, up to a word."""

    __slots__ = ("keys", "many", "one", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node[K]] = _NOTHING
        self.one: _Node[K] | None = None
        self.many: _Node[K] | None = None
        self.keys: dict[K, int] = _NOTHING  # how many spellings of the pattern that ends here have the key

    def next(self, word: str, words_of: Words) -> _Node[K] | None:
        if word == words_of.one:
            return self.one
        return self.many if word == words_of.many else self.words.get(word)

    def link(self, word: str, words_of: Words, node: _Node[K]) -> None:
        if word == words_of.one:
            self.one = node
        elif word == words_of.many:
            self.many = node
        elif self.words is _NOTHING:
            self.words = {word: node}
        else:
            self.words[word] = node

    def unlink(self, word: str, words_of: Words) -> None:
        if word == words_of.one:
            self.one = None
        elif word == words_of.many:
            self.many = None
        else:
            del self.words[word]

    def empty(self) -> bool:
        return not (self.words or self.keys or self.one or self.many)


class Patterns(Generic[K]):
    """Many patterns, each with keys. The cost of a match grows with the words of the name, not with the number of
    patterns.

    Patterns without a wildcard are looked up as they are; the others form a trie. Each node is visited at most once for
    each word. A node below no other `#` belongs to one position; the node of a `#`, once reached, stays active to the
    end.
    """

    def __init__(self, words: Words = DOTTED) -> None:
        self.words = words
        self._bound: set[tuple[str, K]] = set()
        self._exact: dict[str, set[K]] = {}
        self._root: _Node[K] = _Node()

    def __len__(self) -> int:
        """Return the number of pairs of pattern and key."""
        return len(self._bound)

    def add(self, pattern: str, key: K) -> bool:
        """Add a key to a pattern. False: the pattern has it already. Raises BadCommand."""
        words = check_pattern(pattern, self.words)
        if (pattern, key) in self._bound:
            return False
        self._bound.add((pattern, key))
        if is_pattern(pattern, self.words):
            self._grow(words, key)
        else:
            self._exact.setdefault(pattern, set()).add(key)
        return True

    def remove(self, pattern: str, key: K) -> bool:
        """Remove a key from a pattern, and free unused nodes. False: the pattern does not have it."""
        if (pattern, key) not in self._bound:
            return False
        self._bound.remove((pattern, key))
        if is_pattern(pattern, self.words):
            self._prune(_plain(pattern, self.words), key)
        else:
            self._exact[pattern].remove(key)
            if not self._exact[pattern]:
                del self._exact[pattern]
        return True

    def match(self, name: str) -> set[K]:
        """Return the keys of all patterns that the name matches."""
        found = set(self._exact.get(name, ()))
        here = [self._root]
        loops: dict[_Node[K], None] = {}  # reached nodes of `#` with children: tried for every later word
        for word in self.words.split(name):
            ahead = []
            for node in here:
                many = node.many
                if many is not None:
                    found.update(many.keys)
                    if many.words or many.one is not None:
                        loops[many] = None
                child = node.words.get(word)
                if child is not None:
                    ahead.append(child)
                if node.one is not None:
                    ahead.append(node.one)
            for node in loops:
                child = node.words.get(word)
                if child is not None:
                    ahead.append(child)
                if node.one is not None:
                    ahead.append(node.one)
            if not ahead and not loops:
                return found
            here = ahead
        for node in here:
            found.update(node.keys)
            if node.many is not None:
                found.update(node.many.keys)
        return found

    def _grow(self, words: tuple[str, ...], key: K) -> None:
        node = self._root
        for word in words:
            child = node.next(word, self.words)
            if child is None:
                child = _Node()
                node.link(word, self.words, child)
            node = child
        if node.keys is _NOTHING:
            node.keys = {}
        node.keys[key] = node.keys.get(key, 0) + 1

    def _prune(self, words: tuple[str, ...], key: K) -> None:
        path = [self._root]
        for word in words:
            child = path[-1].next(word, self.words)
            assert child is not None  # the pattern is bound
            path.append(child)
        keys = path[-1].keys
        keys[key] -= 1
        if not keys[key]:
            del keys[key]
        for word in reversed(words):
            if not path.pop().empty():
                return
            path[-1].unlink(word, self.words)
