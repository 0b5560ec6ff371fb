"""What must come of the examples of mqfs-fq(5)."""

from __future__ import annotations

import os
import pwd
import re

from tests.docs.pages import Block
from tests.docs.scene import Scene
from tests.docs.treated import prepared, treated

ADDRESS = "http://127.0.0.1:8765"  # of the page


@prepared("mqfs-fq.5")
def a_server_of_fq(at: Scene) -> None:
    at.serve("--fq", "tcp!127.0.0.1!0", "--tcp-user", pwd.getpwuid(os.geteuid()).pw_name)


@treated("mqfs-fq.5", "submit=")
def as_shown(at: Scene, block: Block) -> None:
    found = re.search(r"fq of group 'fq' at tcp!127\.0\.0\.1!(\d+)", (at.folder / "server.log").read_text())
    assert found
    for line in block.lines:
        assert at.type(line.typed.replace(ADDRESS, f"http://127.0.0.1:{found[1]}")) == line.shown
