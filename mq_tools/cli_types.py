"""The frame of a command: option types, parsing, exit codes, one line on standard error for every failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from mq_tools.errors import INTERRUPTED, USAGE, ToolError, print_line
from mq_tools.times import ctl_duration, duration_ns, unix_time

T = TypeVar("T")


class Parsed(click.ParamType[T]):
    """An option type made of a metavar and a function from its text, which raises ValueError."""

    def __init__(self, metavar: str, parse: Callable[[str], T]) -> None:
        self.name = metavar
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            return self._parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


SECONDS = Parsed("T", lambda text: duration_ns(text) / 1e9)
CTL_DURATION = Parsed("D", ctl_duration)
TIME = Parsed("TIME", unix_time)


HELP = {"help_option_names": ["-h", "--help"]}  # settings of a command


def version(program: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `--version` of a command."""
    return click.version_option(package_name="mqfs", prog_name=program, message="%(prog)s %(version)s")


def parse(program: click.Command, arguments: Sequence[str]) -> Any:
    """The result of the command's function; an int after --help. Raises ToolError (usage)."""
    try:
        return program.main(list(arguments), prog_name=program.name, standalone_mode=False)
    except click.ClickException as error:
        raise ToolError(f"{error.format_message().rstrip('.')} (see {program.name} --help)", USAGE) from error
    except click.Abort:
        raise KeyboardInterrupt from None


def run_tool(program: str, run: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """The exit code of a tool; its ToolError becomes one line on standard error."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except ToolError as error:
        if str(error):
            print_line(program, str(error))
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
