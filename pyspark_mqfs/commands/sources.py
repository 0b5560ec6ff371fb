"""Shared parts of the commands: the source of messages, progress, and columns computed from paths.

No query is started here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

import attrs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from pyspark_mqfs.catalog import Selection, ServerCatalog
from pyspark_mqfs.commands.session import CommandError
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import COMMON, Options

SELECTION = ("subscribe", "assign", "subscribePattern")
ROOT = "."  # the root group in a partition path; not a legal name of a group
Progress = Callable[[str], None]


@attrs.frozen
class Source:
    """Selected streams of a server."""

    address: str
    streams: tuple[str, ...] = ()
    pattern: str = ""
    user: str = ""
    token: str = attrs.field(default="", repr=False)

    def server(self) -> dict[str, str]:
        """Return the options of the connection."""
        values = {"address": self.address, "user": self.user, "token": self.token}
        return {name: value for name, value in values.items() if value}

    def selection_options(self) -> dict[str, str]:
        """Return the option that selects the streams. `subscribe`, as in Kafka, separates names by commas and drops
        blanks around them, so names with these need `assign`. Raises CommandError."""
        if bool(self.streams) == bool(self.pattern):
            raise CommandError("streams and --pattern: none or both given (expected GROUP/STREAM... or --pattern)")
        if self.pattern:
            return {"subscribePattern": self.pattern}
        if any("," in path or path != path.strip() for path in self.streams):
            return {"assign": json.dumps({path: [0] for path in self.streams})}
        return {"subscribe": ",".join(self.streams)}

    def options(self) -> dict[str, str]:
        return {**self.server(), **self.selection_options(), "includeHeaders": "true"}

    def check(self) -> None:
        """Raise CommandError or OptionError for invalid options. Asks no server."""
        self._parse()

    def connection(self) -> Server:
        """Return the server. Raises OptionError for invalid options of the connection. Asks no server."""
        return Server.of(Options(self.server(), COMMON, "a command"))

    def _parse(self) -> tuple[Selection, Server]:
        options = Options(self.options(), (*COMMON, *SELECTION, "includeHeaders"), "a command")
        return Selection.of(options), Server.of(options)

    def check_lists(self) -> None:
        """Raise CommandError for a path that is not a stream, but a list of streams with commas."""
        lists = [path for path in self.streams if "," in path]
        words = {path: [path, *map(str.strip, path.split(","))] for path in lists}
        names = tuple(dict.fromkeys(word for path in lists for word in words[path] if word.strip("/")))
        if not names:
            return
        present = {path for path, _, _ in attrs.evolve(self, streams=names).catalog().streams()}
        for path in lists:
            whole, *parts = (word.strip("/") for word in words[path])
            if whole not in present and present.issuperset(parts):
                raise CommandError(f"{path}: no such stream (expected the streams as separate arguments)")

    def catalog(self) -> ServerCatalog:
        selection, server = self._parse()
        with server.link() as link:
            return link.with_retry(selection.catalog)


def selected_names(selection: Mapping[str, str]) -> tuple[str, ...]:
    """Return the streams from which `selection_options` made the option; none for a pattern."""
    if "assign" in selection:
        return tuple(json.loads(selection["assign"]))
    return tuple(filter(None, selection.get("subscribe", "").split(",")))


def read(spark: SparkSession, source: Source, **more: str) -> DataFrame:
    """Return the present messages. Raises CommandError."""
    source.check_lists()
    return spark.read.format("mqfs").options(**source.options(), **more).load()


def follow(spark: SparkSession, source: Source, **more: str) -> DataFrame:
    """Return the present and future messages. Raises CommandError."""
    source.check_lists()
    return spark.readStream.format("mqfs").options(**source.options(), startingOffsets="earliest", **more).load()


def group_of(path: Column) -> Column:
    group = F.substring(path, F.lit(1), F.length(path) - F.length(stream_of(path)) - 1)
    return F.when(group == "", F.lit(ROOT)).otherwise(group)


def stream_of(path: Column) -> Column:
    return F.substring_index(path, "/", -1)


def path_of(group: Column, stream: Column) -> Column:
    return F.when(group == ROOT, stream).otherwise(F.concat(group, F.lit("/"), stream))


def headers_or_empty() -> Column:
    """Return the headers, empty instead of null: Spark copies a batch again for every null list on the way to a
    sink."""
    return F.coalesce(F.col("headers"), F.expr("array()").cast("array<struct<key:string,value:binary>>"))


def header_of(key: str, value: Column) -> Column:
    return F.struct(F.lit(key).alias("key"), value.cast("string").cast("binary").alias("value"))


def no_progress(text: str) -> None:
    """Show no progress."""


def watch(query: StreamingQuery, progress: Progress, verb: str) -> int:
    """Wait for the end of the query; return the number of its rows."""
    started = time.monotonic()
    rows, last = 0, -1
    while True:
        ended = query.awaitTermination(0.5)  # type: ignore[arg-type]
        for batch in query.recentProgress:
            if batch["batchId"] > last and batch["numInputRows"]:
                last = batch["batchId"]
                rows += batch["numInputRows"]
        speed = rows / max(time.monotonic() - started, 1e-9)
        progress(f"{verb}: {rows:,} messages, {speed:,.0f}/s")
        if ended:
            return rows
