"""A server with a replicated log: primary at once, or standby first. Imported with `--replica` only.

A standby listens at all addresses: HTTP answers /.health with 200 and /.ready with 503, an attach is refused with the
address of the primary, and STORE/promote is the socket of `mqfs promote`. After a takeover it starts as a primary.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from mqfs.clock import Heard, SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadConfig, BadReplica, DiskFailed, MqfsError, Standby, ungrouped
from mqfs.model import User
from mqfs.net.sockets import reachable
from mqfs.ninep.server.connection import Server as NinepServer
from mqfs.replica import takeover
from mqfs.replica.log import Fenced, NoAnswer, ReplicatedLog, Stopped, check_url, open_log
from mqfs.replica.replicator import Replicator
from mqfs.replica.takeover import Primary
from mqfs.server import service, tracing
from mqfs.server.options import Options
from mqfs.serving.await_step import post_to_loop
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore
from mqfs.syntax.duration import parse_duration

if TYPE_CHECKING:
    from mqfs.server.app import Server

log = logging.getLogger("mqfs")
StartNinep = Callable[["Server", Tree, trio.Nursery], Awaitable[NinepServer]]
PROMOTE = "promote"  # the socket in a store


def check(options: Options) -> None:
    """Check the options of a replica. Raises BadConfig."""
    assert options.replica is not None
    check_url(options.replica)
    if options.confirm not in ("0", "1"):
        raise BadConfig(f"--confirm {options.confirm!r}: invalid number (expected 0 or 1)")
    for name in ("failover", "replica_keep"):
        _seconds(options, name)
    if _seconds(options, "failover") < 1.5:
        raise BadConfig(f"--failover {options.failover!r}: too short (expected 1500ms or more)")


def _seconds(options: Options, name: str) -> float:
    text = getattr(options, name)
    try:
        return parse_duration(text) / 1e9
    except MqfsError as error:
        raise BadConfig(f"--{name.replace('_', '-')} {text!r}: {error.detail}") from None


class Replica:
    """The replica of one server."""

    def __init__(self, server: Server, start_ninep: StartNinep) -> None:
        self._server, self.options, self._start_ninep = server, server.options, start_ninep
        self._post = post_to_loop()
        assert self.options.store is not None
        self.path = os.path.realpath(self.options.store)
        self.log: ReplicatedLog | None = None
        self.replicator: Replicator | None = None
        self.heard: Heard | None = None  # what the standby, if this was one, heard of the former primary
        self.fenced = trio.Event()  # set when nothing is copied any more: the server has to stop
        self._is_handing_over = False
        self._standby: takeover.Standby | None = None
        self._store: DiskStore | None = None
        self._stop = threading.Event()  # stops the thread that takes over

    @property
    def refusal(self) -> str:
        """Why clients are refused; "" for a primary."""
        if self._standby is None:
            return ""
        return f"standby: the primary is {self._standby.primary or 'not known'}"

    # ------------------------------------------------------------ start

    async def begin(self, signals: AsyncIterator[int]) -> DiskStore | None:
        """Return the store, once this server is the primary and the replicated log has all of the store. A standby
        refuses clients until then. None: the server has to stop, or has the refusal."""
        server, store = self._server, None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.stop_on, signals)
            nursery.start_soon(self._watch)
            nursery.start_soon(_cancel_after, server.stopping, nursery.cancel_scope)
            try:
                if (primary := await self._become_primary()) is not None:
                    store = self._open_store(primary)
                    await self._copy_all(store)
            except (MqfsError, OSError) as error:
                server.refused = error
            nursery.cancel_scope.cancel()
        if store is not None and (server.stopping.is_set() or server.refused or self.fenced.is_set()):
            store.close()
            store = None
        return store

    async def _watch(self) -> None:
        """Tell the service manager that the standby is alive, or that the start continues."""
        while True:
            self._server.notices.start(self.refusal or "what the store has is copied into the replicated log")
            await trio.sleep(service.EVERY_S)

    async def _become_primary(self) -> Primary | None:
        assert self.options.replica is not None
        self.log = replicated = await trio.to_thread.run_sync(open_log, self.options.replica)
        for line in replicated.promises():
            log.info("replica %s: %s", replicated.name, line)
        try:
            if self.options.standby:
                return await self._stand_by(replicated)
            return await trio.to_thread.run_sync(
                takeover.become_primary, replicated, self.path, self._address(), self._stop, abandon_on_cancel=True
            )
        except Stopped:
            return None
        except NoAnswer as error:
            raise BadReplica(f"--replica {replicated.name}: no answer: {error}") from None

    def _address(self) -> str:
        """Return the address where clients find this server, as far as the options say."""
        return next((text for text in self._server.addresses if not text.startswith("unix!")), "")

    def _open_store(self, primary: Primary) -> DiskStore:
        confirm, keep_s = int(self.options.confirm), _seconds(self.options, "replica_keep")
        self.replicator = Replicator(
            primary, self.path, self._post, self._on_end, standbys=confirm, keep_s=keep_s, on_asked=self._on_asked
        )
        line = tracing.printer("store", self._server.traced)
        disk = tracing.trace_disk(line) if line else None
        self._store = DiskStore(self.path, self._post, disk, self.replicator.notify)
        assert self._store.replication is not None
        self._store.replication.begin(primary.state.have)
        return self._store

    async def _copy_all(self, store: DiskStore) -> None:
        """Copy all of the store into the log before serving it, unless another server took over."""
        assert store.replication is not None
        assert self.replicator is not None
        self.replicator.start(store.replication)
        for _ in store.replication.open_all():
            await trio.lowlevel.checkpoint()  # opening a log that was not closed reads it
        idle = trio.Event()
        self.replicator.copy(idle.set)
        async with trio.open_nursery() as nursery:
            for event in (idle, self.fenced):
                nursery.start_soon(_cancel_after, event, nursery.cancel_scope)

    # ------------------------------------------------------------ standby

    async def _stand_by(self, replicated: ReplicatedLog) -> Primary | None:
        failover_s = _seconds(self.options, "failover")
        self._standby = standby = takeover.Standby(replicated, self.path, self._address(), failover_s)
        try:
            return await self._follow(standby)
        except BaseExceptionGroup as group:  # of other tasks: the store or an address cannot be used
            raise ungrouped(group) from group

    async def _follow(self, standby: takeover.Standby) -> Primary | None:
        promotion, ended = Promotion(self.path, standby), trio.Event()
        primary: Primary | None = None
        refused: MqfsError | OSError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._refuse_clients, ended)
            promoting = trio.CancelScope()
            nursery.start_soon(promotion.run, promoting)
            try:
                primary = await trio.to_thread.run_sync(standby.run, abandon_on_cancel=True)
            except (MqfsError, OSError) as error:
                refused = error
            finally:
                standby.stop()
            await promotion.answer(primary is not None)
            promoting.cancel()
            ended.set()
        self._standby, self.heard = None, standby.hearing.newest
        if refused is not None:
            raise refused
        return primary

    async def _refuse_clients(self, ended: trio.Event) -> None:
        """Refuse clients until `ended`, then listen at the addresses again."""
        server, tree = self._server, StandbyTree(self)
        async with trio.open_nursery() as nursery:
            ends: list[Callable[[], Awaitable[None]]] = []
            ends.append((await self._start_ninep(server, tree, nursery)).stop)
            await server.start_http(tree, nursery, ends)
            log.info("standby")
            server.notify("READY=1")
            await ended.wait()
            for end in reversed(ends):
                await end()
            nursery.cancel_scope.cancel()
        tree.close()
        server.close_all()
        server.listeners, server.attach_listeners = {}, []
        server.listen()

    # ------------------------------------------------------------ end

    def _on_end(self, why: Fenced | DiskFailed) -> None:
        if isinstance(why, DiskFailed):
            self._server.refused = why
        self.fenced.set()  # first: whatever fails below, a server that copies nothing must end
        if self._store is not None and self._store.replication is not None:
            self._store.replication.fail(OSError(errno.EIO, str(why)))

    def _on_asked(self, address: str) -> None:
        """Stop the server for a standby, which takes over when the store is closed and the rest is copied."""
        log.warning("mqfs promote: %s is to be the primary: stopping", address or "another server")
        self._is_handing_over = True
        self._server.stopping.set()

    async def stop_when_fenced(self) -> None:
        """Stop the server once nothing is copied any more."""
        await self.fenced.wait()
        self._server.stopping.set()

    def stop(self) -> None:
        """Stop copying. Call it after the store was closed."""
        self._stop.set()
        if self._is_handing_over:
            self.fenced.set()
        if self.replicator is not None:
            self.replicator.stop()
        elif self.log is not None:
            self.log.close()


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


class StandbyTree(Tree):
    """The tree of a standby: it is empty, and every access raises Standby with the primary."""

    def __init__(self, replica: Replica) -> None:
        self._replica: Replica | None = None
        owner = User(os.geteuid(), os.getegid(), frozenset(os.getgroups()), os.getpid(), "server")
        super().__init__(MemoryStore(), SystemClock(), owner=owner)
        self._replica = replica

    @property
    def root(self) -> Any:
        if self._replica is not None and self._replica.refusal:
            raise Standby(self._replica.refusal.removeprefix("standby: "))
        return self._root

    @root.setter
    def root(self, group: Any) -> None:
        self._root = group


class Promotion:
    """The socket of `mqfs promote`: a connection asks for a takeover while it lasts, and is answered by a line."""

    def __init__(self, path: str, standby: takeover.Standby) -> None:
        self._path, self._standby = path, standby
        self._waiting: list[trio.SocketStream] = []

    async def run(self, scope: trio.CancelScope) -> None:
        with scope, contextlib.ExitStack() as stack:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._path, 0o700)  # not made yet if the log was empty
            where = stack.enter_context(reachable(f"{self._path}/{PROMOTE}"))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}/{PROMOTE}")
            sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            await sock.bind(where)
            os.chmod(where, 0o600)
            sock.listen(8)
            try:
                await trio.serve_listeners(self._serve, [trio.SocketListener(sock)])
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(where)

    async def _serve(self, stream: trio.SocketStream) -> None:
        """Ask for the takeover while the command is connected. Without any connection withdraw the request."""
        log.warning("mqfs promote: the standby is to be the primary")
        self._waiting.append(stream)
        self._standby.promote()
        with contextlib.suppress(trio.BrokenResourceError):
            while await stream.receive_some(64):
                pass
        self._waiting.remove(stream)
        if not self._waiting:
            self._standby.withdraw()

    async def answer(self, promoted: bool) -> None:
        answer = b"stopped\n" if not promoted else b"forced\n" if self._standby.forced else b"primary\n"
        for stream in self._waiting:
            with contextlib.suppress(trio.BrokenResourceError), trio.move_on_after(1):
                await stream.send_all(answer)
