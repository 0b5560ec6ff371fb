"""The command line of mq-cat: options, and the source that serves them (cursor, consumer, or `order`)."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

import attrs
import click

from mq_cat.order import OrderedMerge
from mq_cat.output import Format, Output, as_json, as_record, die_of_sigpipe, ended_by_newline, ended_by_nul, raw, timed
from mq_tools import completion
from mq_tools.cli_types import HELP, SECONDS, Parsed, parse, run_tool, version
from mq_tools.consumer import Consumer
from mq_tools.cursor import Cursor, Message
from mq_tools.errors import USAGE, ToolError, print_line, reason
from mq_tools.times import ctl_duration, unix_time
from mq_tools.tree import check_group, check_streams, ctl_of, inodes, is_group, is_pattern, streams_of, views_of

PROGRAM = "mq-cat"
FORMATS = ("raw", "line", "nul", "each", "json", "record")
CHECK_S = 2.0  # between two checks that the streams of an idle reader exist
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # SIGINT is an exception already
_FAILED_READS = 1000  # consecutive failures before the disk counts as lost


class Ended(BaseException):
    """A signal ends the program."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Source(Protocol):
    """An open reader of a group."""

    fd: int

    def read(self) -> list[Message] | None: ...

    def close(self) -> None: ...


@attrs.frozen
class Options:
    """Parsed command-line options."""

    group: str
    streams: Sequence[str]
    count: int | None
    end: bool
    idle_s: float | None
    nul: bool
    start: str | None
    json: bool
    times: bool
    order: bool
    consumer: str | None
    format: str | None

    @property
    def effective_format(self) -> str:
        """The format of --json or -f."""
        return "json" if self.json else self.format or "raw"


def seek_position(text: str) -> str:
    """Return the argument of `seek` for a start: a duration in ms, an ISO 8601 time as @UNIXTIME. Raises ValueError."""
    if re.fullmatch(r"first|last|end|-?[0-9]+", text):
        return text
    if re.fullmatch(r"@[0-9]+(\.[0-9]{1,9})?", text):
        unix_time(text)
        return text  # with all its decimals
    if text.startswith("@"):
        return f"@{unix_time(text[1:]):.6f}"
    if text.startswith("-"):
        return f"-{ctl_duration(text[1:])}"
    raise ValueError(f"bad start {text!r} (expected first, last, end, SEQUENCE, -N, -DURATION or @TIME)")


START = Parsed("WHERE", seek_position)


@click.command(PROGRAM, context_settings=HELP)
@version(PROGRAM)
@click.option("-n", "count", type=click.IntRange(0), metavar="N", help="End after N messages.")
@click.option("-e", "end", is_flag=True, help="Stop at the present end instead of waiting.")
@click.option("--idle", "idle_s", type=SECONDS, help="End with code 124 after T without a message.")
@click.option("-0", "nul", is_flag=True, help="End each message with a NUL byte: -f nul.")
@click.option("--from", "start", type=START, help="Begin at first, last, end, SEQUENCE, -N, -DURATION or @TIME.")
@click.option("-f", "format", type=click.Choice(FORMATS), metavar="FORMAT", help=f"Format: {', '.join(FORMATS)}.")
@click.option("--json", "json", is_flag=True, help="Print one JSON object a message: -f json.")
@click.option("--consumer", metavar="NAME", help="Claim the messages of a consumer, and ack each after output.")
@click.option("-t", "times", is_flag=True, help="Prefix each message with time and stream.")
@click.option("--order", "order", is_flag=True, help="Read 'order' and the streams, not .cursor.")
@click.argument("group", type=click.Path(readable=False))
@click.argument("streams", nargs=-1, metavar="[STREAM]...", shell_complete=completion.streams)
def _command(**options: Any) -> Options:
    """Print the messages of the streams of GROUP in the order of their publication, and wait for more.

    A STREAM may be a view, or a pattern such as 'log.*'; GROUP/STREAM is one stream.
    """
    return Options(**options)


def open_source(options: Options) -> Source:
    """Open the reader that the options select. Raises ToolError."""
    if options.consumer is not None:
        return _open_consumer(options, options.consumer)
    if options.order or not os.path.lexists(os.path.join(options.group, ".cursor")):
        return _open_ordered(options)
    cursor = Cursor(options.group, records=options.effective_format == "record")
    if options.streams:
        cursor.select(options.streams)
    if options.start is not None:
        cursor.command(f"seek {options.start}")
    elif options.streams and "replay last" in ctl_of(options.group):
        cursor.command("seek last")  # the newest of these streams
    if options.end:
        cursor.command("until end")
    return cursor


def _open_consumer(options: Options, name: str) -> Consumer:
    consumer = Consumer(options.group, name, _warn, records=options.effective_format == "record")
    if options.streams:
        consumer.select(options.streams)
    if options.end:
        consumer.command("until end")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # so that unwritten messages are released first
    return consumer


def _warn(text: str) -> None:
    print_line(PROGRAM, text)


