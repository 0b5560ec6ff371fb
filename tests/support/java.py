"""A check for Java, which Spark needs, and its options here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark.jsa"  # Spark's classes, made by script/setup
# For a JVM that lives for seconds: neither the optimizing compiler nor parallel garbage collection pays. The JVM's own
# log, with warnings about an archive that does not fit the class path, would go to standard output. The JVM looks up no
# host name: some machines cannot resolve their own.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -Djdk.net.hosts.file=/dev/null"
SHORT_LIVED = f"{QUICK} -XX:SharedArchiveFile={ARCHIVE}"


def java() -> str:
    """Return why Java is missing, or ""."""
    program = shutil.which("java", path=f"{os.environ.get('JAVA_HOME', '')}/bin:{os.environ.get('PATH', '')}")
    if program is None:
        return "no java: apt install default-jre-headless"
    done = subprocess.run([program, "-version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "" if done.returncode == 0 else f"{program} does not run: {done.stderr}"
