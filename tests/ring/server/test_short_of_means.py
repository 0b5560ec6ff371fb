"""A process that has no room to map a ring, or no descriptors left: its client publishes and reads by the files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mqfs import ring
from tests.support.eventually import HANG_S
from tests.support.server import Server, environment, short_folder

pytestmark = [pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING), pytest.mark.process]

CLIENT = """
import os, resource, sys
import mqfs, mqfs.client.transport.ring_subscription

address, short_of, spare = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = mqfs.connect(address, transport=sys.argv[4])
group = client.group("g")
list(group.history())
if short_of == "descriptors":
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, 4096))
else:
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, resource.RLIM_INFINITY))
messages = group.subscribe()
group.publish("s", b"one")
group.publish_many([("s", b"two")])
print(messages.get(300).body, messages.get(300).body)
"""
CASES = [*(("descriptors", spare) for spare in range(5)), ("memory", 12 << 20), ("memory", 256 << 20)]


def test_a_client_that_cannot_map_a_ring_uses_the_files() -> None:
    with short_folder() as folder, Server.at(folder) as server:
        with server.connect() as client:
            client.group("g", create=True, ctl=["replay all"])
        for short_of, spare in CASES:
            command = [sys.executable, "-c", CLIENT, server.address, short_of, str(spare), "auto"]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S)
            assert (done.stdout, done.stderr) == ("b'one' b'two'\n", ""), (short_of, spare)


def test_one_that_requires_a_ring_says_why() -> None:
    with short_folder() as folder, Server.at(folder) as server:
        with server.connect() as client:
            client.group("g", create=True, ctl=["replay all"])
        for short_of, spare in CASES[:2] + CASES[-2:-1]:
            command = [sys.executable, "-c", CLIENT, server.address, short_of, str(spare), "ring"]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S)
            assert "mqfs.errors.Unsupported: " in done.stderr.splitlines()[-1], (short_of, spare)
