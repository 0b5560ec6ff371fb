"""`mq put`: what goes in front of a message's body in `.put`, and what the bodies are."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import click

from mq_tools.errors import USAGE, ToolError, reason
from mq_tools.files import opened, write
from mq_tools.place import Place, check_there
from mq_tools.times import ctl_duration, unix_time


@attrs.frozen
class Metadata:
    """What `.put` takes beside the stream and the body."""

    delay: str | None = None
    at: float | None = None
    ttl: str | None = None
    priority: int | None = None
    id: str | None = None
    single: bool = False
    headers: Mapping[str, str] = attrs.Factory(dict)

    def keys(self) -> dict[str, Any]:
        """Those that were asked for."""
        return {key: value for key, value in attrs.asdict(self).items() if value not in (None, False, {})}


class Length(click.ParamType[str]):
    """A duration as `ctl` has it."""

    name = "D"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return ctl_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Moment(click.ParamType[float]):
    """A time, in UNIX seconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return unix_time(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def headers_of(words: Sequence[str]) -> dict[str, str]:
    """Raises ToolError."""
    headers = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ToolError(f"-H {word!r}: write KEY=VALUE", USAGE)
        headers[key] = value
    return headers


def bodies_of(words: Sequence[str], *, lines: bool, newline: bool) -> Iterable[bytes]:
    """The words as one message, else standard input: as one, or each of its lines. Raises ToolError."""
    if words:
        return [os.fsencode(" ".join(words)) + (b"\n" if newline else b"")]
    if lines:
        return sys.stdin.buffer
    try:
        return [sys.stdin.buffer.read()]
    except OSError as error:
        raise ToolError(f"standard input: {reason(error)}") from error


class Putter:
    """Writes messages to one stream: plainly, or through `.put` where there is something to tell about them."""

    def __init__(self, place: Place, given: str, *, make: bool) -> None:
        if not make or place.name in ("ctl", "order") or place.name.startswith("."):
            check_there(place, given)
        self._place, self._make = place, make

    def plain(self, bodies: Iterable[bytes]) -> None:
        """One write a message."""
        flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT if self._make else 0)
        path = self._place.path
        with opened(path, flags) as fd:
            for body in bodies:
                check_body(body)
                write(fd, body, path)

    def told(self, bodies: Iterable[bytes], metadata: Metadata) -> Iterable[int]:
        """Through `.put`; the sequence of each message."""
        if self._make and not os.path.lexists(self._place.path):
            with opened(self._place.path, os.O_WRONLY | os.O_CREAT):
                pass
        path = self._place.file(".put")
        front = json.dumps({"stream": self._place.name, **metadata.keys()}, ensure_ascii=False)
        with opened(path, os.O_RDWR) as fd:
            for body in bodies:
                check_body(body)
                write(fd, front.encode("utf-8", "surrogateescape") + b"\n" + body, path)
                yield int(os.read(fd, 100) or b"0")


def check_body(body: bytes) -> None:
    if not body:
        raise ToolError("a message has at least one byte")
