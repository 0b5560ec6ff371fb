"""Workers of dramatiq and agents whose server is replaced by its standby: real processes, with both addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import attrs
import pytest

from tests.jobs.test_workers import DRAMATIQ, PUBLISH, Jobs
from tests.replica.test_servers import Node
from tests.server.test_mcp import agent
from tests.support.eventually import eventually
from tests.support.server import short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
DEFAULT = ("--default", "sync replica")


@attrs.frozen
class Pair:
    """A primary and its standby."""

    primary: Node
    standby: Node

    @property
    def address(self) -> str:
        return f"{self.primary.address},{self.standby.address}"

    def take_over(self) -> None:
        """The primary is killed; its standby serves."""
        self.primary.kill()
        eventually(self.standby.is_primary)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        one, two = (stack.enter_context(short_folder()) for _ in range(2))
        nodes = [
            stack.enter_context(Node.of(folder, f"file://{one}/log", *DEFAULT, *more))
            for folder, more in ((one, []), (two, ["--standby", "--failover", "2s"]))
        ]
        yield Pair(*nodes)


def test_workers_of_dramatiq_go_on(pair: Pair, tmp_path: Path) -> None:
    jobs = Jobs(pair.primary, tmp_path, pair.address)
    try:
        jobs.use(DRAMATIQ, PUBLISH.format(100))
        jobs.start(DRAMATIQ)
        eventually(lambda: len({*jobs.numbers()}) >= 10)
        pair.take_over()
        jobs.use(DRAMATIQ, "for n in range(100, 120): publish(n)")
        eventually(lambda: {*jobs.numbers()} == {*range(120)})
        again = len(jobs.numbers()) - 120
        assert again <= 2 * DRAMATIQ.claimed, f"{again} ran twice: more than its claims"
    finally:
        jobs.close()


def test_an_agent_goes_on(pair: Pair) -> None:
    async def work() -> None:
        async with agent(pair.address, "work") as one:
            await one("send", stream="s", body="1")
            claim = await one("wait", stream="s", seconds=60)
            await anyio.to_thread.run_sync(pair.take_over)
            with pytest.raises(ValueError):
                await one("ack", claim=claim["claim"])
            again = await one("wait", stream="s", seconds=60)
            assert again["body"] == "1"
            await one("ack", claim=again["claim"])
            await one("send", stream="s", body="2", id="2")
            assert (await one("wait", stream="s", seconds=60))["body"] == "2"

    anyio.run(work)