def _open_ordered(options: Options) -> OrderedMerge:
    metadata = {"json": "--json" if options.json else "-f json", "record": "-f record"}.get(
        options.effective_format, ""
    )
    for needed, option in ((options.start, "--from"), (metadata, metadata), (options.times, "-t")):
        if needed:
            raise ToolError(
                f"{options.group}: {option}: not with 'order', which has only names of streams (expected .cursor)"
            )
    source = OrderedMerge(options.group, options.streams, _warn)
    views = views_of(options.group)
    for name in options.streams:
        if is_pattern(options.group, name) and name not in streams_of(options.group):
            raise ToolError(f"{options.group}: pattern {name!r}: not with 'order' (expected streams)")
        if name in views:
            raise ToolError(f"{options.group}: view {name!r}: not in 'order' (expected its streams)")
    source.open(options.streams or [name for name in streams_of(options.group) if name not in views])
    return source


def check_options(options: Options) -> None:
    """Raise ToolError for options that exclude each other."""
    for conflict, text in (
        (options.json and options.times, "-t: not with --json, whose objects have the time"),
        (options.json and options.format not in (None, "json"), f"--json: not with -f {options.format}"),
        (
            options.times and options.effective_format in ("json", "record"),
            f"-t: not with -f {options.effective_format}",
        ),
        (options.nul and options.effective_format in ("each", "record"), f"-0: not with -f {options.effective_format}"),
        (options.order and options.consumer, "--order: not with --consumer"),
        (options.start and options.consumer, "--from: not with --consumer, whose position its workers share"),
    ):
        if conflict:
            raise ToolError(text, USAGE)


def format_of(options: Options) -> Format:
    if options.effective_format == "record":
        return as_record
    body = as_json if options.effective_format == "json" else timed if options.times else raw
    if options.nul or options.effective_format == "nul":
        return ended_by_nul(body)
    return ended_by_newline(body) if options.times or options.effective_format in ("json", "line") else body


def copy(source: Source, output: Output, options: Options, streams: frozenset[int]) -> int:
    """Write messages until an end condition holds; return the exit code. `streams`: inodes of the streams. Raises
    ToolError."""
    failures = 0
    while not output.full:
        try:
            messages = source.read()
        except EOFError:
            if options.end and _exists(options.group):
                return 0
            raise ToolError(_end_reason(options, streams)) from None
        except OSError as error:
            failures += 1
            if error.errno == errno.EPIPE:
                print_line(PROGRAM, "reader fell behind")
            elif error.errno == errno.EIO and failures < _FAILED_READS:
                print_line(PROGRAM, f"{options.group}: cannot read a message: {reason(error)}")
            else:
                raise ToolError(f"{options.group}: {reason(error)}") from error
            continue
        failures = 0
        if messages:
            deliver_until_end(source, output, messages)
        elif messages is None:
            if options.end and isinstance(source, OrderedMerge):
                return 0
            if not output.wait(source.fd, CHECK_S) and streams:
                check_any_left(options.group, streams)
    return 0


def deliver_until_end(source: Source, output: Output, messages: list[Message]) -> None:
    """Write messages. Of claimed messages, acknowledge those that were written and release the rest."""
    if not isinstance(source, Consumer):
        output.put(messages)
        return
    written = 0
    try:
        written = output.put(messages)
    except BrokenPipeError:
        source.release(messages)
        die_of_sigpipe()
    finally:
        source.release(messages[written:])
    source.acknowledge(messages[:written])


def raise_signals() -> None:
    """Raise Ended at SIGTERM and SIGHUP, so that claimed messages are released; a second one ends the program."""

    def end(number: int, _frame: FrameType | None) -> None:
        for ending in _ENDING:
            signal.signal(ending, signal.SIG_DFL)
        raise Ended(number)

    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, end)


def check_any_left(group: str, streams: frozenset[int]) -> None:
    """Raise ToolError if all streams were removed (a rename keeps the inode): no message could follow."""
    try:
        left = inodes(group) & streams
    except OSError:
        return  # the next read fails with the reason
    if not left:
        raise ToolError(f"{group}: the streams were removed")


def _exists(group: str) -> bool:
    return os.path.lexists(os.path.join(group, "order"))


def _end_reason(options: Options, streams: frozenset[int]) -> str:
    """Return the error for an end of file without -e."""
    group = options.group
    try:
        check_group(group)
        if streams:
            check_any_left(group, streams)
    except ToolError as error:
        return str(error) if os.path.lexists(group) else f"{group}: the group was removed"
    if options.consumer is not None and not os.path.lexists(os.path.join(group, ".consumers", options.consumer)):
        return f"{group}: the consumer {options.consumer!r} was removed"
    return f"{group}: unexpected end of file"


def run(arguments: Sequence[str]) -> int:
    options = parse(_command, arguments)
    if not isinstance(options, Options):
        return int(options or 0)  # --help
    check_options(options)
    if not options.streams and not is_group(options.group):
        group, name = os.path.split(options.group)
        if is_group(group or ".") and (is_pattern(group or ".", name) or os.path.lexists(options.group)):
            options = attrs.evolve(options, group=group or ".", streams=[name])
    output = Output(format_of(options), options.count, options.idle_s, write_each=options.effective_format == "each")
    try:
        check_group(options.group)
        streams = check_streams(options.group, options.streams)
        source = open_source(options)
    except OSError as error:
        raise ToolError(f"{error.filename or options.group}: {reason(error)}") from error
    try:
        if isinstance(source, Consumer):
            raise_signals()
        return copy(source, output, options, streams)
    except Ended as ended:
        return 128 + ended.number
    finally:
        source.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mq-cat; return the exit code."""
    return run_tool(PROGRAM, run, arguments)
