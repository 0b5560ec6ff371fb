"""`mq put`: the bodies of messages, their metadata, and the two ways to write them: plainly or by `.put`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from mq_tools.errors import USAGE, ToolError, print_line
from mq_tools.files import lines_of_input, open_file, read_answer, read_input, write
from mq_tools.tree import TreePath, check_exists, is_group_file

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # W3C Trace Context


@attrs.frozen
class Metadata:
    """The keys of an object for `.put`, without the stream."""

    delay: str | None = None
    at: float | None = None
    ttl: str | None = None
    priority: int | None = None
    id: str | None = None
    key: str | None = None
    single: bool = False
    expect: int | None = None
    every: str | None = None
    cron: str | None = None
    headers: Mapping[str, str] = attrs.Factory(dict)

    def keys(self) -> dict[str, Any]:
        """Return the keys that have a value."""
        return {
            key: value
            for key, value in attrs.asdict(self).items()
            if value is not None and value is not False and value != {}
        }


def headers_of(words: Sequence[str]) -> dict[str, str]:
    """Return the headers of KEY=VALUE words. Raises ToolError."""
    headers = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ToolError(f"-H: bad header {word!r} (expected KEY=VALUE)", USAGE)
        headers[key] = value
    return headers


def trace_headers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that put a message into the trace of $TRACEPARENT and $TRACESTATE; {} without a valid one."""
    parent, state = environ.get("TRACEPARENT", ""), environ.get("TRACESTATE", "")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    return {"traceparent": parent, **({"tracestate": state} if state else {})}


def bodies_of(words: Sequence[str], *, lines: bool, newline: bool) -> Iterable[bytes]:
    """Return the words as one body, else standard input as one body or line by line. Raises ToolError."""
    if words:
        return [os.fsencode(" ".join(words)) + (b"\n" if newline else b"")]
    if sys.stdin.isatty():
        print_line("mq", "reading standard input (Ctrl-D ends it)")
    return lines_of_input() if lines else [read_input()]


class Putter:
    """A writer of messages to one stream. Raises ToolError if the stream does not exist and `make` is false."""

    def __init__(self, stream: TreePath, path: str, *, make: bool, hint: str = "--make") -> None:
        """`path`: as typed, for errors; `hint`: how to create the stream."""
        if not make or is_group_file(stream.name):
            check_exists(stream, path, f" (create it: {hint})")
        self._stream, self._make = stream, make

    def append(self, bodies: Iterable[bytes]) -> None:
        """Write each body to the stream. Raises ToolError."""
        flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT if self._make else 0)
        path = self._stream.path
        with open_file(path, flags) as fd:
            for body in bodies:
                check_body(body)
                write(fd, body, path)

    def put(self, bodies: Iterable[bytes], metadata: Metadata) -> Iterable[int]:
        """Write each body by `.put`; yield the sequence of each message, 0 if it is discarded. Raises ToolError."""
        if self._make and not os.path.lexists(self._stream.path):
            with open_file(self._stream.path, os.O_WRONLY | os.O_CREAT):
                pass
        path = self._stream.file(".put")
        head = json.dumps({"stream": self._stream.name, **metadata.keys()}, ensure_ascii=False)
        with open_file(path, os.O_RDWR) as fd:
            for body in bodies:
                if metadata.key is None:  # an empty message with a key removes the key
                    check_body(body)
                write(fd, head.encode("utf-8", "surrogateescape") + b"\n" + body, path)
                yield int(read_answer(fd, path) or b"0")


def check_body(body: bytes) -> None:
    if not body:
        raise ToolError("empty message (expected at least one byte)")
