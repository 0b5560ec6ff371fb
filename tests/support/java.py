"""Whether there is a Java, for Spark."""

from __future__ import annotations

import os
import shutil
import subprocess


def java() -> str:
    """Why there is no Java, or ""."""
    program = shutil.which("java", path=f"{os.environ.get('JAVA_HOME', '')}/bin:{os.environ.get('PATH', '')}")
    if program is None:
        return "no java: apt install default-jre-headless"
    done = subprocess.run([program, "-version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "" if done.returncode == 0 else f"{program} does not run: {done.stderr}"
