"""Names of streams, groups and consumers: legal names, and a bijection from any bytes to names that keeps prefixes.

A byte that no name may have is escaped as `%` and two hexadecimal digits: `%`, `/`, control characters, bytes that are
not UTF-8, and a dot at the beginning. A reserved name without such a byte gets a lone `%` at its end: `%` for the empty
text, `ctl%`, `order%`.

A name has at most limits.NAME_BYTES. `stream_name` cuts a longer one and ends it with `%~` and a digest, which no
escape makes; the text is then in a header of each message (headers.TOPIC).

The caches for names of clients are bounded in bytes, as a bound of the number of names alone is none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sized
from functools import lru_cache, wraps
from typing import TypeVar, cast

from mqfs import limits
from mqfs.errors import BadName

K = TypeVar("K", bound=Sized)
V = TypeVar("V")


def cache_short(entries: int, size: int) -> Callable[[Callable[[K], V]], Callable[[K], V]]:
    """Cache the results for `entries` arguments of at most `size` bytes or characters; longer arguments are computed
    each time."""

    def decorate(function: Callable[[K], V]) -> Callable[[K], V]:
        remembered = cast(Callable[[K], V], lru_cache(entries)(function))

        @wraps(function)
        def call(argument: K) -> V:
            is_short = isinstance(argument, str | bytes) and len(argument) <= size
            return remembered(argument) if is_short else function(argument)

        return call

    return decorate


# ------------------------------------------------------------ legal names


RESERVED = frozenset({"ctl", "order", "", ".", ".."})

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_name(name: str) -> str:
    """Return the name, if a user may give it to a stream or group. Raises BadName."""
    if name in RESERVED or name.startswith("."):
        raise BadName(_why_reserved(name))
    if "/" in name:
        raise BadName(f"invalid name {name!r}: has a slash (expected one path segment)")
    check_control(name)
    size = len(encoded(name))
    if size > limits.NAME_BYTES:
        raise BadName(f"invalid name: {size} bytes (expected at most {limits.NAME_BYTES})")
    return name


def check_file_name(name: str) -> str:
    """Return the name, if a stream, group or consumer can have it. Raises BadName.

    Weaker than `check_name`: stores hold names that are older than its rules.
    """
    if not isinstance(name, str):
        raise TypeError(f"invalid name {name!r} (expected str)")
    if name in RESERVED or name.startswith("."):
        raise BadName(_why_reserved(name))
    if "/" in name or "\0" in name:
        raise BadName(f"invalid name {name!r}: has a {'slash' if '/' in name else 'NUL'} (expected one path segment)")
    if not name.isascii():
        encoded(name)
    return name


def encoded(name: str) -> bytes:
    """Return the bytes of a name. Raises BadName if it has a lone surrogate, and so no bytes."""
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise BadName(f"invalid name {name!r}: invalid bytes (expected UTF-8)") from None


def _why_reserved(name: str) -> str:
    if not name:
        return "invalid name '': empty (expected 1 to 255 bytes)"
    return f"reserved name {name!r} (expected no leading dot, not ctl or order)"


def check_control(name: str) -> None:
    """Check that a name has no control characters. Raises BadName: a terminal, a log or a command line would misread
    them."""
    if _CONTROL.search(name):
        raise BadName(f"invalid name {name!r}: has a control character (expected none)")


def one_line(name: str) -> str:
    """Return a name for a file that is read line by line: names in older stores may have newlines."""
    return name.replace("\n", "\\n")


def with_suffix(name: str, suffix: str) -> str:
    """Return the name with a suffix. The name is cut at a character if both have too many bytes."""
    kept = name.encode()[: limits.NAME_BYTES - len(suffix.encode())]
    return kept.decode(errors="ignore") + suffix


# ------------------------------------------------------------ any bytes as a name


_ENDED = ("", "ctl", "order")  # not names, though each of their bytes may be in one
_ESCAPED = re.compile("[%/\x00-\x1f\x7f\udc80-\udcff]|^\\.")
_ESCAPE = re.compile("%([0-9A-F]{2})")
_SHORTENED, _DIGEST_CHARACTERS = "%~", 32
_SHORT = re.compile(f"[^/\x00-\x1f\x7f]*{_SHORTENED}[0-9a-f]{{{_DIGEST_CHARACTERS}}}")
_SHORTEST = limits.NAME_BYTES - 4  # a name is cut at a character
_CACHED, _CACHED_BYTES = 16_384, 255  # names, and how long those may be: some 10 MB


@cache_short(_CACHED, _CACHED_BYTES)
def escape(text: bytes | str) -> str:
    """Make a stream's name of any text.

    Args:
        text: Any text, or bytes.

    Returns:
        The name, which may be longer than names can be.
    """
    prefix = escape_prefix(text)
    return f"{prefix}%" if prefix in _ENDED else prefix


def stream_name(text: bytes | str) -> str:
    """Return the stream's name for a text of any length. A shortened name is returned as it is."""
    if isinstance(text, str) and is_shortened(text):
        return text
    name = escape(text)
    if len(name) * 4 <= limits.NAME_BYTES or len(name.encode()) <= limits.NAME_BYTES:
        return name
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return with_suffix(name, _SHORTENED + hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS])


def is_shortened(name: str) -> bool:
    """Whether the name is the beginning of a text with a digest of the whole text."""
    return len(name) * 4 > limits.NAME_BYTES and _SHORT.fullmatch(name) is not None and len(name.encode()) > _SHORTEST


def escape_prefix(text: bytes | str) -> str:
    """Return the prefix of the names of all texts with this prefix, and of no others. The text must not end within a
    character."""
    if not isinstance(text, str | bytes):
        raise TypeError(f"invalid text {text!r} (expected str or bytes)")
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    # A byte that is not UTF-8 is decoded to U+DC80 and up.
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", data.decode(errors="surrogateescape"))


def unescape(name: str) -> bytes:
    """Return the text of a name.

    Args:
        name: A name that `escape` has returned.

    Returns:
        The text, in UTF-8 if it was not bytes.

    Raises:
        BadName: `escape` returns no such name.
    """
    try:
        parts = _ESCAPE.split(name.removesuffix("%"))
        data = b"".join(bytes([int(part, 16)]) if at % 2 else part.encode() for at, part in enumerate(parts))
    except UnicodeEncodeError:
        data = b""
    if escape(data) != name:
        raise BadName(f"invalid escape in {name!r} (expected % and two of 0-9 A-F, for bytes that no name may have)")
    return data


@cache_short(_CACHED, _CACHED_BYTES)
def text_of(name: str) -> bytes:
    """Return the text of a name; a name that `escape` does not make stands for itself."""
    try:
        return unescape(name)
    except BadName:
        return name.encode(errors="surrogateescape")
