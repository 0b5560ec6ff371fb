"""What must come of the examples of mqfs-spark(1).

Each would start a Spark of its own; one is typed as it stands, and of the others the command line is understood.
"""

from __future__ import annotations

import shlex

import click

from mqfs.cli.spark import spark
from tests.docs.pages import Block
from tests.docs.scene import Scene
from tests.docs.treated import prepared, treated
from tests.support.spark_pythons import forked_python

JAVA = "WARNING: Using incubator modules: jdk.incubator.vector"  # of Spark's own command line
START_S = 300  # of Spark, and its first query, on a busy machine


@prepared("mqfs-spark.1")
def messages_in_a_group(at: Scene) -> None:
    at.serve()
    group = at.group("jobs", "replay all")
    (group / "mail").write_text("one")


@treated("mqfs-spark.1", "mqfs spark archive")
def archived_and_verified(at: Scene, block: Block) -> None:
    archive, verify = (line.typed for line in block.lines)
    with forked_python() as python:
        at.typing.begin(f"PYSPARK_PYTHON={python} PYSPARK_DRIVER_PYTHON={python} {archive} --master 'local[1]' 2>said")
        assert at.typing.prompted(START_S)
    errors = (at.folder / "said").read_text()
    assert set(errors.splitlines()) <= {JAVA}, errors
    assert at.typing.said[-1].startswith("1 new messages in ")
    command, words = understood(verify)
    assert (command, words["path"], words["pattern"]) == ("verify", "archive", "jobs/.*")


@treated("mqfs-spark.1", "mqfs spark replay")
def replayed(at: Scene, block: Block) -> None:
    command, words = understood(block.text)
    assert (command, words["into"], words["speed"]) == ("replay", "again", 10)


@treated("mqfs-spark.1", "mqfs spark stats")
def counted(at: Scene, block: Block) -> None:
    command, words = understood(block.text)
    assert (command, words["path"], words["report"]) == ("stats", "archive", "archive.html")


@treated("mqfs-spark.1", "mqfs spark dead-letters")
def diverted(at: Scene, block: Block) -> None:
    command, words = understood(block.text)
    assert (command, words["to"], words["streams"]) == ("divert", "jobs/dead", ("jobs/mail",))


def understood(line: str) -> tuple[str, dict[str, object]]:
    """Which command it is, and what its options are."""
    words = shlex.split(line.replace("\\\n", " "))[2:]
    command: click.Command = spark
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.commands[name]
    return name, command.make_context(name, words).params
