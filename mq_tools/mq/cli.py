"""mq's command line: what each command reads and writes, and how it is printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import click
from click.shell_completion import get_completion_class

from mq_cat.cli import _command as mq_cat_command
from mq_tools import files, place
from mq_tools.cli_types import guarded, parsed
from mq_tools.cursor import quote
from mq_tools.errors import USAGE, ToolError, printable
from mq_tools.mq.put import Length, Metadata, Moment, Putter, bodies_of, headers_of
from mq_tools.mq.rows import Row, rows_of
from mq_tools.mq.table import aligned
from mq_tools.times import Duration

PROGRAM = "mq"
SORTS = ("waiting", "in", "out", "age", "dropped", "dead", "name")
SHELLS = ("bash", "zsh", "fish")
FC = TypeVar("FC", bound=Callable[..., Any] | click.Command)
_PATH = click.Path(readable=False)  # for shell completion; what it is, place.py finds out


class Told(click.Group):
    """Commands in the order in which they are told."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(PROGRAM, cls=Told, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Message queues as files, for people who prefer commands: each is a few reads and writes of a tree's files.

    Paths are the tree's own; one that is not there is looked for below $MQFS.
    """


def as_json(help: str) -> Callable[[FC], FC]:
    """The option --json, which each command tells in its own words."""
    return click.option("--json", "json_", is_flag=True, help=help)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


@command.command()
@click.argument("stream", metavar="GROUP/STREAM", type=_PATH)
@click.argument("body", nargs=-1)
@click.option("--delay", type=Length(), help="Nobody gets it before D from now: 500ms, 30s, 5m, 2h, 7d.")
@click.option("--at", type=Moment(), help="Nobody gets it before TIME: 2030-01-31T08:00 or @UNIXTIME.")
@click.option("--ttl", type=Length(), help="Nobody gets it after D from now.")
@click.option("--priority", type=click.IntRange(0, 9), metavar="N", help="9 is served first, 0 last; else it is 5.")
@click.option("--id", metavar="ID", help="The same ID again within the group's 'dedup' is not appended.")
@click.option("--single", is_flag=True, help="One reader only gets it.")
@click.option("-H", "--header", "headers", multiple=True, metavar="KEY=VALUE", help="A header. Repeatable.")
@click.option("-l", "--lines", is_flag=True, help="Each line of standard input is a message.")
@click.option("-N", "--no-newline", is_flag=True, help="No newline after the words of BODY.")
@click.option("--make", is_flag=True, help="Make the stream where it is not there.")
@click.option("-v", "--verbose", is_flag=True, help="Print the sequence of each message.")
@as_json("Print an object with the sequence of each message.")
def put(stream: str, body: Sequence[str], **given: Any) -> None:
    """Write a message: the words of BODY with a newline, else standard input as it is."""
    where = place.place_of(stream)
    if where.kind != "stream":
        raise ToolError(f"{stream}: a {where.kind}, where a stream is needed")
    if given["delay"] is not None and given["at"] is not None:
        raise ToolError("--delay and --at exclude each other", USAGE)
    if body and given["lines"]:
        raise ToolError("-l reads standard input: give no BODY", USAGE)
    fields = {key: given[key] for key in ("delay", "at", "ttl", "priority", "id", "single")}
    metadata = Metadata(**fields, headers=headers_of(given["headers"]))
    bodies = bodies_of(body, lines=given["lines"], newline=not given["no_newline"])
    putter = Putter(where, stream, make=given["make"])
    told = given["json_"] or given["verbose"]
    if not told and not metadata.keys():
        putter.plain(bodies)
        return
    for sequence in putter.told(bodies, metadata):
        if given["json_"]:
            print_json({"sequence": sequence})
        elif told:
            print(sequence)


@command.command()
@click.argument("what", metavar="GROUP[/STREAM|/.consumers/NAME]", type=_PATH)
@click.option("-n", "count", type=click.IntRange(0), default=10, metavar="N", help="At most N messages (10); 0: all.")
@as_json("Print an object a message.")
def peek(what: str, count: int, json_: bool) -> None:
    """Print the messages that wait, oldest first, without taking them."""
    from mq_tools.mq.peek import peek as messages_of

    where = place.place_of(what)
    if where.kind != "group":
        place.check_there(where, what)
    out = sys.stdout.buffer
    for number, (body, about) in enumerate(messages_of(where), 1):
        data = about if json_ else body
        out.write(data if data.endswith(b"\n") else data + b"\n")
        if number == count:
            break
    out.flush()


@command.command("ls")
@click.argument("group", required=False, type=_PATH)
@click.option("-r", "--recursive", is_flag=True, help="The groups inside, too.")
@as_json("Print an object a line.")
def ls(group: str | None, recursive: bool, json_: bool) -> None:
    """List groups, streams, views and consumers, with what waits in each."""
    top = place.group_of(group).group if group else place.default_group()
    rows = rows_of(top)
    if recursive:
        for inner in list(place.groups_below(top))[1:]:
            front = os.path.relpath(inner, top)
            rows += [attrs.evolve(row, name=f"{front}/{row.name}") for row in rows_of(inner)]
        rows.sort(key=lambda row: row.name)
    if json_:
        for row in rows:
            print_json({key: value for key, value in attrs.asdict(row).items() if value not in (None, "")})
    else:
        head = ("NAME", "KIND", "WAITING", "CLAIMED", "DELAYED", "OPEN", "OVER")
        print("\n".join(aligned([head, *map(_cells, rows)], range(2, 6))))


def _cells(row: Row) -> tuple[str, ...]:
    numbers = ("-" if value is None else str(value) for value in (row.waiting, row.claimed, row.delayed, row.readers))
    return row.name, row.kind, *numbers, row.over


@command.command()
@click.argument("what", required=False, metavar="[GROUP[/STREAM|/.consumers/NAME]]", type=_PATH)
@as_json("Print the JSON object itself.")
def stat(what: str | None, json_: bool) -> None:
    """Print the counters of a group, or of a stream or consumer in it."""
    where = place.place_of(what) if what else place.Place(place.default_group())
    value: Any = files.stats_of(where.group)
    if where.kind != "group":
        place.check_there(where, what or "")
        table = {**value.get("views", {}), **value["streams"]} if where.kind == "stream" else value.get("consumers", {})
        if where.name not in table:
            raise ToolError(f"{what}: the server counts nothing for it")
        value = table[where.name]
    if json_:
        print_json(value)
    else:
        for key, text in flat(value):
            print(printable(key), printable(text))


def flat(value: dict[str, Any], front: str = "") -> list[tuple[str, str]]:
    """`key value` lines, what is inside behind a blank."""
    lines: list[tuple[str, str]] = []
    for key, inner in value.items():
        name = f"{front}{quote(key)}"
        if isinstance(inner, dict):
            lines += flat(inner, f"{name} ")
        else:
            lines.append((name, inner if isinstance(inner, str) else json.dumps(inner)))
    return lines


@command.command()
@click.argument("what", metavar="GROUP[/STREAM|/.consumers/NAME]", type=_PATH)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def purge(what: str, yes: bool) -> None:
    """Drop what waits: in a stream, in all of a group, or for a consumer (which goes on at the end)."""
    where = place.place_of(what)
    if where.kind != "group":
        place.check_there(where, what)
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ToolError("nobody to ask whether to drop messages: give -y", USAGE)
        text = "all streams of " if where.kind == "group" else "what waits for " if where.kind == "consumer" else ""
        if not click.confirm(f"Drop {text}{what}?", err=True):
            raise ToolError("nothing dropped")
    if where.kind == "consumer":
        with files.opened(where.path, os.O_WRONLY) as fd:
            files.write(fd, b"seek end\n", where.path)
    else:
        files.tell_ctl(where, [f"clear {quote(where.name)}".strip() if where.name else "clear"])


@command.command()
@click.argument("group", type=_PATH)
@click.argument("stream", required=False)
@click.option("-n", "count", type=click.IntRange(1), metavar="N", help="At most N of that STREAM, oldest first.")
def redrive(group: str, stream: str | None, count: int | None) -> None:
    """Put dead letters back where they came from: all, or those of STREAM."""
    if count is not None and stream is None:
        raise ToolError("-n needs a STREAM", USAGE)
    words = ["redrive", *([quote(stream)] if stream else []), *([str(count)] if count else [])]
    files.tell_ctl(place.group_of(group), [" ".join(words)])


@command.command("ctl")
@click.argument("group", type=_PATH)
@click.argument("lines", nargs=-1, metavar="[LINE]...")
@as_json("Print the settings as an object.")
def ctl(group: str, lines: Sequence[str], json_: bool) -> None:
    """Print a group's settings; or write each LINE (a - is standard input), all or none."""
    where = place.group_of(group)
    if lines:
        text = [sys.stdin.read().rstrip("\n") if line == "-" else line for line in lines]
        files.tell_ctl(where, text)
        return
    text = files.read_whole(where.file("ctl")).splitlines()
    if not json_:
        print("\n".join(text))
        return
    settings: dict[str, Any] = {}
    for line in text:
        key, _, value = line.partition(" ")
        if key in ("bind", "consumer"):
            settings.setdefault(key, []).append(value)
        else:
            settings[key] = value
    print_json(settings)


