"""What must come of the examples of mqfs-bench(1)."""

from __future__ import annotations

import re

from tests.docs.pages import Block
from tests.docs.scene import Scene
from tests.docs.treated import prepared, treated

SOUND = "checked: none lost, doubled, out of order or damaged"


@prepared("mqfs-bench.1")
def a_server_that_runs(at: Scene) -> None:
    at.serve()


def short(at: Scene, block: Block) -> str:
    """Type it, for less than the five seconds of the default; what it shows."""
    said = at.type(f"{block.text} --seconds 0.5 --round-trips 10")
    assert said[-1] == SOUND
    return "\n".join(said)


@treated("mqfs-bench.1", "mqfs bench --sync always")
def one_and_one(at: Scene, block: Block) -> None:
    assert "64 bytes, 1 publishing, 1 receiving all; auto, sync always" in short(at, block)


@treated("mqfs-bench.1", "mqfs bench --producers 2 --workers 4")
def four_workers_behind_two_producers(at: Scene, block: Block) -> None:
    assert "1,024 bytes, 2 publishing, 4 sharing them; auto, sync off" in short(at, block)


@treated("mqfs-bench.1", "mqfs bench --at")
def the_latency_at_a_rate(at: Scene, block: Block) -> None:
    published = re.search(r"published +([\d,]+)", short(at, block))
    assert published
    assert 0 < int(published[1].replace(",", "")) <= 1_000  # of half a second
    assert (at.folder / "latency.png").read_bytes().startswith(b"\x89PNG")


@treated("mqfs-bench.1", "mqfs bench --messages")
def a_figure_for_a_script(at: Scene, block: Block) -> None:
    (shown,) = at.type(block.text)  # jq colours it
    assert float(re.sub(r"\x1b\[[\d;]*m", "", shown)) > 1_000
