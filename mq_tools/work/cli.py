"""mq-work's command line: what was asked for, and the one line where it makes no sense."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from mq_tools.cli_types import guarded, parsed
from mq_tools.errors import USAGE, ToolError
from mq_tools.times import Duration
from mq_tools.work.consumer import Place
from mq_tools.work.worker import PROGRAM, Wish, Worker

_PER = {"s": 1.0, "m": 60.0, "h": 3600.0}
MOST = 256  # commands at a time


class Rate(click.ParamType[float]):
    """`5/s`, `30/m`, `100/h`, or a plain number a second; the shortest time between two starts, in seconds."""

    name = "N/s"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)(?:/([smh]))?", str(value))
        if not found or not float(found[1]):
            self.fail(f"{value!r} is not a rate such as 5/s, 30/m or 100/h", param, ctx)
        return _PER[found[2] or "s"] / float(found[1])


@click.command(PROGRAM, context_settings={"allow_interspersed_args": False})
@click.option("-j", "parallel", type=click.IntRange(1, MOST), default=1, metavar="N", help="Run N commands at a time.")
@click.option("-n", "count", type=click.IntRange(0), metavar="N", help="End after N messages.")
@click.option("-e", "end", is_flag=True, help="End at the present end instead of waiting for more.")
@click.option("-v", "chatty", is_flag=True, help="Tell of messages that were done, too.")
@click.option("--rate", "every_s", type=Rate(), help="Start at most N commands a second (N/m, N/h: a minute, an hour).")
@click.option("--timeout", "timeout_s", type=Duration(), help="End a command that takes longer than T; it has failed.")
@click.option("--grace", "grace_s", type=Duration(), default=5.0, help="From SIGTERM to SIGKILL at a time-out (5s).")
@click.option("--make", "make", is_flag=True, help="Make the consumer where it is not there.")
@click.argument("consumer", type=click.Path(readable=False))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def _command(**given: Any) -> dict[str, Any]:
    """Run COMMAND for each message of CONSUMER, a file GROUP/.consumers/NAME. Write -- before COMMAND.

    The message is its standard input, and {} in an argument is replaced by it. Exit code 0 acknowledges, 75 tries
    again later, 65 makes it a dead letter, any other is a failure. A COMMAND that is not there ends the worker.
    """
    return given


def run(arguments: Sequence[str]) -> int:
    given = parsed(_command, arguments)
    if not isinstance(given, dict):
        return int(given or 0)  # --help
    command = list(given.pop("command"))
    if command[0] == "--":
        del command[0]
    if not command:
        raise ToolError("missing argument COMMAND (see mq-work --help)", USAGE)
    make = given.pop("make")
    place = Place(given.pop("consumer"))
    place.check(make=make)
    return Worker(place, Wish(command=command, **given)).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    return guarded(PROGRAM, run, arguments)
