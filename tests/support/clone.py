"""A fresh copy of the project, like a new clone of a user."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support import ROOT

EVERYWHERE = shutil.ignore_patterns("__pycache__", ".*_cache")
AT_THE_TOP = {".git", ".venv", ".cache", ".hypothesis", "mq", "store", "mqfs.sock", "mqfs.egg-info", "build", "dist"}


def clone(to: Path) -> Path:
    """Copy the project without built and installed files."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        return EVERYWHERE(folder, names) | (AT_THE_TOP & set(names) if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, to, ignore=left_out, symlinks=True)
    return to


def commands(folder: Path, project: Path = ROOT) -> Path:
    """Write the commands of the project into a folder, as an installation does."""
    folder.mkdir(parents=True)
    scripts = tomllib.loads((project / "pyproject.toml").read_text())["project"]["scripts"]
    for name, entry in scripts.items():
        module, function = entry.split(":")
        run = f"import sys; sys.argv[0] = {name!r}; from {module} import {function}; sys.exit({function}())"
        _write(folder / name, project, "-c", run)
    return folder


def _write(path: Path, project: Path, *words: str) -> None:
    """Write a program that runs Python with the project's modules."""
    run = shlex.join([sys.executable, *words])
    path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(project))} exec {run} "$@"\n')
    path.chmod(0o755)


def installed(clone: Path) -> Path:
    """Make a clone look as after script/setup, but with the packages of this Python: nothing is fetched."""
    commands(clone / ".venv" / "bin", clone)
    _write(clone / ".venv" / "bin" / "python", clone)
    setup = (clone / "script" / "setup").read_text()
    # The stamp keeps script/setup from an installation into our own environment.
    wanted = re.findall(r"wanted=\$\((sha256sum pyproject[^)]*)\)", setup)[0]
    stamp = subprocess.run(["bash", "-c", wanted], cwd=clone, stdout=subprocess.PIPE, check=True).stdout
    for what in ("[fuse]", "[test]"):
        (clone / ".venv" / f".installed-{what}").write_bytes(stamp)
    return clone
