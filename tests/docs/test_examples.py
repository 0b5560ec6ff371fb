"""The manual's EXAMPLES, typed into a real shell beside a real server, do what the page says of them.

The examples are read from the pages. What must come of each stands in server_pages and tool_pages, for its beginning.
An example, or a page, that nothing stands for fails, and so does what stands for an example that is no more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import bench_pages, bridge_pages, fq_pages, http_pages, server_pages, spark_pages, tool_pages
from tests.docs.pages import PAGES, examples
from tests.docs.scene import Scene, scene
from tests.docs.treated import PREPARED, TREATED, treatment
from tests.support.linux_guest import BOOT_S

FILLED_BY = (bench_pages, bridge_pages, fq_pages, http_pages, server_pages, spark_pages, tool_pages)  # the table


@pytest.mark.timeout(BOOT_S + 60)
@pytest.mark.parametrize("source", PAGES, ids=lambda page: page.name)
def test_page(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"  # short: it stands in the paths of sockets
    folder.mkdir()
    with scene(folder, source) as at:
        treatments = [treatment(source.name, block) for block in at.blocks]
        assert set(treatments) == set(TREATED[source.name].values()), "an example is gone"
        PREPARED.get(source.name, Scene.serve)(at)
        for block, what in zip(at.blocks, treatments, strict=True):
            what(at, at.block(block.text))
    if at.lack:
        pytest.skip(at.lack)


def test_no_page_is_gone() -> None:
    assert set(TREATED) == {source.name for source in PAGES}


def test_reading_mdoc() -> None:
    source = ".Sh NAME\n.Dl no\n.Sh EXAMPLES\nText:\n.Dl $ a 'b\\ec'\n.Bd -literal -offset indent\nx\n\\&.y\n.Ed\n"
    source += ".Bd -literal\n$ one\nshown\n$ two\n.Ed\n.Sh SEE ALSO\n.Dl no\n"
    assert [[tuple(line) for line in block.lines] for block in examples(source)] == [
        [("a 'b\\c'", [])],
        [("x", []), (".y", [])],
        [("one", ["shown"]), ("two", [])],
    ]
    for wrong in ('.Dl a "b"', ".Bd -literal\nx", ".Bd -literal\n.Pp\n.Ed", ".Dl \\(aq", ".Bd -filled\nx\n.Ed"):
        with pytest.raises(AssertionError):
            examples(f".Sh EXAMPLES\n{wrong}\n")


def test_an_example_that_nothing_stands_for() -> None:
    (block,) = examples(".Sh EXAMPLES\n.Dl $ mq-cat --new mq/room\n")
    with pytest.raises(AssertionError, match="says what must come of this example: mq-cat --new mq/room"):
        treatment("mq-cat.1", block)
