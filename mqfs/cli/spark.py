"""`mqfs spark`: the command line of the data pipeline.

The commands are in pyspark_mqfs/commands. A command imports Spark and Arrow when it runs, so that `--help` is fast and
works without them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import click

from mq_tools.cli_types import TIME
from mqfs.cli.bridge import secret
from mqfs.errors import BadConfig

FAILED, INTERRUPTED = 1, 130
F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def spark() -> None:
    """Archive, replay, verify and analyse streams on Spark; see mqfs-spark(1)."""


def _options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Add shared options to a command."""

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


AT = click.option("--at", metavar="ADDRESS", help="Address of the server: unix!PATH, tcp!HOST!PORT or tls!HOST!PORT.")
PATTERN = click.option("--pattern", default="", metavar="REGEX", help="Select streams by regular expression.")
USER = click.option("--user", default="", metavar="NAME", help="User to act as.")
TOKEN = click.option("--token-file", metavar="FILE", help="File of the bearer token, for TCP and TLS.")
MASTER = click.option("--master", default="local[*]", show_default=True, metavar="URL", help="Spark master.")
CONF = click.option("--conf", multiple=True, metavar="KEY=VALUE", help="Setting of Spark. Repeatable.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
CHECKPOINT = click.option("--checkpoint", default="", metavar="DIR", help="Checkpoint directory.")
WHERE = click.option("--where", default="", metavar="SQL", help="Select messages by an SQL condition.")
FOREVER = click.option("--follow", "forever", is_flag=True, help="Continue with new messages until stopped.")
ALWAYS = (AT, USER, TOKEN, MASTER, CONF, JSON)


def _source(options: dict[str, Any], streams: tuple[str, ...] = ()) -> Any:
    """Remove the options of a server, and return its Source. Raises BadConfig, OSError."""
    from pyspark_mqfs.commands.sources import Source

    address, user, file = options.pop("at"), options.pop("user"), options.pop("token_file")
    if not address:
        raise BadConfig("--at: missing (expected unix!PATH, tcp!HOST!PORT or tls!HOST!PORT)")
    return Source(address, streams, options.pop("pattern", ""), user, secret(file or None))


def _optional_source(options: dict[str, Any], streams: tuple[str, ...]) -> Any:
    """Return the Source of a command that may also read only an archive; None without options of a server."""
    return _source(options, streams) if options["at"] or streams or options["pattern"] else None


def _needs_spark(function: F) -> F:
    """Wrap a command to raise BadConfig if pyspark or pyarrow is not installed."""

    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        for name in ("pyspark", "pyarrow"):
            try:
                import_module(name)
            except ImportError:
                raise BadConfig(f"mqfs spark needs {name} (in a clone: script/setup spark)") from None
        return function(*arguments, **options)

    return checked  # type: ignore[return-value]


def _check(check: Callable[[], None]) -> None:
    """Check the arguments of a command. Raises BadConfig."""
    from pyspark_mqfs.commands.session import CommandError
    from pyspark_mqfs.options import OptionError

    try:
        check()
    except (CommandError, OptionError) as error:
        raise BadConfig(str(error)) from None


def _run(
    options: dict[str, Any], name: str, request: Any, act: Callable[[Any, Any, Any], dict[str, Any]], summary: Any
) -> int:
    """Check the request, `act` on it in a session, print its result by `summary` or as JSON; return the exit code."""
    from mqfs.server.logs import Progress
    from pyspark_mqfs.commands import session

    _check(request.check)
    as_json = options.pop("as_json")
    try:
        with Progress() as progress:
            progress("starting Spark")
            with session.session(options.pop("master"), options.pop("conf"), f"mqfs spark {name}") as spark:
                result = act(spark, request, progress)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BadConfig, click.ClickException):
        raise
    except session.CommandError as error:
        return _fail(str(error))
    except Exception as error:  # Spark wraps an error of the data source in many lines
        return _fail(session.explain(error))
    click.echo(json.dumps(result, default=str) if as_json else summary(result))
    return FAILED if result.get("sound") is False else 0


def _fail(text: str) -> int:
    print("mqfs: " + " ".join(text.split()), file=sys.stderr)
    return FAILED


def _file_size(text: str) -> int:
    from pyspark_mqfs.options import OptionError, Options

    try:
        return Options({"--file-size": text}, ("--file-size",), "a command").size("--file-size") or 0
    except OptionError as error:
        raise BadConfig(str(error)) from None


# ---------------------------------------------------------------- archive, replay, verify


@spark.command()
@click.argument("directory")
@click.argument("streams", nargs=-1)
@_options(PATTERN, *ALWAYS)
@click.option("--file-size", default="128M", show_default=True, metavar="SIZE", help="Size of a file, approximately.")
@_needs_spark
def archive(directory: str, streams: tuple[str, ...], file_size: str, **options: Any) -> int:
    """Update the archive DIRECTORY with the messages of STREAMS, each once.

    An archive is Parquet, partitioned by group, stream and date.
    """
    from pyspark_mqfs.commands import archive as act

    request = act.Archive(_source(options, streams), directory, _file_size(file_size))
    return _run(
        options,
        "archive",
        request,
        act.run,
        lambda result: f"{result['messages']:,} new messages in {result['archive']}",
    )


