"""The state file of the bridges of one folder and group: which messages they have imported.

A line is an id, and when it expires. Bridges of one machine share it: each appends what it imported, and reads what the
others did. A lost file, or one of another machine, costs repeats that the group's `dedup` finds.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, NamedTuple

REWRITE_LINES = 10_000  # that are of no use any more, before the file is written again


class Import(NamedTuple):
    """A message that was imported."""

    id: str
    expires_ms: int


class Seen:
    """Raises OSError."""

    def __init__(self, path: str) -> None:
        self._path = path
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self._file = self._open()
        self._imports: dict[str, Import] = {}
        self._lines = 0  # read of the file
        self._rest = b""  # a line without its end
        with self._locked():
            pass

    def __contains__(self, id: str) -> bool:
        return id in self._imports

    def __len__(self) -> int:
        return len(self._imports)

    def _open(self) -> IO[bytes]:
        file = open(self._path, "a+b", buffering=0)  # noqa: SIM115 - it is open as long as this is
        file.seek(0)
        return file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The file is this bridge's alone, and all of it was read."""
        while True:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if self._is_current():
                break
            self._file.close()  # another bridge wrote it again
            self._file, self._imports, self._lines, self._rest = self._open(), {}, 0, b""
        try:
            self._read()
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _read(self) -> None:
        *lines, self._rest = (self._rest + (self._file.read() or b"")).split(b"\n")
        self._lines += len(lines)
        for line in lines:
            id, _, expires = line.decode(errors="replace").partition(" ")
            if expires.isascii() and expires.isdigit() and len(expires) < 20:
                self._imports[id] = Import(id, int(expires))

    def add(self, imports: Sequence[Import]) -> None:
        """Note them, after they were appended to the group."""
        with self._locked():
            before = b"\n" if self._rest else b""  # which ends what a bridge that was killed has begun
            self._file.write(before + b"".join(map(_line, imports)))
            self._rest = b""
            self._lines += len(imports)
            self._imports.update((one.id, one) for one in imports)

    def refresh(self) -> None:
        """Read what other bridges have noted."""
        with self._locked():
            pass

    def forget(self, is_over: Callable[[Import], bool]) -> None:
        """Remember some no more."""
        self._imports = {one.id: one for one in self._imports.values() if not is_over(one)}
        if self._lines - len(self._imports) > REWRITE_LINES:
            self._rewrite()

    def _rewrite(self) -> None:
        with self._locked():
            fresh = f"{self._path}.new"
            with open(fresh, "wb") as file:
                file.writelines(map(_line, self._imports.values()))
            os.replace(fresh, self._path)
        self.refresh()

    def close(self) -> None:
        self._file.close()


def _line(one: Import) -> bytes:
    return f"{one.id} {one.expires_ms}\n".encode()
