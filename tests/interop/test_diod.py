"""Debian's diod tools, which speak 9P2000.L and ask for authentication first, over TCP and a unix socket."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqfs.net import identity
from tests.support.eventually import HANG_S
from tests.support.ninep import META, Running, make_tree, running

if shutil.which("diodls") is None:
    pytest.skip("diod's tools are not installed", allow_module_level=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(make_tree(), tmp_path, tcp=True, tcp_user=identity.user_name(os.getuid())) as started:
        with started.connect() as client:
            client.mkdir("a")
            with client.open("a/ctl", "w") as ctl:
                ctl.write(b"replay all\n")
            with client.create("a/s") as stream:
                stream.write(b"hi\n")
        yield started


@pytest.fixture(params=["tcp", "unix"])
def where(request: pytest.FixtureRequest, server: Running) -> str:
    return f"127.0.0.1:{server.port}" if request.param == "tcp" else server.address.removeprefix("unix!")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_diodls(where: str) -> None:
    listed = run("diodls", "-s", where, "-a", "/", "a").split()
    assert listed == [*META, "s"]


def test_diodls_long(where: str) -> None:
    lines = run("diodls", "-s", where, "-a", "/a", "-l").splitlines()
    named = {line.split()[-1]: line.split()[0] for line in lines}
    assert named["s"].startswith("-rw-")
    assert named["."].startswith("drwx")
    assert named["order"].startswith("-r--r--r--")


def test_diodcat(where: str) -> None:
    assert run("diodcat", "-s", where, "-a", "/", "a/s") == "hi\n"
    assert run("diodcat", "-s", where, "-a", "/a", "ctl").splitlines()[1] == "replay all"


def test_missing_file(where: str) -> None:
    done = subprocess.run(
        ["diodcat", "-s", where, "-a", "/", "a/none"], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode != 0
    assert "No such file" in done.stderr


def test_missing_tree(where: str) -> None:
    done = subprocess.run(["diodls", "-s", where, "-a", "/none"], capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode != 0
