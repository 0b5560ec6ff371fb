"""A fresh copy of the project, as a user who has just cloned it has it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support import ROOT

EVERYWHERE = shutil.ignore_patterns("__pycache__", ".*_cache")
AT_THE_TOP = {".git", ".venv", ".cache", ".hypothesis", "mq", "store", "mqfs.sock", "mqfs.egg-info", "build", "dist"}


def clone(to: Path) -> Path:
    """A copy without anything that was built or installed."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        return EVERYWHERE(folder, names) | (AT_THE_TOP & set(names) if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, to, ignore=left_out, symlinks=True)
    return to


def installed(clone: Path) -> Path:
    """What script/setup would make of it, but with this Python's packages: nothing is fetched."""
    bin_ = clone / ".venv" / "bin"
    bin_.mkdir(parents=True)
    scripts = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["scripts"]
    words = {"python": ""}
    for name, (module, _, main) in ((name, at.partition(":")) for name, at in scripts.items()):
        words[name] = f"-c \"import sys; sys.argv[0] = '{name}'; from {module} import {main}; sys.exit({main}())\""
    for name in words:
        shim = bin_ / name
        shim.write_text(f'#!/bin/sh\nPYTHONPATH="{clone}" exec "{sys.executable}" {words[name]} "$@"\n')
        shim.chmod(0o755)
    setup = (clone / "script" / "setup").read_text()
    # Else it would install into our own environment.
    wanted = re.findall(r"wanted=\$\((sha256sum pyproject[^)]*)\)", setup)[0]
    stamp = subprocess.run(["bash", "-c", wanted], cwd=clone, stdout=subprocess.PIPE, check=True).stdout
    for what in ("[fuse]", "[test]"):
        (clone / ".venv" / f".installed-{what}").write_bytes(stamp)
    return clone
