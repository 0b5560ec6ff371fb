"""The folder of qlobber-fsq: its layout, its names, and how files are written, read and removed.

```
DIR/staging/NAME        being written          DIR/topics/BB/NAME    rest of a long topic
DIR/messages/BB/NAME    published              DIR/update/UPDATE     random bytes for each bucket, new with each file
```
A file is one byte 0 and the payload. An empty file: its message was handled. All calls raise OSError.

Other programs may put any files into the folder. So each directory is opened relative to its parent, and no link is
followed. A FIFO, a socket or a device is never waited for or written.

A name is `TOPIC@(l|s)+EXPIRES+(s|m|d)+UNIQUE`. A long topic is split: its beginning is in the name, the rest in a file
of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import select
import stat
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO

import attrs

from mqfs import limits
from mqfs.errors import BadConfig, BadRequest
from mqfs.records import headers
from mqfs.syntax.names import stream_name, text_of

log = logging.getLogger("mqfs.bridge")

SINGLE, MULTI, DIRECT = "s", "m", "d"
UNIQUE_BYTES = 16
TOPIC_HEADER = headers.TOPIC
_NAME = re.compile(
    r"(?P<topic>.*)@(?P<long>[ls])\+(?P<expires>[0-9a-f]{1,16})\+(?P<kind>[smd])\+(?P<unique>[^+@/]+)", re.S
)
_CUT = re.compile("[\ud800-\udfff]")  # of bytes that are not UTF-8
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
_NUMBER = struct.Struct(">Q")


@attrs.frozen
class Name:
    """The name of a message's file. `topic`: as in the name, encoded or not; with `long` only its beginning."""

    topic: str
    long: bool
    expires_ms: int
    kind: str
    unique: str

    def __str__(self) -> str:
        return f"{self.topic}@{'l' if self.long else 's'}+{self.expires_ms:x}+{self.kind}+{self.unique}"


def parse(text: str) -> Name | None:
    """Parse the name of a file; None: it is not a message of qlobber-fsq."""
    match = _NAME.fullmatch(text)
    if match is None or _CUT.search(text):
        return None
    return Name(match["topic"], match["long"] == "l", int(match["expires"], 16), match["kind"], match["unique"])


def id_of(text: str) -> str:
    """Return a short unique text for the message of a file: UNIQUE, or a digest of the name if that is too short."""
    unique = text.rpartition("+")[2]
    return unique if len(unique) >= UNIQUE_BYTES else hashlib.sha256(text.encode()).hexdigest()


