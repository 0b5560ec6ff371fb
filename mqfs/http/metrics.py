"""`/.metrics`: the counters of `.stats`, of all groups at once, for Prometheus.

It reads the engine's own counters, in slices, so that other requests are served during a scrape. Streams are included
only on request: there may be a million of them.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mqfs import __version__, limits
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.group import Group
from mqfs.engine.language.permissions import R
from mqfs.engine.stream import Stream
from mqfs.engine.tree.attributes import permit, permit_walk
from mqfs.errors import Denied, MqfsError, NotFound
from mqfs.http.answers import NO_STORE, Answer, accepted
from mqfs.http.route import Call
from mqfs.model import NEVER
from mqfs.store.api import Histogram
from mqfs.syntax.patterns import compile_pattern

# ---------------------------------------------------------------- formats of Prometheus: text 0.0.4, OpenMetrics 1.0

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text"
OPEN_METRICS_1 = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"
END = "# EOF\n"  # of OpenMetrics

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Family(NamedTuple):
    """A metric family. `kind`: counter, gauge or histogram. `about` has no backslash and no line end."""

    name: str
    kind: str
    about: str

    def head(self, open_metrics: bool) -> str:
        """Return the lines before the samples. In OpenMetrics the name of a counter lacks its suffix "_total"."""
        name = self.name.removesuffix("_total") if open_metrics and self.kind == "counter" else self.name
        return f"# HELP {name} {self.about}\n# TYPE {name} {self.kind}\n"


def labels(**values: str) -> str:
    """Return labels in their braces, or "" without any."""
    words = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items())
    text = ",".join(words)
    return f"{{{text}}}" if text else ""


def samples(name: str, rows: Iterable[tuple[str, float]]) -> str:
    """Return a line for each row of labels and value."""
    return "".join([f"{name}{text} {value}\n" for text, value in rows])


# ---------------------------------------------------------------- metrics that Prometheus expects of every process

FAMILIES = (
    Family("process_cpu_seconds_total", "counter", "User and system time."),
    Family("process_resident_memory_bytes", "gauge", "Resident memory."),
    Family("process_virtual_memory_bytes", "gauge", "Virtual memory."),
    Family("process_open_fds", "gauge", "Open descriptors."),
    Family("process_max_fds", "gauge", "How many there may be."),
    Family("process_start_time_seconds", "gauge", "UNIX time of its start."),
)


def values() -> tuple[float, ...]:
    """Return the value of each of FAMILIES, in their order."""
    with open("/proc/self/statm") as file:
        virtual, resident = (int(word) * resource.getpagesize() for word in file.read().split()[:2])
    return (
        time.process_time(),
        resident,
        virtual,
        len(os.listdir("/proc/self/fd")) - 1,  # without the descriptor of the listing itself
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _started(),
    )


def _started() -> float:
    with open("/proc/self/stat") as file:
        after_name = file.read().rpartition(")")[2].split()
    since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot, 2)


# ---------------------------------------------------------------- metrics of the tree

log = logging.getLogger("mqfs.http")
COUNTER, GAUGE = "counter", "gauge"
Values = tuple[float | None, ...]  # one for each family; None: unknown
Row = tuple[str, Values]  # labels and values
LINES = 512  # of one piece of the answer

OF_GROUP = (
    Family("mqfs_messages_written_total", COUNTER, "Messages written."),
    Family("mqfs_bytes_written_total", COUNTER, "Bytes of the messages written."),
    Family("mqfs_messages_read_total", COUNTER, "Messages handed to handles."),
    Family("mqfs_discarded_total", COUNTER, "Messages discarded by 'full drop-new'."),
    Family("mqfs_cut_total", COUNTER, "Messages cut by 'full drop-old'."),
    Family("mqfs_fell_behind_total", COUNTER, "Times that a reader was reported to have fallen behind."),
    Family("mqfs_lost_total", COUNTER, "Messages that readers fell behind."),
    Family("mqfs_refused_total", COUNTER, "Writes refused; .errors has the newest with their reason."),
    Family("mqfs_log_bytes", GAUGE, "Bytes of the log."),
    Family("mqfs_delayed", GAUGE, "Delayed messages."),
    Family("mqfs_keys", GAUGE, "Keys of which 'replay key' keeps the newest message."),
    Family("mqfs_damaged", GAUGE, "Damaged places found in the log."),
    Family("mqfs_read_only", GAUGE, "1 where the disk has failed: nothing can be written."),
    Family("mqfs_disk_full", GAUGE, "1 where the disk had no room: writes are refused until it has."),
)
OF_CONSUMER = (
    Family("mqfs_consumer_waiting", GAUGE, "Messages neither acknowledged nor claimed."),
    Family("mqfs_consumer_claimed", GAUGE, "Messages claimed."),
    Family("mqfs_consumer_delayed", GAUGE, "Waiting messages that are not due yet."),
    Family(
        "mqfs_consumer_oldest_seconds",
        GAUGE,
        "Age of the oldest waiting message, where it is among the next 256; 0 where none waits.",
    ),
    Family("mqfs_consumer_handles", GAUGE, "Open handles."),
    Family("mqfs_consumer_paused", GAUGE, "1 where it is paused, by hand or by its breaker."),
    Family("mqfs_consumer_delivered_total", COUNTER, "Deliveries."),
    Family("mqfs_consumer_acknowledged_total", COUNTER, "Messages acknowledged."),
    Family("mqfs_consumer_failed_total", COUNTER, "Deliveries that failed."),
    Family("mqfs_consumer_dead_total", COUNTER, "Messages that became dead letters."),
)
OF_STREAM = (
    Family("mqfs_stream_messages", GAUGE, "Messages kept."),
    Family("mqfs_stream_bytes", GAUGE, "Bytes of the messages kept."),
    Family("mqfs_stream_written_total", COUNTER, "Messages written."),
)
OF_WORK_STREAM = tuple(  # under `deliver one` a stream has a consumer of its own
    family._replace(name=family.name.replace("_consumer_", "_stream_")) for family in OF_CONSUMER
)
OMITTED = Family("mqfs_streams_omitted", GAUGE, "Streams that were asked for, and for which there was no room.")
PARKED = Family("mqfs_parked", GAUGE, "Reads and writes of all clients that wait.")
BUILD = Family("mqfs_build_info", GAUGE, "The version.")
REPLICA = (
    Family("mqfs_replica_lag_bytes", GAUGE, "Bytes of all logs that the replica lacks."),
    Family("mqfs_replica_lag_seconds", GAUGE, "Age of the oldest bytes that the replica lacks."),
    Family("mqfs_replica_checkpoint_failed", GAUGE, "Whether the last checkpoint of the replica was not made: 0 or 1."),
)
SYNCS = Family("mqfs_sync_seconds", "histogram", "Time that syncs of logs took.")
REQUESTS = Family("mqfs_http_requests_total", COUNTER, "HTTP requests answered.")
STREAMS = Family("mqfs_http_streams", GAUGE, "HTTP answers without an end, by now.")


async def show(call: Call) -> Answer:
    """Answer with all series. The body is made piece by piece: with many groups it has megabytes."""
    pattern = call.option("streams")
    matches = None if pattern is None else compile_pattern(pattern)
    open_metrics = OPEN_METRICS in accepted(call.request.headers.get("accept", ""))
    scrape = Scrape(call)
    await scrape.look(matches)
    return Answer(200, scrape.text(open_metrics), OPEN_METRICS_1 if open_metrics else TEXT, list(NO_STORE))


class Scrape:
    """The rows of one request."""

    def __init__(self, call: Call) -> None:
        self._user, self._tree, self._front = call.user, call.tree, call.front
        self._groups: list[Row] = []
        self._consumers: list[Row] = []
        self._streams: list[Row] = []
        self._work_streams: list[Row] = []
        self._room, self._omitted = limits.HTTP_METRIC_LINES, 0
        self._asked = False  # whether streams were requested

    # ------------------------------------------------------------ the tree

    async def look(self, matches: Callable[[str], bool] | None) -> None:
        """Collect the values of all groups that the user may read, and of the streams whose names match."""
        self._asked = matches is not None
        async for path, group in self._readable():
            counts, bucket, newest = group.counts, group.log.bucket, group.retention.newest
            values = (
                counts.written, counts.written_bytes, counts.read, counts.discarded, counts.cut, counts.fell_behind,
                counts.lost, counts.refused, bucket.upkeep.size, len(group.held),
                newest.count if newest is not None else 0, bucket.upkeep.damaged,
                int(bucket.end.failed is not None), int(group.number in self._tree.store.full),
            )  # fmt: skip
            self._groups.append((labels(group=path), values))
            for name, consumer in list(group.consumers.items()):
                if group.removed:
                    break
                await self._look_at(consumer, labels(group=path, consumer=name), self._consumers)
            if matches is not None:
                await self._look_at_streams(path, group, matches)

    async def _readable(self) -> AsyncIterator[tuple[str, Group]]:
        """Yield groups with their paths. Groups that the user may not see are skipped, without a refusal in the
        audit."""
        left = [("/", self._tree.root)]
        while left:
            path, group = left.pop()
            await self._front.pause()
            if group.removed:
                continue
            if _is_permitted(permit, self._user, group, R):
                yield path, group
            base = path.rstrip("/")
            for name, inner in list(group.groups.items()):
                await self._front.pause()
                if _is_permitted(permit_walk, self._user, group, name):
                    left.append((f"{base}/{name}", inner))

    async def _look_at(self, consumer: Consumer, text: str, table: list[Row]) -> None:
        """Add the row of a consumer, unless its log cannot be read: a scrape has to report a failed disk, not to
        fail."""
        try:
            table.append((text, await self._consumer(consumer)))
        except MqfsError as error:
            log.warning("/.metrics: %s left out: %s", text, error)

    async def _consumer(self, consumer: Consumer) -> Values:
        """Return the values of a consumer, as in .stats. A backlog over many streams is counted in slices, and may
        change meanwhile. Raises MqfsError."""
        backlog, counts = consumer.backlog, consumer.counts
        unacked = 0
        for part in backlog.counts():
            unacked += part
            await self._front.pause()
            if consumer.group.removed:
                raise NotFound("group was removed")
        claimed, delayed = await self._front.await_step(
            consumer.group.portions.run(backlog.count_claimed_and_delayed())
        )
        return (
            max(unacked - claimed, 0), len(consumer.claims), delayed,
            _oldest_s(consumer) if unacked > claimed else 0.0, consumer.opens,
            int(consumer.state.rules.is_paused(consumer.group.clock.engine_ns())), counts.delivered,
            counts.acknowledged, counts.failed, counts.dead,
        )  # fmt: skip

    async def _look_at_streams(self, path: str, group: Group, matches: Callable[[str], bool]) -> None:
        works = group.settings.deliver == "one"
        needed = len(OF_STREAM) + (len(OF_WORK_STREAM) if works else 0)
        for name, stream in list(group.streams.items()):
            await self._front.pause()
            if group.removed or stream.removed or not matches(name):
                continue
            if self._room < needed:
                self._omitted += 1
                continue
            self._room -= needed
            text = labels(group=path, stream=name)
            self._streams.append((text, _stream(stream)))
            if works:
                await self._look_at(stream.shown_consumer(), text, self._work_streams)

    # ------------------------------------------------------------ the text

    async def text(self, open_metrics: bool) -> AsyncIterator[bytes]:
        for piece in self._pieces(open_metrics):
            yield piece.encode()
            await self._front.pause()
        if open_metrics:
            yield END.encode()

    def _pieces(self, open_metrics: bool) -> Iterator[str]:
        for family, rows in self._singles():
            yield family.head(open_metrics) + samples(family.name, rows)
        yield SYNCS.head(open_metrics) + _histogram(SYNCS.name, self._tree.store.sync_times)
        tables = [(OF_GROUP, self._groups), (OF_CONSUMER, self._consumers)]
        if self._asked:
            tables += [(OF_STREAM, self._streams), (OF_WORK_STREAM, self._work_streams)]
        for families, table in tables:
            for column, family in enumerate(families):
                yield family.head(open_metrics)
                for at in range(0, len(table), LINES):
                    yield samples(family.name, _known(column, table[at : at + LINES]))

    def _singles(self) -> Iterator[tuple[Family, Sequence[tuple[str, float]]]]:
        """Yield the families of the process, each with its samples."""
        for family, value in zip(FAMILIES, values(), strict=True):
            yield family, [("", value)]
        yield BUILD, [(labels(version=__version__), 1)]
        server = self._front.server
        requests = sorted(server.requests.items())
        yield REQUESTS, [(labels(method=method, code=str(code)), number) for (method, code), number in requests]
        yield STREAMS, [("", server.streams)]
        yield PARKED, [("", self._tree.waits.used)]
        if (copies := self._tree.store.replication) is not None:
            lag = copies.lag_bytes, round(copies.lag_s, 3), int(copies.has_no_checkpoint)
            yield from ((family, [("", value)]) for family, value in zip(REPLICA, lag, strict=True))
        if self._asked:
            yield OMITTED, [("", self._omitted)]


def _is_permitted(check: Callable[..., None], *of: object) -> bool:
    try:
        check(*of)
    except Denied:
        return False
    return True


def _known(column: int, rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """Return the samples of one family, without unknown values."""
    return ((text, value) for text, values in rows if (value := values[column]) is not None)


def _oldest_s(consumer: Consumer) -> float | None:
    """Return the age of the oldest waiting message in seconds; 0 if none waits, None if it is not among the next
    ones."""
    oldest, position = consumer.backlog.unclaimed()
    if oldest is None:
        return 0.0 if position == NEVER else None
    age_ns: int = consumer.group.clock.wall_ns() - oldest.time_ns
    return max(age_ns, 0) / 1e9


def _stream(stream: Stream) -> tuple[float, ...]:
    stream.kept.update_low_watermark()
    return stream.kept.count, stream.kept.size, stream.written


def _histogram(name: str, histogram: Histogram) -> str:
    counts, total = histogram.cumulative(), histogram.sum
    bounds = [*map(repr, histogram.bounds), "+Inf"]
    buckets = [(labels(le=bound), count) for bound, count in zip(bounds, counts, strict=True)]
    return (
        samples(f"{name}_bucket", buckets)
        + samples(f"{name}_sum", [("", total)])
        + samples(f"{name}_count", [("", counts[-1])])
    )
