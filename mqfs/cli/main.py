"""The command `mqfs`: options, exit codes (0, 1 failed, 2 usage), one line on standard error for every failure.

Owns the command line only; the commands are in server/app.py, store/check.py, bench/.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

import mqfs
from mqfs.cli.bridge import bridge
from mqfs.cli.spark import spark
from mqfs.cli.token import token
from mqfs.errors import BadConfig, MqfsError
from mqfs.server.options import join, read_file

FAILED, USAGE = 1, 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mqfs.__version__, prog_name="mqfs", message="%(prog)s %(version)s")
def command() -> None:
    """Message queues as files: directories are groups, files are streams."""


@command.command()
@click.option("--store", metavar="DIR", help="Directory of the store; without it messages are in memory only.")
@click.option("-m", "--mount", metavar="DIR", help="Mount the tree at this empty directory.")
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDRESS",
    help="Serve 9P at unix!PATH, tcp!HOST!PORT or tls!HOST!PORT. Repeatable.",
)
@click.option(
    "--http",
    multiple=True,
    metavar="ADDRESS",
    help="Serve HTTP at an address of these forms, or HOST:PORT. Repeatable.",
)
@click.option("--http-origin", multiple=True, metavar="ORIGIN", help="Let pages of https://HOST use it. Repeatable.")
@click.option("--http-host", multiple=True, metavar="NAME", help="Name of this host beside localhost. Repeatable.")
@click.option("--http-proxy", multiple=True, metavar="CIDR|user:NAME", help="Believe these proxies. Repeatable.")
@click.option("--http-ntfy", multiple=True, metavar="GROUP=ADDRESS", help="Serve a group as ntfy does. Repeatable.")
@click.option("--http-qpubs/--no-http-qpubs", default=None, help="Serve the names of qpubs below /.qpubs/GROUP/.")
@click.option("--fq", multiple=True, metavar="ADDRESS", help="Serve clients of fq at such an address. Repeatable.")
@click.option("--fq-group", metavar="GROUP", help="Group of the exchanges of fq; without it fq.")
@click.option("--fq-users", metavar="FILE", help="File of users of fq, USER SYSTEM-USER a line; for tokens.")
@click.option("--fq-node", metavar="IPV4", help="Address of this broker among peers of fq.")
@click.option("-s", "--service", metavar="NAME", help="Serve 9P at a unix socket of this name in $NAMESPACE.")
@click.option("--default", multiple=True, metavar="'CTL LINE'", help="Initial setting of new groups. Repeatable.")
@click.option(
    "--limit", multiple=True, metavar="'USER KEY=N...'", help="Quota of a user (*: of the others). Repeatable."
)
@click.option("--tcp-user", metavar="NAME", help="User that TCP clients act as; without it user nobody.")
@click.option("--token-file", metavar="FILE", help="File of tokens; see mqfs token.")
@click.option("--require-token/--no-require-token", default=None, help="Refuse TCP clients without a token.")
@click.option("--tls-cert", metavar="FILE", help="Certificate for tls!HOST!PORT, with its chain, in PEM.")
@click.option("--tls-key", metavar="FILE", help="Key of the certificate; without it in the same file.")
@click.option("--tls-client-ca", metavar="FILE", help="Authorities of clients; a client is its certificate's user.")
@click.option("--audit", metavar="LEVEL", help="Log who did what: off, changes, or all (publishes too).")
@click.option(
    "--insecure/--no-insecure", default=None, help="Allow TCP, and TLS without known clients, beyond loopback."
)
@click.option("--allow-other/--no-allow-other", default=None, help="Let other users access the mount. As root: yes.")
@click.option(
    "-D",
    "--trace",
    is_flag=False,
    flag_value="on",
    metavar="[CLASS,...]",
    help="Print each message of 9p, fuse, http (all three without CLASS), or call of engine, store, ring.",
)
@click.option("--no-trace", "quiet", is_flag=True, help="No trace, whatever the file of --config says.")
@click.option("--config", "file", metavar="FILE", help="TOML file of these options; the command line wins.")
@click.option("--foreground", is_flag=True, help="No effect: the server always runs in the foreground.")
def serve(file: str | None, foreground: bool, quiet: bool, **arguments: Any) -> int:
    """Serve the tree of a store as a mount, over 9P, over HTTP; with none of them, 9P on standard input and output.

    Runs until SIGTERM or SIGINT, then unmounts and exits with 0.
    """
    if quiet:
        arguments["trace"] = "off"
    options = join(read_file(file) if file is not None else {}, arguments)
    from mqfs.server.app import run  # here, so that the other commands need neither trio nor FUSE

    return run(options)


@command.command()
@click.argument("store")
@click.option("--fix", is_flag=True, help="Repair the store; corrupt data is moved to quarantine.")
def check(store: str, fix: bool) -> int:
    """Verify every record of a store that no server has open; print one line a problem."""
    from mqfs.store import check as checks

    count = checks.check(store, fix=fix, report=click.echo)
    if not count:
        click.echo(f"{store}: sound")
        return 0
    problems = f"{count} problem{'s' if count > 1 else ''}"
    if fix and not checks.check(store, report=lambda line: None):
        click.echo(f"{store}: {problems}, repaired; corrupt data is in {store}/quarantine")
        return 0
    click.echo(f"{store}: {problems}" + (", not all repaired" if fix else " (repair: --fix)"))
    return FAILED


@command.command()
@click.option("--at", metavar="ADDRESS", help="Address of a running server; else one is started.")
@click.option("--mount", metavar="DIR", help="Mount of a running server, measured by files.")
@click.option("--store", metavar="DIR", help="Directory for the temporary store; else /var/tmp.")
@click.option("--transport", metavar="NAME", help="auto, ring, 9p, file, or embedded (the engine in the process).")
@click.option("--producers", type=int, default=1, metavar="N", show_default=True, help="Number of producers.")
@click.option("--consumers", type=int, metavar="N", help="Number of consumers of all messages; 1 without --workers.")
@click.option(
    "--workers", type=int, default=0, metavar="N", help="Number of competing consumers, instead of --consumers."
)
@click.option("--size", type=int, default=64, metavar="BYTES", show_default=True, help="Size of a message.")
@click.option("--batch", type=int, default=1, metavar="N", show_default=True, help="Messages per publish call.")
@click.option("--messages", type=int, metavar="N", help="Messages to publish, over all producers.")
@click.option("--seconds", type=float, metavar="S", help="Time to publish; 5 without --messages.")
@click.option("--rate", type=float, metavar="N", help="Messages to publish a second, over all producers.")
@click.option("--sync", default="always", metavar="WHEN", show_default=True, help="Group setting: always, 10ms, off.")
@click.option(
    "--wait", default="committed", metavar="FOR", show_default=True, help="committed, or published (in memory)."
)
@click.option("--ctl", multiple=True, metavar="'CTL LINE'", help="Setting of the group. Repeatable.")
@click.option("--round-trips", type=int, default=1000, metavar="N", show_default=True, help="Round trips to measure.")
@click.option("--json", metavar="FILE", help="Write the results as JSON; -: standard output, without tables.")
@click.option("--plot", metavar="FILE.png", help="Plot the latencies; needs matplotlib.")
def bench(**options: Any) -> int:
    """Measure throughput and latency of producers and consumers or workers, each a process. Checks every message.

    Ctrl-C ends it early, with the results so far.
    """
    from mqfs.bench import display, plan  # here, so that the other commands need none of it

    return display.run(plan.make(options))


command.add_command(bridge)
command.add_command(spark)
command.add_command(token)


def main() -> NoReturn:
    """The entry point: one line for every failure, no traceback."""
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
