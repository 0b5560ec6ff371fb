"""The server process: one nursery over store, tree and front ends; the order in which they start and stop; signals.

Start: sockets, lock and store, tree, mount, readiness. Stop: rings are emptied into the log, parked calls are answered,
replies are sent, mount and sockets end, the last commit, the store is marked clean, the lock is released.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from mqfs import limits
from mqfs.clock import SystemClock
from mqfs.engine.group import NO_REPLICA
from mqfs.engine.language.settings import SYNC_REPLICA, parse_settings
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadAddress, BadCommand, BadConfig, BadName, MqfsError
from mqfs.http.gate import BrowserRules
from mqfs.model import User
from mqfs.net import identity
from mqfs.net.audit import LEVELS, Audit
from mqfs.net.sockets import TlsAddress, UnixAddress, parse_address
from mqfs.net.tls import ServerTls
from mqfs.net.tokens import Tokens
from mqfs.ninep.server.connection import Server as NinepServer
from mqfs.quotas import parse_quotas
from mqfs.ring import MISSING
from mqfs.ring.server import attach_socket
from mqfs.ring.server.registry import RingRegistry
from mqfs.server import logs, service, tracing, web
from mqfs.server.logs import Progress
from mqfs.server.options import LIVE, Options, has_nul, name_space, require_partners
from mqfs.server.web import Served
from mqfs.serving import memory
from mqfs.serving.accept import Listener, adopt, listen, require_safe
from mqfs.serving.await_step import await_step, post_to_loop
from mqfs.serving.fairness import Fairness
from mqfs.store.api import Store
from mqfs.store.group_commit import Inline
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore, check_alone
from mqfs.syntax.names import check_name

if TYPE_CHECKING:
    from mqfs.server.replica import Replica

# ---------------------------------------------------------------- the process: limits, terminal


def raise_file_limit() -> None:
    """Raise the limit of descriptors: every connection, bucket and open file may need one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Terminal:
    """The terminal in which this process was started: none under nohup, or without one."""

    def __init__(self) -> None:
        self._file = -1
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            with contextlib.suppress(OSError):
                self._file = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)

    def is_gone(self) -> bool:
        """Whether the terminal was closed, of which SIGHUP may tell."""
        try:
            return self._file >= 0 and not os.tcgetpgrp(self._file)
        except OSError:
            return True


# ---------------------------------------------------------------- the server

log = logging.getLogger("mqfs")
LEAST_WAIT_S = 0.0003  # between two runs of timers
TICK_S = 1.0
EXIT_FENCED = 75  # EX_TEMPFAIL: another server is the primary; a unit restarts this one as a standby
End = Callable[[], Awaitable[None]]


def run(
    options: Options,
    reread: Callable[[], Options] | None = None,
    notify: Callable[[str], None] = service.notify,
    *,
    ends_with_mount: bool = False,
) -> int:
    """Serve until stopped.

    Args:
        options: The options of the start.
        reread: Returns the options that are in force after SIGHUP, or raises BadConfig. None: they do not change.
        notify: Gets the states of sd_notify(3). Default: the service manager, if there is one.
        ends_with_mount: Whether an unmount from outside ends the server where it serves elsewhere, too.

    Returns:
        The exit code.

    Raises:
        MqfsError: It could not start.
        OSError: As MqfsError.
    """
    logs.check(options.log_level, options.log_format)
    logs.set_up(options.log_level, options.log_format)
    passed = service.passed_sockets()
    check_words(options, passed)
    if not passed:
        check_standard_files(options)
    raise_file_limit()
    memory.keep()
    memory.defer_collector()
    server = Server(options, notify, reread=reread, passed=passed, ends_with_mount=ends_with_mount)
    return trio.run(server.run)


