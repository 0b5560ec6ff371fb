"""The part in C: no warnings, no findings of the sanitizers, and what is left where it was not built."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ring.memory import build
from tests.support import ROOT
from tests.support.campaign import seed, size
from tests.support.eventually import HANG_S


@pytest.mark.process
@pytest.mark.slow
def test_compiles_without_a_warning(tmp_path: Path) -> None:
    include = build.sysconfig.get_paths()["include"]
    for folder in build.NATIVE:
        made, sources = tmp_path / f"{folder.name}.so", build.sources(folder)
        build.compiler(*build.STRICT, build.LIMITED, "-fPIC", "-shared", f"-I{include}", *sources, "-o", made)
    build.driver(tmp_path / "driver", *build.STRICT)


@pytest.mark.process
@pytest.mark.parametrize("folder", build.NATIVE, ids=lambda folder: folder.name)
def test_exports_nothing_but_its_entry(folder: Path, tmp_path: Path) -> None:
    """A name of ours that another library has, too, would be taken from there."""
    shutil.copytree(build.MQFS / "records", tmp_path / "records", ignore=shutil.ignore_patterns("*.so"))
    shutil.copytree(build.MQFS / "ring", tmp_path / "ring", ignore=shutil.ignore_patterns("*.so"))
    made = build.module(tmp_path / folder.name)
    shown = subprocess.run(["nm", "-D", "--defined-only", made], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in shown.splitlines()] == ["PyInit__native"]


def run(driver: Path, *arguments: object) -> None:
    done = subprocess.run(
        [driver, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.process
@pytest.mark.slow
def test_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    driver = build.driver(tmp_path / "driver", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    run(driver, "threads", size(200_000))
    run(driver, "seats", size(200_000))
    run(driver, "noise", size(20_000), seed())


@pytest.mark.process
def test_thread_sanitizer(tmp_path: Path) -> None:
    """Reads of gating consumers have no race; one that may be overtaken reads unfinished writes, and looks again."""
    driver = build.driver(tmp_path / "driver", "-O1", "-fsanitize=thread", "-Wno-tsan")
    run(driver, "threads", size(100_000))
    run(driver, "seats", size(100_000))


@pytest.mark.process
def test_threads_take_and_free_seats_of_one_handle(tmp_path: Path) -> None:
    run(build.driver(tmp_path / "driver", "-O2"), "seats", 200_000)


@pytest.mark.process
def test_without_a_compiler_the_rest_is_installed_and_the_ring_says_what_is_missing(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("mqfs", "mq_cat", "mq_tools", "pyspark_mqfs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "build", "--build-lib", "built"],
        cwd=tmp_path,
        env={**os.environ, "CC": "/nonexistent/cc", "SETUPTOOLS_SCM_PRETEND_VERSION": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "built").rglob("*.so"))
    assert (tmp_path / "built" / "mqfs" / "ring" / "__init__.py").exists()
    program = """if True:
        import mqfs.ring, mqfs.server.app
        from mqfs.records import batch
        print(mqfs.ring.MISSING != '', batch.MISSING != '', len(batch.concatenate([('s', b'', b'x')], {}).data))
        from mqfs.ring import create
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "built")},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True True 40\n", done.stderr
    assert "Unsupported" in done.stderr
    assert "apt install gcc libc6-dev python3-dev" in done.stderr


@pytest.mark.parametrize("folder", build.NATIVE, ids=lambda folder: folder.name)
def test_what_is_imported_was_built_from_this_source(folder: Path) -> None:
    """Else `pip install -e .` is to be run again, as script/setup does."""
    records = build.MQFS / "records"
    sources = sorted({*folder.glob("*.[ch]"), *records.glob("*.h"), records / "crc32c.c"})
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    assert found == importlib.import_module(f"mqfs.{folder.name}._native").SOURCE
