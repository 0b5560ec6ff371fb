"""What mq-cat and pin share of being a command: arguments, exit codes, one line for whatever goes wrong."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from mq_tools.errors import INTERRUPTED, USAGE, ToolError, note


def parsed(program: click.Command, arguments: Sequence[str]) -> Any:
    """What click makes of the arguments. Raises ToolError (usage), one line; an int where it has answered itself."""
    try:
        return program.main(list(arguments), prog_name=program.name, standalone_mode=False)
    except click.ClickException as error:
        raise ToolError(f"{error.format_message().rstrip('.')} (see {program.name} --help)", USAGE) from error
    except click.Abort:
        raise KeyboardInterrupt from None


def guarded(program: str, run: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a tool: its exit code, with one line on standard error where it could not do what was asked."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except ToolError as problem:
        if str(problem):
            note(program, str(problem))
        return problem.code
    except KeyboardInterrupt:
        return INTERRUPTED
