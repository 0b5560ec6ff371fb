"""The command line of mq: arguments, the files read and written by each command, and its output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import click

from mq_tools import completion, files, tree
from mq_tools.cli_types import CTL_DURATION, HELP, SECONDS, TIME, parse, run_tool, version
from mq_tools.cursor import quote
from mq_tools.errors import USAGE, ToolError, printable
from mq_tools.mq.put import Metadata, Putter, bodies_of, headers_of, trace_headers
from mq_tools.mq.rows import Row, rows_of
from mq_tools.mq.schedule import schedule
from mq_tools.mq.table import aligned

PROGRAM = "mq"
SORTS = ("waiting", "in", "out", "age", "dropped", "dead", "name")
FC = TypeVar("FC", bound=Callable[..., Any] | click.Command)
_PATH = click.Path(readable=False)  # for shell completion; tree.resolve checks it


class DeclaredOrder(click.Group):
    """Commands in the order of their declaration."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(PROGRAM, cls=DeclaredOrder, context_settings=HELP)
@version(PROGRAM)
def command() -> None:
    """Message queues as commands: each reads and writes a few files of a mounted tree.

    A relative path that does not exist is looked up below $MQFS.
    """


def as_json(help: str) -> Callable[[FC], FC]:
    """Return the decorator that adds --json with this help text to a command."""
    return click.option("--json", "json_", is_flag=True, help=help)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


@command.command()
@click.argument("stream", metavar="GROUP/STREAM", type=_PATH)
@click.argument("body", nargs=-1)
@click.option("--delay", type=CTL_DURATION, help="Deliver after D: 500ms, 30s, 5m, 2h, 7d.")
@click.option("--at", type=TIME, help="Deliver at TIME: 2030-01-31T08:00 or @UNIXTIME.")
@click.option("--ttl", type=CTL_DURATION, help="Expire after D.")
@click.option(
    "--priority", type=click.IntRange(0, 9), metavar="N", help="Priority: 9 is served first, 0 last; 5 without it."
)
@click.option("--id", metavar="ID", help="Idempotency key: a repeat within the group's 'dedup' is not appended.")
@click.option("--key", metavar="KEY", help="Key: which messages belong together.")
@click.option("--single", is_flag=True, help="Deliver to exactly one receiver.")
@click.option(
    "--expect",
    type=click.IntRange(0),
    metavar="SEQUENCE",
    help="Fail unless the newest message of the stream has that sequence; 0: unless it has none.",
)
@click.option("-H", "--header", "headers", multiple=True, metavar="KEY=VALUE", help="Add a header. Repeatable.")
@click.option("-l", "--lines", is_flag=True, help="Write each line of standard input as a message.")
@click.option("-N", "--no-newline", is_flag=True, help="Add no newline to the words of BODY.")
@click.option("--make", is_flag=True, help="Create the stream, and groups above it, if missing.")
@click.option("-v", "--verbose", is_flag=True, help="Print the sequence of each message.")
@as_json("Print an object with the sequence of each message.")
def put(stream: str, body: Sequence[str], **options: Any) -> None:
    """Write a message: the words of BODY with a newline, else standard input as it is."""
    if options["make"]:
        tree.make_group_above(stream)
    target = tree.resolve(stream)
    if target.kind != "stream":
        raise ToolError(tree.wrong_kind(stream, target, "stream"))
    if options["delay"] is not None and options["at"] is not None:
        raise ToolError("--delay and --at: both given (expected one)", USAGE)
    if body and options["lines"]:
        raise ToolError("-l and BODY: both given (expected one)", USAGE)
    for name in ("id", "expect"):  # which belong to one message
        if options["lines"] and options[name] is not None:
            raise ToolError(f"-l and --{name}: both given (expected one)", USAGE)
    fields = {key: options[key] for key in ("delay", "at", "ttl", "priority", "id", "key", "single", "expect")}
    metadata = Metadata(**fields, headers=trace_headers(os.environ) | headers_of(options["headers"]))
    bodies = bodies_of(body, lines=options["lines"], newline=not options["no_newline"])
    putter = Putter(target, stream, make=options["make"])
    verbose = options["json_"] or options["verbose"]
    if not verbose and not metadata.keys():
        putter.append(bodies)
        return
    for sequence in putter.put(bodies, metadata):
        if options["json_"]:
            print_json({"sequence": sequence})
        elif verbose:
            print(sequence)


