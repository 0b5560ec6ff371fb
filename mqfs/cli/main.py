"""The command `mqfs`: its words and options, its exit codes (0, 1 failed, 2 usage), its one line when it cannot.

Owns the command line only; what a command does is elsewhere (server/app.py, store/check.py, bench/).
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

import mqfs
from mqfs.cli.spark import spark
from mqfs.errors import BadConfig, MqfsError
from mqfs.server.options import join, read_file

FAILED, USAGE = 1, 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mqfs.__version__, prog_name="mqfs", message="%(prog)s %(version)s")
def command() -> None:
    """Message queues as files: directories are groups, files are streams, read and write is all there is."""


@command.command()
@click.option("--store", metavar="DIR", help="Keep messages here; without it they are kept in memory only.")
@click.option("-m", "--mount", metavar="DIR", help="Mount the tree at this empty directory.")
@click.option("--listen", multiple=True, metavar="DIAL", help="Serve 9P at unix!PATH or tcp!HOST!PORT. Repeatable.")
@click.option("-s", "--service", metavar="NAME", help="Serve 9P at a unix socket of that name in $NAMESPACE.")
@click.option("--default", multiple=True, metavar="'CTL LINE'", help="What new groups start with. Repeatable.")
@click.option("--tcp-user", metavar="NAME", help="On whose behalf TCP clients act (nobody).")
@click.option("--token-file", metavar="FILE", help="Who TCP clients with a token are: lines of USER SECRET.")
@click.option("--insecure/--no-insecure", default=None, help="Listen beyond loopback, without encryption.")
@click.option("--allow-other/--no-allow-other", default=None, help="Let other users use the mount (as root: yes).")
@click.option("-D", "--trace/--no-trace", default=None, help="Print every 9P message on standard error.")
@click.option("--config", "file", metavar="FILE", help="A TOML file with these names; the command line wins.")
@click.option("--foreground", is_flag=True, help="Accepted, and the only way it runs.")
def serve(file: str | None, foreground: bool, **said: Any) -> int:
    """Serve the tree of a store, as a mount and over 9P; with neither asked for, 9P on standard input and output.

    It runs until SIGTERM or SIGINT, then unmounts and exits with 0.
    """
    options = join(read_file(file) if file is not None else {}, said)
    from mqfs.server.app import run  # here, so that the other commands need neither trio nor FUSE

    return run(options)


@command.command()
@click.argument("store")
@click.option("--fix", is_flag=True, help="Repair what can be; what is bad is moved to quarantine.")
def check(store: str, fix: bool) -> int:
    """Verify every record of a store that no server has open; each problem is one line."""
    from mqfs.store import check as checks

    found = checks.check(store, fix=fix, report=click.echo)
    if not found:
        click.echo(f"{store}: sound")
        return 0
    problems = f"{found} problem{'s' if found > 1 else ''}"
    if fix and not checks.check(store, report=lambda line: None):
        click.echo(f"{store}: {problems}, repaired; what was bad is in {store}/quarantine")
        return 0
    click.echo(f"{store}: {problems}" + (" could not all be repaired" if fix else "; --fix repairs what can be"))
    return FAILED


@command.command()
@click.option("--at", metavar="DIAL", help="A server that runs: unix!PATH or tcp!HOST!PORT. Else one is started.")
@click.option("--mount", metavar="DIR", help="A mount of a server that runs; by files.")
@click.option("--store", metavar="DIR", help="The bench's own server keeps its store below this directory (/var/tmp).")
@click.option("--transport", metavar="WAY", help="auto, ring, 9p, file, or embedded: the engine in the process.")
@click.option("--producers", type=int, metavar="N", help="Processes that publish (1).")
@click.option("--consumers", type=int, metavar="N", help="Processes that get every message (1).")
@click.option(
    "--workers", type=int, metavar="N", help="Instead: processes that share the messages and acknowledge each."
)
@click.option("--size", type=int, metavar="BYTES", help="Of a message (64).")
@click.option("--batch", type=int, metavar="N", help="So many are published at once (1).")
@click.option("--messages", type=int, metavar="N", help="How many, of all producers together.")
@click.option("--seconds", type=float, metavar="S", help="How long (5, without --messages).")
@click.option("--rate", type=float, metavar="N", help="Publish N a second, all together, not as many as can be.")
@click.option("--sync", metavar="WHEN", help="always, 10ms, off: when a publish returns (always).")
@click.option(
    "--wait", metavar="FOR", help="committed: as sync says; published: until it is in shared memory (committed)."
)
@click.option("--ctl", multiple=True, metavar="'CTL LINE'", help="A setting of the group. Repeatable.")
@click.option("--round-trips", type=int, metavar="N", help="There and back, one after another (1000).")
@click.option(
    "--json", metavar="FILE", help="What was found, as JSON; - is standard output, and then there is no table."
)
@click.option("--plot", metavar="FILE.png", help="A picture of the latencies; needs matplotlib.")
def bench(**said: Any) -> int:
    """Measure: producers, consumers or workers as processes, every message checked.

    Ctrl-C ends it early and shows what was measured by then.
    """
    from mqfs.bench import (
        display,  # here, so that the other commands need none of it
        plan,
    )

    return display.run(plan.make(said))


command.add_command(spark)


def main() -> NoReturn:
    """The entry point: one line for everything that can go wrong, no traceback."""
    try:
        result = command.main(prog_name="mqfs", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(USAGE)
    except click.ClickException as error:
        fail(f"{error.format_message().rstrip('.')}; see {_help(error)}", error.exit_code)
    except click.Abort:
        sys.exit(FAILED)
    except BadConfig as error:
        fail(str(error), USAGE)
    except (MqfsError, OSError) as error:
        fail(str(error), FAILED)


def _help(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'mqfs'} --help"


def fail(text: str, code: int) -> NoReturn:
    print("mqfs: " + " ".join(text.split()), file=sys.stderr)
    sys.exit(code)
