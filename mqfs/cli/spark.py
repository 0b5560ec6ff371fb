"""`mqfs spark`: the commands of the data pipeline, and their words and options.

Owns the command line only; what a command does is in pyspark_mqfs/commands. Spark and Arrow come with the command that
is run, so that `--help` is at once, and there without them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import click

from mqfs.errors import BadConfig

FAILED = 1
_UNIX_TIME = re.compile(r"@[0-9]+(\.[0-9]{1,9})?|(?![0-9]{8}$)[0-9]+(\.[0-9]{1,9})?")  # 8 digits are a date
_END_S = 253_402_300_800  # the year 10,000: ISO 8601 has no more
F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def spark() -> None:
    """Archive, replay, verify and analyse streams on Spark; see mqfs-spark(1)."""


def _options(*which: Callable[[Any], Any]) -> Callable[[F], F]:
    """Options that several commands have."""

    def add(function: F) -> F:
        for option in reversed(which):
            function = option(function)
        return function

    return add


AT = click.option("--at", metavar="DIAL", help="The server: unix!PATH or tcp!HOST!PORT.")
PATTERN = click.option("--pattern", default="", metavar="REGEX", help="Instead of streams: whose paths it matches.")
USER = click.option("--user", default="", metavar="NAME", help="On whose behalf.")
TOKEN = click.option("--token-file", metavar="FILE", help="The secret that a TCP client shows, alone in a file.")
MASTER = click.option("--master", default="local[*]", metavar="URL", help="The Spark master (local[*]).")
CONF = click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark. Repeatable.")
JSON = click.option("--json", "as_json", is_flag=True, help="What was done or found, as JSON on standard output.")
CHECKPOINT = click.option("--checkpoint", default="", metavar="DIR", help="Where it is noted how far it is.")
WHERE = click.option("--where", default="", metavar="SQL", help="Only messages of which this is true.")
FOREVER = click.option("--follow", "forever", is_flag=True, help="Go on with what comes, until it is stopped.")
ALWAYS = (AT, USER, TOKEN, MASTER, CONF, JSON)


def _source(said: dict[str, Any], streams: tuple[str, ...] = (), address: str = "") -> Any:
    """What the options say of a server, and what they say is taken out."""
    from pyspark_mqfs.commands.sources import Source

    at, user, file = said.pop("at"), said.pop("user"), said.pop("token_file")
    if not (address or at):
        raise BadConfig("--at DIAL is missing: unix!PATH or tcp!HOST!PORT")
    token = ""
    if file:
        with open(file) as text:
            token = text.read().strip()
    return Source(address or at, streams, said.pop("pattern", ""), user, token)


def _source_if_named(said: dict[str, Any], streams: tuple[str, ...]) -> Any:
    """The server of a command that may also do without; None where nothing is said of one."""
    return _source(said, streams) if said["at"] or streams or said["pattern"] else None


def _needs_spark(function: F) -> F:
    """One line where pyspark is not installed."""

    @wraps(function)
    def guarded(*arguments: Any, **said: Any) -> Any:
        for name in ("pyspark", "pyarrow"):
            try:
                import_module(name)
            except ImportError:
                raise BadConfig(f"mqfs spark needs {name} (in a clone: script/setup spark)") from None
        return function(*arguments, **said)

    return guarded  # type: ignore[return-value]


def _check(checks: Callable[[], None]) -> None:
    """What a command says of its arguments. Raises BadConfig."""
    from pyspark_mqfs.commands.session import Failed
    from pyspark_mqfs.options import OptionError

    try:
        checks()
    except (Failed, OptionError) as error:
        raise BadConfig(str(error)) from None


def _run(said: dict[str, Any], name: str, what: Any, act: Callable[[Any, Any], dict[str, Any]], line: Any) -> int:
    """Check `what`; then, in a session, do it, and show what came of it by `line` or as JSON; the exit code."""
    from pyspark_mqfs.commands import session, sources

    _check(what.check)
    as_json = said.pop("as_json")
    tell = sources.no_progress if as_json else sources.terminal_progress
    try:
        tell("starting Spark")
        with session.session(said.pop("master"), said.pop("conf"), f"mqfs spark {name}") as spark:
            found = act(spark, tell)
        sources.finished(tell)
    except KeyboardInterrupt:
        sources.finished(tell)
        return 130
    except (BadConfig, click.ClickException):
        raise
    except session.Failed as error:
        return _failed(str(error), tell)
    except Exception as error:  # what Spark wraps: one line of it is ours, or the first of its own
        return _failed(session.explain(error), tell)
    click.echo(json.dumps(found, default=str) if as_json else line(found))
    return FAILED if found.get("sound") is False else 0


def _failed(text: str, tell: Any) -> int:
    from pyspark_mqfs.commands import sources

    sources.finished(tell)
    print("mqfs: " + " ".join(text.split()), file=sys.stderr)
    return FAILED


def _time(text: str | None) -> float | None:
    """UNIX seconds of ISO 8601, local unless it has a zone, or of `@UNIXTIME`, as in the tools. Raises BadConfig."""
    if text is None:
        return None
    try:
        value = float(text.lstrip("@")) if _UNIX_TIME.fullmatch(text) else datetime.fromisoformat(text).timestamp()
        if 0 <= value < _END_S:
            return value
    except (ValueError, OverflowError):
        pass
    raise BadConfig(f"bad time {text!r} (expected 2030-01-31T08:00, 2030-01-31T08:00Z or @1900000000)")


def _size(text: str) -> int:
    from pyspark_mqfs.options import OptionError, Options

    try:
        return Options({"size": text}, ("size",), "a command").size("size") or 0
    except OptionError as error:
        raise BadConfig(f"--file-size: {error}") from None


# ---------------------------------------------------------------- archive, replay, verify


@spark.command()
@click.argument("directory")
@click.argument("streams", nargs=-1)
@_options(PATTERN, *ALWAYS)
@click.option("--file-size", default="128M", metavar="SIZE", help="About this much in a file (128M).")
@_needs_spark
def archive(directory: str, streams: tuple[str, ...], file_size: str, **said: Any) -> int:
    """Bring the archive DIRECTORY up to what is in STREAMS now, each message once.

    It is Parquet by group, stream and date of the message.
    """
    from pyspark_mqfs.commands import archive as act

    what = act.Archive(_source(said, streams), directory, _size(file_size))
    return _run(
        said, "archive", what, lambda spark, tell: act.run(spark, what, tell),
        lambda found: f"{found['messages']:,} messages more in {found['archive']}",
    )  # fmt: skip


@spark.command()
@click.argument("directory")
@click.argument("streams", nargs=-1)
@_options(WHERE, *ALWAYS)
@click.option("--into", default="", metavar="GROUP", help="Put all paths below this group.")
@click.option("--since", metavar="TIME", help="Messages from this time on.")
@click.option("--until", metavar="TIME", help="Messages before this time.")
@click.option("--rate", default=0, type=click.IntRange(0), metavar="N", help="N messages a second.")
@click.option(
    "--speed", default=0.0, type=click.FloatRange(0), metavar="X", help="As they came, X times as fast; 1 as it was."
)
@click.option("--plain", is_flag=True, help="Do not say in headers when and where a message was before.")
@click.option("--id", "name", default="", metavar="NAME", help="Of this replay: it is published once under it.")
@_needs_spark
def replay(directory: str, streams: tuple[str, ...], since: str | None, until: str | None, **said: Any) -> int:
    """Publish what is in the archive DIRECTORY, of STREAMS or all, in its order, again; repeated, what is missing."""
    from pyspark_mqfs.commands import replay as act

    target = _source(said)
    words = {name: said.pop(name) for name in ("into", "where", "rate", "speed", "plain", "name")}
    what = act.Replay(directory, target, streams=streams, since=_time(since), until=_time(until), **words)
    return _run(
        said, "replay", what, lambda spark, tell: act.run(spark, what, tell),
        lambda found: f"{found['messages']:,} messages in {found['batches']} batches as {found['replay']}",
    )  # fmt: skip


@spark.command()
@click.argument("streams", nargs=-1)
@_options(PATTERN, *ALWAYS)
@click.option("--archive", "path", default="", metavar="DIR", help="This archive; with --at: against the streams.")
@click.option("--replayed", is_flag=True, help="The streams are a replay of the archive.")
@click.option("--into", default="", metavar="GROUP", help="That replay's --into.")
@click.option("--holes", is_flag=True, help="A sequence that is missing is a problem, too.")
@_needs_spark
def verify(streams: tuple[str, ...], path: str, **said: Any) -> int:
    """Look for messages that are doubled, lost, damaged, different or out of time; 1 where there are any."""
    from pyspark_mqfs.commands import verify as act

    words = {name: said.pop(name) for name in ("replayed", "into", "holes")}
    what = act.Verify(path, _source_if_named(said, streams), **words)
    return _run(said, "verify", what, lambda spark, tell: act.run(spark, what, tell), act.line)


# ---------------------------------------------------------------- stats, copy, dead letters


@spark.command()
@click.argument("streams", nargs=-1)
@_options(PATTERN, WHERE, *ALWAYS)
@click.option("--archive", "path", default="", metavar="DIR", help="Of this archive, not of a server.")
@click.option("--sent", default="", metavar="HEADER", help="The header with the UNIX time at which it was sent.")
@click.option("--report", default="", metavar="FILE", help="A page FILE.html, or pictures FILE-rate.png and so on.")
@_needs_spark
def stats(streams: tuple[str, ...], path: str, report: str, **said: Any) -> int:
    """Count messages and bytes by stream, over time and by size."""
    from pyspark_mqfs.commands import report as pages
    from pyspark_mqfs.commands import stats as act

    source = _source_if_named(said, streams)
    if report:
        pages.check_path(report)
    what = act.Stats(path, source, said.pop("where"), said.pop("sent"))

    def count(spark: Any, tell: Any) -> dict[str, Any]:
        found = act.run(spark, what, tell)
        if report:
            found["files"] = pages.write(found, report, path or what.source.address)  # type: ignore[union-attr]
        return found

    return _run(said, "stats", what, count, lambda found: pages.table(found))


@spark.command()
@click.argument("streams", nargs=-1)
@_options(PATTERN, WHERE, CHECKPOINT, FOREVER, *ALWAYS)
@click.option("--target", default="", metavar="DIAL", help="Another server to write to.")
@click.option("--to", default="", metavar="GROUP/STREAM", help="All to this stream.")
@click.option("--into", default="", metavar="GROUP", help="To the same paths below this group.")
@_needs_spark
def copy(streams: tuple[str, ...], target: str, **said: Any) -> int:
    """Copy messages of STREAMS, with their headers, each once."""
    from pyspark_mqfs.commands import copy as act

    source = _source(said, streams)
    words = {name: said.pop(name) for name in ("to", "into", "where", "checkpoint", "forever")}
    what = act.Copy(source, act.at(source, target), **words)
    return _run(
        said,
        "copy",
        what,
        lambda spark, tell: act.run(spark, what, tell),
        lambda found: f"{found['read']:,} messages read",
    )


@spark.group("dead-letters")
def dead_letters() -> None:
    """Put bad messages aside, and send dead letters back."""


@dead_letters.command()
@click.argument("streams", nargs=-1)
@_options(PATTERN, WHERE, CHECKPOINT, FOREVER, *ALWAYS)
@click.option("--to", required=True, metavar="GROUP/STREAM", help="The stream of dead letters.")
@click.option("--reason", default="", metavar="TEXT", help="Why, in the header letter.reason.")
@_needs_spark
def divert(streams: tuple[str, ...], **said: Any) -> int:
    """Copy messages of STREAMS that --where calls bad to a stream of dead letters."""
    from pyspark_mqfs.commands import dead_letters as act

    source = _source(said, streams)
    words = {name: said.pop(name) for name in ("to", "reason", "where", "checkpoint", "forever")}
    what = act.Divert(source, **words)
    return _run(
        said, "dead-letters", what, lambda spark, tell: act.divert(spark, what, tell),
        lambda found: f"{found['read']:,} messages read",
    )  # fmt: skip


@dead_letters.command()
@click.argument("stream")
@_options(WHERE, CHECKPOINT, *ALWAYS)
@_needs_spark
def redrive(stream: str, **said: Any) -> int:
    """Send dead letters of STREAM back to where they came from, and drop them there."""
    from pyspark_mqfs.commands import dead_letters as act

    what = act.Redrive(_source(said, (stream,)), said.pop("where"), said.pop("checkpoint"))
    return _run(
        said, "dead-letters", what, lambda spark, tell: act.redrive(spark, what, tell),
        lambda found: f"{found['redriven']:,} letters sent back",
    )  # fmt: skip


__all__ = ["spark"]
