"""All that a machine has, for a while: no ring ends for it, and nothing is lost or late."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from mqfs import ring
from mqfs.ring.server.keeper_link import KeeperLink
from tests.ring.server import crowd
from tests.support.campaign import size
from tests.support.eventually import eventually
from tests.support.server import Server

pytestmark = [pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING), pytest.mark.process, pytest.mark.slow]

MODES = {
    **{f"p{n}": ("shared", "published") for n in range(3)},
    **{f"m{n}": (f"own-{n}", "many") for n in range(3)},
    "c0": ("shared", "committed"),
    "d0": ("own-0", "drafts"),
    "u0": ("shared", "put"),
    "f0": ("", "follow"),
}


def write(path: Path, name: str, end: float, wrote: list[int]) -> None:
    """Through the mount, as fast as it goes."""
    number = 0
    with open(path, "ab", buffering=0) as file:
        while time.monotonic() < end:
            file.write(b"%s %d" % (name.encode(), number))
            number += 1
    wrote.append(number)


@pytest.mark.timeout(300)
def test_no_ring_ends_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROWD_PAUSE", "0.002")
    mount = tmp_path / "mq"
    mount.mkdir()
    address = f"unix!{tmp_path / 's'}"
    seconds = size(20)
    with Server("--store", "store", "--listen", "unix!s", cwd=tmp_path, mount=mount) as server:
        group = mount / "a"
        group.mkdir()
        (group / "ctl").write_text("replay all\nsync off\n")
        for name in ("own-0", "own-1", "own-2", "shared"):
            (group / name).touch()
        with crowd.crowd(tmp_path, address, "a", MODES) as members:
            end, wrote = time.monotonic() + seconds, list[int]()
            writers = [threading.Thread(target=write, args=(group / "shared", f"w{n}", end, wrote)) for n in range(2)]
            for writer in writers:
                writer.start()
            for writer in writers:
                writer.join()
            for member in members:
                if member.mode != "follow":
                    member.end()
            log = crowd.log_of(address, "a")
            follower = next(member for member in members if member.mode == "follow")
            eventually(lambda: follower.newest() >= max(log), "the follower")
            follower.end()
        text = server.text()
        told = crowd.check(log, members)
        crowd.check_followers(log, members)
        assert sum(wrote) == sum(body.startswith("w") for _, body in log.values())
    assert "retired" not in text, text
    KeeperLink(str(tmp_path / "store")).quit()
    print(f"{told} messages confirmed and {sum(wrote)} written in {seconds} s")