@command.command()
@click.argument("stream", metavar="GROUP/STREAM", type=_PATH)
@click.argument("body", nargs=-1)
@click.option("--timeout", "timeout_s", type=SECONDS, default="10s", show_default=True, help="Wait T for the reply.")
@click.option("-H", "--header", "headers", multiple=True, metavar="KEY=VALUE", help="Add a header. Repeatable.")
@click.option("-N", "--no-newline", is_flag=True, help="Add no newline to the words of BODY.")
def request(stream: str, body: Sequence[str], timeout_s: float, headers: Sequence[str], no_newline: bool) -> None:
    """Write a message as mq put does, wait for the reply to it, and print that."""
    from mq_tools.mq.request import request as reply_to

    target = _existing(stream)
    if target.kind != "stream":
        raise ToolError(tree.wrong_kind(stream, target, "stream"))
    if not timeout_s:
        raise ToolError("--timeout 0: too short (expected a time such as 10s)", USAGE)
    given = trace_headers(os.environ) | headers_of(headers)
    for data in bodies_of(body, lines=False, newline=not no_newline):
        sys.stdout.buffer.write(reply_to(target, data, given, timeout_s))
        sys.stdout.buffer.flush()


@command.command()
@click.argument("path", metavar="GROUP[/STREAM|/.consumers/NAME]", type=_PATH)
@click.option(
    "-n",
    "count",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="Print at most N messages; 0: all.",
)
@as_json("Print an object a message.")
def peek(path: str, count: int, json_: bool) -> None:
    """Print waiting messages, oldest first; none is claimed."""
    from mq_tools.mq.peek import peek as messages_of

    target = _existing(path)
    out = sys.stdout.buffer
    for number, (body, row) in enumerate(messages_of(target), 1):
        data = row if json_ else body
        out.write(data if data.endswith(b"\n") else data + b"\n")
        if number == count:
            break
    out.flush()


def _existing(path: str) -> tree.TreePath:
    """Return the group, stream or consumer of a path. Raises ToolError if it does not exist."""
    target = tree.resolve(path)
    if target.kind != "group":
        tree.check_exists(target, path)
    return target


@command.command("ls")
@click.argument("group", required=False, type=_PATH)
@click.option("-r", "--recursive", is_flag=True, help="Also list the groups inside.")
@as_json("Print an object a line.")
def ls(group: str | None, recursive: bool, json_: bool) -> None:
    """List groups, streams, views and consumers with their waiting messages."""
    top = tree.resolve_group(group) if group else tree.default_group()
    rows = rows_of(top)
    if recursive:
        for inner in list(tree.groups_below(top))[1:]:
            prefix = os.path.relpath(inner, top)
            rows += [attrs.evolve(row, name=f"{prefix}/{row.name}") for row in rows_of(inner)]
        rows.sort(key=lambda row: row.name)
    if json_:
        for row in rows:
            print_json({key: value for key, value in attrs.asdict(row).items() if value not in (None, "")})
    else:
        head = ("NAME", "KIND", "WAITING", "CLAIMED", "DELAYED", "OPEN", "HELD-BACK", "OVER")
        print("\n".join(aligned([head, *map(_cells, rows)], range(2, 6))))


def _cells(row: Row) -> tuple[str, ...]:
    numbers = ("-" if value is None else str(value) for value in (row.waiting, row.claimed, row.delayed, row.readers))
    return row.name, row.kind, *numbers, row.held_back or "-", row.over


@command.command()
@click.argument("path", required=False, metavar="[GROUP[/STREAM|/.consumers/NAME]]", type=_PATH)
@as_json("Print the JSON object itself.")
def stat(path: str | None, json_: bool) -> None:
    """Print the counters of a group, or of a stream or consumer in it."""
    target = _existing(path) if path else tree.TreePath(tree.default_group())
    value: Any = files.stats_of(target.group)
    if target.kind != "group":
        table = (
            {**value.get("views", {}), **value["streams"]} if target.kind == "stream" else value.get("consumers", {})
        )
        if target.name not in table:
            raise ToolError(f"{path}: no counters in .stats")
        value = table[target.name]
    if json_:
        print_json(value)
    else:
        for key, text in flatten(value):
            print(printable(key), printable(text))


