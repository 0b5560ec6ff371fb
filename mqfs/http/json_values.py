"""The values of a JSON array, one after the other: in the very characters that were sent, and bounded before each is
parsed, so that no body of a client keeps others waiting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from mqfs import limits
from mqfs.errors import BadRequest, TooLong

_BLANKS = re.compile(r"[ \t\r\n]*")


def is_json(text: bytes) -> bool:
    """Whether it is one value."""
    try:
        _DECODER.decode(text.decode())
    except (ValueError, RecursionError):
        return False
    return True


def elements(body: bytes) -> Iterator[str]:
    """The elements of an array, or the one value that is none. Raises BadRequest, TooLong."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise BadRequest("body: not UTF-8 (expected JSON)") from None
    yield from _elements(text)


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} (expected JSON)")


_DECODER = json.JSONDecoder(parse_constant=_constant)


def _elements(text: str) -> Iterator[str]:
    at = _past_blanks(text, 0)
    if not text.startswith("[", at):
        end = _element_end(text, at)
        yield text[at:end]
        _require_end(text, end)
        return
    at = _past_blanks(text, at + 1)
    if text.startswith("]", at):
        return _require_end(text, at + 1)
    begin, part = 0, ""  # what is parsed at once, and where it begins
    while True:
        if not part or at - begin > limits.HTTP_JSON_BYTES:
            begin, part = at, text[at : at + 2 * limits.HTTP_JSON_BYTES]
        end = begin + _element_end(part, at - begin, is_cut=begin + len(part) < len(text))
        yield text[at:end]
        at = _past_blanks(text, end)
        if text.startswith("]", at):
            return _require_end(text, at + 1)
        if not text.startswith(",", at):
            raise BadRequest(f"body: not JSON: column {at + 1} (expected a comma or ])")
        at = _past_blanks(text, at + 1)


def _element_end(text: str, at: int, *, is_cut: bool = False) -> int:
    """Where a value ends. `is_cut`: there is more text."""
    if len(text) - at > 2 * limits.HTTP_JSON_BYTES:
        text, is_cut = text[: at + 2 * limits.HTTP_JSON_BYTES], True
    try:
        end = int(_DECODER.raw_decode(text, at)[1])
    except (ValueError, RecursionError) as error:
        if not is_cut:
            reason = "nested too deeply" if isinstance(error, RecursionError) else error
            raise BadRequest(f"body: not JSON: {reason}") from None
        end = len(text)
    if is_cut and end == len(text):  # a number, too, may go on
        expected = f"at most {limits.HTTP_JSON_BYTES} characters"
        raise TooLong(f"body: not JSON, or an element is too long (expected {expected})")
    return end


def member(text: str, name: str) -> str:
    """The characters of a member of an object, which is JSON and has it; of several, of the last, as json.loads."""
    at, found = text.index("{") + 1, ""
    while text[at := _past_blanks(text, at)] != "}":
        key, end = _DECODER.raw_decode(text, at)
        begin = _past_blanks(text, _past_blanks(text, end) + 1)  # behind the colon
        _, at = _DECODER.raw_decode(text, begin)
        if key == name:
            found = text[begin:at]
        at = _past_blanks(text, at)
        at += text[at] == ","
    return found


def _past_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found is not None else at


def _require_end(text: str, at: int) -> None:
    if _past_blanks(text, at) != len(text):
        raise BadRequest(f"body: not JSON: column {at + 1} (expected the end)")
