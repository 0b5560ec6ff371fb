"""Ctrl-C while a command is still being imported: it ends, and prints no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.tools import MODULES, environment

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
WAYS = {
    **{name: ["-c", "import sys; from {} import {} as run; sys.exit(run())".format(*entry.split(":"))]
       for name, entry in SCRIPTS.items()},
    **{f"-m {module}": ["-m", module] for module in ["mqfs", *MODULES.values()]},
}  # fmt: skip


def run(folder: Path, way: str, redirection: str = "") -> subprocess.CompletedProcess[str]:
    """A command that gets a SIGINT in the moment in which it imports click, which all do."""
    (folder / "click").mkdir()
    (folder / "click" / "__init__.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT); raise SystemExit(7)\n"
    )
    env = environment(PYTHONPATH=f"{folder}:{ROOT}")
    command = ["sh", "-c", f'{redirection} exec "$@"', "sh", sys.executable, *WAYS[way]]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_while_it_is_imported(tmp_path: Path, way: str) -> None:
    done = run(tmp_path, way)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("way", WAYS)
def test_an_ignored_sigint_stays_ignored(tmp_path: Path, way: str) -> None:
    """As of a command that a shell starts in the background."""
    done = run(tmp_path, way, "trap '' INT;")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