@spark.command()
@click.argument("directory")
@click.argument("streams", nargs=-1)
@_options(WHERE, *ALWAYS)
@click.option("--into", default="", metavar="GROUP", help="Prefix all paths with this group.")
@click.option("--since", type=TIME, help="Select messages at or after this time.")
@click.option("--until", type=TIME, help="Select messages before this time.")
@click.option(
    "--rate", default=0, type=click.IntRange(0), metavar="N", help="Messages a second; 0: as fast as possible."
)
@click.option(
    "--speed", default=0.0, type=click.FloatRange(0), metavar="X", help="Replay at X times the original speed."
)
@click.option("--plain", is_flag=True, help="Add no headers of the original sequence and time.")
@click.option("--id", "name", default="", metavar="NAME", help="Idempotency key of this replay.")
@_needs_spark
def replay(directory: str, streams: tuple[str, ...], since: float | None, until: float | None, **options: Any) -> int:
    """Publish the messages of the archive DIRECTORY again, of STREAMS or all, in order. A repeat completes it."""
    from pyspark_mqfs.commands import replay as act

    target = _source(options)
    arguments = {name: options.pop(name) for name in ("into", "where", "rate", "speed", "plain", "name")}
    request = act.Replay(directory, target, streams=streams, since=since, until=until, **arguments)
    return _run(
        options,
        "replay",
        request,
        act.run,
        lambda result: f"{result['messages']:,} messages in {result['batches']} batches as {result['replay']}",
    )


@spark.command()
@click.argument("streams", nargs=-1)
@_options(PATTERN, *ALWAYS)
@click.option(
    "--archive", "path", default="", metavar="DIR", help="Archive to verify; with --at: compare it with the streams."
)
@click.option("--replayed", is_flag=True, help="Compare with streams that are a replay of the archive.")
@click.option("--into", default="", metavar="GROUP", help="Group of that replay, its --into.")
@click.option("--holes", is_flag=True, help="Report gaps in sequences as errors.")
@_needs_spark
def verify(streams: tuple[str, ...], path: str, **options: Any) -> int:
    """Find messages that are doubled, lost, corrupt, different or out of time order; exit code 1 if there are any."""
    from pyspark_mqfs.commands import verify as act

    arguments = {name: options.pop(name) for name in ("replayed", "into", "holes")}
    request = act.Verify(path, _optional_source(options, streams), **arguments)
    return _run(options, "verify", request, act.run, act.summary)


# ---------------------------------------------------------------- stats, copy, dead letters


@spark.command()
@click.argument("streams", nargs=-1)
@_options(PATTERN, WHERE, *ALWAYS)
@click.option("--archive", "path", default="", metavar="DIR", help="Read this archive instead of a server.")
@click.option("--sent", default="", metavar="HEADER", help="Header with the UNIX time of sending, for latencies.")
@click.option("--report", default="", metavar="FILE", help="Write a page FILE.html, or plots FILE-rate.png and so on.")
@_needs_spark
def stats(streams: tuple[str, ...], path: str, report: str, **options: Any) -> int:
    """Count messages and bytes by stream, over time and by size."""
    from pyspark_mqfs.commands import report as pages
    from pyspark_mqfs.commands import stats as act

    source = _optional_source(options, streams)
    if report:
        pages.check_path(report)
    request = act.Stats(path, source, options.pop("where"), options.pop("sent"))

    def count(spark: Any, request: Any, progress: Any) -> dict[str, Any]:
        result = act.run(spark, request, progress)
        if report:
            result["files"] = pages.write(result, report, path or request.source.address)
        return result

    return _run(options, "stats", request, count, pages.table)


@spark.command()
@click.argument("streams", nargs=-1)
@_options(PATTERN, WHERE, CHECKPOINT, FOREVER, *ALWAYS)
@click.option("--target", default="", metavar="ADDRESS", help="Server to write to, if another.")
@click.option("--to", default="", metavar="GROUP/STREAM", help="Copy all messages to this stream.")
@click.option("--into", default="", metavar="GROUP", help="Copy to the same paths below this group.")
@_needs_spark
def copy(streams: tuple[str, ...], target: str, **options: Any) -> int:
    """Copy messages of STREAMS with their headers, each once."""
    from pyspark_mqfs.commands import copy as act

    source = _source(options, streams)
    arguments = {name: options.pop(name) for name in ("to", "into", "where", "checkpoint", "forever")}
    request = act.Copy(source, act.target_server(source, target), **arguments)
    return _run(options, "copy", request, act.run, lambda result: f"{result['read']:,} messages read")


@spark.group("dead-letters")
def dead_letters() -> None:
    """Divert bad messages, and redrive dead letters."""


@dead_letters.command()
@click.argument("streams", nargs=-1)
@_options(PATTERN, WHERE, CHECKPOINT, FOREVER, *ALWAYS)
@click.option("--to", required=True, metavar="GROUP/STREAM", help="Stream of the dead letters.")
@click.option("--reason", default="", metavar="TEXT", help="Value of the header letter.reason.")
@_needs_spark
def divert(streams: tuple[str, ...], **options: Any) -> int:
    """Copy the messages of STREAMS selected by --where to a stream of dead letters."""
    from pyspark_mqfs.commands import dead_letters as act

    source = _source(options, streams)
    arguments = {name: options.pop(name) for name in ("to", "reason", "where", "checkpoint", "forever")}
    request = act.Divert(source, **arguments)
    return _run(options, "dead-letters", request, act.divert, lambda result: f"{result['read']:,} messages read")


@dead_letters.command()
@click.argument("stream")
@_options(WHERE, CHECKPOINT, *ALWAYS)
@_needs_spark
def redrive(stream: str, **options: Any) -> int:
    """Publish the dead letters of STREAM to their original streams, and drop them from STREAM."""
    from pyspark_mqfs.commands import dead_letters as act

    request = act.Redrive(_source(options, (stream,)), options.pop("where"), options.pop("checkpoint"))
    return _run(
        options, "dead-letters", request, act.redrive, lambda result: f"{result['redriven']:,} letters redriven"
    )
