"""A mount: the checks before it, mounting, serving, unmounting.

Root mounts with mount(2); an ordinary user through fusermount3, which passes the device on a socket. Requests are
answered in device_loop.py. A process has one mount, as pyfuse3's state is global.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import logging
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyfuse3
import trio

from mqfs.engine.tree.tree import Tree
from mqfs.errors import MountError
from mqfs.fuse.backend import Backend, Files, LocalTree, Nodes
from mqfs.fuse.device_loop import DeviceLoop

log = logging.getLogger("mqfs.fuse")
ABORTED = "{} s: a mount in which a read waits longer is aborted"

DEVICE = "/dev/fuse"
CONFIG = "/etc/fuse.conf"
MS_NOSUID, MS_NODEV = 2, 4
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
SOCKET_BYTES = 4 << 20  # requested; the system may grant less
PATIENCE_S = 1.0  # for which an unmount waits for open files

_libc = ctypes.CDLL(None, use_errno=True)


# ------------------------------------------------------------ the mount table


def unescape(field: str) -> str:
    """Decode a path as /proc/self/mountinfo writes it."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def mounts() -> Iterator[tuple[str, str, str]]:
    """Yield the path, type and device number of each mounted file system, the latest mount last."""
    with open("/proc/self/mountinfo", "rb") as table:  # bytes: in text some characters of a path end a line or field
        for line in table:
            fields = [os.fsdecode(field) for field in line.split(b" ")]
            yield unescape(fields[4]), fields[fields.index("-", 6) + 1], fields[2]


def top_mount(path: str) -> tuple[str, str]:
    """Return the type and the device number of the file system last mounted at a path, or "" twice."""
    found = "", ""
    for where, kind, number in mounts():
        if where == path:
            found = kind, number
    return found


def mounted(path: str) -> str:
    """Return the type of the file system mounted at a path, or ""."""
    return top_mount(path)[0]


