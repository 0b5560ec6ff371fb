"""Lines of words, quoted as in rc(1): of commands, and of a token file.

    USER sha256:ID:HEX [expires=WHEN] [scope=SCOPE] [path=/GROUP] [note=TEXT]

A line has only the SHA-256 of the secret, mq_ID_RANDOM: a secret of 256 random bits needs no slow hash.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from datetime import UTC, datetime

import attrs

from mqfs import limits
from mqfs.errors import BadCommand, BadRequest
from mqfs.model import SCOPES

_WORD = re.compile(r"[^\s'#]+|'[^']*(?:''[^']*)*'")
_PLAIN = re.compile(r"[^\s'#]+\Z")


def split(line: str) -> list[str]:
    """Return the words of a line, quoted as in rc(1): 'it''s'. An unquoted # begins a comment, but one before a dot
    begins a pattern. Raises BadCommand."""
    if "'" not in line and "#" not in line:
        return line.split()
    words: list[str] = []
    at, glued = 0, False
    while at < len(line):
        if line[at].isspace():
            at, glued = at + 1, False
            continue
        if line[at] == "#":
            if not glued and line[at + 1 : at + 2] != ".":
                break
            words[-1:] = [words[-1] + "#"] if glued else [*words[-1:], "#"]
            at, glued = at + 1, True
            continue
        match = _WORD.match(line, at)
        if match is None:
            raise BadCommand("quote not closed (expected another ')")
        word = match.group()
        if word[0] == "'":
            word = word[1:-1].replace("''", "'")
        if glued:
            words[-1] += word
        else:
            words.append(word)
        at, glued = match.end(), True
    return words


def quote(word: str) -> str:
    """Return the word quoted so that `split` gives it back."""
    return word if _PLAIN.match(word) else "'" + word.replace("'", "''") + "'"


def quote_word(word: str) -> str:
    """Return the word quoted for a command line. Raises BadRequest if it has a newline, which would end the line."""
    if "\n" in word:
        raise BadRequest(f"invalid argument {word!r}: newline (expected one line)")
    return quote(word)


def command_lines(*lines: str) -> bytes:
    """Return commands as the bytes of one write."""
    return "".join(f"{line}\n" for line in lines).encode()


# ------------------------------------------------------------ lines of a token file


MARK = "sha256:"  # begins the second word
FORM = "USER sha256:ID:HEX [expires=YYYY-MM-DD] [scope=read|write|admin] [path=/GROUP] [note=TEXT]"
_HASHED = re.compile(rf"{MARK}([0-9A-Za-z]{{1,32}}):([0-9a-f]{{64}})\Z")
_SECRET = re.compile(rb"mq_([0-9A-Za-z]{1,32})_[0-9A-Za-z_-]{43}\Z")
_INVALID = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # control characters, and bytes that are not UTF-8
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?\Z", re.ASCII)


@attrs.frozen
class TokenLine:
    """A token. `expires`: UNIX time from which on it is refused."""

    user: str
    id: str
    digest: bytes
    scope: str = "admin"
    path: tuple[str, ...] = ()
    expires: float = math.inf
    note: str = ""


def new_secret() -> tuple[str, str]:
    """Return the ID and the secret of a new token."""
    token = secrets.token_hex(4)
    return token, f"mq_{token}_{secrets.token_urlsafe(32)}"


def digest(secret: bytes) -> bytes:
    """Return the hash of a secret, as in its line."""
    return hashlib.sha256(secret).digest()


def id_of(secret: bytes) -> str:
    """Return the ID in a secret; empty if it is not a token."""
    found = _SECRET.match(secret)
    return found[1].decode() if found is not None else ""


def parse_line(text: str) -> TokenLine:
    """Parse a line of a token file. Raises BadCommand."""
    user, *words = split(text) or [""]  # a line may be blank as text, and not as bytes
    match = _HASHED.match(words[0]) if words else None
    if match is None:  # not shown: it may be the secret
        raise BadCommand(f"malformed hash (expected {MARK}ID:HEX, 64 digits)")
    values: dict[str, str] = {}
    for option in words[1:]:
        key, equals, value = option.partition("=")
        if key not in ("expires", "scope", "path", "note") or not equals or key in values:
            raise BadCommand(f"malformed option (expected {FORM})")  # not shown: it may be the secret
        values[key] = value
    return TokenLine(
        user,
        match[1],
        bytes.fromhex(match[2]),
        parse_scope(values.get("scope", "admin")),
        parse_path(values.get("path", "/")),
        parse_moment(values["expires"]) if "expires" in values else math.inf,
        values.get("note", ""),
    )


def print_line(line: TokenLine) -> str:
    """Return the text that `parse_line` takes, without its newline."""
    words = [line.user, f"{MARK}{line.id}:{line.digest.hex()}", f"scope={line.scope}"]
    if line.path:
        words.append(f"path={print_path(line.path)}")
    if line.expires < math.inf:
        words.append(f"expires={print_moment(line.expires)}")
    if line.note:
        words.append(f"note={line.note}")
    return " ".join(map(quote, words))


def parse_scope(word: str) -> str:
    """Return a known scope. Raises BadCommand."""
    if word not in SCOPES:
        raise BadCommand(f"scope {word!r} (expected {', '.join(SCOPES)})")
    return word


def parse_path(word: str) -> tuple[str, ...]:
    """Return the names of a path from the root. Raises BadCommand."""
    names = tuple(name for name in word.split("/") if name)
    deep = len(names) > limits.PATH_GROUPS + 2  # a file in a folder of the deepest group
    if not word.startswith("/") or deep or {".", ".."} & set(names) or _INVALID.search(word):
        raise BadCommand(f"path {word!r} (expected /GROUP or /GROUP/NAME, without . and ..)")
    return names


def print_path(names: tuple[str, ...]) -> str:
    return "/" + "/".join(names)


def parse_moment(word: str) -> float:
    """Return the UNIX time of a date (its beginning) or a second, both UTC. Raises BadCommand."""
    try:
        if _MOMENT.match(word) is None:
            raise ValueError
        return datetime.fromisoformat(word).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise BadCommand(f"expires {word!r} (expected YYYY-MM-DD or YYYY-MM-DDTHH:MM:SSZ)") from None


def print_moment(moment: float) -> str:
    """Return the second, rounded up, in UTC; at midnight only the date."""
    text = datetime.fromtimestamp(math.ceil(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return text.removesuffix("T00:00:00Z")
