"""Where `seek -N` leads and what `.kept` holds, found in the index, is what a reader is given one by one."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mqfs import limits
from mqfs.errors import MqfsError
from mqfs.model import Kind, Wait
from tests.support.queues import Queues

PUTS = ["", ',"single":true', ',"ttl":"3s"', ',"priority":9']


class Campaign:
    """Messages of all sorts come and go at random."""

    def __init__(self, seed: int, path: Path | None, replay: str) -> None:
        self.random = random.Random(seed)
        self.queues = Queues(f"replay {replay}", "ttl 40s" if seed % 3 == 0 else "ttl 0", path=path)
        self.queues.stream("t")
        self.queues.consumer("w", *(["s"] if seed % 2 else []))
        self.worker = self.queues.at(".consumers/w", os.O_RDWR)

    def run(self) -> None:
        steps = [self.write, self.write, self.write, self.put, self.eof, self.drop, self.take, self.take, self.later]
        for _ in range(150):
            try:
                self.random.choice(steps)()
            except MqfsError:
                continue  # gone already
        for lines in ("", "select s\n", "select #\n", "select s t\n"):
            self.look_back(lines)
        self.look_at_kept()

    def write(self) -> None:
        self.queues.write(self.random.choice("st"), b"%d" % self.random.randrange(9_999))

    def put(self) -> None:
        text = json.dumps({"stream": self.random.choice("st")})[:-1] + self.random.choice(PUTS) + "} put"
        self.queues.write(".put", text.encode())

    def eof(self) -> None:
        self.queues.ctl(f"eof {self.random.choice('st')}")

    def drop(self) -> None:
        newest = self.queues.group.log.end.next
        self.queues.ctl(f"drop {self.random.choice('st')} {self.random.randrange(1, newest)}")

    def take(self) -> None:
        """Acknowledged in any order, so that what is had lies in runs."""
        if self.worker.waits:
            return
        step = self.worker.read(100)
        if not isinstance(step, Wait) and self.random.random() < 0.6:
            self.worker.write(b"ack %d\n" % self.random.choice(list(self.worker.claims)))

    def later(self) -> None:
        self.queues.clock.forward(self.random.choice([1, 4]))
        self.queues.tree.tick()

    def all_of(self, lines: str) -> list[dict[str, Any]]:
        cursor = self.queues.cursor(*lines.splitlines(), "seek first", "until end", "format json")
        rows = []
        while data := cursor.read(10_000):
            rows.append(json.loads(data))
        cursor.close()
        return rows

    def look_back(self, lines: str) -> None:
        sequences = [row["sequence"] for row in self.all_of(lines)]
        for count in {1, 2, 7, len(sequences) - 1, len(sequences), len(sequences) + 5} - {0, -1}:
            if sequences:
                cursor = self.queues.cursor(*lines.splitlines(), f"seek -{count}", "format json")
                assert json.loads(cursor.read(10_000))["sequence"] == sequences[-count:][0]
                cursor.close()

    def look_at_kept(self) -> None:
        """A reader of the stream would be there, and change what is kept for whom: it is looked at one by one."""
        group, position, bodies = self.queues.group, 0, []
        handle = self.queues.at(".kept/s")
        stream = group.streams["s"]
        while (record := group.log.reader.find(stream.number, position)) is not None:
            position = record.sequence + 1
            if record.kind == Kind.MESSAGE and stream.kept.visible(record) and not group.ranks.is_hidden(record):
                bodies.append(record.body)
        assert handle.read(1 << 20, 0) == b"".join(bodies)
        handle.close()


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("replay", ["all", "off"])
@pytest.mark.parametrize("seed", range(6))
def test_the_index_tells_what_a_reader_is_given(
    seed: int, replay: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 4_096)
    monkeypatch.setattr(limits, "SEGMENT_FIRST_BYTES", 1_024)
    monkeypatch.setattr(limits, "KEPT_COPY_MESSAGES", 1_024 if seed % 2 else 2)
    Campaign(seed, tmp_path / "store" if place == "disk" else None, replay).run()
