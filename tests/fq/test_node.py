"""npm `fq`, unchanged, through everything that its API has."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.fq.client import port
from tests.support import ROOT
from tests.support.eventually import HANG_S
from tests.support.server import Server, environment

PACKAGES = ROOT / ".cache" / "node-fq" / "node_modules"


def test_the_client_of_npm(server: Server) -> None:
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("node") / "api.js"), "127.0.0.1", str(port(server))],
        env=environment(PACKAGES=str(PACKAGES)),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    steps: dict[str, object] = {}
    messages = []
    for line in done.stdout.splitlines():
        event = json.loads(line)
        if event["step"] == "message":
            messages.append(event["value"])
        else:
            steps[event["step"]] = event["value"]
    status = steps.pop("status")
    assert steps == {
        "connect": True,
        "ready": True,
        "bind": [None, True],
        "illegal": [None, -1],
        "permanent": [None, True],
        "published": None,
        "sent": None,
        "beat": True,
        "unbind": [None, True],
        "ready again": True,
        "shutdown": True,
    }
    wanted = {"no_exchange": 1, "no_route": 1, "routed": 3, "dropped": 0, "msgs_in": 5, "msgs_out": 3}
    assert isinstance(status, list)
    assert status[0] is None
    assert {key: status[1][key] for key in wanted} == wanted
    assert [message["route"] for message in messages] == ["a.text", "a.bytes", "a.own"]
    assert {(message["sender"], message["exchange"], len(message["hops"])) for message in messages} == {
        ("noder", "npm", 2)
    }
    assert [message["size"] for message in messages] == [5, 3, 100_000]
    assert messages[0]["payload"] == "täxt".encode().hex()
    assert (messages[1]["payload"], messages[1]["id"]) == ("00ff0a", "37" * 16)
    assert messages[2]["id"] == "39" * 16
