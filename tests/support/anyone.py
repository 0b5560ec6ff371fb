"""A Python with our packages that any user may run: others may have no access to the checkout and its environment."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import ROOT

OURS = ("mqfs", "mq_cat", "mq_tools", "tests")
NEEDED = (
    "attr", "attrs", "click", "google_crc32c", "httptools", "idna", "outcome", "pyfuse3", "sniffio",
    "sortedcontainers", "trio",
)  # fmt: skip
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def plain_environment(packages: str) -> dict[str, str]:
    """Return the environment of that Python: of ours only the variables that sanitizers need."""
    kept = {name: os.environ[name] for name in ("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS") if name in os.environ}
    return {"PYTHONPATH": packages, **kept}


@functools.cache
def python_for_anyone() -> tuple[str, str]:
    """Return the interpreter and its PYTHONPATH. Skips the test if other users may not run the interpreter."""
    folder = tempfile.mkdtemp(prefix="mqfs-anyone-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chmod(folder, 0o755)
    for name in OURS:
        shutil.copytree(ROOT / name, f"{folder}/{name}", ignore=shutil.ignore_patterns("__pycache__"))
    for name in NEEDED:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent
        for part in (source, source.with_name(f"{name}.libs")):
            if part.exists():
                shutil.copytree(part, f"{folder}/{part.name}", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    python = os.path.realpath(sys.executable)
    try:
        trial = subprocess.run([*NOBODY, python, "-c", "import os"], cwd="/", capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"setpriv (util-linux) is missing: {error}")
    if trial.returncode:
        pytest.skip(f"{python} may not be run by the user nobody: make the virtual environment with /usr/bin/python3")
    return python, folder