def unmount(path: str, *, lazily: bool = False) -> None:
    """Unmount what is mounted at a path. Raises OSError."""
    if os.geteuid() == 0:
        if _libc.umount2(os.fsencode(path), UMOUNT_NOFOLLOW | (MNT_DETACH if lazily else 0)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return
    command = ["fusermount3", "-u", *(["-z"] if lazily else []), "--", path]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(errno.EBUSY, done.stderr.strip(), path)


# ------------------------------------------------------------ before mounting


def check_mountpoint(path: str) -> str:
    """Return the real path of a directory to mount on. Unmounts a dead server's stale mount. Raises MountError."""
    real = os.path.realpath(path)
    try:
        os.stat(real)
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
            raise MountError(f"{path}: {error.strerror} (expected an existing directory)") from None
        clean(real)
    if not stat.S_ISDIR(os.stat(real).st_mode):
        raise MountError(f"{path}: not a directory (expected an empty directory)")
    kind = mounted(real)
    if kind:
        pid = server_of(real)
        by, remedy = (f" by process {pid}", f"kill {pid}") if pid else ("", f"umount {path}")
        raise MountError(f"{path}: {kind} is mounted there{by} (expected '{remedy}' before, or another directory)")
    try:
        if os.listdir(real):
            raise MountError(f"{path}: not empty (expected an empty directory)")
    except OSError as error:
        raise MountError(f"{path}: {error.strerror}") from None
    return real


def server_of(real: str) -> int:
    """Return the process that serves the FUSE mount at a path; 0 if it is another user's or the kernel does not say."""
    connection = f"fuse_connection:\t{os.minor(os.stat(real).st_dev)}\n"
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for file in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{file}") == DEVICE:
                    with open(f"/proc/{pid}/fdinfo/{file}", encoding="ascii") as info:
                        if connection in info.readlines():
                            return int(pid)
    return 0


def clean(real: str) -> None:
    """Unmount the stale mount of a dead server. Raises MountError."""
    log.info("%s: stale mount of a dead server unmounted", real)
    try:
        while mounted(real):
            unmount(real, lazily=True)
        os.stat(real)
    except OSError as error:
        raise MountError(f"{real}: stale mount of a dead server not unmounted: {error.strerror}") from None


def check_device() -> None:
    """Raise MountError if there is no usable FUSE device."""
    if not os.path.exists(DEVICE):
        raise MountError(f"{DEVICE} does not exist (expected the kernel's fuse module, or --listen to serve 9P)")
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise MountError(f"{DEVICE}: permission denied (expected mode 666, or --listen to serve 9P)")


def request_timeouts() -> dict[str, int]:
    """Return the seconds after which this kernel ends requests (0: never), by setting. Empty in old kernels."""
    found = {}
    for name in ("default_request_timeout", "max_request_timeout"):
        with contextlib.suppress(OSError), open(f"/proc/sys/fs/fuse/{name}", encoding="ascii") as file:
            found[f"fs.fuse.{name}"] = int(file.read())
    return found


def others_allowed(wanted: bool | None) -> bool:
    """Whether others may use the mount: root's unless refused, a user's if asked and permitted. Raises MountError."""
    if os.geteuid() == 0:
        return wanted is not False
    if not wanted:
        return False
    with contextlib.suppress(OSError), open(CONFIG, encoding="utf-8", errors="replace") as config:
        if any(line.strip() == "user_allow_other" for line in config):
            return True
    raise MountError(f"allow_other: not permitted to users (expected a line user_allow_other in {CONFIG})")


# ------------------------------------------------------------ mounting


def mount(path: str, *, allow_other: bool, source: str = "mqfs") -> int:
    """Mount on a checked path and return the device. Raises MountError."""
    for name, seconds in request_timeouts().items():
        if seconds:
            log.warning("%s is %s (expected sysctl -w %s=0)", name, ABORTED.format(seconds), name)
    as_self = mount_as_root if os.geteuid() == 0 else mount_as_user
    device = as_self(path, allow_other, source)
    os.set_blocking(device, False)
    os.set_inheritable(device, False)
    return device


def mount_as_root(path: str, allow_other: bool, source: str) -> int:
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    others = ",allow_other" if allow_other else ""
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0{others}"
    if _libc.mount(os.fsencode(source), os.fsencode(path), b"fuse.mqfs", MS_NOSUID | MS_NODEV, options.encode()):
        number = ctypes.get_errno()
        os.close(device)
        hint = " (expected CAP_SYS_ADMIN)" if number == errno.EPERM else ""
        raise MountError(f"{path}: {os.strerror(number)}{hint}")
    return device


def mount_as_user(path: str, allow_other: bool, source: str) -> int:
    """Mount through fusermount3: it is set-uid root, opens the device, mounts, and sends the descriptor."""
    program = shutil.which("fusermount3")
    if program is None:
        raise MountError("fusermount3 not found, which an ordinary user needs (apt install fuse3)")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        name = source.replace("\\", "\\\\").replace(",", "\\,")
        options = f"fsname={name},subtype=mqfs" + (",allow_other" if allow_other else "")
        done = subprocess.run(
            [program, "-o", options, "--", path],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        theirs.close()
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["fusermount3 failed"]
            raise MountError(f"{path}: {lines[-1].removeprefix('fusermount3: ')}")
        return received_descriptor(ours)


def received_descriptor(connection: socket.socket) -> int:
    numbers = array.array("i")
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(numbers.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: numbers.itemsize])
            return numbers[0]
    raise MountError("fusermount3: no descriptor received")


# ------------------------------------------------------------ serving


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return our end and libfuse's end of a socket pair, which keeps requests and replies whole and in order."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return ours, theirs


class Links(pyfuse3.Operations):
    """The requests that are passed to pyfuse3, all refused: there are no links."""

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext) -> Any:
        raise pyfuse3.FUSEError(errno.EPERM)

    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext) -> Any:
        raise pyfuse3.FUSEError(errno.EPERM)

    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> Any:
        raise pyfuse3.FUSEError(errno.EINVAL)


