"""mq-cat's command line: what was asked for, and which of the two ways of reading answers it."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import click

from mq_cat.order import OrderedMerge
from mq_cat.output import Format, Output, as_json, as_record, die_of_sigpipe, ended_by_newline, ended_by_nul, raw, timed
from mq_tools.cli_types import guarded, parsed
from mq_tools.consumer import Consumer
from mq_tools.cursor import Cursor, Message
from mq_tools.errors import USAGE, ToolError, note, reason
from mq_tools.times import Duration, ctl_duration, unix_time
from mq_tools.tree import check_group, check_streams, inodes, streams_of, views_of

PROGRAM = "mq-cat"
FORMATS = ("raw", "line", "nul", "each", "json", "record")
LOOK_S = 2.0  # how often a silent reader looks whether its streams are still there
_DAMAGED_IN_A_ROW = 1000  # reads that fail one after the other, before the disk itself is taken to be gone


class Source(Protocol):
    """A way of reading a group."""

    fd: int

    def take(self) -> list[Message] | None: ...

    def close(self) -> None: ...


@attrs.frozen
class Options:
    """What the command line asked for."""

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
    def shape(self) -> str:
        """The format asked for by any of the options."""
        return "json" if self.json else self.format or "raw"


class Start(click.ParamType[str]):
    """Where to begin, as the cursor's `seek` has it; `@` also takes an ISO 8601 time."""

    name = "WHERE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        where = str(value)
        if re.fullmatch(r"first|last|end|-?[0-9]+", where):
            return where
        try:
            if where.startswith("@"):
                return _seek_time(where)
            if where.startswith("-"):
                return f"-{ctl_duration(where[1:])}"
        except ValueError as error:
            self.fail(str(error), param, ctx)
        self.fail(f"bad start {where!r} (expected first, last, end, SEQUENCE, -N, -DURATION or @TIME)", param, ctx)


def _seek_time(where: str) -> str:
    """`@TIME` as `seek` has it, with all decimals that were given. Raises ValueError."""
    if re.fullmatch(r"@[0-9]+(\.[0-9]{1,9})?", where):
        unix_time(where)
        return where
    return f"@{unix_time(where[1:]):.6f}"