def check_words(options: Options, passed: Sequence[tuple[str, socket.socket]] = ()) -> None:
    """Check options that are invalid on any machine, before anything is opened. `passed`: as of Server. Raises
    BadConfig."""
    for field in attrs.fields(Options):
        value, is_path = getattr(options, field.name), field.name in ("store", "mount", "service")
        if has_nul(value) or (is_path and value == ""):
            expected = f"{'a path' if is_path else 'text'} without NUL"
            raise BadConfig(f"--{field.name.replace('_', '-')} {value!r}: invalid (expected {expected})")
    try:
        for text in options.listen:
            parse_address(text)
        parse_quotas(options.limit)
        settings = parse_settings(options.default)
        check_name(settings.dead)
    except BadAddress as error:
        raise BadConfig(f"--listen: {error.detail}") from None
    except (BadCommand, BadName) as error:
        raise BadConfig(f"--default: {error.detail}") from None
    if settings.sync == SYNC_REPLICA and options.replica is None:
        raise BadConfig(f"--default: {NO_REPLICA}")
    web.check(options)
    tracing.parse(options.trace)
    logs.check(options.log_level, options.log_format)
    if options.replica is not None:
        from mqfs.server import replica  # imported here, as all of it

        replica.check(options)
    others = {name for name, _ in passed}
    others |= {"tcp!" for _, sock in passed if sock.family != socket.AF_UNIX}
    for text, _ in web.addresses(options):
        address = parse_address(text)
        others.add(str(address).partition("!")[0] + "!")
        if isinstance(address, TlsAddress) and options.tls_cert is None:
            raise BadConfig(f"{text}: no certificate (expected --tls-cert FILE)")
        require_safe(address, insecure=options.insecure, identified=is_identified(options))
    if options.audit not in LEVELS:
        raise BadConfig(f"--audit {options.audit!r}: unknown level (expected {', '.join(LEVELS)})")
    if identity.user_number(options.tcp_user) is None:
        raise BadConfig(f"--tcp-user {options.tcp_user!r}: unknown user (expected one of getent passwd)")
    require_partners(options, others)


def is_identified(options: Options) -> bool:
    """Whether clients over TLS are identified by a token or a certificate."""
    return options.token_file is not None or options.tls_client_ca is not None


def check_standard_files(options: Options) -> None:
    """Check that standard input and output are open if 9P is to be spoken on them. Raises BadConfig."""
    if web.is_on_standard_files(options):
        modes = [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE for fd in (0, 1)]
        if modes[0] == os.O_WRONLY or modes[1] == os.O_RDONLY:  # as `open_standard_files` opens closed ones
            raise BadConfig("standard input or output: closed (expected --mount, --listen, --http, --fq or -s)")


def make_name_space(service: str) -> None:
    """Make the directory of `-s`, private to this user. Raises BadAddress if it belongs to another user."""
    if "!" in service:
        return
    path = name_space()
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.stat(path).st_uid != os.geteuid():
        raise BadAddress(f"{path}: belongs to another user (expected NAMESPACE set to a directory of your own)")


async def no_signals() -> AsyncIterator[int]:
    """Yield no signals: for a program that handles them itself."""
    await trio.sleep_forever()
    yield 0


class StoppedEarly(Exception):
    """Raised at a signal during the recovery of groups. The text says how many were recovered."""


