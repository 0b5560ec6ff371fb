"""Rows as aligned text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mq_tools.errors import printable


def aligned(rows: Sequence[Sequence[str]], right_aligned: Collection[int]) -> list[str]:
    """Return one line of printable text a row; `right_aligned`: the indexes of the right-aligned columns."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right_aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
