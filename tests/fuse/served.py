"""A server of nothing but a mount, for tests: `python -m tests.fuse.served MOUNTPOINT [STORE [away]]`.

With `away` the store has a replica that confirms nothing.
On SIGUSR1 it writes the sizes of its tables to MOUNTPOINT.sizes. SIGTERM ends it, cleanly.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

import trio

from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.errors import MountError
from mqfs.fuse.mount import FuseMount
from mqfs.model import User
from mqfs.server.service import notify
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from tests.support.timers import ring_timers


def write_sizes(mount: FuseMount, handles: int) -> None:
    """The sizes of its tables, as MOUNTPOINT.sizes. `handles`: of open files in its tree."""
    Path(f"{mount.path}.new").write_text(sizes(mount, handles))
    os.replace(f"{mount.path}.new", f"{mount.path}.sizes")


def sizes(mount: FuseMount, handles: int) -> str:
    assert mount.loop is not None
    return json.dumps(
        {
            "nodes": len(mount.nodes),
            "given": mount.nodes.given,
            "files": len(mount.files.open),
            "listings": len(mount.files.listings),
            "waiting": len(mount.loop.parked.by_unique),
            "early": len(mount.loop.parked.early),
            "locks": len(mount.tree.locks),
            "watched": len(mount.processes),
            "handles": handles,
            "parked": mount.tree.waits.used,
        }
    )


async def house(tree: Tree) -> None:
    while True:
        await trio.sleep(1)
        tree.tick()


async def run(mountpoint: str, path: str = "", replica: str = "") -> None:
    away = (lambda: None) if replica else None
    post = trio.lowlevel.current_trio_token().run_sync_soon
    store = DiskStore(path, post, replica=away) if path else MemoryStore()
    tree = Tree(store, SystemClock(), owner=User(os.geteuid(), os.getegid()))
    mount = FuseMount(tree, mountpoint)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
        await mount.attach()
        async with trio.open_nursery() as nursery:
            await nursery.start(mount.run)
            nursery.start_soon(house, tree)
            nursery.start_soon(ring_timers, tree)
            notify("READY=1")
            nursery.start_soon(until_unmounted, mount, nursery.cancel_scope)
            async for number in signals:
                if number == signal.SIGTERM:
                    break
                write_sizes(mount, tree.open_files.count)
            tree.close()
            await mount.stop()
            nursery.cancel_scope.cancel()
    store.close()


async def until_unmounted(mount: FuseMount, scope: trio.CancelScope) -> None:
    await mount.ended.wait()
    scope.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        trio.run(run, *sys.argv[1:])
    except MountError as error:
        sys.exit(str(error))
