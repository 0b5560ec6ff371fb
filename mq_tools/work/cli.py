"""The command line of mq-work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from mq_tools.cli_types import HELP, SECONDS, Parsed, parse, run_tool, version
from mq_tools.errors import USAGE, ToolError
from mq_tools.work.consumer import ConsumerFile
from mq_tools.work.worker import PROGRAM, Options, Worker

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
COMMANDS = 256  # limit of -j


def interval_s(rate: str) -> float:
    """Return the seconds from start to start at `5/s`, `30/m`, `100/h`, or a number a second. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)(?:/([smh]))?", rate)
    if not match or not float(match[1]):
        raise ValueError(f"bad rate {rate!r} (expected 5/s, 30/m or 100/h)")
    return _UNITS_S[match[2] or "s"] / float(match[1])


RATE = Parsed("N/s", interval_s)


@click.command(PROGRAM, context_settings={**HELP, "allow_interspersed_args": False})
@version(PROGRAM)
@click.option(
    "-j",
    "parallel",
    type=click.IntRange(1, COMMANDS),
    default=1,
    show_default=True,
    metavar="N",
    help="Commands to run at a time.",
)
@click.option("-n", "count", type=click.IntRange(0), metavar="N", help="End after N messages.")
@click.option("-e", "end", is_flag=True, help="Stop at the present end instead of waiting.")
@click.option("-v", "verbose", is_flag=True, help="Also log successful messages.")
@click.option(
    "--rate", "interval_s", type=RATE, help="Start at most N commands a second (N/m, N/h: a minute, an hour)."
)
@click.option("--timeout", "timeout_s", type=SECONDS, help="Stop a command after T, as a failure.")
@click.option("--grace", "grace_s", type=SECONDS, default="5s", show_default=True, help="Time from SIGTERM to SIGKILL.")
@click.option("--make", "make", is_flag=True, help="Create the consumer if missing.")
@click.argument("consumer", type=click.Path(readable=False))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def _command(**options: Any) -> dict[str, Any]:
    """Run COMMAND for each message of CONSUMER, a file GROUP/.consumers/NAME. Write -- before COMMAND.

    The message is its standard input; {} in an argument is replaced by it. Exit code 0 acks the message, 65 makes it
    a dead letter, 75 retries it later; any other is a failure. A missing COMMAND ends the worker.
    """
    return options


def run(arguments: Sequence[str]) -> int:
    options = parse(_command, arguments)
    if not isinstance(options, dict):
        return int(options or 0)  # --help
    command = list(options.pop("command"))
    if command[0] == "--":
        del command[0]
    if not command:
        raise ToolError("missing argument COMMAND (see mq-work --help)", USAGE)
    if options["timeout_s"] == 0:
        raise ToolError("--timeout 0: too short (expected a time such as 10s)", USAGE)
    make = options.pop("make")
    consumer = ConsumerFile(options.pop("consumer"))
    consumer.check(make=make)
    return Worker(consumer, Options(command=command, **options)).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mq-work; return the exit code."""
    return run_tool(PROGRAM, run, arguments)
