"""The command `mqfs`: options, exit codes (0, 1 failed, 2 usage, 130 interrupted), one line for each failure.

Only the command line is here; the commands are in server/app.py, store/check.py, bench/.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, NoReturn

import click

import mqfs
from mq_tools import completion
from mq_tools.cli_types import open_standard_files, output_failed, usage_error
from mqfs.cli import common
from mqfs.cli.common import become_owner
from mqfs.errors import BadConfig, BadStore, MqfsError
from mqfs.server.options import command_line, join, read_file

ELSEWHERE = ("bridge", "doctor", "mcp", "mount", "spark", "token")  # commands, each in the module of its name
FAILED, USAGE, INTERRUPTED = 1, 2, 130
PROMOTE = "promote"  # the socket in the store of a standby
FORCED = "the primary did not hand over: what it had not copied yet may be set aside in its store, in quarantine/"


class Commands(click.Group):
    """The commands. Those of other modules are imported when requested, so that completion in the shell is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in ELSEWHERE:
            found = super().get_command(ctx, cmd_name)
        else:
            found = getattr(import_module(f"mqfs.cli.{cmd_name}"), cmd_name)
        if found is not None and "_MQFS_COMPLETE" in os.environ:
            completion.complete_paths(found)
        return found


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mqfs.__version__, prog_name="mqfs", message="%(prog)s %(version)s")
def command() -> None:
    """Message queues as files: directories are groups, files are streams."""


def _server_options(do: Callable[..., int]) -> Callable[..., int]:
    for names, more in reversed(command_line()):
        do = click.option(*names, **more)(do)
    return do


@command.command()
@_server_options
@click.option("--config", "file", metavar="FILE", help="TOML file of these options; the command line wins.")
def serve(file: str | None, **arguments: Any) -> int:
    """Serve the tree of a store as a mount, over 9P, over HTTP; with none of them, 9P on standard input and output.

    Runs until SIGTERM or SIGINT, then unmounts and exits with 0.
    """

    options = join(read_file(file) if file is not None else {}, arguments)
    from mqfs.server.app import run  # here, so that the other commands need neither trio nor FUSE

    if file is None or not os.path.isfile(file):  # a pipe of the shell cannot be read again
        return run(options)
    return run(options, lambda: join(read_file(file, again=True), arguments))


@command.command()
@click.argument("store")
@click.option("--fix", is_flag=True, help="Repair the store; corrupt data is moved to quarantine.")
def check(store: str, fix: bool) -> int:
    """Verify every record of a store that no server has open; print one line a problem.

    With --fix root acts as the owner of the store.
    """
    from mqfs.server.logs import Progress  # here, so that the other commands need none of it
    from mqfs.store import check as checks

    def report(line: str) -> None:
        with progress.away():
            click.echo(line)

    if fix:
        become_owner(store)
    try:
        with Progress() as progress:
            count = checks.check(store, fix=fix, report=report, progress=progress)
            left = checks.check(store, report=lambda line: None, progress=progress) if fix and count else count
    except KeyboardInterrupt:
        return INTERRUPTED
    problems = f"{count} problem{'s' if count > 1 else ''}"
    if not count:
        click.echo(f"{store}: sound")
    elif not left:
        click.echo(f"{store}: {problems}, repaired; corrupt data is in {store}/quarantine")
    else:
        click.echo(f"{store}: {problems}" + (", not all repaired" if fix else " (repair: --fix)"))
    return FAILED if left else 0


