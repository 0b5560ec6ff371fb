"""A recording of a terminal: lines are typed into a shell beside a server, and what is shown becomes an SVG.

usage: python -m tests.docs.record FILE.svg   (script/record)
"""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

from tests.support import ROOT
from tests.support.clone import commands
from tests.support.server import Server
from tests.support.shell import shell

SCRIPT = ROOT / "docs" / "terminal.txt"
COLUMNS, LINE_S = 80, 0.7
# As rich draws it, but with the reader's own monospace font: nothing is loaded from elsewhere.
FRAME = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px monospace; line-height: {line_height}px; }}
.{unique_id}-title {{ font: 18px sans-serif; }}
@keyframes shown {{ from {{ opacity: 0 }} to {{ opacity: 0 }} }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def session(folder: Path) -> list[tuple[str, bool]]:
    """Every line of the terminal, and whether it was typed."""
    with ExitStack() as stack:
        (folder / "mq").mkdir()
        words = ("--store", "store", "--listen", "unix!mqfs.sock", "--default", "replay all")  # as script/run
        stack.enter_context(Server(*words, cwd=folder, mount=folder / "mq"))
        typing = stack.enter_context(shell(folder, f"{commands(folder / '.bin')}:/usr/bin:/bin"))
        rows: list[tuple[str, bool]] = []
        for line in SCRIPT.read_text().splitlines():
            rows += [(line, True), *((shown, False) for shown in typing.type(line))]
            assert typing.code == 0, line
        return rows


def drawn(rows: list[tuple[str, bool]]) -> str:
    """The SVG. Its lines appear one after the other; where nothing moves all are there."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for text, is_typed in rows:
        console.print(Text.assemble(("$ ", "bold green"), (text, "bold")) if is_typed else Text(text))
    console.print()  # rich clips all lines but the last
    svg = console.export_svg(title="mqfs", code_format=FRAME, unique_id="mqfs")
    typed = [is_typed for _, is_typed in rows]
    delays = [LINE_S * sum(typed[: number + 1]) for number in range(len(rows) + 1)]
    return re.sub(
        r"<text (?=[^>]*#mqfs-line-(\d+)\))",
        lambda found: f'<text style="animation: shown {delays[int(found[1])]:.1f}s" ',
        svg,
    )


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        Path(sys.argv[1]).write_text(drawn(session(Path(folder))))