def bucket_number(name: str, buckets: int) -> int:
    """Return the number of the bucket for the file of that name."""
    digest = hashlib.md5(name.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big") % buckets


@attrs.frozen
class Origin:
    """The group from which a bridge writes files. The name of a message's file is the same for all its bridges."""

    store: str
    group: int

    def unique(self, sequence: int) -> str:
        """Return UNIQUE for a message: its sequence, and a digest by which the bridge recognizes its files."""
        number = _NUMBER.pack(sequence)
        text = f"{self.store}/{self.group}/{sequence}".encode()
        return (number + hashlib.sha256(text).digest()[: UNIQUE_BYTES - len(number)]).hex()

    def wrote(self, name: Name) -> bool:
        """Whether a bridge of this group made a name."""
        digits = 2 * _NUMBER.size
        if len(name.unique) != 2 * UNIQUE_BYTES or not _HEX.fullmatch(name.unique):
            return False
        return name.unique == self.unique(int(name.unique[:digits], 16))


@attrs.frozen
class Topics:
    """The notation of topics in names and in streams.

    `encoded`: hexadecimal in names; else unchanged. `split_at`: characters of a topic in a name; the rest is in a file.
    `theirs`, `ours`: the separators of topics and of streams, which are swapped in both directions.
    """

    encoded: bool = True
    split_at: int = 200
    theirs: str = "."
    ours: str = "."

    def name(self, topic: str, kind: str, expires_ms: int, unique: str) -> tuple[Name, str]:
        """Return a message's name, and the rest of its topic for the other file. Raises BadRequest if the topic cannot
        be in a name."""
        text = topic.encode().hex() if self.encoded else topic
        name = Name(text[: self.split_at], len(text) > self.split_at, expires_ms, kind, unique)
        if "/" in text or "\0" in text or len(str(name).encode()) > limits.NAME_BYTES:
            raise BadRequest(f"topic {topic[:80]!r}: not the name of a file (expected encoded topics)")
        return name, text[self.split_at :]

    def topic(self, name: Name, rest: str) -> str:
        """Return the topic of a message. Raises BadRequest if it is not encoded as expected."""
        text = name.topic + rest
        if not self.encoded:
            return text
        if not _HEX.fullmatch(text):
            raise BadRequest(f"topic {text[:80]!r}: not hexadecimal (expected --raw-topics)")
        return bytes.fromhex(text).decode(errors="replace")

    def stream(self, topic: str) -> str:
        """Return the stream of a topic. A name that is too long is shortened; the header `fsq-topic` has all of it."""
        return stream_name(self._swap(topic))

    def topic_of(self, stream: str, header: str | None) -> str:
        """Return the topic of a stream's message; `header`: its `fsq-topic`."""
        if header is not None and self.stream(header) == stream:
            return header
        if header is not None and stream_name(header) == stream:  # written by the library, with our separators
            return self._swap(header)
        return self._swap(text_of(stream).decode(errors="replace"))

    def _swap(self, text: str) -> str:
        if self.theirs == self.ours:
            return text
        return text.translate({ord(self.theirs): self.ours, ord(self.ours): self.theirs})


DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
STAMP_BYTES = 32
TOPIC_BYTES = 1 << 20  # bytes read of the rest of a topic: a stream's name is far shorter
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
BUSY_S = 0.1  # before a rename is retried after EBUSY, as network file systems need it


def _digits(number: int, base: int, width: int) -> str:
    text = ""
    for _ in range(width):
        number, digit = divmod(number, base)
        text = DIGITS[digit] + text
    return text


def bucket_names(found: Iterable[str]) -> list[str]:
    """Return the sorted names of the buckets found. Raises BadConfig unless they are all numbers of one width and
    base."""
    names = sorted(name for name in found if not name.startswith("."))
    width, count = len(names[0]) if names else 0, len(names)
    base = next((base for base in range(1, len(DIGITS) + 1) if width and base**width == count), 0)
    expected = [_digits(number, base, width) for number in range(count)] if base > 1 else ["0"]
    if not base or (names != expected and names != ["0" * width]):
        raise BadConfig(f"messages: {count} buckets (expected those of a folder of qlobber-fsq, as 00 to ff)")
    return names


# ------------------------------------------------------------ the folder


class NotPlain(OSError):
    """A link, directory, FIFO, socket or device where a plain file is expected."""


def _open(name: str, flags: int, directory: int) -> int:
    """Open a plain file and return the descriptor. Raises NotPlain."""
    try:
        file = os.open(name, flags | _PLAIN, 0o666, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NotPlain(error.errno, "not a plain file", name) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotPlain(errno.ELOOP, "not a plain file", name)
    return file


class Folder:
    """One folder. `sync`: written files and directories are on disk before a call returns."""

    def __init__(self, path: str, *, sync: bool = True) -> None:
        self.path, self._sync = os.path.realpath(path), sync
        try:
            found = self._list("messages")
        except FileNotFoundError:
            raise BadConfig(f"{path}: no messages in it (expected a folder that qlobber-fsq has made)") from None
        self.buckets = bucket_names(found)
        self._make("topics", "staging", "update")
        self._make(*self.buckets, into=("topics",))
        self._stamp_bytes = self._measure_stamps()

    def _make(self, *names: str, into: tuple[str, ...] = ()) -> None:
        with self.directory(*into) as directory:
            for name in names:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=directory)

    @contextmanager
    def directory(self, *names: str) -> Iterator[int]:
        """Open the directory at a path of these names, and yield its descriptor."""
        found = os.open(self.path, _DIRECTORY)
        try:
            for name in names:
                outer, found = found, os.open(name, _DIRECTORY, dir_fd=found)
                os.close(outer)
            yield found
        finally:
            os.close(found)

    def _list(self, *names: str) -> list[str]:
        with self.directory(*names) as directory:
            return os.listdir(directory)

    @property
    def owner(self) -> int:
        """The uid of the folder's owner."""
        return os.stat(self.path).st_uid

    # ------------------------------------------------------------ paths

    def bucket_of(self, name: str) -> str:
        return self.buckets[bucket_number(name, len(self.buckets))]

    # ------------------------------------------------------------ stamps

    def _measure_stamps(self) -> int:
        """Return the bytes of a bucket's stamp: 0 without UPDATE, the usual number if UPDATE has an unexpected size."""
        try:
            with self._reader("UPDATE", "update") as file:
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return 0
        each, rest = divmod(size, len(self.buckets))
        return each if 0 < each <= limits.BRIDGE_STAMP_BYTES and not rest else STAMP_BYTES

    def read_stamps(self) -> list[bytes] | None:
        """Return the stamps of all buckets; None: there is no UPDATE, or it is incomplete."""
        size = self._stamp_bytes
        try:
            with self._reader("UPDATE", "update") as file:
                data = file.read(size * len(self.buckets))
        except FileNotFoundError:
            return None
        if not size or len(data) < size * len(self.buckets):
            return None
        return [data[at : at + size] for at in range(0, size * len(self.buckets), size)]

    def stamp(self, buckets: Iterable[str]) -> None:
        """Write new stamps of these buckets, so that readers scan them."""
        if not self._stamp_bytes:
            return
        with self.directory("update") as directory:
            file = _open("UPDATE", os.O_CREAT | os.O_WRONLY, directory)
        try:
            for bucket in buckets:
                place = self.buckets.index(bucket) * self._stamp_bytes
                os.pwrite(file, os.urandom(self._stamp_bytes), place)
        finally:
            os.close(file)

    # ------------------------------------------------------------ writing

    def publish(self, name: Name, rest: str, body: Iterable[bytes], stopping: threading.Event) -> str | None:
        """Write a message's file and move it into its bucket. Returns the bucket; None: the file exists already.

        The caller calls `settle` after one or several files.
        """
        text = str(name)
        bucket = self.bucket_of(text)
        staged = str(attrs.evolve(name, topic=secrets.token_hex(8)))  # another bridge may be writing the same file
        with self.directory("messages", bucket) as messages, self.directory("staging") as staging:
            if _is_there(text, messages):
                return None
            try:
                if rest:
                    with self.directory("topics", bucket) as topics:
                        self._write(staged, staging, [rest.encode()])
                        _move(staged, staging, text, topics, stopping)
                        self._sync_directory(topics)
                self._write(staged, staging, [b"\0"], body)
                _move(staged, staging, text, messages, stopping)
            except BaseException:
                self.unstage(staged)
                raise
        return bucket

    def _write(self, name: str, directory: int, *pieces: Iterable[bytes]) -> None:
        with os.fdopen(_open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, directory), "wb") as file:
            for some in pieces:
                file.writelines(some)
            if self._sync:
                file.flush()
                os.fsync(file.fileno())

    def settle(self, buckets: Iterable[str]) -> None:
        """Stamp the buckets of published files, and sync their directories."""
        buckets = set(buckets)
        self.stamp(buckets)
        for bucket in buckets:
            with self.directory("messages", bucket) as directory:
                self._sync_directory(directory)

    def _sync_directory(self, directory: int) -> None:
        if self._sync:
            os.fsync(directory)

    # ------------------------------------------------------------ reading

    def files(self, bucket: str) -> list[str]:
        return self._list("messages", bucket)

    def read_rest(self, bucket: str, name: Name) -> str:
        """Read the rest of a long topic; "" for others. Raises FileNotFoundError if its file is missing or empty."""
        if not name.long:
            return ""
        with self._reader(str(name), "topics", bucket) as file:
            rest = file.read(TOPIC_BYTES).decode(errors="replace")
        if not rest:
            raise FileNotFoundError(errno.ENOENT, "the rest of the topic is empty", str(name))
        return rest

    def changed_ns(self, bucket: str) -> int:
        """Return when the directory of a bucket was changed, UNIX ns."""
        with self.directory("messages", bucket) as directory:
            return os.fstat(directory).st_mtime_ns

    def status(self, bucket: str, name: str) -> os.stat_result:
        with self.directory("messages", bucket) as directory:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def open(self, bucket: str, name: str) -> IO[bytes]:
        return self._reader(name, "messages", bucket)

    def _reader(self, name: str, *directories: str) -> IO[bytes]:
        with self.directory(*directories) as directory:
            return os.fdopen(_open(name, os.O_RDONLY, directory), "rb")

    @contextmanager
    def lock(self, bucket: str, name: str) -> Iterator[IO[bytes] | None]:
        """Open and lock the file of a single, and yield it; None: another process has the lock, or the single was
        handled or removed."""
        with contextlib.ExitStack() as stack:
            file = None
            with contextlib.suppress(FileNotFoundError), self.directory("messages", bucket) as directory:
                file = stack.enter_context(os.fdopen(_open(name, os.O_RDWR, directory), "r+b"))
            yield file if file is not None and self._is_to_do(bucket, name, file) else None

    def _is_to_do(self, bucket: str, name: str, file: IO[bytes]) -> bool:
        """Lock a single. Whether this process got the lock and the single was not handled. If it was handled, but not
        removed, remove it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        status = os.fstat(file.fileno())
        if status.st_nlink and not status.st_size:
            self.remove(bucket, name)
        return bool(status.st_nlink and status.st_size)

    def finish(self, bucket: str, name: str, file: IO[bytes]) -> None:
        """Mark a locked single as handled, and remove it."""
        os.ftruncate(file.fileno(), 0)
        if self._sync:
            os.fsync(file.fileno())
        self.remove(bucket, name)

    def remove(self, bucket: str, name: str) -> None:
        """Remove the files of a message."""
        for kind in ("messages", "topics"):
            with contextlib.suppress(FileNotFoundError), self.directory(kind, bucket) as directory:
                os.unlink(name, dir_fd=directory)

    def staged(self) -> list[str]:
        return self._list("staging")

    def unstage(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self.directory("staging") as directory:
            os.unlink(name, dir_fd=directory)


def _move(staged: str, staging: int, name: str, directory: int, stopping: threading.Event) -> None:
    while True:
        try:
            os.rename(staged, name, src_dir_fd=staging, dst_dir_fd=directory)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or stopping.wait(BUSY_S):
                raise


def _is_there(name: str, directory: int) -> bool:
    try:
        os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


# ---------------------------------------------------------------- changed buckets

# inotify reports writers on this machine only, stamps in UPDATE all writers that stamp, a directory's time the others.

IN_MODIFY, IN_MOVED_TO, IN_CREATE, IN_Q_OVERFLOW = 0x2, 0x80, 0x100, 0x4000
IN_NO_LINK = 0x0300_0000  # IN_ONLYDIR, IN_DONT_FOLLOW
LOOK_S = 10.0  # between two checks of the times of all directories
BURST_S = 0.002  # wait after an event, so that many files written at once take one scan
_EVENT = struct.Struct("iIII")


class Inotify:
    """Events of directories. `fileno`: readable when there are events; -1: the system has no inotify."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fileno = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._names: dict[int, str] = {}

    def watch(self, path: str, mask: int, name: str) -> bool:
        """Report `name` when there are events of `mask` at a path. Whether the system accepted that."""
        number = self._libc.inotify_add_watch(self.fileno, os.fsencode(path), ctypes.c_uint32(mask | IN_NO_LINK))
        if number >= 0:
            self._names[number] = name
        return bool(number >= 0)

    def read(self) -> set[str] | None:
        """Return the names reported since the last call; None: events were lost."""
        found: set[str] = set()
        while True:
            try:
                data = os.read(self.fileno, 65_536)
            except BlockingIOError:
                return found
            at = 0
            while at < len(data):
                number, mask, _, size = _EVENT.unpack_from(data, at)
                if mask & IN_Q_OVERFLOW:
                    return None
                if number in self._names:
                    found.add(self._names[number])
                at += _EVENT.size + size

    def close(self) -> None:
        if self.fileno >= 0:
            os.close(self.fileno)


