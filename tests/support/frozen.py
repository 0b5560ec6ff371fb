"""A socket before a server's, which can stop to pass on what that says, and a mount behind it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.server import COMMAND, Server, unmount


class Frozen:
    """A socket before a server's. Once frozen, one more connection is answered its attach, and the next nothing."""

    def __init__(self, path: Path, server: str) -> None:
        self.path, self.server = path, server.removeprefix("unix!")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.answers: Iterator[Iterable[int]] = itertools.repeat(itertools.count())  # of each connection
        self.open: list[socket.socket] = []  # a client's, and the server's for it, in turn
        self.muted: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self.listener.accept()
                theirs = socket.socket(socket.AF_UNIX)
                try:
                    theirs.connect(self.server)
                except OSError:  # it is away, or about to listen
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
        """Pass on no more answers of the server to the clients of now."""
        self.muted.update(self.open[1::2])

    def freeze(self) -> None:
        self.answers = itertools.chain([range(2)], itertools.repeat(()))  # Rversion, Rattach
        self.end()

    def end(self) -> None:
        for one in self.open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextlib.contextmanager
def mounted_behind(folder: Path, server: Server, more: str = "") -> Iterator[tuple[Frozen, Server]]:
    """A mount at `mq` of the folder, of a Frozen before that server. `more`: addresses."""
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
    finally:  # no client comes any more
        frozen.listener.close()
        frozen.end()
