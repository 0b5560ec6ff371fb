"""One folder that two mounts of two mount namespaces show at different paths: fsq in the one, bridges in the other.

It shows that nothing but the folder is shared: no path, no inotify of `messages` by another path. It does not show what
file systems over a network do: caches of directories and attributes, locks by a server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bridge.rig import Make, Node
from tests.support.eventually import eventually
from tests.support.mount_space import own_mounts

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.root]


def elsewhere(folder: Path, at: Path) -> list[str]:
    """Words before a command, which sees the folder at that path and nothing at its own."""
    at.mkdir()
    script = 'mount --bind "$1" "$2" && mount -t tmpfs none "$1" && shift 2 && exec "$@"'
    return [*own_mounts(), "sh", "-c", script, "sh", str(folder), str(at)]


def test_a_folder_is_shared_by_two_mount_namespaces(make: Make) -> None:
    r = make()
    r.folder.mkdir()
    there = r.home / f"there-{r.name}"
    node = Node(there, before=elsewhere(r.folder, there), notify=False)
    r.nodes.append(node)
    node.subscribe()
    bridges = [r.bridge(), r.bridge()]
    for number in range(20):
        node.publish("in", str(number))
        node.publish("jobs", str(number), single=True, ttl=3_600_000)
        r.group.publish("out", str(number))
    assert not any(bridge.process.poll() for bridge in bridges)
    eventually(lambda: len(node.messages(topic="out")) == 20, "the messages")
    eventually(lambda: len([1 for stream, _ in r.kept() if stream == "in"]) == 20, "the messages")
    eventually(lambda: len(node.of("done")) == 20, "the jobs")
    assert len(node.messages(topic="jobs")) == 20
    assert not there.joinpath("messages").exists()