class Changes:
    """The changed buckets of one folder, which have to be scanned."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._stamps: list[bytes] | None = None
        self._scanned: dict[str, int] = {}  # the time of each directory at its last scan, ns
        self._sure: set[str] = set()  # buckets with the same time at two scans: some file systems have coarse times
        self._looked = self._poll_at = 0.0
        self._inotify = Inotify()
        watched = self._inotify.watch(f"{folder.path}/update", IN_MODIFY | IN_CREATE | IN_MOVED_TO, "")
        for bucket in folder.buckets:
            path = f"{folder.path}/messages/{bucket}"
            watched = watched and self._inotify.watch(path, IN_MOVED_TO | IN_CREATE, bucket)
        if not watched:
            log.warning("inotify: %s (only the poll finds new files)", os.strerror(ctypes.get_errno() or errno.ENOSYS))

    def wait(self, seconds: float, wake: int) -> set[str]:
        """Wait for changes and return the buckets to scan: at most `seconds` after the last poll, sooner after an event
        of inotify or when `wake` is readable."""
        files = [wake] + [self._inotify.fileno] * (self._inotify.fileno >= 0)
        ready = select.select(files, [], [], max(self._poll_at - time.monotonic(), 0.0))[0]
        found: set[str] = set()
        if self._inotify.fileno in ready:
            time.sleep(BURST_S)
            reported = self._inotify.read()
            found = set(self._folder.buckets) if reported is None else reported - {""}
            if reported is None or "" in reported:
                found |= self._stamped()
        if time.monotonic() >= self._poll_at:  # also while events of this machine come without end
            self._poll_at = time.monotonic() + seconds
            found |= self._stamped() | self._touched()
        return found

    def _stamped(self) -> set[str]:
        """Return the buckets with a new stamp."""
        stamps, before = self._folder.read_stamps(), self._stamps
        if stamps is None:
            self._looked = 0.0  # without stamps, check the times of directories at each poll
            return set()
        self._stamps = stamps
        if before is None:
            return set(self._folder.buckets)
        return {b for b, new, old in zip(self._folder.buckets, stamps, before, strict=True) if new != old}

    def _touched(self) -> set[str]:
        """Return the buckets whose directory changed since its scan; checked once in LOOK_S."""
        if time.monotonic() - self._looked < LOOK_S:
            return set()
        self._looked = time.monotonic()
        times = {bucket: self._folder.changed_ns(bucket) for bucket in self._folder.buckets}
        return {b for b, changed in times.items() if b not in self._sure or changed != self._scanned[b]}

    def scanning(self, bucket: str) -> None:
        """Record the time of a bucket's directory as its scan begins."""
        changed = self._folder.changed_ns(bucket)
        if self._scanned.get(bucket) == changed:
            self._sure.add(bucket)
        else:
            self._sure.discard(bucket)
        self._scanned[bucket] = changed

    def close(self) -> None:
        self._inotify.close()
