"""A real process killed with -9 at random moments, again and again on one store."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.store.check import check
from mqfs.store.store import DiskStore
from tests.store.test_damage import read
from tests.support import ROOT
from tests.support.campaign import size, tree_seed
from tests.support.temp_store import abandon

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("mqfs.store").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("mqfs.store").setLevel(logging.NOTSET)


def killed(path: str, number: int, moment: int) -> list[bytes]:
    """The lines that a writer printed until it was killed behind that many bytes of output."""
    command = [sys.executable, "-m", "tests.store.writer", path, str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, cwd=ROOT) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        data = os.read(writer.stdout.fileno(), 1)
        while len(data) < moment:
            more = os.read(writer.stdout.fileno(), moment)
            assert more, "the writer ended by itself"
            data += more
        writer.send_signal(signal.SIGKILL)
        data += writer.stdout.read()
        assert writer.wait() == -signal.SIGKILL
    return data.split(b"\n")[:-1]


def test_killed_at_random_moments(tmp_path: Path) -> None:
    path, luck = f"{tmp_path}/store", random.Random(tree_seed())
    told: dict[tuple[int, int], bytes] = {}
    for number in range(size(200, least=5)):
        for line in killed(path, number, luck.choice([1, 100, 3_000, luck.randint(1, 20_000)])):
            group, sequence, body = line.split(b" ", 2)
            assert (int(group), int(sequence)) not in told, "a sequence was given twice"
            told[int(group), int(sequence)] = body
        if number % 5 == 0:
            lines: list[str] = []
            assert check(path, report=lines.append) == 0, lines[:9]
        _look(path, told)


def _look(path: str, told: dict[tuple[int, int], bytes]) -> None:
    store = DiskStore(path)
    for group in store.groups():
        bucket = store.open(group)
        records, damaged = read(bucket)
        assert not damaged
        found = {record.sequence: record.body for record in records}
        kept = max(found, default=0) - 400  # what the writer trimmed last may be gone
        for (where, sequence), body in told.items():
            if where == group and sequence >= kept:
                assert found[sequence] == body
        orders = [tuple(map(int, body.rstrip(b".").split(b".")[:2])) for body in found.values()]
        assert orders == sorted(set(orders))
        assert bucket.end.next > max([*found, *(s for g, s in told if g == group)])
    abandon(store)  # not a clean stop: the next writer finds what the last one left
