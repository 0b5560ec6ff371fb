"""What the commands have in common: where messages come from, how far they are, columns that are worked out.

Owns names and expressions; starts no query.
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

ROOT = "."  # the root group in a path of partitions: no group is called so
Tell = Callable[[str], None]


@attrs.frozen
class Source:
    """Streams of a server."""

    address: str
    streams: tuple[str, ...] = ()
    pattern: str = ""
    user: str = ""
    token: str = attrs.field(default="", repr=False)

    def server(self) -> dict[str, str]:
        """The options that say where."""
        said = {"address": self.address, "user": self.user, "token": self.token}
        return {name: value for name, value in said.items() if value}

    def which(self) -> dict[str, str]:
        if bool(self.streams) == bool(self.pattern):
            raise Failed("name the streams as GROUP/STREAM, or say --pattern; one of both is right")
        return {"subscribePattern": self.pattern} if self.pattern else {"subscribe": ",".join(self.streams)}

    def options(self) -> dict[str, str]:
        return {**self.server(), **self.which(), "includeHeaders": "true"}

    def check(self) -> None:
        """Raises Failed or OptionError for what means nothing, before anybody is asked."""
        self._understood()

    def check_server(self) -> None:
        """The same of what says where; of a server that is written to, streams are not asked for."""
        Server.of(Options(self.server(), COMMON, "a command"))

    def _understood(self) -> tuple[Selection, Server]:
        options = Options(self.options(), (*COMMON, "subscribe", "subscribePattern", "includeHeaders"), "a command")
        return Selection.of(options), Server.of(options)

    def survey(self) -> ServerCatalog:
        selection, server = self._understood()
        with server.link() as link:
            return link.retried(selection.survey)


def read(spark: SparkSession, source: Source, **more: str) -> DataFrame:
    """What is there now."""
    return spark.read.format("mqfs").options(**source.options(), **more).load()


def follow(spark: SparkSession, source: Source, **more: str) -> DataFrame:
    """What is there and comes."""
    return spark.readStream.format("mqfs").options(**source.options(), startingOffsets="earliest", **more).load()


def group_of(path: Column) -> Column:
    found = F.substring(path, F.lit(1), F.length(path) - F.length(stream_of(path)) - 1)
    return F.when(found == "", F.lit(ROOT)).otherwise(found)


def stream_of(path: Column) -> Column:
    return F.substring_index(path, "/", -1)


def path_of(group: Column, stream: Column) -> Column:
    return F.when(group == ROOT, stream).otherwise(F.concat(group, F.lit("/"), stream))


def no_progress(text: str) -> None:
    """Tells nobody."""


def terminal_progress(text: str) -> None:
    """Tells a person at a terminal, in one line that is written over."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def finished(tell: Tell) -> None:
    """The line is taken away."""
    tell("")


def watch(query: StreamingQuery, tell: Tell, what: str, total: int) -> int:
    """Until it ends; how many rows it has read. `total`: as many as are expected, 0 if that is not known."""
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
