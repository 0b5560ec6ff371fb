"""Legal names of streams, groups and consumers."""

from __future__ import annotations

import re

from mqfs import limits
from mqfs.errors import BadName

RESERVED = frozenset({"ctl", "order", "", ".", ".."})

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_name(name: str) -> str:
    """The name, if a user may give it to a stream or group; raises BadName."""
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
    """The name, if it can be one file of a group, and no other than a stream's, group's or consumer's. Raises BadName.

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
    """The bytes of a name. Raises BadName where it has none: a surrogate stands alone."""
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise BadName(f"invalid name {name!r}: invalid bytes (expected UTF-8)") from None


def _why_reserved(name: str) -> str:
    if not name:
        return "invalid name '': empty (expected 1 to 255 bytes)"
    return f"reserved name {name!r} (expected no leading dot, not ctl or order)"


def check_control(name: str) -> None:
    """Raises BadName where a terminal, a log or a line of commands would take the name for something else."""
    if _CONTROL.search(name):
        raise BadName(f"invalid name {name!r}: has a control character (expected none)")


def one_line(name: str) -> str:
    """A name in a file that is read line by line: those of older stores may hold newlines."""
    return name.replace("\n", "\\n")


def with_suffix(name: str, suffix: str) -> str:
    """The name and a suffix, the name cut at a character where both have too many bytes."""
    kept = name.encode()[: limits.NAME_BYTES - len(suffix.encode())]
    return kept.decode(errors="ignore") + suffix
