"""A fresh copy of the project, as somebody who has just cloned it has it."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

from tests.server.process import ROOT

LEFT_OUT = (".git", ".venv", ".cache", ".hypothesis", "mq", "store", "mqfs.sock", "__pycache__", "*.egg-info", ".*_cache")


def clone(to: Path) -> Path:
    """A copy without anything that was built or installed."""
    shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    return to


def installed(clone: Path) -> Path:
    """What script/setup would make of it, but with this Python's packages: nothing is fetched."""
    bin_ = clone / ".venv" / "bin"
    bin_.mkdir(parents=True)
    for name, words in (("python", ""), ("mqfs", " -m mqfs"), ("mq-cat", " -m mq_cat"), ("pin", " -m pin")):
        shim = bin_ / name
        shim.write_text(f'#!/bin/sh\nPYTHONPATH="{clone}" exec "{sys.executable}"{words} "$@"\n')
        shim.chmod(0o755)
    stamp = hashlib.sha256((clone / "pyproject.toml").read_bytes()).hexdigest() + "  pyproject.toml\n"
    for what in ("run", "[test]"):
        (clone / ".venv" / f".installed-{what}").write_text(stamp)
    return clone