class Server:
    """One run of the server."""

    def __init__(
        self,
        options: Options,
        notify: Callable[[str], None] = service.notify,
        *,
        owns_process: bool = True,
        reread: Callable[[], Options] | None = None,
        passed: Sequence[tuple[str, socket.socket]] = (),
        ends_with_mount: bool = False,
    ) -> None:
        """`notify`, `reread`, `ends_with_mount`: as of `run`. `owns_process`: whether to handle signals and tune
        memory. `passed`: sockets that listen already, each with its protocol."""
        self.options, self.notify, self.owns_process = options, notify, owns_process
        self.reread, self.passed, self.ends_with_mount = reread, passed, ends_with_mount
        self.notices = service.Notices(notify, None if owns_process else math.inf)
        self.rules = BrowserRules(options.http_origin, options.http_host)
        self.audit = Audit(options.audit)
        self.tokens = None
        if options.token_file is not None:
            self.tokens = Tokens(options.token_file, self.audit, required=options.require_token)
        key, client_ca = options.tls_key, options.tls_client_ca
        self.tls = None if options.tls_cert is None else ServerTls(options.tls_cert, key, client_ca)
        self.fairness = Fairness()
        self.traced = tracing.parse(options.trace)
        self.stopping = trio.Event()
        self.terminal = Terminal() if owns_process else None
        self.contained = False  # whether a failure of maintenance was logged with its traceback
        self.attach_listeners: list[Listener] = []
        self.listeners: dict[Listener, Served] = {}
        self.refused: MqfsError | OSError | None = None  # why the start failed
        self.early: list[int] = []  # signals to stop that arrived before it served
        self.replica: Replica | None = None
        self.crashed = False
        self.mounted: Callable[[], bool] | None = None  # by the table of mounts: this thread must not use its mount

    async def run(self) -> int:
        """Start, serve and stop. Return the exit code."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if self.owns_process else ()
        with trio.open_signal_receiver(*numbers) if numbers else contextlib.nullcontext(no_signals()) as signals:
            await self.check_mountpoint()  # first: nothing was made if the options are refused
            self.listen()
            try:
                if self.options.replica is None:
                    await self.serve_store(self.open_store(), signals)
                else:
                    from mqfs.server.replica import Replica  # here, so that without --replica nothing of it is imported

                    self.replica = Replica(self, start_ninep)
                    if (store := await self.replica.begin(signals)) is not None:
                        await self.serve_store(store, signals)
            finally:
                self.close_all()
                if self.replica is not None:
                    self.replica.stop()
        if self.refused is not None:
            raise self.refused
        if self.replica is not None and self.replica.fenced.is_set():
            return EXIT_FENCED
        return 1 if self.crashed else 0

    async def serve_store(self, store: Store, signals: AsyncIterator[int]) -> None:
        """Serve a store, then close it."""
        try:
            await self.serve(store, signals)
        except StoppedEarly as early:
            log.info("%s: start ended: %s", signal.Signals(self.early[0]).name, early)
        finally:
            store.close()

    async def check_mountpoint(self) -> None:
        """Check that mounting will be possible, and remove a killed server's stale mount. Raises MountError."""
        if self.options.mount is not None:
            from mqfs.fuse import mount  # here, so that without a mount no FUSE is needed

            mount.check_device()
            mount.others_allowed(self.options.allow_other)
            await trio.to_thread.run_sync(mount.check_mountpoint, self.options.mount)

    def listen(self) -> None:
        """Listen on all addresses, or none. Early clients wait until they are served. Raises BadAddress."""
        options = self.options
        identified = is_identified(options)
        if options.service is not None:
            make_name_space(options.service)
        try:
            for name, sock in self.passed:  # duplicated, as a standby listens twice
                self._serve_at(adopt(sock.dup(), insecure=options.insecure), Served(service.PASSED[name]))
            for text, served in web.addresses(options):  # off loopback only as securely as the options say
                self._serve_at(listen(text, insecure=options.insecure, identified=identified), served)
        except BaseException:
            self.close_all()
            raise

    def _serve_at(self, listener: Listener, served: Served) -> None:
        self.listeners[listener] = served
        if served.protocol == service.NINEP:
            self.listen_for_rings(listener)

    @property
    def addresses(self) -> list[str]:
        """The addresses at which it serves, with the ports that were chosen."""
        return [str(listener.address) for listener in self.listeners]

    def close_all(self) -> None:
        for listener in (*self.listeners, *self.attach_listeners):
            listener.close()

    def listen_for_rings(self, listener: Listener) -> None:
        """Listen for attachments to rings beside a unix socket. If that fails, everything else works."""
        if MISSING or not isinstance(listener.address, UnixAddress):
            return
        try:
            self.attach_listeners.append(attach_socket.listen(listener.address))
        except BadAddress as error:
            log.warning("rings for clients of %s unavailable: %s", listener.address, error)

    def open_store(self) -> Store:
        if self.options.store is None:
            log.info("no --store: messages are kept in memory and lost at exit")
            return MemoryStore()
        check_alone(self.options.store)
        line = tracing.printer("store", self.traced)
        return DiskStore(self.options.store, post_to_loop(), tracing.trace_disk(line) if line else None)

    async def serve(self, store: Store, signals: AsyncIterator[int]) -> None:
        """Run the front ends over the tree until the stop, then end them in order."""
        user = User(os.geteuid(), os.getegid(), frozenset(os.getgroups()), os.getpid(), "server")
        rings = RingRegistry(store, post_to_loop())
        if line := tracing.printer("ring", self.traced):
            tracing.trace_calls(rings, ("attach", "resume", "close"), line)
        tree = self.load(store, user, rings)
        if line := tracing.printer("engine", self.traced):
            tracing.trace_tree(tree, line)
        if self.owns_process:
            memory.spare_collector()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.stop_on, signals)
            if self.tokens is not None:
                nursery.start_soon(follow, self.tokens)
            if self.replica is not None:
                nursery.start_soon(self.replica.stop_when_fenced)
            nursery.start_soon(self.guard, "maintenance", functools.partial(self.maintain, tree, rings, store))
            ends: list[End] = []
            attaching = attach_socket.AttachSocket(rings, self.attach_listeners, self.fairness)
            try:
                await nursery.start(functools.partial(self.guard, "the attach socket", attaching.run, only=False))
                await self.start_front_ends(tree, nursery, ends)
                log.info("ready")
                self.notify("READY=1")
                self.notices.tick(status(tree))
            except (MqfsError, OSError) as error:
                self.refused = error
                self.stopping.set()
            with identity.serving_others():  # during the start there are no others
                await self.stopping.wait()
                self.notify("STOPPING=1")
                await attaching.stop()
                with trio.move_on_after(limits.SHUTDOWN_S):
                    await await_step(rings.close())
                tree.close()
                for end in reversed(ends):
                    await end()
            nursery.cancel_scope.cancel()

    def load(self, store: Store, user: User, rings: RingRegistry) -> Tree:
        """Return the tree of the store. Recovering its groups may take long. Raises StoppedEarly at a signal."""
        with Progress() if self.owns_process else contextlib.nullcontext() as line, self.early_signals():

            def progress(done: int, total: int) -> None:
                text = f"{done:,} of {total:,} groups recovered"
                if line is not None:
                    line(text)
                self.notices.start(text)
                if self.early:
                    raise StoppedEarly(text)

            return Tree(
                store,
                SystemClock(self.replica.heard if self.replica is not None else None),
                owner=user,
                umask=identity.file_mask(),
                defaults=self.options.default,
                prepare=rings.resume,
                audit=self.audit,
                quotas=parse_quotas(self.options.limit),
                progress=progress,
            )

    @contextlib.contextmanager
    def early_signals(self) -> Iterator[None]:
        """Record signals to stop at once: trio delivers them only when its loop runs again, after the start."""
        numbers = (signal.SIGTERM, signal.SIGINT) if self.owns_process else ()
        before = {number: signal.signal(number, lambda number, _: self.early.append(number)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.early:
            log.info("%s: stopping", signal.Signals(self.early[0]).name)
            self.stopping.set()

    async def start_front_ends(self, tree: Tree, nursery: trio.Nursery, ends: list[End]) -> None:
        """Serve the sockets, the mount, or standard input and output. Append a function to `ends` that ends each."""
        options = self.options
        nine = await start_ninep(self, tree, nursery)
        ends.append(nine.stop)
        await self.start_http(tree, nursery, ends)
        if options.mount is not None:
            only = self.ends_with_mount or not self.listeners
            await self.start_mount(tree, nursery, ends, options.mount, only)
        elif not self.listeners:
            log.info("9P on standard input and output (--mount DIR and --listen ADDRESS serve elsewhere)")
            nursery.start_soon(self.guard, "9P on standard input", nine.serve_descriptors)

    async def start_http(self, tree: Tree, nursery: trio.Nursery, ends: list[End]) -> None:
        """Serve HTTP and fq, if they have listeners."""
        for name, server in web.make_servers(
            self.options,
            tree,
            self.listeners,
            tokens=self.tokens,
            tls=self.tls,
            fairness=self.fairness,
            rules=self.rules,
            troubles=functools.partial(self.troubles, tree),
            trace=tracing.printer("http", self.traced),
        ):
            await nursery.start(self.guard, name, server.run)
            ends.append(server.stop)

    def troubles(self, tree: Tree) -> list[str]:
        """Return the reasons why the server is not ready for work."""
        found = ["the server stops"] if self.stopping.is_set() or tree.closing else []
        found += [self.replica.refusal] if self.replica is not None and self.replica.refusal else []
        found += [f"group {group.name} is read-only" for group in tree.groups.values() if group.log.end.failed]
        if self.mounted is not None and not self.mounted():
            found.append(f"{self.options.mount} is not mounted")
        return found

    async def start_mount(self, tree: Tree, nursery: trio.Nursery, ends: list[End], path: str, only: bool) -> None:
        """Mount the tree. `only`: nothing else is served, so an unmount from outside ends the server."""
        from mqfs.fuse.mount import FuseMount

        trace = tracing.printer("fuse", self.traced)
        source = "mqfs" if self.options.store is None else os.path.realpath(self.options.store)
        fuse = FuseMount(tree, path, allow_other=self.options.allow_other, trace=trace, source=source)
        await fuse.attach()
        log.info("mounted at %s", path)
        self.mounted = fuse.is_mounted
        ends.append(fuse.stop)

        async def run(*, task_status: trio.TaskStatus[None]) -> None:
            await fuse.run(task_status=task_status)
            log.info("%s: unmounted", path)

        await nursery.start(functools.partial(self.guard, "the mount", run, only=only))

    async def guard(
        self,
        name: str,
        work: Callable[..., Awaitable[None]],
        *,
        only: bool = True,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run a front end or a similar task. If it is the `only` one, the server ends with it; after an exception, with
        exit code 1."""
        try:
            await work() if task_status is trio.TASK_STATUS_IGNORED else await work(task_status=task_status)
        except Exception:
            log.exception("%s failed", name)
            self.crashed = only = True
        if only:
            self.stopping.set()

    async def stop_on(self, signals: AsyncIterator[int]) -> None:
        """Stop the server once at SIGTERM, SIGINT or the end of its terminal. At any other SIGHUP reload its files."""
        more, wanted = trio.open_memory_channel[None](1)  # a change during a reading causes one more reading
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reload_at, wanted)
            async for number in signals:
                if number == signal.SIGHUP and not (self.terminal is not None and self.terminal.is_gone()):
                    with contextlib.suppress(trio.WouldBlock):
                        more.send_nowait(None)
                elif not self.stopping.is_set():
                    log.info("%s: stopping", signal.Signals(number).name)
                    self.stopping.set()

    async def _reload_at(self, wanted: trio.MemoryReceiveChannel[None]) -> None:
        """Reload apart from the signals: a reload may take as long as the user database, and a stop does not wait."""
        async for _ in wanted:
            self.notices.reloading()
            await self.reload()
            if not self.stopping.is_set():
                self.notify("READY=1")

    async def reload(self) -> None:
        """Reload options, tokens, certificate, key and the clients' authorities. An invalid file changes nothing."""
        try:
            if self.reread is not None:
                options = await trio.to_thread.run_sync(self._read_options, self.reread, abandon_on_cancel=True)
                self._change(options)
        except MqfsError as error:
            log.warning("%s; the options stay as they were", error)
        except Exception as error:  # or no thread could be started
            log.error("options not read again: %r", error)
        if self.tokens is not None:
            await reread(self.tokens, asked=True)
        if self.tls is None:
            return
        try:
            await trio.to_thread.run_sync(self.tls.reload, abandon_on_cancel=True)
        except Exception as error:  # or no thread could be started
            log.warning("certificate not replaced: %s", error)
        else:
            log.info("certificate read again from %s", self.tls.cert)

    def _read_options(self, reread: Callable[[], Options]) -> Options:
        """Read and check the options, on a thread, as users are looked up. Raises BadConfig."""
        options = reread()
        check_words(options, self.passed)
        return options

    def _change(self, options: Options) -> None:
        """Put those options in force that may change while the server runs."""
        changed = [
            field.name
            for field in attrs.fields(Options)
            if getattr(options, field.name) != getattr(self.options, field.name)
        ]
        if later := ", ".join(name.replace("_", "-") for name in changed if name not in LIVE):
            log.warning("options changed that are in force from the next start: %s", later)
        live = {name: getattr(options, name) for name in changed if name in LIVE}
        self.options = now = attrs.evolve(self.options, **live)
        self.rules.origins, self.rules.hosts = now.http_origin, now.http_host
        logs.set_up(now.log_level, now.log_format)
        if live:
            log.info("options changed: %s", ", ".join(name.replace("_", "-") for name in live))

    def contain(self, step: Callable[[], None]) -> None:
        """Perform one step of periodic maintenance. Its errors end neither the server nor the next step."""
        try:
            step()
        except Exception as error:
            log.error("periodic maintenance failed: %r", error, exc_info=not self.contained)
            self.contained = True

    async def maintain(self, tree: Tree, rings: RingRegistry, store: Store) -> None:
        """Run periodic maintenance once a second, and the tree's timers when due."""
        committer = store.committer if isinstance(store, DiskStore) else Inline()
        sooner = trio.Event()

        tree.timers.on_sooner, tree.timers.piece_s = lambda: sooner.set(), self.fairness.piece_s  # the newest event
        tick_at = trio.current_time()
        while not self.stopping.is_set():
            if trio.current_time() >= tick_at:
                tick_at = trio.current_time() + TICK_S
                for step in (tree.tick, rings.tick, functools.partial(memory.give_back, tree.memory)):
                    self.contain(step)
                    await trio.lowlevel.checkpoint()
                self.contain(self.audit.tick)
                self.notices.tick(status(tree), committer.progress())
            else:
                self.contain(tree.run_timers)
            sooner = trio.Event()
            wait_s = tick_at - trio.current_time()
            if (due := tree.timers.next_due_ns) is not None:
                wait_s = min(wait_s, (due - tree.clock.engine_ns()) / 1e9)
            with trio.move_on_after(max(wait_s, LEAST_WAIT_S)):
                await sooner.wait()


async def follow(tokens: Tokens) -> None:
    """Check once a second whether tokens changed or expired."""
    while True:
        await trio.sleep(TICK_S)
        try:
            if tokens.tick():
                await reread(tokens, asked=False)
        except Exception:
            log.exception("tokens: not looked at")


async def reread(tokens: Tokens, *, asked: bool) -> None:
    """Read tokens again, on a thread, as their users are looked up. `asked`: as of Tokens.read."""
    read = functools.partial(tokens.read, asked=asked)
    try:
        tokens.replace(await trio.to_thread.run_sync(read, abandon_on_cancel=True))
    except Exception as error:  # or no thread could be started
        log.error("tokens not read again: %r", error)


def status(tree: Tree) -> str:
    """Return the status that the service manager shows."""
    count = len(tree.groups)
    return f"serving {count:,} group{'s' if count != 1 else ''}"


async def start_ninep(server: Server, tree: Tree, nursery: trio.Nursery) -> NinepServer:
    """Serve 9P at its sockets."""
    nine = NinepServer(
        tree,
        tcp_user=server.options.tcp_user,
        tokens=server.tokens,
        tls=server.tls,
        fairness=server.fairness,
        trace=tracing.printer("9p", server.traced),
    )
    for listener, served in server.listeners.items():
        if served.protocol == service.NINEP:
            nine.add(listener)
            log.info("9P at %s", listener.address)
    await nursery.start(server.guard, "9P", nine.run)
    return nine
