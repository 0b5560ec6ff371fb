"""A store that an earlier version wrote opens, with every message."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

from mqfs.records.record import SETTLED, padded, row_at
from mqfs.store.check import check
from tests.store.format_1 import ARCHIVE, contents, reopened, write


def extracted(folder: Path) -> tuple[Path, object]:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder)
    (folder / "store").chmod(0o700)
    return folder / "store", json.loads((folder / "contents.json").read_text())


def test_a_store_of_format_1_opens_with_every_message(tmp_path: Path) -> None:
    path, inside = extracted(tmp_path)
    assert check(str(path)) == 0
    units = reopened(path)
    assert contents(units) == inside
    before = len(units.kept("s"))
    units.at("s", os.O_WRONLY).write(b"later")
    units.close()
    units = reopened(path)
    assert [row["body"] for row in units.kept("s")][before:] == ["later"]
    units.close()
    assert check(str(path)) == 0


def test_the_same_writes_make_the_same_files(tmp_path: Path) -> None:
    """Record for record: what is written today an earlier version reads."""
    path, inside = extracted(tmp_path)
    assert write(tmp_path / "today") == inside
    files = sorted(file.relative_to(path) for file in (path / "buckets").rglob("*") if file.is_file())
    assert len(files) > 8
    logs = [file for file in files if file.suffix == ".log"]
    differing = [str(file) for file in logs if _records(path / file) != _records(tmp_path / "today" / file)]
    assert differing == []


def _records(log: Path) -> list[object]:
    """Without the mark that all before was on disk, which a clean stop did not write."""
    data, rows = log.read_bytes(), list[object]()
    at = 0
    while (row := row_at(data, at)) is not None:
        rows.append((row._replace(flags=row.flags & ~SETTLED), data[at + 32 : at + row.size]))
        at += padded(row.size)
    assert at == len(data)
    return rows
