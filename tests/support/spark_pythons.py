"""The Pythons of a Spark, forked from one that has imported what they need: a short query takes a dozen, and each would
import for half a second of a processor."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import ROOT, fork_client
from tests.support.forked import Forker, listening

# Not data_source_pushdown_filters: by its import pyspark_mqfs/reader.py sees whether Spark pushes filters.
MODULES = (
    "pyspark.worker", "pyspark.sql.worker.plan_data_source_read", "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.streaming.python_streaming_source_runner", "pyspark_mqfs",
)  # fmt: skip


@contextmanager
def forked_python(*modules: str) -> Iterator[str]:
    """A program in the place of `python`, for PYSPARK_PYTHON without `modules`: what it runs is forked from a process
    of ours that has imported these."""
    with tempfile.TemporaryDirectory(prefix="mqfs-") as folder:
        with listening(folder) as listener:
            forker = Forker({**os.environ, "PYTHONPATH": str(ROOT)}, *(modules or MODULES), listener=listener)
        try:
            yield str(fork_client.write(Path(folder, "python")))
        finally:
            forker.close()


def write(folder: Path) -> Path:
    """The program for PYSPARK_PYTHON, in a new folder, of a command that is started by `beside`."""
    folder.mkdir()
    return fork_client.write(folder / "python")


def beside(program: Path, *command: str) -> list[str]:
    """A command, and in its session the process that `program` forks from; both end by a kill of that session."""
    python = shlex.join([sys.executable, "-m", "tests.support.forked", str(program.parent), *MODULES])
    return ["sh", "-c", f'PYTHONPATH={shlex.quote(str(ROOT))} {python} </dev/null >&2 & exec "$@"', "sh", *command]
