"""As served.py, of a tree in another process: `python -m tests.fuse.served_elsewhere MOUNTPOINT [STORE]`.

The server is a child, at a socket beside the mountpoint. On SIGUSR1 the sizes of the mount's tables are written.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import trio

from mqfs.errors import MqfsError
from mqfs.fuse.mount import FuseMount
from mqfs.remote.files import OpenFile
from mqfs.remote.session import Session
from mqfs.remote.tree import RemoteTree
from mqfs.server.service import notify
from tests.fuse.served import until_unmounted, write_sizes

PATIENCE_S = 60.0


async def run(mountpoint: str, address: str) -> None:
    session = Session(address, patience_s=PATIENCE_S)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
        link = await session.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run, link)
            tree = await RemoteTree.of(session)
            mount = FuseMount(tree, mountpoint)
            await mount.attach()
            await nursery.start(mount.run)
            notify("READY=1")
            nursery.start_soon(until_unmounted, mount, nursery.cancel_scope)
            async for number in signals:
                if number == signal.SIGTERM:
                    break
                write_sizes(mount, sum(isinstance(file, OpenFile) for file in session.files))
            session.close()
            await mount.stop()
            nursery.cancel_scope.cancel()


def main(mountpoint: str, store: str = "") -> None:
    address = f"unix!/tmp/mqfs-elsewhere-{os.getpid()}"
    ready, theirs = os.pipe()
    command = [sys.executable, "-m", "mqfs", "serve", "--listen", address, *(["--store", store] if store else [])]
    environ = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    server = subprocess.Popen(command, stderr=theirs, env=environ)
    os.close(theirs)
    with open(ready) as lines:
        for line in lines:
            if line == "mqfs: ready\n":
                break
        try:
            trio.run(run, mountpoint, address)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        main(*sys.argv[1:])
    except MqfsError as error:
        sys.exit(str(error))
