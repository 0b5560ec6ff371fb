"""Values of the command line: callbacks of click, which refuse a wrong one as a wrong command line."""

from __future__ import annotations

import click

from mqfs.errors import BadAddress, BadCommand
from mqfs.net.address import parse_addresses
from mqfs.syntax.duration import parse_duration


def duration(context: click.Context, option: click.Parameter, value: str) -> int:
    """A callback of click: the nanoseconds of a duration. Raises BadParameter."""
    try:
        return parse_duration(value)
    except BadCommand as error:
        raise click.BadParameter(error.detail) from None


def duration_s(context: click.Context, option: click.Parameter, value: str) -> float:
    """As `duration`, in seconds."""
    return duration(context, option, value) / 1e9


def wait_s(context: click.Context, option: click.Parameter, value: str) -> float:
    """As `duration_s`, of a time to wait, which is not 0."""
    if not (seconds := duration_s(context, option, value)):
        raise click.BadParameter(f"{value!r} (expected more than 0)")
    return seconds


def addresses(context: click.Context, argument: click.Parameter, value: str | None) -> str | None:
    """A callback of click: the address of a server, or several with commas between; None: not given. Raises
    BadParameter."""
    try:
        if value is not None:
            parse_addresses(value)
    except BadAddress as error:
        raise click.BadParameter(error.detail) from None
    return value
