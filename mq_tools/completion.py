"""Shell completion beside paths and options: streams of a group, lines of its `ctl`, and sessions of pin."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import click
from click.shell_completion import get_completion_class

from mq_tools import tree
from mq_tools.cursor import quote
from mq_tools.errors import ToolError, alarm

# Values of settings that are words; other settings are completed to their present value.
SETTINGS = {
    "data": "message line coalesce",
    "replay": "off last key all",
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
PATIENCE_S = 0.5  # enough for a busy machine; an idle one takes 10 ms
PROGRAMS = ("mq", "mq-work", "mq-cat", "pin", "mqfs")


@click.command("completion", short_help="Print the completion script of all commands.")
@click.argument("shell", type=click.Choice(SHELLS), required=False, metavar="[bash|zsh|fish]")
def command(shell: str | None) -> None:
    """Print the completion script of mq, mq-work, mq-cat, pin and mqfs for SHELL (default: $SHELL)."""
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise click.UsageError(f"$SHELL {name!r}: unknown shell (expected {', '.join(SHELLS)})")
    scripts = [script(name, program) for program in PROGRAMS]
    click.echo(_of_zsh(scripts) if name == "zsh" else "\n".join(scripts))


def _of_zsh(scripts: Iterable[str]) -> str:
    """Return one file for zsh that works with `eval` and in $fpath.

    In $fpath the first line names the programs, and $service is the one to complete. zsh runs the autoloaded file at
    each completion, so there it calls the function of the program instead of defining completions.
    """
    functions = [text.partition("\n")[2].partition("if [[ $zsh_eval_context")[0].strip() for text in scripts]
    ending = """if (( $+compstate )); then
    "_${service//-/_}_completion" "$@"
else"""
    define = "\n".join(f"    compdef _{program.replace('-', '_')}_completion {program}" for program in PROGRAMS)
    return "\n\n".join([f"#compdef {' '.join(PROGRAMS)}", *functions, f"{ending}\n{define}\nfi"])


def script(shell: str, program: str) -> str:
    """Return the completion script of one program."""
    kind = get_completion_class(shell)
    assert kind is not None
    variable = f"_{program}_COMPLETE".replace("-", "_").upper()
    return kind(click.Command(program), {}, program, variable).source()


_DIRECTORY, _FILE = click.Path(file_okay=False), click.Path()
_PATHS = {"DIR": _DIRECTORY, "DIRECTORY": _DIRECTORY, "STORE": _DIRECTORY, "FILE": _FILE, "FILE.png": _FILE}


def complete_paths(command: click.Command) -> None:
    """Set path completion for parameters whose metavar stands for a path, in the command and its subcommands."""
    for param in command.params:
        if param.type is click.STRING:
            param.type = _PATHS.get(param.metavar or (param.name or "").upper(), click.STRING)
    for below in getattr(command, "commands", {}).values():
        complete_paths(below)


def quickly() -> AbstractContextManager[None]:
    """Raise TimeoutError after `PATIENCE_S`: a mount whose server hangs would block the shell."""
    return alarm(PATIENCE_S, TimeoutError())


def sessions(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the sessions of pin in the mount of its options: groups with a file `size`."""
    mount = ctx.params.get("mount") or os.environ.get("MQFS", "./mq")
    try:
        with quickly(), os.scandir(mount) as entries:
            names = [entry.name for entry in entries if os.path.lexists(os.path.join(entry.path, "size"))]
    except OSError:
        return []
    return _beginning(incomplete, sorted(names))


def streams(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the streams and views of the argument `group`."""
    return _beginning(incomplete, _of_group(ctx, tree.streams_of))


def ctl_lines(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return present and possible settings, and actions on the existing streams, consumers and views."""
    lines = [f"{verb} {word}" for verb, words in SETTINGS.items() for word in words.split()]
    lines += _of_group(ctx, tree.ctl_of)
    for verbs, names in (
        (("eof", "clear", "redrive"), tree.streams_of),
        (("remove", "pause", "resume", "limit", "rate", "breaker"), _consumers),
        (("unbind",), tree.views_of),
    ):
        found = _of_group(ctx, names)
        lines += [f"{verb} {quote(name)}" for verb in verbs for name in found]
    return _beginning(incomplete, dict.fromkeys(lines))


def _of_group(ctx: click.Context, names: Callable[[str], Iterable[str]]) -> list[str]:
    try:
        with quickly():
            return list(names(tree.resolve_group(ctx.params["group"])))
    except (ToolError, OSError):  # TimeoutError is one
        return []


def _consumers(group: str) -> list[str]:
    return sorted(name for name in os.listdir(os.path.join(group, tree.CONSUMERS)) if not name.startswith("."))


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    """Return the words that begin with `incomplete`. bash inserts words verbatim, so they are quoted for it, unless the
    typed word has a quote."""
    found = [word for word in words if word.startswith(incomplete)]
    typed = os.environ["COMP_WORDS"].split("\n")  # bash has one word a line, other shells one line
    if len(typed) == 1 or any(mark in typed[-1] for mark in "'\""):
        return found
    return [shlex.quote(word) for word in found]
