"""The folder of qlobber-fsq: its layout, and how files get into it and out of it.

```
DIR/staging/NAME        being written          DIR/topics/BB/NAME    rest of a long topic
DIR/messages/BB/NAME    published              DIR/update/UPDATE     random bytes for each bucket, new with each file
```
A file is one byte 0 and the payload; of no bytes: its message was handled. Raises OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO

from mqfs.bridge.names import Name, bucket_number
from mqfs.errors import BadConfig

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
STAMP_BYTES = 32
BUSY_S = 0.1  # before a rename that met EBUSY is tried again, as network file systems want it


def _digits(number: int, base: int, width: int) -> str:
    text = ""
    for _ in range(width):
        number, digit = divmod(number, base)
        text = DIGITS[digit] + text
    return text


def bucket_names(found: Iterable[str]) -> list[str]:
    """The names of all buckets, from those that are there. Raises BadConfig where these are not all of a base."""
    names = sorted(name for name in found if not name.startswith("."))
    width, count = len(names[0]) if names else 0, len(names)
    base = next((base for base in range(1, len(DIGITS) + 1) if width and base**width == count), 0)
    expected = [_digits(number, base, width) for number in range(count)] if base > 1 else ["0"]
    if not base or (names != expected and names != ["0" * width]):
        raise BadConfig(f"messages: {count} buckets (expected those of a folder of qlobber-fsq, as 00 to ff)")
    return names


class Folder:
    """One folder. `sync`: files and directories that are written are on disk before a call returns."""

    def __init__(self, path: str, *, sync: bool = True) -> None:
        self.path, self._sync = os.path.realpath(path), sync
        try:
            found = os.listdir(f"{self.path}/messages")
        except FileNotFoundError:
            raise BadConfig(f"{path}: no messages in it (expected a folder that qlobber-fsq has made)") from None
        self.buckets = bucket_names(found)
        for bucket in self.buckets:
            with contextlib.suppress(FileExistsError):
                os.makedirs(f"{self.path}/topics/{bucket}")
        for other in ("staging", "update"):
            os.makedirs(f"{self.path}/{other}", exist_ok=True)
        self._stamp_bytes = self._measure_stamps()

    # ------------------------------------------------------------ paths

    def bucket_of(self, name: str) -> str:
        return self.buckets[bucket_number(name, len(self.buckets))]

    def bucket_path(self, bucket: str) -> str:
        return f"{self.path}/messages/{bucket}"

    def message_path(self, bucket: str, name: str) -> str:
        return f"{self.path}/messages/{bucket}/{name}"

    def _topic_path(self, bucket: str, name: str) -> str:
        return f"{self.path}/topics/{bucket}/{name}"

    @property
    def update_path(self) -> str:
        return f"{self.path}/update/UPDATE"

    # ------------------------------------------------------------ stamps

    def _measure_stamps(self) -> int:
        """Bytes of a bucket's stamp: 0 where there is no UPDATE, the usual ones where it has another size."""
        try:
            size = os.stat(self.update_path).st_size
        except FileNotFoundError:
            return 0
        whole = size and size % len(self.buckets) == 0
        return size // len(self.buckets) if whole else STAMP_BYTES

    def read_stamps(self) -> list[bytes] | None:
        """The stamps of all buckets; None: there is no UPDATE, or it is not whole."""
        size = self._stamp_bytes
        try:
            with open(self.update_path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        if not size or len(data) < size * len(self.buckets):
            return None
        return [data[at : at + size] for at in range(0, size * len(self.buckets), size)]

    def stamp(self, buckets: Iterable[str]) -> None:
        """Have readers scan these buckets."""
        if not self._stamp_bytes:
            return
        file = os.open(self.update_path, os.O_CREAT | os.O_WRONLY, 0o666)
        try:
            for bucket in buckets:
                place = self.buckets.index(bucket) * self._stamp_bytes
                os.pwrite(file, os.urandom(self._stamp_bytes), place)
        finally:
            os.close(file)

    # ------------------------------------------------------------ writing

    def publish(self, name: Name, rest: str, body: Iterable[bytes], stopping: threading.Event) -> str | None:
        """Write a message's file and put it into its bucket, which is returned; None: it is there already.

        `settle` comes after one or several of them.
        """
        text = str(name)
        bucket = self.bucket_of(text)
        path, staged = self.message_path(bucket, text), f"{self.path}/staging/{text}"
        if os.path.lexists(path):
            return None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staged)  # of a bridge that was killed
        with self._writer(staged, exclusive=True) as file:
            file.write(b"\0")
            file.writelines(body)
        if rest:
            with self._writer(self._topic_path(bucket, text), exclusive=False) as file:
                file.write(rest.encode())
            self._sync_directory(self._topic_path(bucket, ""))
        while True:
            try:
                os.rename(staged, path)
                return bucket
            except OSError as error:
                if error.errno != errno.EBUSY or stopping.wait(BUSY_S):
                    raise

    @contextmanager
    def _writer(self, path: str, *, exclusive: bool) -> Iterator[IO[bytes]]:
        with open(path, "xb" if exclusive else "wb") as file:
            yield file
            if self._sync:
                file.flush()
                os.fsync(file.fileno())

    def settle(self, buckets: Iterable[str]) -> None:
        """Stamp the buckets of files that were published, and have their directories on disk."""
        buckets = set(buckets)
        self.stamp(buckets)
        for bucket in buckets:
            self._sync_directory(self.bucket_path(bucket))

    def _sync_directory(self, path: str) -> None:
        if self._sync:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    # ------------------------------------------------------------ reading

    def files(self, bucket: str) -> list[str]:
        return os.listdir(self.bucket_path(bucket))

    def read_rest(self, bucket: str, name: Name) -> str:
        """What of its topic is not in the name. Raises FileNotFoundError where that is not there."""
        if not name.long:
            return ""
        with open(self._topic_path(bucket, str(name)), "rb") as file:
            rest = file.read().decode(errors="replace")
        if not rest:
            raise FileNotFoundError(errno.ENOENT, "the rest of the topic is empty", file.name)
        return rest

    def status(self, bucket: str, name: str) -> os.stat_result:
        return os.stat(self.message_path(bucket, name))

    def open(self, bucket: str, name: str) -> IO[bytes]:
        return open(self.message_path(bucket, name), "rb")

    @contextmanager
    def lock(self, bucket: str, name: str) -> Iterator[IO[bytes] | None]:
        """The file of a single, locked and not handled yet; None: it is another's, or was handled."""
        with contextlib.ExitStack() as stack:
            file = None
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(open(self.message_path(bucket, name), "r+b"))
            yield file if file is not None and self._is_to_do(bucket, name, file) else None

    def _is_to_do(self, bucket: str, name: str, file: IO[bytes]) -> bool:
        """Lock it, unless another has the lock; what was handled and is still there is removed."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        status = os.fstat(file.fileno())
        if status.st_nlink and not status.st_size:
            self.remove(bucket, name)
        return bool(status.st_nlink and status.st_size)

    def finish(self, bucket: str, name: str, file: IO[bytes]) -> None:
        """Remove a locked single that was handled."""
        os.ftruncate(file.fileno(), 0)
        if self._sync:
            os.fsync(file.fileno())
        self.remove(bucket, name)

    def remove(self, bucket: str, name: str) -> None:
        """Remove the files of a message."""
        for path in (self.message_path(bucket, name), self._topic_path(bucket, name)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def staged(self) -> list[str]:
        return os.listdir(f"{self.path}/staging")

    def unstage(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.path}/staging/{name}")
