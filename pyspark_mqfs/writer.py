"""The writers of batch and streaming queries.

The transaction id of a streaming batch is its query and batch number. That of a batch query is txnAppId and txnVersion,
or a unique id. Inside foreachBatch the id of the query is not used: a second write of the same batch would count as a
repeat.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence

import attrs
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pyspark_mqfs import batch_encoder, sink
from pyspark_mqfs.connection import Server
from pyspark_mqfs.options import COMMON, OptionError, Options, invalid

WRITE = (*COMMON, "topic", "txnAppId", "txnVersion", "create", "reservedHeaders", "largeBatches")
QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"  # properties of a streaming task
_APP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
_NUMBERS = (1 << 63) - 1


@attrs.frozen
class StagedRows(WriterCommitMessage):
    """The staged rows of one task attempt."""

    run: str  # the id of the streaming query, or of the batch writer
    partition: int
    batches: tuple[sink.StagedBatch, ...]


@attrs.frozen
class Sink:
    """The target and the options of a write. It is small, as it is pickled with each task."""

    server: Server
    stream: str
    create: bool
    reserved: str
    split: str  # option largeBatches: "", "refuse" or "split"

    @classmethod
    def of(cls, options: Options, schema: StructType, overwrite: bool) -> Sink:
        if overwrite:
            raise OptionError("mode overwrite: not supported (expected append)")
        stream = options.text("topic")
        batch_encoder.check_schema(schema, has_topic=bool(stream))
        return cls(
            Server.of(options),
            batch_encoder.check_path(stream) if stream else "",
            options.flag("create", True),
            _one_of(options, "reservedHeaders", batch_encoder.RESERVED_POLICIES),
            _one_of(options, "largeBatches", ("", "refuse", "split")),
        )

    def stage(self, run: str, prefix: str, rows: Iterator[pa.RecordBatch]) -> StagedRows:
        """Run a task: stage all rows, or none."""
        context = TaskContext.get()
        partition, attempt = (context.partitionId(), context.taskAttemptId()) if context else (0, 0)
        encoder = batch_encoder.Encoder(self.stream, self.reserved)
        staging = sink.Staging(self.server, f"{prefix}{partition}-{attempt}", self.create)
        try:
            for batch in rows:
                for frames in encoder.encode(batch):
                    staging.put(frames)
            return StagedRows(run, partition, staging.finish())
        except BaseException:
            staging.drop()
            raise


def _one_of(options: Options, name: str, expected: Sequence[str]) -> str:
    value = options.text(name, expected[0]).strip().lower()
    if value not in expected:
        raise invalid(name, value, " or ".join(word for word in expected if word))
    return value


def _by_partition(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    return sorted((m for m in messages if isinstance(m, StagedRows)), key=lambda staged: staged.partition)


def _batches(messages: Sequence[WriterCommitMessage | None]) -> list[sink.StagedBatch]:
    return [batch for staged in _by_partition(messages) for batch in staged.batches]


class BatchWriter(DataSourceArrowWriter):
    """The writer of `df.write`. Commits once per txnAppId and txnVersion, if set."""

    def __init__(self, target: Sink, application: str, version: int) -> None:
        """`application`: txnAppId, or "" for a unique id."""
        self.sink, self.application, self.version = target, application, version
        self.run = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        return self.sink.stage(self.run, self._prefix(self.run), iterator)

    def _prefix(self, run: str) -> str:
        return f"spark-{run[:12]}-"

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        staged = _by_partition(messages)
        if not staged:
            return
        once = bool(self.application)
        producer = f"spark-app-{self.application}" if once else f"spark-run-{staged[0].run}"
        split = self.sink.split == "split" or (not once and self.sink.split != "refuse")
        transaction = sink.Transaction(producer, self.version + 1, self._prefix(staged[0].run), once, split)
        sink.commit(self.sink.server, transaction, _batches(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        sink.drop(self.sink.server, _batches(messages))


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of `df.writeStream`. Commits once per query and batch."""

    def __init__(self, target: Sink) -> None:
        self.sink = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY) if context else None
        batch = context.getLocalProperty(BATCH) if context else None
        if not query or batch is None:
            raise sink.SinkError("no query and batch number from Spark (expected pyspark 4.2 or newer)")
        return self.sink.stage(query, _prefix(query, int(batch)), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        staged = _by_partition(messages)
        if not staged:
            return
        query = staged[0].run
        split = self.sink.split == "split"
        transaction = sink.Transaction(f"spark-{query}", batchId + 1, _prefix(query, batchId), True, split)
        sink.commit(self.sink.server, transaction, _batches(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        sink.drop(self.sink.server, _batches(messages))


def _prefix(query: str, batch: int) -> str:
    """Return the prefix of the names staged for a batch of a stream."""
    return f"spark-{query}-{batch}-"


def batch_writer(values: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    options = Options(values, WRITE, "the writer")
    target = Sink.of(options, schema, overwrite)
    application = options.text("txnAppId")
    version = options.number("txnVersion", None, 0)
    if bool(application) != (version is not None):
        raise OptionError("options txnAppId and txnVersion: one without the other (expected both or none)")
    if application and not _APP.fullmatch(application):
        raise invalid("txnAppId", application, "up to 100 letters, digits and . _ : -")
    if version is not None and version >= _NUMBERS:
        raise invalid("txnVersion", str(version), f"a number below {_NUMBERS}")
    return BatchWriter(target, application, version or 0)


def stream_writer(values: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    options = Options(values, WRITE, "the writer of a stream")
    for name in ("txnAppId", "txnVersion"):
        if name in options:
            raise OptionError(f"option {name}: only for batch writes")
    return StreamWriter(Sink.of(options, schema, overwrite))
