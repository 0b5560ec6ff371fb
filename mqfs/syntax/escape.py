"""Any bytes as the name of a stream: a bijection that keeps prefixes.

A byte that no name may have is `%` and two hexadecimal digits: `%`, `/`, control characters, what is not UTF-8, and a
dot at the beginning. A lone `%` ends a text that is no name as it is: `%` the empty one, `ctl%`, `order%`.

A name has at most limits.NAME_BYTES. `stream_name` cuts a longer one and ends it with `%~` and a digest, which no
escape makes; the text is then in a header of each message (headers.TOPIC).
"""

from __future__ import annotations

import hashlib
import re

from mqfs import limits
from mqfs.errors import BadName
from mqfs.syntax.cache import cache_short

_ENDED = ("", "ctl", "order")  # no names, though each of their bytes may be in one
_ESCAPED = re.compile("[%/\x00-\x1f\x7f\udc80-\udcff]|^\\.")
_ESCAPE = re.compile("%([0-9A-F]{2})")
_SHORTENED, _DIGEST_CHARACTERS = "%~", 32
_SHORT = re.compile(f"[^/\x00-\x1f\x7f]*{_SHORTENED}[0-9a-f]{{{_DIGEST_CHARACTERS}}}")
_SHORTEST = limits.NAME_BYTES - 4  # a name is cut at a character
_CACHED, _CACHED_BYTES = 16_384, 255  # names, and how long those may be: some 10 MB


@cache_short(_CACHED, _CACHED_BYTES)
def escape(text: bytes | str) -> str:
    """Make a name of a stream of any text.

    Args:
        text: Any text, or bytes.

    Returns:
        The name. Only its length may be more than a name has.
    """
    prefix = escape_prefix(text)
    return f"{prefix}%" if prefix in _ENDED else prefix


def stream_name(text: bytes | str) -> str:
    """The name of the stream of a text of any length. That of a name which was shortened is itself."""
    if isinstance(text, str) and is_shortened(text):
        return text
    name = escape(text)
    if len(name) * 4 <= limits.NAME_BYTES or len(name.encode()) <= limits.NAME_BYTES:
        return name
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    end = _SHORTENED + hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]
    return name.encode()[: limits.NAME_BYTES - len(end)].decode(errors="ignore") + end


def is_shortened(name: str) -> bool:
    """Whether it is the beginning of a text, and a digest of all of it."""
    return len(name) * 4 > limits.NAME_BYTES and _SHORT.fullmatch(name) is not None and len(name.encode()) > _SHORTEST


def escape_prefix(text: bytes | str) -> str:
    """The prefix of the names of all texts with this prefix, and of no others. It must not end within a character."""
    if not isinstance(text, str | bytes):
        raise TypeError(f"invalid text {text!r} (expected str or bytes)")
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    return _ESCAPED.sub(lambda found: f"%{_byte(found[0]):02X}", data.decode(errors="surrogateescape"))


def _byte(character: str) -> int:
    return ord(character) & 0xFF  # what is not UTF-8 was decoded to U+DC80 and up


def unescape(name: str) -> bytes:
    """Give the text of a name back.

    Args:
        name: What `escape` has returned.

    Returns:
        The text, as UTF-8 where it was not bytes.

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
    """The text of a name; one that `escape` gives no text stands for itself."""
    try:
        return unescape(name)
    except BadName:
        return name.encode(errors="surrogateescape")
