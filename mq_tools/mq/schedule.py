"""`mq schedule`: list, put and remove the schedules of a group."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click

from mq_tools import files, tree
from mq_tools.cli_types import CTL_DURATION, TIME
from mq_tools.cursor import quote
from mq_tools.errors import USAGE, ToolError, printable
from mq_tools.mq.put import Metadata, Putter, bodies_of, headers_of
from mq_tools.mq.table import aligned

_PATH = click.Path(readable=False)


@click.group()
def schedule() -> None:
    """Schedules: messages that the server publishes again and again."""


@schedule.command("ls")
@click.argument("group", required=False, type=_PATH)
@click.option("--json", "json_", is_flag=True, help="Print an object a line.")
def ls(group: str | None, json_: bool) -> None:
    """List the schedules of a group, the next one first."""
    rows = files.stats_of(tree.resolve_group(group) if group else tree.default_group()).get("schedules", {})
    if json_:
        for name, row in rows.items():
            print(json.dumps({"id": name, **row}, ensure_ascii=False))
        return
    head = ("ID", "STREAM", "WHEN", "NEXT")
    print("\n".join(map(printable, aligned([head, *(_cells(name, row) for name, row in rows.items())], ()))))


def _cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    when = f"every {row['every']}" if "every" in row else str(row.get("cron", ""))
    return name, str(row["stream"]), when, datetime.fromtimestamp(row["next"]).isoformat(" ", "seconds")


@schedule.command("add")
@click.argument("stream", metavar="GROUP/STREAM", type=_PATH)
@click.argument("id_", metavar="ID")
@click.argument("body", nargs=-1)
@click.option("--every", type=CTL_DURATION, help="Publish again after D, 1s or more: 30s, 5m, 2h, 7d.")
@click.option(
    "--cron", metavar="FIELDS", help="Publish at these times: '0 5 * * 1-5 Europe/Berlin'; UTC without a zone."
)
@click.option("--at", type=TIME, help="With --every, the first time: 2030-01-31T08:00 or @UNIXTIME.")
@click.option("--ttl", type=CTL_DURATION, help="Each message expires after D.")
@click.option("--priority", type=click.IntRange(0, 9), metavar="N", help="Priority: 9 is served first; 5 without it.")
@click.option("-H", "--header", "headers", multiple=True, metavar="KEY=VALUE", help="Add a header. Repeatable.")
@click.option("-N", "--no-newline", is_flag=True, help="Add no newline to the words of BODY.")
def add(stream: str, id_: str, body: Sequence[str], headers: Sequence[str], no_newline: bool, **keys: Any) -> None:
    """Put a schedule, or another one in place of it: BODY, else standard input, is its message."""
    if (keys["every"] is None) == (keys["cron"] is None):
        raise ToolError("--every and --cron: expected one of them", USAGE)
    target = tree.resolve(stream)
    if target.kind != "stream":
        raise ToolError(tree.wrong_kind(stream, target, "stream"))
    metadata = Metadata(**keys, id=id_, headers=headers_of(headers))
    putter = Putter(target, stream, make=False, hint=f"touch {shlex.quote(stream)}")
    for _ in putter.put(bodies_of(body, lines=False, newline=not no_newline), metadata):
        pass


@schedule.command("rm")
@click.argument("group", type=_PATH)
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
def rm(group: str, ids: Sequence[str]) -> None:
    """Remove schedules, all of them or none."""
    files.write_ctl(os.fspath(tree.resolve_group(group)), [f"unschedule {quote(name)}" for name in ids])
