"""`mqfs bridge`: clients that carry messages between a group and another system."""

from __future__ import annotations

import os
import socket
from typing import Any

import click

from mqfs import limits
from mqfs.cli import common
from mqfs.errors import BadConfig


@click.group()
def bridge() -> None:
    """Carry messages between a group and another system."""


def _separators(context: click.Context, option: click.Parameter, value: str) -> tuple[str, str]:
    if len(value) != 3 or value[1] != ":":
        raise click.BadParameter(f"{value!r} (expected two characters and a colon between, as in '/:.')")
    return value[0], value[2]


@bridge.command()
@click.argument("folder", metavar="DIR")
@click.argument("address", callback=common.addresses)
@click.argument("group")
@click.option("--in", "direction", flag_value="in", help="Carry from the folder into the group only.")
@click.option("--out", "direction", flag_value="out", help="Carry from the group into the folder only.")
@click.option("--both", "direction", flag_value="both", default=True, help="Carry both ways. The default.")
@click.option("--select", multiple=True, metavar="PATTERN", help="Carry these streams only. Repeatable.")
@click.option("--no-singles", is_flag=True, help="Leave messages for one worker where they are.")
@click.option(
    "--poll",
    default="1s",
    callback=common.more_than_0,
    metavar="DURATION",
    show_default=True,
    help="Interval between scans.",
)
@click.option(
    "--separator", default=".:.", callback=_separators, metavar="X:Y", show_default=True,
    help="Word separators of topics and of streams.",
)  # fmt: skip
@click.option("--raw-topics", is_flag=True, help="Read topics unencoded, as with encode_topics off.")
@click.option(
    "--split-topic-at",
    default=200,
    metavar="N",
    show_default=True,
    help="Length at which topics are split, as of QlobberFSQ.",
)
@click.option(
    "--multi-ttl", default="1m", callback=common.more_than_0, metavar="DURATION", show_default=True,
    help="Lifetime of exported messages without a ttl.",
)  # fmt: skip
@click.option(
    "--single-ttl", default="1h", callback=common.more_than_0, metavar="DURATION", show_default=True,
    help="Lifetime of exported messages for one worker.",
)  # fmt: skip
@click.option(
    "--window", default="10m", callback=common.duration, metavar="DURATION", show_default=True,
    help="Minimum 'dedup' of the group.",
)  # fmt: skip
@click.option("--expire", is_flag=True, help="Remove expired files.")
@click.option("--no-sync", is_flag=True, help="Do not wait for the disk, like QlobberFSQ.")
@click.option("--consumer", default="fsq", metavar="NAME", show_default=True, help="Consumer that holds the position.")
@click.option("--state", default="", metavar="FILE", help="File of the imported messages; else one in $XDG_STATE_HOME.")
@click.option("--user", default="", metavar="NAME", help="User to act as.")
@click.option("--token-file", metavar="FILE", help="File of the bearer token, for TCP and TLS.")
def fsq(direction: str, token_file: str | None, no_singles: bool, no_sync: bool, **options: Any) -> int:
    """Carry messages between DIR, the folder of qlobber-fsq's processes, and GROUP of the server at ADDRESS.

    Runs until SIGTERM or SIGINT. May be killed at any moment, and run several times.
    """
    from mqfs.bridge.folder import Topics  # here, so that the other commands need none of it
    from mqfs.bridge.run import Options, run
    from mqfs.server.logs import set_up

    encoded, split_at = not options.pop("raw_topics"), options.pop("split_topic_at")
    theirs, ours = options.pop("separator")
    if split_at < 1:
        raise BadConfig(f"--split-topic-at: {split_at} (expected 1 or more)")
    set_up()
    return run(
        Options(
            folder=os.fspath(options.pop("folder")),
            inwards=direction != "out",
            outwards=direction != "in",
            singles=not no_singles,
            sync=not no_sync,
            topics=Topics(encoded, split_at, theirs, ours),
            patterns=options.pop("select"),
            token=secret(token_file),
            **options,
        )
    )


def _broker(context: click.Context, option: click.Parameter, value: str) -> dict[str, Any]:
    tls = value.startswith("tls!")
    host, _, port = value.removeprefix("tls!").rpartition("!" if tls else ":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65_536:
        raise click.BadParameter(f"{value!r} (expected HOST:PORT or tls!HOST!PORT)")
    return {"host": host.strip("[]"), "port": int(port), "tls": tls}


def _node(context: click.Context, option: click.Parameter, value: str) -> bytes:
    try:
        return socket.inet_pton(socket.AF_INET, value)
    except OSError:
        raise click.BadParameter(f"{value!r} (expected an IPv4 address)") from None


@bridge.command()
@click.argument("broker", metavar="HOST:PORT", callback=_broker)
@click.argument("exchange")
@click.argument("program")
@click.argument("address", callback=common.addresses)
@click.option(
    "--node", required=True, callback=_node, metavar="IPV4", help="IPv4 address of the local broker (its --fq-node)."
)
@click.option("--group", default="fq", metavar="GROUP", show_default=True, help="Group of the exchanges here.")
@click.option("--queue", default="", metavar="NAME", help="Queue at the broker; else bridge-NODE-EXCHANGE.")
@click.option("--permanent/--transient", default=True, help="Keep messages while disconnected.")
@click.option("--name", default="mqfs", metavar="USER", show_default=True, help="User of the broker.")
@click.option("--password-file", metavar="FILE", help="File of that user's password.")
@click.option("--user", default="", metavar="NAME", help="User to act as on the server at ADDRESS.")
@click.option("--token-file", metavar="FILE", help="File of the bearer token, for TCP and TLS.")
def fq(broker: dict[str, Any], password_file: str | None, token_file: str | None, **options: Any) -> int:
    """Carry messages of EXCHANGE that PROGRAM selects from a broker of fq to the server at ADDRESS.

    Runs until SIGTERM or SIGINT. May be killed at any moment.
    """
    from mqfs.bridge.fq import Options, run  # here, so that the other commands need none of it
    from mqfs.server.logs import set_up

    set_up()
    password, token = secret(password_file), secret(token_file)
    return run(Options(**broker, password=password, token=token, **options))


def secret(path: str | None) -> str:
    """Return the content of a file of a token or a password; "" without a file. Raises BadConfig."""
    if path is None:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(limits.CONFIG_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(
            f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8'} (expected a readable file)"
        ) from None
    word = text.strip()
    if not 0 < len(word) <= limits.CONFIG_BYTES:
        raise BadConfig(f"{path}: {'too long' if word else 'empty'} (expected a token or a password)")
    return word