class FuseMount:
    """The tree, mounted. Call `attach`, then `run`, and `stop` once the tree was closed."""

    def __init__(
        self,
        tree: Tree | Backend,
        path: str,
        *,
        allow_other: bool | None = None,
        trace: Callable[[str], None] | None = None,
        source: str = "mqfs",
    ) -> None:
        """`trace`: called with a line for each request and reply. `source`: the device in the table of mounts."""
        self.path, self.allow_other, self.trace, self.source = path, allow_other, trace, source
        self.tree: Any = tree
        self.backend: Backend = LocalTree(tree) if isinstance(tree, Tree) else tree
        self.nodes, self.files = Nodes(tree), Files()
        self.device = -1
        self._number = ""  # its device number: later another server's mount may be at the same path
        self.loop: DeviceLoop | None = None
        self.processes = Watcher()
        self._scope = trio.CancelScope()
        self.ended = trio.Event()

    async def attach(self) -> None:
        """Check and mount. Raises MountError, with nothing mounted."""
        await trio.to_thread.run_sync(self._attach)

    def _attach(self) -> None:
        check_device()
        allow_other = others_allowed(self.allow_other)
        self.path = check_mountpoint(self.path)
        self.device = mount(self.path, allow_other=allow_other, source=self.source)
        self._number = top_mount(self.path)[1]

    def is_mounted(self) -> bool:
        """Whether the mount still exists, on top at its path."""
        return self._number != "" and top_mount(self.path)[1] == self._number

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until unmounted, by `stop` or from outside. Reports started once the mount answers."""
        ours, theirs = make_pair()
        self.loop = loop = DeviceLoop(self.backend, self.nodes, self.files, self.device, ours)
        if self.trace is not None:
            loop.device.trace(self.trace)
        pyfuse3.init(Links(), f"/dev/fd/{theirs.fileno()}", set())
        theirs.detach()  # libfuse closes it
        self.tree.processes = self.processes
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pyfuse3.main)
                    nursery.start_soon(loop.replies)
                    nursery.start_soon(self.processes.run)
                    nursery.start_soon(self._announce, task_status)
                    await loop.requests()
                    nursery.cancel_scope.cancel()
        finally:
            self._end(ours)

    async def _announce(self, task_status: trio.TaskStatus[None]) -> None:
        await trio.to_thread.run_sync(os.stat, self.path, abandon_on_cancel=True)
        task_status.started()

    def _end(self, ours: socket.socket) -> None:
        """Unmount in every case, and close all files."""
        with contextlib.suppress(OSError):
            if self.is_mounted():
                unmount(self.path, lazily=True)
        for where in [where for where, _, number in mounts() if number == self._number]:
            log.warning("%s: a dead mount stays, covered or moved (expected 'umount %s')", self.path, where)
        if self.loop is not None:
            self.loop.close()
        self.files.close_all()  # before the device: late replies must not go to a reused descriptor
        os.close(self.device)
        ours.close()
        pyfuse3.close(unmount=False)
        self.tree.processes = None
        self.processes.close()
        self.ended.set()

    async def stop(self) -> None:
        """Unmount. Call it after the tree was closed: parked requests have been answered then."""
        if self.ended.is_set() or self.device < 0:
            return
        if self.loop is None:  # it never ran
            if self.is_mounted():
                unmount(self.path, lazily=True)
            os.close(self.device)
            return
        self.loop.close()
        with trio.CancelScope(shield=True):
            try:
                await self._unmount()
            finally:
                self._scope.cancel()
                await self.ended.wait()

    async def _unmount(self) -> None:
        """Retry while clients close their files, then unmount lazily."""
        deadline = trio.current_time() + PATIENCE_S
        while self.is_mounted():
            lazily = trio.current_time() > deadline
            try:
                await trio.to_thread.run_sync(partial(unmount, self.path, lazily=lazily))
            except OSError as error:
                if lazily:
                    log.error("%s: not unmounted: %s", self.path, error.strerror)
                    return
                await trio.sleep(0.02)


# ---------------------------------------------------------------- ends of processes: a pidfd each, one epoll, one task

EVENTS = 64  # ends of processes handled before other tasks run


class Watched:
    """A process whose end is awaited, with the functions to call then."""

    __slots__ = ("fd", "pid", "thens")

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self.fd = pid, fd
        self.thens: dict[object, Callable[[], None]] = {}

    def is_the(self, pid: int) -> bool:
        """Whether that number still belongs to this process."""
        try:
            signal.pidfd_send_signal(self.fd, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.pid == pid


class Watcher:
    """The engine's `ProcessWatcher`, active while `run` runs."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._by_pid: dict[int, Watched] = {}
        self._by_fd: dict[int, Watched] = {}

    def __len__(self) -> int:
        return len(self._by_fd)

    def watch(self, pid: int, then: Callable[[], None]) -> Callable[[], None] | None:
        """See `ProcessWatcher`."""
        watched = self._by_pid.get(pid)
        if watched is None or not watched.is_the(pid):
            try:
                watched = self._open(pid)
            except OSError as error:
                if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
                    return None
                log.error("process %d not watched: %s; its claims return when it closes the file", pid, error)
                return nothing
        key = object()
        watched.thens[key] = then

        def stop() -> None:
            watched.thens.pop(key, None)
            if not watched.thens:
                self._forget(watched)

        return stop

    def _open(self, pid: int) -> Watched:
        if pid <= 0:
            raise ProcessLookupError(errno.ESRCH, "no process")
        fd = os.pidfd_open(pid)
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except BaseException:
            os.close(fd)
            raise
        watched = self._by_pid[pid] = self._by_fd[fd] = Watched(pid, fd)
        return watched

    def _forget(self, watched: Watched) -> None:
        """Close the descriptor of a process. Does nothing the second time."""
        if self._by_fd.get(watched.fd) is not watched:
            return
        del self._by_fd[watched.fd]
        if self._by_pid.get(watched.pid) is watched:
            del self._by_pid[watched.pid]
        self._epoll.unregister(watched.fd)
        os.close(watched.fd)

    async def run(self) -> None:
        """Handle the ends of processes for ever."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for fd, _ in self._epoll.poll(0, EVENTS):
                watched = self._by_fd.get(fd)
                if watched is not None:
                    self._ended(watched)

    def _ended(self, watched: Watched) -> None:
        self._forget(watched)
        while watched.thens:
            then = watched.thens.pop(next(iter(watched.thens)))
            try:
                then()
            except Exception:
                log.exception("end of process %d: callback failed", watched.pid)

    def close(self) -> None:
        """Stop all watches."""
        for watched in list(self._by_fd.values()):
            self._forget(watched)
        self._epoll.close()


def nothing() -> None:
    pass
