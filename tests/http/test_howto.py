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


def worker() -> str:
    text = (ROOT / "docs" / "howto" / "curl.md").read_text()
    found = re.search(r'```sh title="worker.sh"\n(.*?)```', text, re.DOTALL)
    assert found
    assert found[1].count("\n") <= 7
    return found[1]


@pytest.mark.skipif(not shutil.which("jq"), reason="jq is missing")
def test_the_worker_of_the_guide(web: Web, tmp_path: Path) -> None:
    group = web.group("retries 2", "backoff 10ms 10ms")
    web.put(f"{group}/.consumers/mailer")
    jobs = ["one", "two words\n", "back\\slash $(no)", "fail"]
    for job in jobs:
        web.post(f"{group}/jobs", job)
    (tmp_path / "worker.sh").write_text(worker())
    done = tmp_path / "done"
    work = tmp_path / "work"
    work.write_text(f'#!/bin/sh\njob=$(cat; echo .)\n[ "$job" != fail. ] && printf \'%s|\' "$job" >>{done}\n')
    work.chmod(0o755)
    command = ["sh", "worker.sh", f"{web.url}{group}/.consumers/mailer", str(work)]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        eventually(lambda: web.get(f"{group}/.stats").json["consumers"]["mailer"]["dead"] == 1)
        assert done.read_text() == "".join(f"{job}.|" for job in jobs[:-1])
        assert web.get(f"{group}/.consumers/mailer").body == b""
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG_S)


def test_the_worker_of_the_examples(web: Web) -> None:
    group = f"{web.url}/curled"
    done = subprocess.run(
        [ROOT / "examples" / "curl-worker.sh", group], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["sent to alice", "sent to bob", "dead: nobody@"]
    assert web.get("/curled/.stats").json["consumers"]["mailer"]["failed"] == 3
