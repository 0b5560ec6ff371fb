"""The command line of pin, and its environment variables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import attrs
import click

from mq_tools.cli_types import HELP, parse, run_tool, version
from mq_tools.completion import sessions
from mq_tools.errors import USAGE, ToolError
from mq_tools.pin.attach import PROGRAM, attach, write
from mq_tools.pin.host import get_size, start
from mq_tools.pin.session import Session

DETACH = "^\\"


@attrs.frozen
class Options:
    """Parsed command-line options."""

    attach: bool
    create: bool
    write: bool
    mount: str
    id: str
    command: Sequence[str]


@click.command(PROGRAM, context_settings={**HELP, "allow_interspersed_args": False})
@version(PROGRAM)
@click.option("-a", "attach", is_flag=True, help="Attach this terminal to the session.")
@click.option("-c", "create", is_flag=True, help="Create the session and run COMMAND in it ($SHELL -i without it).")
@click.option("-w", "write", is_flag=True, help="Type the words of COMMAND and a newline, or standard input.")
@click.option("-m", "mount", envvar="MQFS", default="./mq", metavar="MOUNT", help="The mount, else $MQFS, else ./mq.")
@click.argument("id", shell_complete=sessions)
@click.argument("command", nargs=-1, metavar="[COMMAND]...")
def _command(**options: Any) -> Options:
    """Run a program on a terminal that outlives the present one.

    Without a flag: attach to session ID, creating it if missing. Detach with Ctrl-\\ (see $PIN_DETACH).
    """
    return Options(**options)


def detach_key(text: str) -> bytes:
    """Return the bytes of the key `^X` or of one character; empty for `none`. Raises ToolError."""
    if text == "none":
        return b""
    if len(text) == 2 and text[0] == "^" and "@" <= text[1].upper() <= "_":
        return bytes([ord(text[1].upper()) - 64])
    if len(text) == 1:
        return os.fsencode(text)
    raise ToolError(f"$PIN_DETACH: bad key {text!r} (expected ^], one character, or none)", USAGE)


def create(session: Session, command: Sequence[str]) -> None:
    """Create the session and start its command. Raises ToolError."""
    session.create()
    start(session, command or (os.environ.get("SHELL") or "/bin/sh", "-i"), get_size() or (24, 80))


def run(arguments: Sequence[str]) -> int:
    options = parse(_command, arguments)
    if not isinstance(options, Options):
        return int(options or 0)  # --help
    if options.attach and options.write:
        raise ToolError("-a and -w: both given (expected one)", USAGE)
    if options.attach and not options.create and options.command:
        raise ToolError("-a and COMMAND: both given (expected -c with COMMAND)", USAGE)
    session = Session(options.mount, options.id)
    key = detach_key(os.environ.get("PIN_DETACH", DETACH))
    flags = options.attach or options.create or options.write
    session.check_mount()
    if options.create or (not flags and not session.exists):
        create(session, options.command)
    if options.write:
        write(session, () if options.create else options.command)
    return attach(session, key) if options.attach or not flags else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pin; return the exit code."""
    return run_tool(PROGRAM, run, arguments)
