"""Checkpoints of the queries of commands.

A command without a checkpoint gets a temporary one. At its end, the consumers of the query, which would retain messages
for ever, and its producer are removed from the server.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import attrs

from mqfs.errors import MqfsError, NotFound
from mqfs.ninep.client.connection import Client
from mqfs.syntax.lines import quote_word
from pyspark_mqfs.catalog import path_of
from pyspark_mqfs.commands.sources import Source
from pyspark_mqfs.connection import write_text
from pyspark_mqfs.options import OptionError


@attrs.frozen
class QueryCheckpoint:
    """The checkpoint of one query."""

    path: str
    reader_options: Mapping[str, str]
    resumable: bool  # whether a later run can continue


@contextmanager
def query_checkpoint(path: str, source: Source) -> Iterator[QueryCheckpoint]:
    """Yield the checkpoint at a path; if the path is "", a temporary one, removed at the end with its consumers."""
    if path:
        yield QueryCheckpoint(path, {}, True)
        return
    prefix = f"once-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="mqfs-spark-") as own:
        try:
            yield QueryCheckpoint(own, {"groupIdPrefix": prefix}, False)
        finally:
            with suppress(OSError, MqfsError, OptionError), source.connection().link() as link:
                client = link.client()
                for group in source.catalog().groups:
                    with suppress(MqfsError):
                        _remove(client, group, prefix)


def forget_producer(target: Source, groups: Iterable[str], producer: str) -> None:
    """Make the server forget a producer that commits no more."""
    with suppress(OSError, MqfsError, OptionError), target.connection().link() as link:
        client = link.client()
        for group in groups:
            with suppress(MqfsError):
                write_text(client, path_of(group, ".txn/ctl"), f"forget {producer}")


def _remove(client: Client, group: str, prefix: str) -> None:
    """Remove the consumers of a group with that prefix, and their views."""
    for name in client.list(path_of(group, ".consumers")):
        if name.startswith(f"{prefix}-"):
            client.remove(path_of(group, f".consumers/{name}"))
            with suppress(NotFound):
                client.stat(path_of(group, name))
                write_text(client, path_of(group, "ctl"), f"unbind {quote_word(name)}\n")
