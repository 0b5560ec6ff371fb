"""Processes of Python forked from one that has imported mqfs, as imports take most of the time of a start.

    python -m tests.support.forked LINK [LISTENER MODULE...]
    python -m tests.support.forked FOLDER MODULE...

LINK and LISTENER are descriptors of sockets. The process serves until LINK ends; other programs connect to LISTENER
(fork_client.py). With a folder it serves the program in that folder, until it is killed. A message is a request: the
arguments of `python`, a folder and an environment, with four descriptors: standard input, output and error, and a pipe
for the exit status. The answer is the process number. Modules are imported with all their submodules.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll, select
from types import ModuleType
from typing import Any, NoReturn

REQUEST_BYTES = 1 << 20
ROOMS = (
    "mqfs.bench", "mqfs.bridge", "mqfs.cli", "mqfs.client", "mqfs.engine", "mqfs.fq", "mqfs.http", "mqfs.ninep",
    "mqfs.remote", "mqfs.replica", "mqfs.ring", "mqfs.server", "mqfs.store", "mq_cat", "mq_tools",
    *(["mqfs.fuse"] if importlib.util.find_spec("pyfuse3") else []),
)  # fmt: skip


class Forked(subprocess.Popen[Any]):
    """A subprocess.Popen of [sys.executable, "-m" or "-c", ...] in which our modules are already imported."""

    def __init__(self, words: list[str], *, cwd: Path, env: Mapping[str, str], **more: Any) -> None:
        self._status = -1
        super().__init__(words, cwd=cwd, env=env, **more)

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ) -> None:  # fmt: skip
        """Have the Forker fork the process, instead of fork and exec."""
        assert args[0] == sys.executable, args
        assert not any((preexec_fn, pass_fds, shell)), "no such processes are forked here"
        ends = [own if end == -1 else end for own, end in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid, self._status = Forker.one(env).start([start_new_session, args[1:], str(cwd), env], ends)
        self._child_created = self._closed_child_pipe_fds = True
        devnull = getattr(self, "_devnull", -1)
        pairs = ((p2cwrite, p2cread), (c2pread, c2pwrite), (errread, errwrite))
        for end in {devnull, *(its for ours, its in pairs if ours != -1)} - {-1}:
            os.close(end)

    def _wait(self, timeout: float | None) -> int:
        if (found := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return found

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        return self._look(0)

    def _look(self, timeout: float | None) -> int | None:
        status = poll()  # `select` has a limit of 1,024 descriptors
        status.register(self._status, POLLIN)
        if self.returncode is None and status.poll(None if timeout is None else 1_000 * timeout):
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:  # empty: its Forker has ended
                    self.returncode = int(os.read(self._status, 32) or -signal.SIGKILL)
                    os.close(self._status)
        return self.returncode


class Forker:
    """The process that forks others. Each process of pytest has one, started with the first fork."""

    _one: Forker | None = None

    def __init__(self, environment: Mapping[str, str], *modules: str, listener: socket.socket | None = None) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = [one.fileno() for one in (other, listener) if one is not None]
        command = [sys.executable, "-m", "tests.support.forked", *map(str, passed), *modules]
        with other:
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=passed)

    @classmethod
    def one(cls, environment: dict[str, str]) -> Forker:
        if cls._one is None or cls._one.pid != os.getpid():
            cls._one = cls(environment)
        return cls._one

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, request: list[Any], standard: list[int]) -> tuple[int, int]:
        """Start a process. Return its process number, and the pipe from which its exit status is read."""
        sys.audit("subprocess.Popen", sys.executable, *request[1:])  # see Guard in conftest.py
        status, ended = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [*standard, ended])
                return int(self._socket.recv(32)), status
        finally:
            os.close(ended)


def listening(folder: str) -> socket.socket:
    """Listen for the program `python` in a folder, under a name that other network namespaces do not see."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + folder)
    listener.listen(100)
    return listener


def serve(link: socket.socket | None, *listeners: socket.socket) -> None:
    """Fork a process for each request, and pass on its exit status, until the link ends."""
    links: list[Any] = [*([] if link is None else [link]), *listeners]
    ends: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread that forked processes would not have"
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select([woken, *links], [], [])
        if woken in ready:
            os.read(woken, 4_096)
            reap(ends)
        for one in [one for one in links if one in ready]:
            if one in listeners:
                links.append(one.accept()[0])
                continue
            request, descriptors, _, _ = socket.recv_fds(one, REQUEST_BYTES, 4)
            if not request:
                if one is link:
                    return
                links.remove(one)
                one.close()
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (*(its.detach() for its in links), woken, wake, *ends.values()):
                    os.close(descriptor)
                become(json.loads(request), list(descriptors))
            *standard, ends[pid] = descriptors
            for descriptor in standard:
                os.close(descriptor)
            one.send(b"%d" % pid)


def reap(ends: dict[int, int]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = ends.pop(pid)
        with suppress(BrokenPipeError):  # the program that waited was killed
            os.write(end, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(end)


def become(request: list[Any], descriptors: list[int]) -> NoReturn:
    """Behave as `python WORDS`, and end as that does."""
    alone, words, folder, environment = request
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if alone:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if "PYTHONUNBUFFERED" not in environment:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    # Programs that this process starts may be forked, too, if they need only the standard descriptors.
    sys.executable = os.environ.pop("FORKED_PYTHON", sys.executable)
    how, what, *sys.argv[1:] = words[1:] if words[0] == "-P" else words
    code: Any = 0
    try:
        if how == "-m":
            if not hasattr(sys.modules.get(what), "__path__"):
                sys.modules.pop(what, None)  # runpy runs it as __main__
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)


def leave(code: Any) -> NoReturn:
    """End as Python does, but without the destruction of all modules, which takes tens of milliseconds."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def import_all(modules: Sequence[str]) -> None:
    """Import the modules that forked processes may need."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # no threads of numpy: a forked process could find a lock held by one
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # nor of Arrow
    for name in modules:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            if not module.name.endswith((".__main__", ".client.arrow")):  # Arrow is large and rarely used
                importlib.import_module(module.name)
    gc.freeze()


def main(at: str, *words: str) -> None:
    if at.startswith("/"):
        listener = listening(at)
        import_all(words)
        serve(None, listener)
    else:
        import_all(words[1:] or ROOMS)
        serve(*(socket.socket(fileno=int(descriptor)) for descriptor in (at, *words[:1])))


if __name__ == "__main__":
    main(*sys.argv[1:])
