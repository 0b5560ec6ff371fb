"""What must come of the examples of mqfs-http(5)."""

from __future__ import annotations

import os
import pwd
import re

from tests.docs.pages import Block
from tests.docs.scene import Scene
from tests.docs.treated import prepared, treated
from tests.support.eventually import eventually

ADDRESS = "http://127.0.0.1:8080"  # of the page


@prepared("mqfs-http.5")
def a_server_that_speaks_http(at: Scene) -> None:
    at.serve("--http", "tcp!127.0.0.1!0", "--tcp-user", pwd.getpwuid(os.geteuid()).pw_name)


def here(at: Scene, text: str) -> str:
    """With the port of our server."""
    found = re.search(r"HTTP at tcp!127\.0\.0\.1!(\d+)", (at.folder / "server.log").read_text())
    assert found
    return text.replace(ADDRESS, f"http://127.0.0.1:{found[1]}")


@treated("mqfs-http.5", "curl -X PUT")
@treated("mqfs-http.5", "curl -H 'Idempotency-Key")
def as_shown(at: Scene, block: Block) -> None:
    for line in block.lines:
        assert at.type(here(at, line.typed)) == line.shown


def opened(at: Scene) -> bool:
    return ".cursor" in (at.mount / "shop" / ".who").read_text()


@treated("mqfs-http.5", "curl 'http://127.0.0.1:8080/shop/orders?since=end")
def a_long_poll(at: Scene, block: Block) -> None:
    at.typing.begin(here(at, block.text))
    eventually(lambda: opened(at))
    with open(at.mount / "shop" / "orders", "w") as stream:
        stream.write("4 chairs\n")
    at.typing.terminal.expect_exact("4 chairs")
    assert at.typing.prompt() == []


@treated("mqfs-http.5", "curl -N -H 'Accept: text/event-stream'")
def events(at: Scene, block: Block) -> None:
    at.typing.begin(here(at, block.text))
    at.typing.terminal.expect_exact("retry: 2000")
    at.typing.terminal.expect_exact('"body":"3 lamps"')
    at.typing.interrupt()
