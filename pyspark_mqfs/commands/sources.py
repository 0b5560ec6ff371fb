"""Shared parts of the commands: the source of messages, progress, and columns computed from paths.

Starts no query.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
from pyspark.sql import functions as F

from pyspark_mqfs.catalog import Selection, ServerCatalog
from pyspark_mqfs.commands.session import Failed
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import COMMON, Options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

ROOT = "."  # the root group in a partition path; not a legal name of a group
Tell = Callable[[str], None]


@attrs.frozen
class Source:
    """Selected streams of a server."""

    address: str
    streams: tuple[str, ...] = ()
    pattern: str = ""
    user: str = ""
    token: str = attrs.field(default="", repr=False)

    def server(self) -> dict[str, str]:
        """The options of the connection."""
        said = {"address": self.address, "user": self.user, "token": self.token}
        return {name: value for name, value in said.items() if value}

    def which(self) -> dict[str, str]:
        if bool(self.streams) == bool(self.pattern):
            raise Failed("streams and --pattern: none or both given (expected GROUP/STREAM... or --pattern)")
        return {"subscribePattern": self.pattern} if self.pattern else {"subscribe": ",".join(self.streams)}

    def options(self) -> dict[str, str]:
        return {**self.server(), **self.which(), "includeHeaders": "true"}

    def check(self) -> None:
        """Raises CommandError or OptionError for invalid options. Asks no server."""
        self._understood()

    def check_server(self) -> None:
        """The same of the connection only, for a target."""
        Server.of(Options(self.server(), COMMON, "a command"))

    def _understood(self) -> tuple[Selection, Server]:
        options = Options(self.options(), (*COMMON, "subscribe", "subscribePattern", "includeHeaders"), "a command")
        return Selection.of(options), Server.of(options)

    def survey(self) -> ServerCatalog:
        selection, server = self._understood()
        with server.link() as link:
            return link.retried(selection.survey)


def read(spark: SparkSession, source: Source, **more: str) -> DataFrame:
    """The present messages."""
    return spark.read.format("mqfs").options(**source.options(), **more).load()


def follow(spark: SparkSession, source: Source, **more: str) -> DataFrame:
    """The present and future messages."""
    return spark.readStream.format("mqfs").options(**source.options(), startingOffsets="earliest", **more).load()


def group_of(path: Column) -> Column:
    found = F.substring(path, F.lit(1), F.length(path) - F.length(stream_of(path)) - 1)
    return F.when(found == "", F.lit(ROOT)).otherwise(found)


def stream_of(path: Column) -> Column:
    return F.substring_index(path, "/", -1)


def path_of(group: Column, stream: Column) -> Column:
    return F.when(group == ROOT, stream).otherwise(F.concat(group, F.lit("/"), stream))


def no_progress(text: str) -> None:
    """No-op progress callback."""


def terminal_progress(text: str) -> None:
    """Show progress on a terminal, in a line that is overwritten."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def finished(tell: Tell) -> None:
    """Remove the line of progress."""
    tell("")


def watch(query: StreamingQuery, tell: Tell, what: str, total: int) -> int:
    """Wait for the end of the query; the number of its rows. `total`: the expected number, 0: unknown."""
    began = time.monotonic()
    rows, last = 0, -1
    while True:
        ended = query.awaitTermination(0.5)  # type: ignore[arg-type]
        for progress in query.recentProgress:
            if progress["batchId"] > last and progress["numInputRows"]:
                last = progress["batchId"]
                rows += progress["numInputRows"]
        speed = rows / max(time.monotonic() - began, 1e-9)
        share = f" of {total:,} ({min(rows / total, 1):.0%})" if total else ""
        tell(f"{what}: {rows:,}{share} messages, {speed:,.0f}/s")
        if ended:
            return rows


__all__ = [
    "ROOT",
    "Source",
    "Tell",
    "finished",
    "follow",
    "group_of",
    "no_progress",
    "path_of",
    "read",
    "stream_of",
    "terminal_progress",
    "watch",
]
