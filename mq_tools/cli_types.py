"""The frame of a command: option types, parsing, exit codes, one line on standard error for every failure."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import click

from mq_tools.errors import INTERRUPTED, USAGE, ToolError, print_line, reason
from mq_tools.times import ctl_duration, duration_ns, unix_time

T = TypeVar("T")


class Parsed(click.ParamType[T]):
    """An option type: a metavar, and a parser that raises ValueError for a bad value."""

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
    """Return the decorator that adds `--version` to a command."""
    return click.version_option(package_name="mqfs", prog_name=program, message="%(prog)s %(version)s")


def parse(program: click.Command, arguments: Sequence[str]) -> Any:
    """Parse the arguments and return the result of the command's function.

    Return an int after a help text, also after the help for a missing subcommand. Raises ToolError (usage).
    """
    try:
        return program.main(list(arguments), prog_name=program.name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE
    except click.ClickException as error:
        raise ToolError(usage_error(error), USAGE) from error
    except click.Abort:
        raise KeyboardInterrupt from None


# ---------------------------------------------------------------- what click refuses, in the form of all our errors

_COMMAND = re.compile(r"No such command '(.*)'")
_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)")
_VALUE = re.compile(r"(requires|does not take) an? (?:argument|value)")
_OF_TYPE = re.compile(r"(.*) is not (?:one of|in the range|a valid) ", re.DOTALL)


def usage_error(error: click.ClickException) -> str:
    """Return the text of a click error in our form: what failed: reason (expected ...; did you mean ...)."""
    context = getattr(error, "ctx", None)
    text = _usage_error(error, context)
    return text if context is None or text.endswith(")") else f"{text} (see {context.command_path} --help)"


def _usage_error(error: click.ClickException, context: click.Context | None) -> str:
    command = context.command if context is not None else None
    if isinstance(error, click.NoSuchOption):
        options = [name for param in command.get_params(context) for name in param.opts] if command and context else []
        return f"unknown option {error.option_name!r}" + _guess(error.option_name, options)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"missing {error.param.param_type_name} {_label(error.param)}"
    if isinstance(error, click.BadParameter):
        return _bad_value(error, error.param)
    if isinstance(error, click.BadOptionUsage) and (found := _VALUE.search(error.message)):
        return f"{error.option_name}: {'missing value' if found[1] == 'requires' else 'unexpected value'}"
    if found := _COMMAND.match(error.message):
        names = command.list_commands(context) if isinstance(command, click.Group) and context else []
        return f"unknown command {found[1]!r}" + (_guess(found[1], names) or f" (expected one of {', '.join(names)})")
    if found := _EXTRA.match(error.message):
        return f"unexpected argument {found[1].split(' ')[0]!r}"
    return error.message[:1].lower() + error.message[1:].rstrip(".")


def _guess(word: str, names: Iterable[str]) -> str:
    found = get_close_matches(word, list(names), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _label(param: click.Parameter) -> str:
    """Return an option as it is typed, an argument in capitals."""
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return (param.name or "").upper() if "[" in param.human_readable_name else param.human_readable_name


def _bad_value(error: click.BadParameter, param: click.Parameter | None) -> str:
    """Return the text for a value that its type refuses. Errors of `Parsed` types already have the reason."""
    label, kind = _label(param) if param is not None else "", param.type if param is not None else None
    value = _OF_TYPE.match(error.message)
    if value is None or kind is None:
        return f"{label} {error.message}" if error.message.startswith("'") else f"{label}: {error.message}".lstrip(": ")
    if isinstance(kind, click.Choice):
        choices = [str(choice) for choice in kind.choices]
        return f"{label} {value[1]}: unknown (expected one of {', '.join(choices)})"
    if isinstance(kind, click.IntRange | click.FloatRange) and kind.min is not None:
        expected = f"{kind.min} to {kind.max}" if kind.max is not None else f"at least {kind.min}"
        reason = "out of range" if "not in the range" in error.message else "not a number"
        return f"{label} {value[1]}: {reason} (expected {expected})"
    return f"{label} {value[1]}: not a number (expected a {'whole ' if kind is click.INT else ''}number)"


# ---------------------------------------------------------------- running a tool


def open_standard_files() -> None:
    """Open /dev/null as each closed descriptor from 0 to 2; otherwise the next opened file would get that number.

    Standard input is opened for writing and standard output for reading: using a closed one stays an error. Text for
    standard error is discarded.
    """
    for fd, name, flags in ((0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # it gets the lowest free number
            file = io.FileIO(fd, "w" if fd else "r", closefd=False)
            buffer = io.BufferedWriter(file) if fd else io.BufferedReader(file)
            setattr(sys, name, io.TextIOWrapper(buffer, encoding="utf-8", errors="surrogateescape"))


def output_failed() -> bool:
    """Whether standard output refuses the printed text. If so, discard the text: the interpreter would flush it again
    at exit and print an error of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return True
    return False


def run_tool(program: str, run: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a tool and return its exit code. A ToolError or OSError, as of output, becomes a line on standard error."""
    open_standard_files()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    code = 0
    try:
        code = _run(program, run, sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except OSError as error:
        print_line(program, f"{error.filename or 'standard output'}: {reason(error)}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes it once more
        return code or 1


def _run(program: str, run: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    try:
        return run(arguments)
    except ToolError as error:
        if str(error):
            print_line(program, str(error))
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
