"""A stream whose server is replaced by its standby: it has both addresses, and reads on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.replica.test_servers import Node
from tests.spark.test_stream import Query
from tests.support.eventually import eventually
from tests.support.server import short_folder

CTL = ["replay all", "sync replica"]


def publish(node: Node, begin: int, end: int) -> None:
    with node.connect() as client:
        group = client.group("g", create=True, ctl=CTL)
        group.publish_many([("s", b"%d" % number) for number in range(begin, end)])


def test_a_stream_goes_on_after_a_takeover(spark: Any, tmp_path: Path) -> None:
    with short_folder() as one, short_folder() as two:
        url = f"file://{one}/log"
        with Node.of(one, url) as primary, Node.of(two, url, "--standby", "--failover", "2s") as standby:
            publish(primary, 0, 50)
            both: Any = SimpleNamespace(address=f"{primary.address},{standby.address}")
            query = Query(spark, both, tmp_path / "checkpoint", subscribe="g/s")
            running = query.start(processingTime="200 milliseconds")
            try:
                eventually(lambda: values(query) == [*range(50)])
                primary.kill()
                eventually(standby.is_primary)
                publish(standby, 50, 100)
                eventually(lambda: running.exception() is not None or len(values(query)) >= 100)
                assert running.exception() is None
                assert values(query) == [*range(100)]
            finally:
                running.stop()


def values(query: Query) -> list[int]:
    """All that came, in the order of their batches."""
    return [int(value) for batch in query.batches for _, _, value in sorted(batch, key=lambda row: row[1])]
