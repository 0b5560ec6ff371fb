"""Workers with curl: that of the guide, in six lines of shell, and that of the examples."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.http.web import Web
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually

needs_jq = pytest.mark.skipif(not shutil.which("jq"), reason="jq is missing")
ODD = [
    b"\xff\xfe",
    b"\0a\x80\n",
    b'say "hi"\\t\t\x1f',
    "\u20ac".encode(),
    b"\r\n",
    b"",
    b"null",
    bytes(range(256)) * 400,
]


def worker() -> str:
    text = (ROOT / "docs" / "howto" / "curl.md").read_text()
    found = re.search(r'```sh title="worker.sh"\n(.*?)```', text, re.DOTALL)
    assert found
    assert found[1].count("\n") <= 7
    return found[1]


@needs_jq
def test_the_worker_of_the_guide(web: Web, tmp_path: Path) -> None:
    group = web.group("retries 2", "backoff 10ms 10ms")
    web.put(f"{group}/.consumers/mailer")
    jobs = [b"one", b"two words\n", b"back\\slash $(no)", *ODD, b"fail"]
    for job in jobs:
        web.post(f"{group}/jobs", job)
    (tmp_path / "worker.sh").write_text(worker())
    done = tmp_path / "done"
    work = tmp_path / "work"
    work.write_text(f"#!/bin/sh\ncat >job\n! grep -qx fail job && (cat job; printf '|') >>{done}\n")
    work.chmod(0o755)
    command = ["sh", "worker.sh", f"{web.url}{group}/.consumers/mailer", str(work)]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        eventually(lambda: web.get(f"{group}/.stats").json["consumers"]["mailer"]["dead"] == 1)
        assert done.read_bytes() == b"".join(job + b"|" for job in jobs[:-1])
        assert web.get(f"{group}/.consumers/mailer").body == b""
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG_S)


@needs_jq
@pytest.mark.parametrize("bodies", [[], [body for body in ODD if b"\0" not in body and body.strip()]])
def test_the_worker_of_the_examples(web: Web, bodies: list[bytes]) -> None:
    """A shell has a body in a variable: without NUL, and without line ends behind it."""
    group = f"/curled-{len(bodies)}"
    assert web.put(f"{group}/").status == 201
    assert web.put(f"{group}/.consumers/mailer?over=mail").status == 201
    for body in bodies:
        web.post(f"{group}/mail", body)
    command = [ROOT / "examples" / "curl-worker.sh", web.url + group]
    done = subprocess.run(command, capture_output=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    sent = b"".join(b"sent to %b\n" % body for body in (*bodies, b"alice", b"bob"))
    assert done.stdout == sent + b"dead: nobody@\n"
    assert web.get(f"{group}/.stats").json["consumers"]["mailer"]["failed"] == 3
