"""`mq redrive --edit`: edit dead letters, and send them back to their original streams.

The edited message is published first, and then the dead letter is dropped. The message's id is made of the dead
letter's stream and sequence: if this program ends in between, a repeat within `dedup` does not publish it again.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import islice

from mq_tools.cursor import Cursor, Message, quote
from mq_tools.errors import ToolError, reason
from mq_tools.files import open_file, read_answer, read_lines, stats_of, write, write_ctl
from mq_tools.mq.peek import by_cursor
from mq_tools.tree import unquote

_LETTER = ("stream", "sequence", "deliveries", "reason", "consumer")  # headers that the server adds to a dead letter
_OWN = ("sender", "id", "held", "single", "ttl")  # set by the server or `_send`, or valid for the original only


def edit_dead_letters(group: str, stream: str | None, count: int) -> Iterator[tuple[int, str]]:
    """Edit at most `count` dead letters, oldest first; `stream`: only letters that came from it. Yield the sequence and
    the result of each. Raises ToolError."""
    for letter in _letters(group, stream, count):
        body = _edited(letter)
        if body is None:
            yield letter.sequence, "unchanged, left"
            continue
        _send(group, letter, body)
        write_ctl(group, [f"drop {quote(letter.stream)} {letter.sequence}"])
        yield letter.sequence, f"sent to {letter.headers['stream']}"


def _letters(group: str, stream: str | None, count: int) -> list[Message]:
    lines = read_lines(os.path.join(group, "ctl"))
    name = next((unquote(line.split(" ", 1)[1]) for line in lines if line.startswith("dead ")), None)
    if name is None:
        raise ToolError(f"{group}: no line dead in ctl (expected a group of mqfs)")
    if name not in stats_of(group).get("streams", {}):
        return []
    cursor = Cursor(group)
    try:
        origins = ((letter, letter.headers.get("stream")) for letter in by_cursor(cursor, name))
        return list(islice((letter for letter, origin in origins if origin and stream in (None, origin)), count))
    finally:
        cursor.close()


def _editor() -> list[str]:
    """Return the words of VISUAL, else EDITOR, else vi. Raises ToolError."""
    text = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    try:
        return shlex.split(text) or ["vi"]
    except ValueError as error:
        raise ToolError(f"bad editor {text!r}: {str(error).lower()} (expected a command in EDITOR)") from error


def _edited(letter: Message) -> bytes | None:
    """Return the edited body; None if it is unchanged. Raises ToolError, also for a body in parts or emptied."""
    if "part" in letter.headers:
        raise ToolError(f"dead letter {letter.sequence}: a body in parts cannot be edited (expected one message)")
    editor = _editor()
    with tempfile.TemporaryDirectory(prefix="mq-", ignore_cleanup_errors=True) as folder:
        path = os.path.join(folder, f"{letter.sequence}.txt")
        with open(path, "wb") as file:
            file.write(letter.body)
        try:
            code = subprocess.run([*editor, path], check=False).returncode
        except OSError as error:
            raise ToolError(f"{editor[0]}: {reason(error)} (expected an editor in EDITOR)") from error
        if code:
            raise ToolError(f"{editor[0]}: exit status {code}, nothing sent")
        try:
            with open(path, "rb") as file:  # an editor may have put another file in its place
                body = file.read()
        except OSError as error:
            raise ToolError(f"{editor[0]}: edited file: {reason(error)}, nothing sent") from error
    if letter.body and not body.strip(b"\n"):
        raise ToolError(f"dead letter {letter.sequence}: emptied, nothing sent (the dead letter stays)")
    if not letter.body.endswith(b"\n"):
        body = body.removesuffix(b"\n")  # editors end the last line
    return None if body == letter.body else body


def _send(group: str, letter: Message, body: bytes) -> None:
    """Publish the changed message. Raises ToolError, also if the stream is full or has no receiver: the dead letter
    stays."""
    origin = letter.headers["stream"]
    keys: dict[str, object] = {"stream": origin, "id": f"edit of {letter.stream} {letter.sequence}", "kept": True}
    if "priority" in letter.headers:
        keys["priority"] = int(letter.headers["priority"])
    left_out = (*_LETTER, *_OWN, "priority")
    keys["headers"] = {key: text for key, text in letter.headers.items() if key not in left_out}
    if "single" in letter.headers:
        keys["single"] = True
    path = os.path.join(group, ".put")
    with open_file(path, os.O_RDWR) as fd:
        write(fd, json.dumps(keys, ensure_ascii=False).encode() + b"\n" + body, path)
        answer = read_answer(fd, path).split()
    if not answer:
        raise ToolError(f"dead letter {letter.sequence}: discarded: stream {origin!r} is full (the dead letter stays)")
    if answer[-1] == b"0":
        raise ToolError(
            f"dead letter {letter.sequence}: no receiver of {origin!r} (expected a consumer or a reader;"
            " the dead letter stays)"
        )