def flatten(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return (key, value) pairs; the keys of nested objects are joined by blanks."""
    lines: list[tuple[str, str]] = []
    for key, inner in value.items():
        name = f"{prefix}{quote(key)}"
        if isinstance(inner, dict):
            lines += flatten(inner, f"{name} ")
        else:
            lines.append((name, inner if isinstance(inner, str) else json.dumps(inner)))
    return lines


@command.command()
@click.argument("path", metavar="GROUP[/STREAM|/.consumers/NAME]", type=_PATH)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def purge(path: str, yes: bool) -> None:
    """Drop the waiting messages of a stream, of all streams of a group, or of a consumer."""
    target = _existing(path)
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ToolError("not a terminal (pass -y to drop messages)", USAGE)
        owner = {"group": "all streams of ", "stream": "", "consumer": "consumer "}[target.kind]
        if not click.confirm(f"Drop the waiting messages of {owner}{path}?", err=True):
            raise ToolError("nothing dropped")
    if target.kind == "consumer":
        with files.open_file(target.path, os.O_RDWR) as fd:
            files.write(fd, b"seek end\n", target.path)
    else:
        files.write_ctl(target.group, [f"clear {quote(target.name)}" if target.name else "clear"])


@command.command()
@click.argument("group", type=_PATH)
@click.argument("stream", required=False, shell_complete=completion.streams)
@click.option("-n", "count", type=click.IntRange(1), metavar="N", help="Move at most N of STREAM, oldest first.")
@click.option("--edit", is_flag=True, help="Change each body in $EDITOR first; an unchanged one stays. One without -n.")
def redrive(group: str, stream: str | None, count: int | None, edit: bool) -> None:
    """Move dead letters back to their streams: all, or those of STREAM."""
    if edit:
        from mq_tools.mq.edit import edit_dead_letters

        for sequence, done in edit_dead_letters(tree.resolve_group(group), stream, count or 1):
            print(f"{sequence}: {printable(done)}")
        return
    if count is not None and stream is None:
        raise ToolError("-n: missing argument STREAM", USAGE)
    words = ["redrive", *([quote(stream)] if stream else []), *([str(count)] if count else [])]
    files.write_ctl(tree.resolve_group(group), [" ".join(words)])


_REPEATED = ("bind", "consumer", "limit", "rate", "breaker", "pause")  # keys that several lines of `ctl` may have


@command.command("ctl")
@click.argument("group", type=_PATH)
@click.argument("lines", nargs=-1, metavar="[LINE]...", shell_complete=completion.ctl_lines)
@as_json("Print the settings as an object.")
def ctl(group: str, lines: Sequence[str], json_: bool) -> None:
    """Print the settings of a group, or write each LINE (-: standard input), all or none."""
    path = tree.resolve_group(group)
    if lines:
        text = [os.fsdecode(files.read_input()).rstrip("\n") if line == "-" else line for line in lines]
        files.write_ctl(path, text)
        return
    text = files.read_lines(os.path.join(path, "ctl"))
    if not json_:
        print("\n".join(text))
        return
    settings: dict[str, Any] = {}
    for line in text:
        key, _, value = line.partition(" ")
        if key in _REPEATED:
            settings.setdefault(key, []).append(value)
        else:
            settings[key] = value
    print_json(settings)


@command.command()
@click.argument("groups", nargs=-1, metavar="[GROUP]...", type=_PATH)
@click.option("--interval", "interval_s", type=SECONDS, default="1s", show_default=True, help="Refresh interval.")
@click.option("-n", "count", type=click.IntRange(1), metavar="N", help="End after N frames.")
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="waiting",
    show_default=True,
    metavar="BY",
    help=f"Sort by {', '.join(SORTS)}.",
)
@as_json("Print an array a frame.")
def top(groups: Sequence[str], interval_s: float, count: int | None, sort: str, json_: bool) -> None:
    """Show waiting messages and rates of groups and those inside; q ends it.

    Without a terminal, print one frame (-n: more) as text.
    """
    from mq_tools.mq.top import show_live, show_plain  # here, so that the other commands start without rich

    paths = [tree.resolve_group(group) for group in groups] or [tree.default_group()]
    if json_ or not (sys.stdin.isatty() and sys.stdout.isatty()):
        show_plain(paths, interval_s, sort, count or 1, as_json=json_)
    else:
        show_live(paths, interval_s, sort, count)


command.add_command(schedule)
command.add_command(completion.command)


def run(arguments: Sequence[str]) -> int:
    result = parse(command, arguments)
    return result if isinstance(result, int) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mq; return the exit code."""
    return run_tool(PROGRAM, run, arguments)
