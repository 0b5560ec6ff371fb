"""pin's command line: what was asked for, and what in the environment bears on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import attrs
import click

from mq_tools.cli_types import guarded, parsed
from mq_tools.errors import USAGE, ToolError
from mq_tools.pin.attach import PROGRAM, attach, write
from mq_tools.pin.host import get_size, start
from mq_tools.pin.session import Session

DETACH = "^\\"


@attrs.frozen
class Wish:
    """What the command line asked for."""

    attach: bool
    create: bool
    write: bool
    mount: str
    id: str
    command: Sequence[str]


@click.command(PROGRAM, context_settings={"allow_interspersed_args": False})
@click.option("-a", "attach", is_flag=True, help="Attach this terminal to the session.")
@click.option("-c", "create", is_flag=True, help="Create the session and run COMMAND in it (default: $SHELL -i).")
@click.option("-w", "write", is_flag=True, help="Type COMMAND's words and a newline, or standard input, into it.")
@click.option("-m", "mount", envvar="MQFS", default="./mq", metavar="MOUNT", help="The mount (default: $MQFS, ./mq).")
@click.argument("id")
@click.argument("command", nargs=-1, metavar="[COMMAND]...")
def _command(**given: Any) -> Wish:
    """Programs on a terminal that outlives the one they were started from.

    Without a flag: attach to session ID, creating it if it is not there. Detach with Ctrl-\\ (see $PIN_DETACH).
    """
    return Wish(**given)


def detach_key(text: str) -> bytes:
    """`^X`, one character, or `none`. Raises ToolError."""
    if text == "none":
        return b""
    if len(text) == 2 and text[0] == "^" and "@" <= text[1].upper() <= "_":
        return bytes([ord(text[1].upper()) - 64])
    if len(text) == 1:
        return os.fsencode(text)
    raise ToolError(f"$PIN_DETACH is {text!r}: write ^ and a letter such as ^], one character, or none", USAGE)


def create(session: Session, command: Sequence[str]) -> None:
    """Make the session and start its command."""
    session.make()
    start(session, command or (os.environ.get("SHELL") or "/bin/sh", "-i"), get_size() or (24, 80))


def run(arguments: Sequence[str]) -> int:
    wanted = parsed(_command, arguments)
    if not isinstance(wanted, Wish):
        return int(wanted or 0)  # --help
    if wanted.attach and wanted.write:
        raise ToolError("-a and -w exclude each other", USAGE)
    if wanted.attach and not wanted.create and wanted.command:
        raise ToolError("-a takes no COMMAND: the session runs its own", USAGE)
    session = Session(wanted.mount, wanted.id)
    key = detach_key(os.environ.get("PIN_DETACH", DETACH))
    flags = wanted.attach or wanted.create or wanted.write
    session.check_mount()
    if wanted.create or (not flags and not session.there):
        create(session, wanted.command)
    if wanted.write:
        write(session, () if wanted.create else wanted.command)
    return attach(session, key) if wanted.attach or not flags else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    return guarded(PROGRAM, run, arguments)
