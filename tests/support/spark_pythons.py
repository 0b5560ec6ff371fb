"""The Pythons of Spark, forked from one that has imported their modules: a short query starts a dozen, and the imports
of each would take half a second of processor time."""

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

# Without data_source_pushdown_filters: from its import pyspark_mqfs/reader.py concludes that Spark pushes filters.
MODULES = (
    "pyspark.worker", "pyspark.sql.worker.plan_data_source_read", "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.streaming.python_streaming_source_runner", "pyspark_mqfs",
)  # fmt: skip


@contextmanager
def forked_python(*modules: str) -> Iterator[str]:
    """Make a replacement for `python`, and yield its path. Its processes are forked from one that has imported
    `modules`; without these, it is for PYSPARK_PYTHON."""
    with tempfile.TemporaryDirectory(prefix="mqfs-") as folder:
        with listening(folder) as listener:
            forker = Forker({**os.environ, "PYTHONPATH": str(ROOT)}, *(modules or MODULES), listener=listener)
        try:
            yield str(fork_client.write(Path(folder, "python")))
        finally:
            forker.close()


def write(folder: Path) -> Path:
    """Write a program for PYSPARK_PYTHON into a new folder, for a command of `beside`. Return its path."""
    folder.mkdir()
    return fork_client.write(folder / "python")


def beside(program: Path, *command: str) -> list[str]:
    """Return a command that also runs, in its session, the process from which `program` forks. A kill of the session
    ends both."""
    python = shlex.join([sys.executable, "-m", "tests.support.forked", str(program.parent), *MODULES])
    return ["sh", "-c", f'PYTHONPATH={shlex.quote(str(ROOT))} {python} </dev/null >&2 & exec "$@"', "sh", *command]
