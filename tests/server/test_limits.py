"""`--limit` of a real server: over 9P, from the command line and from a file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from mqfs.errors import Again, MqfsError
from mqfs.ninep import blocking
from mqfs.ninep.codec.dialect import Dialect
from tests.support.server import Server, can_mount
from tests.support.server import mqfs as run

pytestmark = pytest.mark.process
ME = str(os.geteuid())


def test_a_rate_and_a_bound_over_9p(tmp_path: Path) -> None:
    (tmp_path / "mqfs.toml").write_text(f'limit = ["{ME} messages=5 parked=1", "* handles=9"]\n')
    with (
        Server.at(tmp_path, "--config", "mqfs.toml") as server,
        blocking.connect(server.address, dialect=Dialect.LINUX) as client,
    ):
        client.create("s").close()
        writer = client.open("s", "w", nonblocking=True)
        refused = 0
        for _ in range(1000):
            try:
                writer.write(b"x")
            except Again:
                refused += 1
        assert refused > 0
        assert client.open("s", "w").write(b"waits for its turn") == 18
        with blocking.connect(server.address) as other, pytest.raises(TimeoutError):
            other.open("s").receive(timeout=0.01)
        row = json.loads(client.open(".stats").receive())["quotas"][ME]
        assert row["bounds"] == {"messages": 5, "parked": 1}
        assert row["delayed"] >= refused


@pytest.mark.fuse
@pytest.mark.skipif(not can_mount(), reason="no /dev/fuse")
def test_a_mount_answers_edquot(tmp_path: Path) -> None:
    with Server.at(tmp_path, "--limit", f"{ME} kept=100", mount=True) as server:
        group = server.group("g", "replay all", streams=["s"])
        (group / "s").write_bytes(b"x" * 90)
        with pytest.raises(OSError, match="quota") as caught:
            (group / "s").write_bytes(b"x" * 90)
        assert caught.value.errno == errno.EDQUOT


def test_the_library_raises_it_as_over_quota(tmp_path: Path) -> None:
    with Server.at(tmp_path, "--limit", f"{ME} kept=100") as server, server.connect() as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.publish("s", b"x" * 90)
        with pytest.raises(MqfsError, match=r"quota exceeded: the streams of uid \d+ keep 90 bytes"):
            group.publish("s", b"x" * 90)


def test_a_wrong_limit_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    done = run("serve", "--store", "store", "--limit", "* size=3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "mqfs: bad configuration: --limit '* size=3': malformed (expected USER KEY=NUMBER..., keys messages, bytes, "
        "kept, parked, handles, claims, 10M for sizes)\n"
    )
    assert os.listdir(tmp_path) == []
