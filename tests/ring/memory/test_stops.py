"""Every point at which a process may be killed or stopped, one by one; and mutants of the ring that they catch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ring.memory import build, stops
from tests.support import ROOT
from tests.support.eventually import HANG_S

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("name", "check", "arguments"), stops.checks())
def test_stop(name: str, check: Any, arguments: tuple[int, ...]) -> None:
    check(*arguments)


# What random kills may well never find: (the text, what stands there instead, the checks that find it).
MUTANTS = {
    "what was reserved by the dead is published": (
        "atomic_fetch_add(&s->recovered, 1);",
        "atomic_fetch_add(&s->recovered, 1); s->state[0].tail = atomic_load(&s->reserved); "
        "atomic_store(&s->tail, s->state[0].tail);",
        "killed",
    ),
    "the newer state counts, published or not": (
        "return tail & 7 ? NULL :",
        "if (tail) return &s->state[s->state[1].tail + 1 > s->state[0].tail + 1];\n    return tail & 7 ? NULL :",
        "killed",
    ),
    "the tail goes first": (
        "    RING_STOP(STOP_RESERVED);\n",
        "    RING_STOP(STOP_RESERVED);\n    atomic_store_explicit(&s->tail, next.tail, memory_order_release);\n",
        "killed",
    ),
    "the kernel is not told of the lock": (
        "ring_self.robust->list_op_pending = "
        "(struct robust_list *)((char *)&s->lock - ring_self.robust->futex_offset);",
        ";",
        "killed",
    ),
    "readers trust the tail": (
        "atomic_store_explicit(&s->reserved, next.tail, memory_order_relaxed);",
        "atomic_store_explicit(&s->reserved, now->tail, memory_order_relaxed);",
        "overwritten",
    ),
    "the dead gate": (
        "if (state != SLOT_FREE && state != SLOT_KEPT && !ring_slot_alive(h, i))",
        "if (!state && !ring_slot_alive(h, i))",
        "consumer",
    ),
    "who does not move is dead": (
        "if (state != SLOT_FREE && state != SLOT_KEPT && !ring_slot_alive(h, i))",
        "if (state != SLOT_FREE && state != SLOT_KEPT)",
        "consumer",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str, tmp_path: Path) -> None:
    text, instead, only = MUTANTS[mutant]
    shutil.copytree(ROOT / "mqfs", tmp_path / "mqfs", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (source,) = (path for path in (tmp_path / "mqfs" / "ring").glob("*.[ch]") if text in path.read_text())
    assert source.read_text().count(text) == 1
    source.write_text(source.read_text().replace(text, instead))
    build.module(tmp_path / "mqfs" / "ring")
    for folder in ("ring", "support"):
        shutil.copytree(
            ROOT / "tests" / folder, tmp_path / "tests" / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (tmp_path / "tests" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "tests.ring.memory.stops", only],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert "caught" in done.stdout, done.stderr
