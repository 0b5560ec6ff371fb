"""Completions of the shell beside paths and options: streams of a group, and lines of its `ctl`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable

import click
from click.shell_completion import get_completion_class

from mq_tools import tree
from mq_tools.cursor import quote
from mq_tools.errors import ToolError
from mq_tools.files import read_text

# Settings that are words; others are completed to their present value.
SETTINGS = {
    "data": "message line coalesce",
    "replay": "off last all",
    "full": "drop-old drop-new block reject",
    "sync": "always off replica",
    "keep": "disk ring",
    "ring": "owner off all",
    "deliver": "all one",
    "ack": "read next",
    "order": "sequence expiry",
    "protect": "on off",
    "sender": "on off",
}

SHELLS = ("bash", "zsh", "fish")
PROGRAMS = ("mq", "mq-work", "mq-cat", "pin", "mqfs")


@click.command("completion", short_help="Print the completion script of all commands.")
@click.argument("shell", type=click.Choice(SHELLS), required=False, metavar="[bash|zsh|fish]")
@click.pass_context
def command(context: click.Context, shell: str | None) -> None:
    """Print the completion script of mq, mq-work, mq-cat, pin and mqfs for SHELL (default: $SHELL)."""
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise click.UsageError(f"$SHELL {name!r}: unknown shell (expected {', '.join(SHELLS)})")
    kind = get_completion_class(name)
    assert kind is not None
    for program in PROGRAMS:
        variable = f"_{program}_COMPLETE".replace("-", "_").upper()
        click.echo(kind(context.command, {}, program, variable).source())


def streams(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Streams and views of the argument `group`."""
    return _beginning(incomplete, _of_group(ctx, tree.streams_of))


def ctl_lines(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Settings as they are and as they can be, and actions with what there is."""
    lines = [f"{verb} {word}" for verb, words in SETTINGS.items() for word in words.split()]
    lines += _of_group(ctx, lambda group: read_text(os.path.join(group, "ctl")).splitlines())
    for verbs, names in (
        (("eof", "clear", "redrive"), tree.streams_of),
        (("remove",), _consumers),
        (("unbind",), tree.views_of),
    ):
        found = _of_group(ctx, names)
        lines += [f"{verb} {quote(name)}" for verb in verbs for name in found]
    return _beginning(incomplete, dict.fromkeys(lines))


def _of_group(ctx: click.Context, names: Callable[[str], Iterable[str]]) -> list[str]:
    try:
        return list(names(tree.resolve_group(ctx.params["group"])))
    except (ToolError, OSError):
        return []


def _consumers(group: str) -> list[str]:
    return sorted(name for name in os.listdir(os.path.join(group, tree.CONSUMERS)) if not name.startswith("."))


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    """Those that begin so. Bash takes them as they are: they are quoted where the word that was typed is not."""
    found = [word for word in words if word.startswith(incomplete)]
    typed = os.environ["COMP_WORDS"].split("\n")  # of bash a line each
    if len(typed) == 1 or any(mark in typed[-1] for mark in "'\""):
        return found
    return [shlex.quote(word) for word in found]