@command.command()
@click.argument("groups", nargs=-1, metavar="[GROUP]...", type=_PATH)
@click.option("--interval", "interval_s", type=Duration(), default=1.0, metavar="T", help="From frame to frame (1s).")
@click.option("-n", "count", type=click.IntRange(1), metavar="N", help="End after N frames.")
@click.option("--sort", type=click.Choice(SORTS), default="waiting", metavar="BY", help=f"{', '.join(SORTS)}.")
@as_json("Print an array a frame.")
def top(groups: Sequence[str], interval_s: float, count: int | None, sort: str, json_: bool) -> None:
    """Show what waits, comes and goes in groups and those inside, again and again; q ends it.

    Not on a terminal it prints one frame (-n: more) as text.
    """
    from mq_tools.mq.top import show_live, show_plain  # here, so that the other commands start without rich

    paths = [place.group_of(group).group for group in groups] or [place.default_group()]
    if json_ or not (sys.stdin.isatty() and sys.stdout.isatty()):
        show_plain(paths, interval_s, sort, count or 1, as_json=json_)
    else:
        show_live(paths, interval_s, sort, count)


@command.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False, metavar="[bash|zsh|fish]")
def completion(shell: str | None) -> None:
    """Print what makes SHELL (by default $SHELL) complete mq, mq-work and mq-cat."""
    from mq_tools.work.cli import _command as mq_work_command

    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise ToolError(f"which shell? one of {', '.join(SHELLS)}", USAGE)
    kind = get_completion_class(name)
    assert kind is not None
    for tool in (command, mq_work_command, mq_cat_command):
        program = tool.name or ""
        variable = f"_{program}_COMPLETE".replace("-", "_").upper()
        print(kind(tool, {}, program, variable).source())


def run(arguments: Sequence[str]) -> int:
    if not arguments and "_MQ_COMPLETE" not in os.environ:
        context = click.Context(command, info_name=PROGRAM, **command.context_settings)
        click.echo(command.get_help(context), err=True)
        return USAGE
    try:
        result = parsed(command, arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return 0
    return result if isinstance(result, int) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    return guarded(PROGRAM, run, arguments)
