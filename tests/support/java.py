"""Whether there is a Java, for Spark, and how it is started here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark.jsa"  # of Spark's classes, ready to be mapped: script/setup makes it
# For a Java that lives for seconds: what it would gain by compiling well or collecting in threads it never sees.
# What Java logs itself goes to standard output, as that an archive is of other classes.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
SHORT_LIVED = f"{QUICK} -XX:SharedArchiveFile={ARCHIVE}"


def java() -> str:
    """Why there is no Java, or ""."""
    program = shutil.which("java", path=f"{os.environ.get('JAVA_HOME', '')}/bin:{os.environ.get('PATH', '')}")
    if program is None:
        return "no java: apt install default-jre-headless"
    done = subprocess.run([program, "-version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "" if done.returncode == 0 else f"{program} does not run: {done.stderr}"
