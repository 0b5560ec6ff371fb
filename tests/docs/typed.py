"""Markdown pages that are typed: their console blocks, and the programs that they let their reader write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pexpect

from tests.docs.pages import Line
from tests.support.eventually import eventually
from tests.support.shell import Shell

BLOCK = re.compile(r'^```(console|python title="([\w.]+)")\n(.*?)^```', re.MULTILINE | re.DOTALL)


class Program(NamedTuple):
    """A file to be written."""

    name: str
    text: str


class Served(NamedTuple):
    """A clone with its server."""

    folder: Path
    port: int  # of HTTP

    def text(self, page: Path) -> str:
        """A page, to be typed here: other tests have a server at the port that it names."""
        return page.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{self.port}")


def steps(text: str) -> list[Line | Program]:
    """In order: every program, and every `$ ` line with its `> ` lines and what it shows (`^C`: until interrupted)."""
    found: list[Line | Program] = []
    for _, name, body in BLOCK.findall(text):
        found += [Program(name, body)] if name else console(body)
    return found


def console(body: str) -> list[Line]:
    lines: list[Line] = []
    for row in body.splitlines():
        if row.startswith("$ "):
            lines.append(Line(row[2:], []))
        elif row.startswith("> ") and not lines[-1].shown:
            lines[-1] = Line(f"{lines[-1].typed}\n{row[2:]}", [])
        else:
            lines[-1].shown.append(row)
    return lines


def type_page(text: str, typing: Shell, folder: Path) -> int:
    """Type it all; how many lines were typed. Raises AssertionError where not exactly what the page shows comes."""
    lines = 0
    for step in steps(text):
        if isinstance(step, Program):
            (folder / step.name).write_text(step.text)
        else:
            lines += 1
            with named(step):
                type_line(step, typing, folder)
    return lines


@contextmanager
def named(line: Line) -> Iterator[None]:
    """Whatever goes wrong names the line."""
    try:
        yield
    except (AssertionError, pexpect.TIMEOUT) as error:
        raise AssertionError(f"$ {line.typed}\n{error}") from None


def type_line(line: Line, typing: Shell, folder: Path) -> None:
    is_interrupted = line.shown[-1:] == ["^C"]
    typing.begin(line.typed)
    typing.shows(*(line.shown[:-1] if is_interrupted else line.shown), prompt=not is_interrupted)
    if is_interrupted:
        typing.interrupt()
    if line.typed.endswith("&"):  # readers, which are to wait before more is typed
        (stream,) = set(re.findall(r"mq/\S+", line.typed))
        waiting = f'"waiting": {line.typed.count("&")}'
        eventually(lambda: waiting in (folder / stream).with_name(".stats").read_text(), "the readers wait")
