"""The Spark session of a command, and its errors in one line.

All commands share its settings; those of the user win.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from mqfs.errors import BadConfig

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",  # dates in an archive do not depend on the machine
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",  # a stream 007 stays a string
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100000",
    "spark.sql.streaming.stopTimeout": "30s",
}
_OWN_ERROR = re.compile(
    r"(?:\b(?:pyspark_mqfs|mqfs)(?:\.\w+)+: |\b(?:OptionError|SinkError|MqfsError): |\[USER_RAISED_EXCEPTION\] )"
    r"(.*?)(?:\n|$)"
)
_PYTHON = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?:py4j\.protocol\.\w+: )?(?=\S)")
_STREAM = re.compile(r"^\[STREAM_FAILED\] Query \[[^]]*\] terminated with exception: ")
_CALL = re.compile(r"^An error occurred while calling \S+\s+: (?:\S+: )?")  # of py4j


class CommandError(Exception):
    """A command failed; the text is one line."""


@contextmanager
def session(master: str, settings: Sequence[str], name: str) -> Iterator[SparkSession]:
    """Yield a session, which ends with the block. Raises BadConfig."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Warnings of pyspark about versions of pandas, which a user cannot avoid.
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    log = Path(__file__).with_name("log4j2.properties")
    builder = SparkSession.builder.appName(name).master(master)
    configuration = {**SETTINGS, "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{log}"}
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.startswith("spark."):
            raise BadConfig(f"--conf: bad setting {setting!r} (expected spark.KEY=VALUE)")
        configuration[key] = value
    for key, value in configuration.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def explain(error: BaseException) -> str:
    """Return the line of our own error in an error wrapped by Spark. Without one, return the line of the last error in
    Python, or else the first line."""
    text = str(error)
    matches = _OWN_ERROR.findall(text)
    if matches:
        return str(matches[-1]).strip()
    if "Traceback (most" in text:
        text = _PYTHON.split(text)[-1]
    return _CALL.sub("", _STREAM.sub("", text)).strip().split("\n", 1)[0][:500]
