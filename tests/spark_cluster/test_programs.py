"""Whole runs on a cluster: commands, and programs that bring along what the workers do not have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark import packages
from tests.spark_cluster.cluster import PASSING, TOKEN, Cluster, Driver
from tests.support import ROOT
from tests.support.eventually import HANG_S

# Files of Arrow and numpy. Byte code goes along: three machines would compile the modules that they import.
UNUSED = re.compile(r"/tests?/|/include/|\.(pyx|pxi|pxd|a)$|flight|libarrow_s3|/libarrow\w*\.so(\.\d+\.\d+\.\d+)?$")


@pytest.fixture(scope="module")
def source(cluster: Cluster) -> str:
    cluster.group("programs")
    cluster.fill("programs/in", [b"%d" % n for n in range(5_000)])
    return "programs/in"


def settings(cluster: Cluster) -> Iterator[str]:
    """Room beside the session that lasts."""
    for name, value in (
        ("driver.host", cluster.driver.address), ("driver.bindAddress", cluster.driver.address),
        ("driver.memory", "512m"), ("executor.memory", PASSING), ("executor.cores", 1), ("cores.max", 1),
        ("ui.enabled", "false"), ("sql.shuffle.partitions", 2),
    ):  # fmt: skip
        yield from ("--conf", f"spark.{name}={value}")


def run(cluster: Cluster, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        cluster.driver.inside(*words), cwd=cwd or cluster.folder, env=cluster.environment(cluster.driver, **env),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-20_000:]
    return done


def test_archive_and_verify(cluster: Cluster, driver: Driver, source: str, tmp_path: Path) -> None:
    """Archived by the session that lasts, by both workers; verified by the command, which has a session of its own."""
    secret, archive = cluster.hidden / "secret", str(tmp_path / "archive")
    secret.write_text(TOKEN)
    assert driver.do("archive", address=cluster.address, token=TOKEN, stream=source, path=archive) == 5_000
    done = run(
        cluster, sys.executable, "-m", "mqfs", "spark", "verify", "--master", cluster.master, "--at", cluster.address,
        "--token-file", str(secret), "--json", *settings(cluster), "--archive", archive, source,
        PYTHONPATH=str(ROOT), PYSPARK_PYTHON=str(cluster.python), PYSPARK_DRIVER_PYTHON=str(cluster.python),
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["sound"], found["messages"], found["same"]) == (True, 5_000, 5_000)


def submit(cluster: Cluster, cwd: Path, source: str, to: str, how: str, *words: str, **env: str) -> Any:
    """What the job says; and its rows are there."""
    program = str(cluster.home / "bin" / "spark-submit")
    job = str(Path(__file__).with_name("job.py"))
    done = run(cluster, program, "--master", cluster.master, *settings(cluster), *words, job, cluster.address, TOKEN,
               source, to, how, cwd=cwd, **env)  # fmt: skip
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    assert cluster.bodies(to) == [b"%d" % n for n in range(5_000)] * 2
    return found


def test_a_zip_that_goes_along(cluster: Cluster, source: str, tmp_path: Path) -> None:
    """`--py-files`: the package is not installed, what it needs is. PYTHONPATH is for the driver's own processes."""
    bare, package = str(packages.python(tmp_path / "bare")), str(packages.zipped(tmp_path))
    found = submit(cluster, tmp_path, source, f"programs/{tmp_path.name}", "found", "--py-files", package,
                   PYSPARK_PYTHON=bare, PYTHONPATH=package)  # fmt: skip
    assert {executable for executable, _, _ in found["executors"]} == {bare}
    assert all("mqfs.zip/pyspark_mqfs/" in file for _, _, file in found["executors"])
    assert not any(package in file for _, _, file in found["executors"])


def test_an_environment_that_goes_along(cluster: Cluster, source: str, tmp_path: Path) -> None:
    """`--archives`: nothing is installed. It is unpacked where the driver is started, too."""
    packages.python(tmp_path / "env", ours=True)
    # Other archives than .tar.gz lose the permissions of files in Spark. To compress it takes longer than to move it.
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz", dereference=True, compresslevel=0) as tar:
        tar.add(tmp_path / "env", ".", filter=lambda file: None if UNUSED.search(file.name) else file)
    found = submit(cluster, tmp_path, source, f"programs/{tmp_path.name}", "found", "--archives", "env.tar.gz#env",
                   PYSPARK_PYTHON="./env/bin/python")  # fmt: skip
    prefixes = {prefix for _, prefix, _ in found["executors"]}
    assert {Path(prefix).name for prefix in prefixes} == {"env"}
    assert all(str(cluster.folder / "work-") in prefix for prefix in prefixes)
    assert all(f"{prefix}/lib/" in file for _, prefix, file in found["executors"])
