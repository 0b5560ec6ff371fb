"""Requests that wait, of whatever kind, hold up no other request."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.fuse.served_by import Child, Served
from tests.support.eventually import eventually

GROUPS = 120  # a request each: the kernel makes names in a group one by one, and pyfuse3 would perform 100 at once
CHANGES = (
    "os.chmod(g + '/s', 0o600)",
    "os.close(os.open(g + '/new', os.O_WRONLY | os.O_CREAT))",
    "os.mknod(g + '/new')",
    "os.rename(g + '/s', g + '/new')",
    "os.unlink(g + '/s')",
)
PROGRAM = f"""
import threading
def ctl(number):
    with open(f"{{mq}}/{{number}}/ctl", "w") as file:
        file.write("sync replica\\n")
def change(number):
    g = f"{{mq}}/{{number}}"
    exec({CHANGES!r}[number % {len(CHANGES)}])
for what in ctl, change:
    for number in range({GROUPS}):
        threading.Thread(target=what, args=(number,), daemon=True).start()
    print(what.__name__)
    input()
"""


def change_everything(group: Path) -> None:
    """A request of each kind that makes, changes, opens or removes files."""
    (group / "s").write_text("x")
    (group / "s").chmod(0o600)
    os.truncate(group / "s", 0)
    os.mknod(group / "t")
    (group / "t").rename(group / "u")
    (group / "u").unlink()
    (group / "g").mkdir()
    (group / "g").rmdir()
    assert os.access(group / "s", os.W_OK)
    assert os.statvfs(group).f_namemax == 255


def test_changes_that_wait_for_the_replica_hold_up_no_others(tmp_path: Path) -> None:
    """They cannot be interrupted: they are made."""
    words = [sys.executable, "-m", "tests.fuse.served", str(tmp_path / "mq"), str(tmp_path / "store"), "away"]
    served = Served(tmp_path / "mq", command=words)
    try:
        for number in range(GROUPS):
            (served.path / str(number)).mkdir()
            (served.path / str(number) / "s").touch()
        (served.path / "other").mkdir()
        with Child(served.path, PROGRAM) as child:
            for what, count in (("ctl", GROUPS), ("change", 2 * GROUPS)):
                assert child.line() == what
                eventually(lambda count=count: served.sizes()["waiting"] == count)  # type: ignore[misc]
                child.tell()
            change_everything(served.path / "other")
            assert served.sizes()["parked"] == GROUPS  # of the writes: an open needs no place of a read's
            assert served.stop() == 0
    finally:
        served.close()