@click.command(PROGRAM, add_help_option=True)
@click.option("-n", "count", type=click.IntRange(0), metavar="N", help="End after N messages.")
@click.option("-e", "end", is_flag=True, help="End at the present end instead of waiting for more.")
@click.option("--idle", "idle_s", type=Duration(), help="End with code 124 after T without a message.")
@click.option("-0", "nul", is_flag=True, help="End each message with a NUL byte: -f nul.")
@click.option("--from", "start", type=Start(), help="Begin at first, last, end, SEQUENCE, -N, -DURATION or @TIME.")
@click.option("-f", "format", type=click.Choice(FORMATS), metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")
@click.option("--json", "json", is_flag=True, help="One JSON object a message: -f json.")
@click.option("--consumer", metavar="NAME", help="Take the messages of a consumer, and acknowledge what was written.")
@click.option("-t", "times", is_flag=True, help="Put time and stream before each message.")
@click.option("--order", "order", is_flag=True, help="Use 'order' and the streams even where there is a .cursor.")
@click.argument("group", type=click.Path(readable=False))
@click.argument("streams", nargs=-1, metavar="[STREAM]...")
def _command(**given: Any) -> Options:
    """Print the messages of a GROUP's streams in the order they were written, and wait for more."""
    return Options(**given)


def source_of(wish: Options) -> Source:
    """The open reader. Raises ToolError."""
    if wish.consumer is not None:
        return _consumer(wish, wish.consumer)
    if wish.order or not os.path.lexists(os.path.join(wish.group, ".cursor")):
        return _in_order(wish)
    cursor = Cursor(wish.group, records=wish.shape == "record")
    if wish.streams:
        cursor.select(wish.streams)
    if wish.start is not None:
        cursor.command(f"seek {wish.start}")
    elif wish.streams and _replays_last(wish.group):
        cursor.command("seek last")  # the newest of these streams, not of the group
    if wish.end:
        cursor.command("until end")
    return cursor


def _consumer(wish: Options, name: str) -> Consumer:
    consumer = Consumer(wish.group, name, records=wish.shape == "record")
    if wish.streams:
        consumer.select(wish.streams)
    if wish.end:
        consumer.command("until end")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # what cannot be written is given back first
    return consumer


def _replays_last(group: str) -> bool:
    try:
        with open(os.path.join(group, "ctl"), "rb") as ctl:
            return b"replay last" in ctl.read().splitlines()
    except OSError:
        return False


def _in_order(wish: Options) -> OrderedMerge:
    told = {"json": "--json" if wish.json else "-f json", "record": "-f record"}.get(wish.shape, "")
    for asked, option in ((wish.start, "--from"), (told, told), (wish.times, "-t")):
        if asked:
            raise ToolError(
                f"{wish.group}: {option} needs a tree with .cursor files: 'order' tells only streams' names"
            )
    source = OrderedMerge(wish.group, wish.streams, lambda text: note(PROGRAM, text))
    views = views_of(wish.group)
    for name in wish.streams:
        if name in views:
            raise ToolError(f"{wish.group}: {name!r} is a view, which 'order' does not name; give its streams")
    source.open(wish.streams or [name for name in streams_of(wish.group) if name not in views])
    return source


def check_wish(wish: Options) -> None:
    """Raises ToolError where options exclude each other."""
    for both, text in (
        (wish.json and wish.times, "-t and --json exclude each other: a JSON object has the time in it"),
        (wish.json and wish.format not in (None, "json"), f"--json and -f {wish.format} exclude each other"),
        (wish.times and wish.shape in ("json", "record"), f"-t and -f {wish.shape} exclude each other"),
        (wish.nul and wish.shape in ("each", "record"), f"-0 and -f {wish.shape} exclude each other"),
        (wish.order and wish.consumer, "--order and --consumer exclude each other"),
        (wish.start and wish.consumer, "--from and --consumer exclude each other: all who work with it have one place"),
    ):
        if both:
            raise ToolError(text, USAGE)


def format_of(wish: Options) -> Format:
    if wish.shape == "record":
        return as_record
    body = as_json if wish.shape == "json" else timed if wish.times else raw
    if wish.nul or wish.shape == "nul":
        return ended_by_nul(body)
    return ended_by_newline(body) if wish.times or wish.shape in ("json", "line") else body


def copy(source: Source, output: Output, wish: Options, wanted: frozenset[int]) -> int:
    """Write what comes, until one of the ends that were asked for."""
    failures = 0
    while not output.full:
        try:
            messages = source.take()
        except EOFError:
            if wish.end and _there(wish.group):
                return 0
            raise ToolError(_why_over(wish, wanted)) from None
        except OSError as error:
            failures += 1
            if error.errno == errno.EPIPE:
                note(PROGRAM, "reader fell behind")
            elif error.errno == errno.EIO and failures < _DAMAGED_IN_A_ROW:
                note(PROGRAM, f"{wish.group}: a message could not be read: {reason(error)}")
            else:
                raise ToolError(f"{wish.group}: {reason(error)}") from error
            continue
        failures = 0
        if messages:
            deliver_until_end(source, output, messages)
        elif messages is None:
            if wish.end and isinstance(source, OrderedMerge):
                return 0
            if not output.wait(source.fd, LOOK_S) and wish.streams:
                check_left(wish.group, wanted)
    return 0


def deliver_until_end(source: Source, output: Output, messages: list[Message]) -> None:
    """Write messages; where they were claimed, acknowledge what was written and give back what was not."""
    if not isinstance(source, Consumer):
        output.put(messages)
        return
    written = 0
    try:
        written = output.put(messages)
    except BrokenPipeError:
        source.give_back(messages)
        die_of_sigpipe()
    finally:
        source.give_back(messages[written:])
    source.acknowledge(messages[:written])


def check_left(group: str, wanted: frozenset[int]) -> None:
    """Raises ToolError where none of the streams is there any more, under whatever name: nothing would ever come."""
    try:
        left = inodes(group) & wanted
    except OSError:
        return  # the next read says why
    if not left:
        raise ToolError(f"{group}: the streams were removed")


def _there(group: str) -> bool:
    return os.path.lexists(os.path.join(group, "order"))


def _why_over(wish: Options, wanted: frozenset[int]) -> str:
    """Why reading ended though nobody asked for it."""
    group = wish.group
    try:
        check_group(group)
        if wanted:
            check_left(group, wanted)
    except ToolError as error:
        return f"{error} (any more)" if "no such group" in str(error) else str(error)
    if wish.consumer is not None and not os.path.lexists(os.path.join(group, ".consumers", wish.consumer)):
        return f"{group}: the consumer {wish.consumer!r} was removed"
    return f"{group}: the tree ended the reading"


def run(arguments: Sequence[str]) -> int:
    wish = parsed(_command, arguments)
    if not isinstance(wish, Options):
        return int(wish or 0)  # --help
    check_wish(wish)
    output = Output(format_of(wish), wish.count, wish.idle_s, each=wish.shape == "each")
    try:
        check_group(wish.group)
        wanted = check_streams(wish.group, wish.streams)
        source = source_of(wish)
    except OSError as error:
        raise ToolError(f"{error.filename or wish.group}: {reason(error)}") from error
    try:
        return copy(source, output, wish, wanted)
    finally:
        source.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    return guarded(PROGRAM, run, arguments)
