"""What script/package builds: a wheel that needs no compiler, a source archive with all there is, a Debian package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from mqfs.http.groups import KINDS
from tests.docs.pages import PAGES
from tests.support import ROOT
from tests.support.clone import clone
from tests.support.eventually import HANG_S
from tests.support.server import environment

SITE = Path(sysconfig.get_path("purelib"))
BIN = Path(sys.executable).parent
EPOCH = "1700000000"


def package(kind: str, source: Path, to: Path) -> Path:
    """Build one; its file."""
    done = subprocess.run(
        [source / "script" / "package", kind, to],
        env=environment(
            MQFS_VENV=sys.prefix, SOURCE_DATE_EPOCH=EPOCH,
            DPKG_DEB_COMPRESSOR_TYPE="gzip", DPKG_DEB_COMPRESSOR_LEVEL="1",
        ),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("source") / "mqfs")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_brings_the_manual_and_the_page(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        assert {f"mqfs/http/web/{name}" for name in KINDS} <= set(archive.namelist())
        installed = {name.partition(".data/data/")[2]: archive.read(name) for name in archive.namelist()}
    for page in PAGES:
        assert installed[f"share/man/man{page.suffix[1:]}/{page.name}"] == page.read_bytes()
    assert installed["share/doc/mqfs/format.md"] == (ROOT / "docs" / "reference" / "format.md").read_bytes()


def test_the_wheel_is_for_this_python_and_all_later_ones(wheel: Path) -> None:
    """As its name says, by the names that its parts in C use; and an index would accept its text."""
    assert "-cp311-abi3-linux_" in wheel.name
    for command in (["abi3audit", "--strict", "--verbose"], ["twine", "check", "--strict"]):
        done = subprocess.run([BIN / command[0], *command[1:], wheel], capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_is_the_same_wherever_it_is_built(wheel: Path, tmp_path: Path) -> None:
    again = package("wheel", clone(tmp_path / "elsewhere" / "a" / "mqfs"), tmp_path / "to")
    assert again.read_bytes() == wheel.read_bytes()


def test_the_source_archive_has_all_there_is(source: Path, tmp_path: Path) -> None:
    """Documents, tests, headers; and what it builds is that wheel (see above)."""
    archive = package("sdist", source, tmp_path)
    with tarfile.open(archive) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames() if not tar.getmember(name).isdir()}
        assert {member.mtime for member in tar.getmembers()} == {int(EPOCH)}
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and path.suffix != ".so"}
    assert files - inside == set()
    assert {"PKG-INFO", "setup.cfg"} <= inside
    assert package("sdist", source, tmp_path / "again").read_bytes() == archive.read_bytes()


# ---------------------------------------------------------------- installed without a compiler and without pyfuse3


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel, and of our packages all but pyfuse3. No compiler is in PATH."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next((folder / "lib").glob("python3*/site-packages"))
    for path in SITE.iterdir():
        if not path.name.lower().startswith(("pyfuse3", "mqfs", "__editable__", "__pycache__")):
            (packages / path.name).symlink_to(path)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"]
    (folder / "empty").mkdir()
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], env={"PATH": str(folder / "empty")}, check=True
    )
    yield folder
    shutil.rmtree(folder)


def test_an_installation_without_a_compiler(venv: Path, tmp_path: Path) -> None:
    """Its parts in C are there; a mount says in one line what it lacks, whoever asks for it."""
    (tmp_path / "mq").mkdir()

    def said(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [venv / "bin" / words[0], *words[1:]], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True,
            text=True, timeout=HANG_S,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    assert {"ok   records in C: built", "ok   rings in C: built"} <= set(said("mqfs", "doctor")[1].splitlines())
    assert "warn pyfuse3: not installed" in said("mqfs", "doctor")[1]
    lack = "cannot mount: No module named 'pyfuse3' (expected gcc, pkg-config, python3-dev and libfuse3-dev installed,"
    for name, code, words in (
        ("mqfs", 1, ["serve", "--mount", "mq"]),
        ("mqfs", 1, ["mount", "unix!s", "mq"]),
        ("mount.mqfs", 32, ["store", "mq"]),
    ):
        found = said(name, *words)
        assert (found[0], found[1].count("\n")) == (code, 1), found
        assert found[1].startswith(f"{name}: {lack}")
    assert not (tmp_path / "store").exists()


def test_the_rest_works_without_pyfuse3(venv: Path) -> None:
    """A part of the tests of the library, 9P and HTTP, by that Python, with the sources of here."""
    tests = ["tests/client/test_publishing.py", "tests/ninep/test_server.py", "tests/http/test_routes.py"]
    done = subprocess.run(
        [venv / "bin" / "python", "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests],
        cwd=ROOT, env=environment(PATH=os.environ["PATH"]), capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5_000:]
    assert " passed" in done.stdout