@command.command()
@click.option("--at", metavar="ADDRESS", help="Address of a running server; else one is started.")
@click.option("--mount", metavar="DIR", help="Mount of a running server, measured by files.")
@click.option("--store", metavar="DIR", help="Directory for the temporary store; else /var/tmp.")
@click.option(
    "--transport", metavar="NAME", help="Transport: auto, ring, 9p, file, or embedded (the engine in the process)."
)
@click.option("--producers", type=int, default=1, metavar="N", show_default=True, help="Number of producers.")
@click.option("--consumers", type=int, metavar="N", help="Number of consumers of all messages; 1 without --workers.")
@click.option(
    "--workers", type=int, default=0, metavar="N", help="Number of competing consumers, instead of --consumers."
)
@click.option("--size", type=int, default=64, metavar="BYTES", show_default=True, help="Size of a message.")
@click.option("--batch", type=int, default=1, metavar="N", show_default=True, help="Messages per publish call.")
@click.option(
    "--prefetch", type=int, default=1, metavar="N", show_default=True, help="Messages a worker claims at once."
)
@click.option("--messages", type=int, metavar="N", help="Messages to publish, over all producers.")
@click.option("--seconds", type=float, metavar="S", help="Time to publish; 5 without --messages.")
@click.option("--rate", type=float, metavar="N", help="Messages to publish a second, over all producers.")
@click.option("--sync", default="always", metavar="WHEN", show_default=True, help="Group setting: always, 10ms, off.")
@click.option(
    "--wait",
    default="committed",
    metavar="FOR",
    show_default=True,
    help="Wait until committed, or published (in memory).",
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


@command.command()
@click.argument("store")
@click.option(
    "--wait", "wait_s", default="60s", callback=common.wait_s, metavar="DURATION", show_default=True,
    help="Time to wait for the takeover.",
)  # fmt: skip
def promote(store: str, wait_s: float) -> int:
    """Make the standby that serves STORE the primary, and wait until it is.

    The primary of before stops, copies the rest, and hands over. Where it is away, or does not do so in 20 seconds, the
    takeover is by force: what it had not copied yet may be set aside then.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(wait_s)
        _connect(sock, store)
        try:
            answer = sock.recv(64).decode(errors="replace").strip()
        except TimeoutError:
            text = f"{store}: not promoted in {wait_s:g} s, and given up (see the log of the standby)"
            raise BadStore(text) from None
    if answer == "forced":
        click.echo(f"mqfs: {store}: {FORCED}", err=True)
    elif answer != "primary":
        raise BadStore(f"{store}: not promoted: the standby stopped (see its log)")
    click.echo(f"{store}: primary")
    return 0


def _connect(sock: socket.socket, store: str) -> None:
    """Connect to the socket in the store, whose path may be longer than a socket's address permits."""
    try:
        folder = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise BadStore(f"{store}: {error.strerror} (expected the store of a standby)") from None
    try:
        sock.connect(f"/proc/self/fd/{folder}/{PROMOTE}")
    except OSError as error:
        raise BadStore(f"{store}: no standby serves it: {error.strerror} (expected mqfs serve --standby)") from None
    finally:
        os.close(folder)


@command.command()
@click.argument("url")
@click.argument("store")
@click.option(
    "--until", metavar="@TIME|GROUP:SEQUENCE",
    help="Last time that counts, @UNIX-SECONDS or @2026-01-31T12:00:00; or the last message of a group.",
)  # fmt: skip
@click.option(
    "--group", "groups", multiple=True, metavar="PATH", help="Group to restore, with those inside. Repeatable."
)
def restore(url: str, store: str, until: str | None, groups: tuple[str, ...]) -> int:
    """Make STORE, a new directory, of the replicated log at URL, as it was at the end, at a time or after a message.

    It is a store of its own: it has a new uuid, and the log is left as it is. Root acts as the owner of STORE, or of
    the directory that it is made in.
    """
    from mqfs.replica.log import open_log  # here, so that the other commands need none of it
    from mqfs.replica.restore import Point
    from mqfs.replica.restore import restore as make
    from mqfs.server.logs import Progress

    point = Point() if until is None else parse_point(until)
    log = open_log(url, create=False)
    become_owner(store)
    try:
        with Progress() as progress:
            path, wanted = os.path.realpath(store), [path.strip("/") for path in groups]
            done = make(log, path, point, wanted, lambda number: progress(f"{number:,} frames restored"))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        log.close()
    at = datetime.fromtimestamp(done.time_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    count = f"{done.groups} group{'s' if done.groups != 1 else ''}"
    click.echo(f"{store}: {count}, up to frame {done.number} of {at}{'; ' * bool(done.missed)}{done.missed}")
    return 0


def parse_point(text: str) -> Any:
    """Return the Point of @SECONDS, @DATE or GROUP:SEQUENCE. Raises BadConfig."""
    from mqfs.replica.restore import Point

    message = re.fullmatch(r"([^@].*|):([0-9]{1,18})", text)
    return Point(group=message[1].strip("/"), sequence=int(message[2])) if message else Point(parse_time(text))


def parse_time(text: str) -> int:
    """Return UNIX nanoseconds of @SECONDS or @DATE. Raises BadConfig."""
    word = text.removeprefix("@")
    try:
        if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", word):
            return int(float(word) * 1e9)
        moment = datetime.fromisoformat(word)
        return int((moment if moment.tzinfo else moment.astimezone()).timestamp() * 1e9)
    except ValueError:
        expected = "expected @UNIX-SECONDS, @2026-01-31T12:00:00 or GROUP:SEQUENCE"
        raise BadConfig(f"--until {text!r}: invalid time ({expected})") from None


command.add_command(completion.command)


def main() -> NoReturn:
    """Run `mqfs`: one line for every failure, no traceback."""
    open_standard_files()
    try:
        result = command.main(prog_name="mqfs", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(result if isinstance(result, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(USAGE)
    except click.ClickException as error:
        fail(usage_error(error), error.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED)
    except BadConfig as error:
        fail(str(error), USAGE)
    except MqfsError as error:
        fail(str(error), FAILED)
    except OSError as error:
        where = "standard output" if output_failed() else error.filename
        if where == "standard output" and isinstance(error, BrokenPipeError):
            sys.exit(FAILED)  # as click does: the reader needs no more
        reason = error.strerror or str(error)
        fail(f"{where}: {reason}" if where else reason, FAILED)


def fail(text: str, code: int) -> NoReturn:
    print("mqfs: " + " ".join(text.split()), file=sys.stderr)
    sys.exit(code)
