"""`mqfs serve` as a real process: a test starts it, waits until it is ready, kills it, and starts it again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import mqfs as library
from mqfs.client import Client
from mqfs.ring.server import fd_keeper
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.forked import Forked

COMMAND = [sys.executable, "-m", "mqfs"]
SERVE = (*COMMAND, "serve")
AT_START = ("PYTHON", "LD_", "MALLOC_", "LC_", "LANG")  # variables that a process reads at its start
NO_FUSE = "/dev/fuse is missing or may not be opened: load the fuse module, or chmod 666 /dev/fuse"


def environment(**more: str) -> dict[str, str]:
    """Return our environment, with which the sources are found from any directory."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


def mqfs(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself; standard input is empty."""
    return run([*COMMAND, *arguments], cwd=cwd, env=environment(**more), text=True)


def start(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], **more: Any) -> subprocess.Popen[Any]:
    """Start a Python that imports our modules: forked from one that has imported them, if that makes no difference."""
    ours = environment()
    changed = (name for name in {*ours, *env} - {"PYTHONUNBUFFERED"} if env.get(name) != ours.get(name))
    same = command[0] == sys.executable and not any(name.startswith(AT_START) for name in changed)
    return (Forked if same else subprocess.Popen)([*command], cwd=cwd, env=env, **more)


def run(command: Sequence[str], *, input: Any = None, **more: Any) -> subprocess.CompletedProcess[Any]:
    """Start a process as `start`, wait for its end, and return its output."""
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with start(command, **{"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}) as process:
        try:
            output, errors = process.communicate(input, timeout=HANG_S)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


class Ready:
    """A NOTIFY_SOCKET that receives the messages of a server."""

    def __init__(self, folder: Path, *, abstract: bool = False) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = f"@mqfs-test-{os.getpid()}-{id(self)}" if abstract else str(folder / f".notify-{id(self):x}")
        self.socket.bind("\0" + self.address[1:] if abstract else self.address)
        if not abstract:
            os.chmod(self.address, 0o666)  # the server may run as another user
        self.socket.settimeout(0.05)

    def next(self) -> str | None:
        try:
            return self.socket.recv(4096).decode()
        except TimeoutError:
            return None

    def close(self) -> None:
        self.socket.close()
        if not self.address.startswith("@"):
            os.unlink(self.address)


class Server:
    """A server that is ready. `log` has its output. `program`: the command to run instead of `mqfs serve`. A command
    `python -m` is forked from a process that has imported our modules (forked.py)."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        mount: Path | None = None,
        program: Sequence[str] = SERVE,
        transport: str = "9p",
        **more: str,
    ) -> None:
        self.folder, self.mount, self.program, self.transport, self.more = cwd, mount, program, transport, more
        self.arguments = [*arguments, *([] if mount is None else ["--mount", str(mount)])]
        self.address = next((word for word in arguments if word.startswith("unix!")), "")
        self.log = cwd / "server.log"
        self.start()

    @classmethod
    def at(cls, folder: Path, *options: str, mount: bool = False, **more: Any) -> Server:
        """Start a server over the store of a folder, on its `socket`; with `mount` also mounted at its `mq`."""
        if mount:
            (folder / "mq").mkdir(exist_ok=True)
            more["mount"] = folder / "mq"
        return cls("--store", f"{folder}/store", "--listen", f"unix!{folder}/socket", *options, cwd=folder, **more)

    def start(self) -> None:
        ready = Ready(self.folder)
        try:
            with open(self.log, "ab") as log:
                self.process = self._run(log.fileno(), environment(NOTIFY_SOCKET=ready.address, **self.more))
            try:
                eventually(lambda: self._is_ready(ready), f"the server: {self.text()}")
            except BaseException:
                self.kill()
                raise
        finally:
            ready.close()

    def _run(self, log: int, environ: dict[str, str]) -> subprocess.Popen[Any]:
        kind = start if tuple(self.program[:2]) == SERVE[:2] else subprocess.Popen
        command = [*self.program, *self.arguments]
        return kind(command, cwd=self.folder, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _is_ready(self, ready: Ready) -> bool:
        assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text()}"
        return ready.next() == "READY=1"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def path(self) -> Path:
        """The mount point."""
        assert self.mount is not None
        return self.mount

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code. After SIGKILL the dead mount stays, as it does for a user."""
        self.process.send_signal(number)
        return self.process.wait(HANG_S)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def restart(self, number: int = signal.SIGKILL) -> None:
        """End the server by a signal, and start it again."""
        self.stop(number)
        self.start()

    def connect(self, **options: Any) -> Client:
        return library.connect(self.address, **{"transport": self.transport, **options})

    def group(self, name: str, *ctl: str, streams: Sequence[str] = ()) -> Path:
        """Make a group in the mount, with settings and streams."""
        path = self.path / name
        path.mkdir()
        if ctl:
            (path / "ctl").write_text("".join(f"{line}\n" for line in ctl))
        for stream in streams:
            (path / stream).touch()
        return path

    def close(self) -> None:
        """End the server, in whatever state, and unmount. Asserts that its log has no traceback."""
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            self.process.kill()
            self.process.wait()
            if self.mount is not None:
                unmount(self.mount)
        assert "Traceback" not in self.text(), self.text()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(*([AssertionError] if kind is not None else [])):  # the first failure is more useful
            self.close()


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder whose name fits into the path of a socket, and which other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="mqfs-", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        yield Path(name)
        end_keepers(Path(name))


def keepers(path: Path) -> list[int]:
    """Return the fd keepers of servers over a store, or over stores below a folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if os.fsencode(fd_keeper.__file__) in words and (words[-2] + b"/").startswith(os.fsencode(path) + b"/"):
                found.append(int(pid))
    return found


def end_keepers(folder: Path) -> None:
    """End the fd keepers of servers that were killed and not started again."""
    for pid in keepers(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def can_mount() -> bool:
    return os.access("/dev/fuse", os.R_OK | os.W_OK)


def mounted(path: Path) -> bool:
    """Whether there is a mount, dead or alive."""
    with open("/proc/self/mountinfo", "rb") as file:
        return any(line.split(b" ")[4].replace(b"\\040", b" ") == os.fsencode(path.absolute()) for line in file)


def unmount(path: Path) -> None:
    """Unmount, also after a server that was killed."""
    while mounted(path):
        command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*command, str(path)], check=True, capture_output=True)
