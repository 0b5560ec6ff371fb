"""A small store of format 1: data/format-1.tar.xz, with its contents as JSON.

It was written by the code of 22 November 2026. `python -m tests.store.format_1` replaces it.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mqfs.engine.tree.tree import Tree
from mqfs.model import Wait
from mqfs.store.store import DiskStore
from tests.support.batches import Units, frame
from tests.support.clock import ManualClock
from tests.support.hand import ROOT
from tests.support.queues import read, say
from tests.support.temp_store import lowered

ARCHIVE = Path(__file__).with_name("data") / "format-1.tar.xz"
LATER = ("sender ", "words ")  # settings that it has no word for
LIMITS = {"SEGMENT_BYTES": 8_192, "SEGMENT_FIRST_BYTES": 1_024, "INDEX_STRIDE_BYTES": 2_048}


def write(path: Path) -> dict[str, Any]:
    """Segments with and without an index, messages with headers, EOF markers, batches, a consumer in the middle of its
    work, a compacted range; stopped cleanly. Returns the contents."""
    with lowered(**LIMITS):
        units = Units("retries 2", path=path)
        units.consumer()
        writer = units.at("s", os.O_WRONLY)
        for number in range(200):
            writer.write(b"message %d " % number * (1 + number % 17))
            if number % 20 == 0:
                units.batch(frame("s", b"one"), frame("t", b"two", color="red"), frame("t", b"three"))
            if number % 50 == 0:
                assert not isinstance(writer.write(b""), Wait)
        units.put(b"first", "t", priority=5)
        worker = units.worker()
        for _ in range(10):
            read(worker)
            say(worker, "ack")
        read(worker)
        say(worker, "nack")
        units.stage("p", "t", b"staged")
        units.say("commit app.7 p\n")
        units.close()
        units = reopened(path)
        inside = contents(units)
        units.close()
    return inside


def contents(units: Units) -> dict[str, Any]:
    """What a user sees, but for times."""
    rows = [row for name in sorted(units.group.streams) for row in units.kept(name)]
    messages = [[row["stream"], row["sequence"], row["body"], row.get("headers", {})] for row in rows]
    consumer = json.loads(units.text(".stats"))["consumers"]["w"]
    return {
        "messages": messages,
        "consumer": {key: value for key, value in consumer.items() if isinstance(value, int)},
        "ctl": "".join(line for line in units.text("ctl").splitlines(True) if not line.startswith(LATER)),
        "committed": units.committed(),
        "next": json.loads(units.text(".stats"))["next"],
    }


def reopened(path: Path) -> Units:
    """A new server over a store that `write` made."""
    units = object.__new__(Units)
    units.path, units.clock = path, ManualClock()
    units.store = DiskStore(str(path))
    units.tree = Tree(units.store, units.clock, owner=ROOT)
    units.group = units.tree.root.groups["g"]
    return units


def archive() -> None:
    with TemporaryDirectory() as folder:
        inside = write(Path(folder) / "store")
        ARCHIVE.parent.mkdir(exist_ok=True)
        with tarfile.open(ARCHIVE, "w:xz") as made:
            made.add(f"{folder}/store", "store", filter=_anonymous)
            entry = tarfile.TarInfo("contents.json")
            data = json.dumps(inside).encode()
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    archive()
