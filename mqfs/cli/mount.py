"""`mqfs mount`: the tree of a remote server as a mount that outlives that server."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import click

from mqfs.cli import common
from mqfs.cli.bridge import secret
from mqfs.errors import MqfsError
from mqfs.net.sockets import UnixAddress, parse_addresses

log = logging.getLogger("mqfs.mount")


@attrs.frozen
class Options:
    """The options of `mqfs mount`. `patience_s`: how long to wait for the server."""

    address: str
    directory: str
    patience_s: float
    allow_other: bool | None
    user: str
    token: str
    trace: bool


@click.command()
@click.argument("address", metavar="ADDRESS[,ADDRESS...]", callback=common.addresses)
@click.argument("directory", metavar="DIR")
@click.option(
    "--patience", "patience_s", default="60s", callback=common.duration_s, metavar="DURATION", show_default=True,
    help="Time to wait for a server that is gone, before calls fail.",
)  # fmt: skip
@click.option(
    "--allow-other/--no-allow-other", default=None,
    help="Let other users access the mount. As root, over a unix socket: yes.",
)  # fmt: skip
@click.option("--user", default="", metavar="NAME", help="User to act as.")
@click.option("--token-file", metavar="FILE", help="File of the bearer token, for TCP and TLS.")
@click.option("-D", "--trace", is_flag=True, help="Print each request of the kernel.")
def mount(token_file: str | None, **options: Any) -> int:
    """Mount the tree of the server at ADDRESS on DIR. The mount outlives that server.

    Several addresses are a primary and its standbys: the one that serves is used. Runs until SIGTERM, SIGINT or the end
    of its terminal, then unmounts and exits with 0.
    """
    import trio  # here, so that the other commands need none of it

    from mqfs.server.app import raise_file_limit
    from mqfs.server.logs import set_up
    from mqfs.server.service import notify

    set_up()
    raise_file_limit()
    return trio.run(run, Options(token=secret(token_file), **options), notify)


def may_others(options: Options) -> bool | None:
    """Whether other users may use the mount; None: if run by root. Without the option, False if the server
    cannot tell users apart."""
    knows = all(isinstance(one, UnixAddress) for one in parse_addresses(options.address)) and not options.user
    return options.allow_other if knows or options.allow_other is not None else False


async def run(options: Options, notify: Callable[[str], None]) -> int:
    """Connect, mount, serve until a signal, unmount. Return the exit code. Raises MqfsError if it could not start."""
    import trio

    from mqfs.fuse import mount as mounts
    from mqfs.remote.session import Session
    from mqfs.remote.tree import RemoteTree
    from mqfs.server.app import Terminal
    from mqfs.server.tracing import printer

    mounts.check_device()
    allow_other = may_others(options)
    mounts.others_allowed(allow_other)
    path = await trio.to_thread.run_sync(mounts.check_mountpoint, options.directory)
    session = Session(options.address, patience_s=options.patience_s, user=options.user, token=options.token)
    terminal = Terminal()  # first: it reads whether SIGHUP is ignored
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        refused: MqfsError | None = None
        stopping, starting = trio.Event(), trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_signal, signals, terminal, session, stopping, starting)
            try:
                with starting:  # waits for a server that does not answer
                    link = await session.connect()
                    nursery.start_soon(session.run, link)
                    tree = await RemoteTree.of(session)
                    trace = printer("fuse", {"fuse"} if options.trace else ())
                    fuse = mounts.FuseMount(tree, path, allow_other=allow_other, trace=trace)
                    await fuse.attach()
                    await nursery.start(fuse.run)
            except MqfsError as error:
                refused = error
            if refused is not None or starting.cancelled_caught:
                nursery.cancel_scope.cancel()
                await trio.lowlevel.checkpoint()
            log.info("%s mounted at %s", link.where, path)
            notify("READY=1")
            nursery.start_soon(_until_unmounted, fuse, nursery.cancel_scope)
            await stopping.wait()
            notify("STOPPING=1")
            await fuse.stop()
            nursery.cancel_scope.cancel()
    if refused is not None and not stopping.is_set():
        raise refused
    return 0


async def _until_signal(signals: AsyncIterator[int], terminal: Any, session: Any, stopping: Any, starting: Any) -> None:
    """At a signal that ends the mount, set `stopping`, close the session, and cancel `starting`: otherwise a
    start in progress would wait for answers."""
    async for number in signals:
        if number != signal.SIGHUP or terminal.is_gone():
            log.info("%s: stopping", signal.Signals(number).name)
            stopping.set()
            session.close()
            starting.cancel()
            break


async def _until_unmounted(fuse: Any, scope: Any) -> None:
    await fuse.ended.wait()
    log.info("%s: unmounted", fuse.path)
    scope.cancel()
