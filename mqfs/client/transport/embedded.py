"""The tree of a store, with the engine in this process.

The holder of a lock acts as the engine's only thread. A maintenance thread runs its timers. Threads block on a `Wait`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from mqfs import limits
from mqfs.client.types import READ_BYTES, TEMPORARY, File
from mqfs.clock import SystemClock
from mqfs.engine.core.portions import exhaust
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadStore, Disconnected, Interrupted, MqfsError, NotFound, NotPermitted
from mqfs.model import Step, User, Wait
from mqfs.net.identity import file_mask
from mqfs.ninep.client.machine import flags_of
from mqfs.store.api import Store
from mqfs.store.group_commit import run_posted
from mqfs.store.memory import MemoryStore
from mqfs.store.store import DiskStore, check_alone

if TYPE_CHECKING:
    from mqfs.client.transport.ring import RingGroup

T = TypeVar("T")

log = logging.getLogger("mqfs.client")
TICK_S = 1.0
LEAST_WAIT_S = 0.001
_INTERRUPTED, _SETTLED = True, False


class EmbeddedTransport:
    """See `Link`."""

    can_be_lost = False

    def __init__(self, path: str | None, defaults: Sequence[str] = ()) -> None:
        self.label = path or "memory"
        self._pid = os.getpid()
        self.lock = threading.Lock()  # its holder is the engine's thread
        self._changed = threading.Condition(self.lock)
        self.dropped: list[Any] = []  # handles of garbage-collected files, to be closed
        self.busy = 0  # threads that wait for a result
        self._closed = self._is_stopped = False
        self._store: Store = open_store(path, self._post) if path else MemoryStore()
        try:
            pid = os.getpid()
            self.user = User(os.geteuid(), os.getegid(), frozenset(os.getgroups()), pid, "library")
            self.tree = Tree(self._store, SystemClock(), owner=self.user, umask=file_mask(), defaults=defaults)
        except BaseException:
            self._is_stopped = True
            self._store.close()
            raise
        self.tree.timers.on_sooner = self._changed.notify_all
        self._maintenance = threading.Thread(target=self._run_maintenance, name="mqfs-maintenance", daemon=True)
        self._maintenance.start()

    # ------------------------------------------------------------ threads

    def _post(self, call: Callable[[], None]) -> None:
        """Deliver a result of the commit thread, on that thread."""
        with self.lock:
            if self._is_stopped:
                raise RuntimeError("post failed: the store is closed")
            run_posted(call)

    def _run_maintenance(self) -> None:
        """Call `tick` once a second, and run the tree's timers when they are due."""
        tick_at = time.monotonic()
        with self._changed:
            while not self._is_stopped:
                try:
                    if time.monotonic() >= tick_at:
                        tick_at = time.monotonic() + TICK_S
                        self.tree.tick()
                    else:
                        self.tree.run_timers()
                except (OSError, MqfsError) as error:
                    log.error("maintenance failed: %s", error)
                except Exception:
                    log.exception("maintenance failed")
                wait_s = tick_at - time.monotonic()
                if (due := self.tree.timers.next_due_ns) is not None:
                    wait_s = min(wait_s, (due - self.tree.clock.engine_ns()) / 1e9)
                self._changed.wait(max(wait_s, LEAST_WAIT_S))

    def require(self) -> None:
        """Check that the store is open, and of this process; close garbage-collected files. The caller holds the lock.
        Raises Disconnected."""
        if os.getpid() != self._pid:
            raise Disconnected("store of the parent process (expected another one in the child)")
        if self._closed:
            raise Disconnected("the client was closed")
        while self.dropped:
            self.dropped.pop().close()

    def do(self, call: Callable[[], Step[T]], timeout: float | None = None) -> T:
        """Return the result of a call of the engine. Ctrl-C and the timeout in seconds cancel the call, if that is
        still possible. Raises TimeoutError, and the call's errors."""
        gate: queue.SimpleQueue[bool] = queue.SimpleQueue()
        with self.lock:
            self.require()
            step = self.start(call(), gate)
        return self.finish(step, gate, timeout) if isinstance(step, Wait) else step

    def start(self, step: Step[T], gate: queue.SimpleQueue[bool]) -> Step[T]:
        """Return the step, and put an item into `gate` when it is resolved. The caller holds the lock."""
        if isinstance(step, Wait):
            step.subscribe(lambda _: gate.put(_SETTLED))
            self.busy += 1
        return step

    def finish(self, step: Wait[T], gate: queue.SimpleQueue[bool], timeout: float | None = None) -> T:
        """Wait for a step, and return its result. Raises its error; after TimeoutError or Interrupted it has had no
        effect."""
        try:
            if self._is_interrupted(step, gate, timeout):
                raise Interrupted
            return step.result()
        finally:
            with self.lock:
                self.busy -= 1
                self._changed.notify_all()

    def _is_interrupted(self, step: Wait[T], gate: queue.SimpleQueue[bool], timeout: float | None) -> bool:
        late = TimeoutError(f"no answer in {timeout or 0:g} s")
        try:
            with contextlib.suppress(queue.Empty):
                return gate.get(timeout=timeout)
            with self.lock:
                if step.cancel(late):
                    raise late
            return gate.get()
        except BaseException as error:
            if error is late:
                raise
            with self.lock:
                if step.cancel():
                    raise
            gate.get()
            raise

    # ------------------------------------------------------------ files

    def open(self, path: str, mode: str) -> File:
        with self.lock:
            self.require()
            node = self.tree.find(self.user, path)
            return EmbeddedFile(self, self.tree.open(self.user, node, flags_of(mode)))

    def create(self, path: str) -> None:
        self._make(path, self.tree.create, 0o666)

    def create_temporary(self, path: str) -> File:
        self._make(path, lambda user, group, name, _: self.tree.create(user, group, name, TEMPORARY), 0)
        return self.open(path, "r+")

    def mkdir(self, path: str) -> None:
        self._make(path, self.tree.mkdir, 0o777)

    def _make(self, path: str, make: Callable[..., Step[Any]], mode: int) -> None:
        """Make a file with the permission bits of its group, as 9P does, whatever the umask."""

        def call() -> Step[Any]:
            above, _, name = path.rstrip("/").rpartition("/")
            group: Any = self.tree.find(self.user, above)
            return make(self.user, group, name, self.tree.stat(group).mode & mode)

        self.do(call)

    def remove(self, path: str) -> None:
        def call() -> Step[None]:
            node: Any = self.tree.find(self.user, path)
            if node is self.tree.root:
                raise NotPermitted("cannot remove the root group")
            remove = self.tree.rmdir if node.directory else self.tree.unlink
            return remove(self.user, self.tree.parent(node), node.name)

        self.do(call)

    def reach(self, deadline: float | None) -> None:
        """Do nothing: an embedded engine is never lost."""

    def names(self, path: str) -> list[str]:
        with self.lock:
            self.require()
            node: Any = self.tree.find(self.user, path)
            return [entry.name for entry in exhaust(self.tree.entries(self.user, node))]

    def look_up(self, paths: Sequence[str]) -> Callable[[], list[bool]]:
        with self.lock:
            self.require()
            found = [self._exists(path) for path in paths]
        return lambda: found

    def _exists(self, path: str) -> bool:
        try:
            self.tree.find(self.user, path)
        except NotFound:
            return False
        return True

    def direct(self, path: str) -> RingGroup | None:
        return None

    def write_all(self, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        """See `Link`. All writes begin before the first is waited for, so that one commit serves them."""
        started: list[tuple[Step[int] | MqfsError, queue.SimpleQueue[bool]]] = []
        with self.lock:
            self.require()
            for file, data in writes:
                gate: queue.SimpleQueue[bool] = queue.SimpleQueue()
                assert isinstance(file, EmbeddedFile)
                try:
                    started.append((self.start(file.handle.write(data), gate), gate))
                except MqfsError as error:
                    started.append((error, gate))
        return [self._error_of(step, gate) for step, gate in started]

    def _error_of(self, step: Step[int] | MqfsError, gate: queue.SimpleQueue[bool]) -> MqfsError | None:
        if isinstance(step, MqfsError):
            return step
        try:
            if isinstance(step, Wait):
                self.finish(step, gate)
        except MqfsError as error:
            return error
        return None

    def close(self) -> None:
        """Answer waiting threads, write everything to disk, and unlock the store."""
        with self._changed:
            if self._closed or os.getpid() != self._pid:
                return
            self.require()
            self._closed = True
            self.tree.close()
            self._changed.wait_for(lambda: not self.busy, limits.SHUTDOWN_S)
            self._is_stopped = True
            self._changed.notify_all()
        self._maintenance.join()
        self._store.close()


class EmbeddedFile:
    """An open file of the engine."""

    is_lost = False

    def __init__(self, link: EmbeddedTransport, handle: Any) -> None:
        self._link, self.handle = link, handle
        self._offset = 0
        self._waiting: tuple[Wait[bytes], queue.SimpleQueue[bool]] | None = None
        self._begun: tuple[Step[bytes], queue.SimpleQueue[bool]] | None = None  # a read begun by `when_ready`
        self._on_ready: Callable[[], None] | None = None
        self._interrupted = False

    def receive(self, count: int = READ_BYTES, timeout: float | None = None) -> bytes:
        with self._link.lock:
            self._link.require()
            step, gate = self._begun or self._begin(count)
            self._begun = self._on_ready = None
            if isinstance(step, Wait):
                self._link.busy += 1
        data = self._wait(step, gate, timeout) if isinstance(step, Wait) else step
        self._offset += len(data)
        return data

    def _begin(self, count: int) -> tuple[Step[bytes], queue.SimpleQueue[bool]]:
        """Begin to read. The caller holds the lock."""
        gate: queue.SimpleQueue[bool] = queue.SimpleQueue()
        step = self.handle.read(count, self._offset)
        if isinstance(step, Wait):

            def then(_: Wait[bytes]) -> None:
                gate.put(_SETTLED)
                self._call_ready()

            step.subscribe(then)
            self._waiting = step, gate
            self._end_if_interrupted()
        return step, gate

    def _call_ready(self) -> None:
        call, self._on_ready = self._on_ready, None
        if call is not None:
            call()

    def when_ready(self, call: Callable[[], None]) -> None:
        """See `File`."""
        with self._link.lock:
            self._link.require()
            if self.handle.closed:
                call()
                return
            self._begun = self._begun or self._begin(READ_BYTES)
            self._on_ready = call
            step = self._begun[0]
            if not isinstance(step, Wait) or step.settled or self._waiting is None:
                self._call_ready()

    def _wait(self, step: Wait[bytes], gate: queue.SimpleQueue[bool], timeout: float | None) -> bytes:
        try:
            return self._link.finish(step, gate, timeout)
        except (MqfsError, TimeoutError):
            raise
        except BaseException:
            with self._link.lock, contextlib.suppress(MqfsError):
                if step.settled:
                    self.handle.push_back(step.result())
            raise
        finally:
            self._waiting = None

    def _end_if_interrupted(self) -> None:
        if self._interrupted and self._waiting is not None:
            step, gate = self._waiting
            if step.cancel():
                self._interrupted, self._waiting = False, None
                gate.put(_INTERRUPTED)
                self._call_ready()

    def interrupt(self) -> None:
        with self._link.lock:
            self._interrupted = True
            self._end_if_interrupted()

    def write(self, data: bytes) -> None:
        self._link.do(lambda: self.handle.write(data))

    def send(self, data: bytes) -> Callable[..., object]:
        failed: list[MqfsError] = []
        try:
            self.write(data)
        except MqfsError as error:
            failed.append(error)

        def wait(deadline: float | None = None) -> None:
            if failed:
                raise failed[0]

        return wait

    def begin_read(self) -> None:
        pass

    def look_up(self, path: str) -> Callable[[], bool]:
        return lambda: self._link.look_up([path])()[0]

    def ask(self, data: bytes, timeout: float | None = None) -> bytes:
        try:
            self._link.do(lambda: self.handle.write(data), timeout)
        except MqfsError:
            self.receive()  # the error text
            raise
        return self.receive()

    def close(self) -> None:
        with self._link.lock:
            self.handle.close()

    def __del__(self) -> None:
        if not self.handle.closed:
            self._link.dropped.append(self.handle)


# ---------------------------------------------------------------- the store and its lock

_opened: WeakSet[DiskStore] = WeakSet()


def _leave_stores() -> None:
    for store in _opened:
        store.leave_to_parent()


os.register_at_fork(after_in_child=_leave_stores)


def open_store(path: str, post: Callable[[Callable[[], None]], None]) -> DiskStore:
    """Open a store. Raises BadStore; if another process has it open, the text says how to reach that process."""
    check_alone(path)
    try:
        _opened.add(store := DiskStore(path, post))
        return store
    except BadStore as error:
        holder = re.search(r"in use by process (\d+)$", error.detail)
        if holder is None:
            raise
        raise BadStore(error.detail + _advice(int(holder[1]))) from None


def _advice(pid: int) -> str:
    if pid == os.getpid():
        return " (this process: use its client, from any thread)"
    addresses = listening(pid)
    if addresses:
        return f" (expected mqfs.connect({addresses[0]!r}))"
    return " (expected mqfs.connect(ADDRESS), if it is a server)"


def listening(pid: int) -> list[str]:
    """Return the unix sockets that a process listens at; none if the kernel hides them from this user."""
    addresses = []
    with contextlib.suppress(OSError):
        sockets = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                words = line.split(maxsplit=7)
                listens = len(words) == 8 and words[3:5] == ["00010000", "0001"]  # SOCK_STREAM: no attach socket
                if listens and f"socket:[{words[6]}]" in sockets:
                    folder = os.readlink(f"/proc/{pid}/cwd")
                    addresses.append(f"unix!{os.path.join(folder, words[7].rstrip(chr(10)))}")
    return addresses
