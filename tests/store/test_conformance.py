"""Both stores do what the seam says, the disk one also with segments so small that everything spans several."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests.conformance.store import check_store
from tests.support.temp_store import lowered


def test_memory() -> None:
    check_store(MemoryStore)


def test_disk(tmp_path: Path) -> None:
    numbers = itertools.count()
    check_store(lambda: DiskStore(f"{tmp_path}/{next(numbers)}"))


@pytest.mark.slow
@pytest.mark.parametrize("descriptors", [4, 512])
def test_disk_in_small_segments(tmp_path: Path, descriptors: int) -> None:
    numbers = itertools.count()
    with lowered(SEGMENT_BYTES=8_192, INDEX_STRIDE_BYTES=1_024, SEGMENT_FIRST_BYTES=512, OPEN_BUCKETS=descriptors):
        check_store(lambda: DiskStore(f"{tmp_path}/{next(numbers)}"))
