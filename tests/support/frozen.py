"""A proxy between a mount and its server, which can stop passing on the server's answers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.server import COMMAND, Server, unmount


class Frozen:
    """A proxy socket of a server. When it is frozen, the next connection gets two answers, to its version and attach;
    later connections get none."""

    def __init__(self, path: Path, server: str) -> None:
        self.path, self.server = path, server.removeprefix("unix!")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.answers: Iterator[Iterable[int]] = itertools.repeat(itertools.count())  # answers to pass on, by connection
        self.open: list[socket.socket] = []  # pairs: the socket of a client, and its socket to the server
        self.muted: set[socket.socket] = set()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self.listener.accept()
                theirs = socket.socket(socket.AF_UNIX)
                try:
                    theirs.connect(self.server)
                except OSError:  # the server is down, or has not started to listen
                    ours.close()
                    theirs.close()
                    continue
                self.open += (ours, theirs)
                threading.Thread(target=self._pass, args=(ours, theirs, itertools.count()), daemon=True).start()
                threading.Thread(target=self._pass, args=(theirs, ours, next(self.answers)), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, times: Iterable[int]) -> None:
        with contextlib.suppress(OSError):
            for _ in times:
                if not (data := source.recv(1 << 16)):
                    break
                if source not in self.muted:
                    target.sendall(data)

    def mute(self) -> None:
        """Stop passing on answers of the server to the present clients."""
        self.muted.update(self.open[1::2])

    def freeze(self) -> None:
        self.answers = itertools.chain([range(2)], itertools.repeat(()))  # Rversion, Rattach
        self.end()

    def end(self) -> None:
        for one in self.open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        """End all connections, and the thread that accepts them, which would wait for ever on a closed socket."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self.listener.close()
        self.end()


@contextlib.contextmanager
def mounted_behind(folder: Path, server: Server, more: str = "") -> Iterator[tuple[Frozen, Server]]:
    """Mount a server, through a Frozen, at `mq` in the folder. `more`: further addresses for `mqfs mount`."""
    (folder / "mq").mkdir()
    (folder / "mount").mkdir()
    frozen = Frozen(folder / "frozen", server.address)
    words = [*COMMAND, "mount", f"unix!{frozen.path}{more}", str(folder / "mq")]
    try:
        with Server(cwd=folder / "mount", program=words) as mount:
            try:
                yield frozen, mount
            finally:
                unmount(folder / "mq")
    finally:  # no client connects any more
        frozen.close()
