"""A replicated log of objects: in an object store (S3, Google, Azure), or as files of a directory.

    log/00000000000000000017      frame 17, created if absent: whoever creates it has the number
    checkpoint/..., segment/...   its checkpoints
    standby/NAME                  number and CRC field of the last frame that this standby has on its disk
    handover                      the standby that asks to be the primary (takeover.py)
    probe/...                     of a start: an object that exists is not created again

Each number is one name, without a check sum, so that of two primaries one is refused. Takeovers are never removed: a
late request of an old primary can only have the number of its successor's takeover.
"""

from __future__ import annotations

import contextlib
import os
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import ObjectStore, from_url

from mqfs import limits
from mqfs.errors import BadReplica
from mqfs.replica.frame import Frame, decode
from mqfs.replica.log import LogRecord, NoAnswer, Refused, Report

_FATAL = (PermissionDeniedError, UnauthenticatedError, NotSupportedError)
_DIGITS = 20
_PARTS = "segment/"  # names of objects of up to REPLICA_PART_BYTES
_PROBES = 3  # probes of the condition, while there is no answer
_BULK = 1_000  # names in one request to delete
_ROW = 64  # frames read in one call: a standby syncs its disk once for them, and keeps up with its primary
_AHEAD = 8  # frames requested at once, at most: an object store answers each slowly


class StoreObjects:
    """The objects below a URL of an object store. See `Objects` in log.py."""

    def __init__(self, url: str) -> None:
        scheme, _, bucket, prefix = split(url)
        self._url, self._prefix = f"{scheme}://{bucket}", f"{prefix}/"
        self._frames = self._open(limits.REPLICA_CALL_S)
        self._parts = self._open(limits.REPLICA_PART_S)

    def _open(self, answer_s: float) -> ObjectStore:
        """Open the store; an answer may take `answer_s` seconds."""
        within = timedelta(seconds=answer_s)
        retry: Any = {"max_retries": 2, "retry_timeout": within}
        client: Any = {"timeout": within, "allow_http": True}
        try:
            return from_url(self._url, client_options=client, retry_config=retry)
        except (BaseError, ValueError, UnknownConfigurationKeyError) as error:
            raise BadReplica(f"{self._url}: cannot be opened: {_reason(error)}") from None

    def _store(self, name: str) -> ObjectStore:
        return self._parts if name.startswith(_PARTS) else self._frames

    def create(self, name: str, data: bytes) -> None:
        """Make an object, durably. Raises Refused if it exists."""
        with self._calling(name):
            try:
                obstore.put(self._store(name), self._prefix + name, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                raise Refused from None

    def put(self, name: str, data: bytes) -> None:
        with self._calling(name):
            obstore.put(self._store(name), self._prefix + name, data, use_multipart=False)

    def get(self, name: str) -> bytes | None:
        with self._calling(name):
            try:
                return bytes(obstore.get(self._store(name), self._prefix + name).bytes())
            except (NotFoundError, FileNotFoundError):
                return None

    def list(self, prefix: str, after: str = "", most: int = 0) -> Sequence[str]:
        with self._calling(prefix):
            chunks = obstore.list(self._frames, self._prefix + prefix, offset=self._prefix + after if after else None)
            found = (one["path"].removeprefix(self._prefix) for chunk in chunks for one in chunk)
            return sorted(islice(found, most or None))  # pages come in order, each when it is needed

    def delete(self, *names: str) -> None:
        for begin in range(0, len(names), _BULK):
            self._delete(names[begin : begin + _BULK])

    def _delete(self, names: Sequence[str]) -> None:
        """Delete names in one request if the store has such a request; not every store has it, or accepts names that
        are missing."""
        paths = [self._prefix + name for name in names]
        if len(paths) > 1:
            with contextlib.suppress(BaseError, OSError):
                obstore.delete(self._parts, paths)
                return
        for path in paths:
            with self._calling(path), contextlib.suppress(NotFoundError, FileNotFoundError):
                obstore.delete(self._frames, path)

    def remove_stale_uploads(self) -> None:
        """Do nothing: a request leaves nothing behind, since an object is stored whole or not at all."""

    @contextlib.contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        try:
            yield
        except _FATAL as error:
            raise BadReplica(f"{name}: refused by the object store: {_reason(error)}") from None
        except (BaseError, OSError) as error:
            raise NoAnswer(_reason(error)) from None


def _reason(error: Exception) -> str:
    """Return the first line of an error, without Rust's debug output after it; of a long line its last words."""
    text = " ".join(str(error).split("\n", 1)[0].split())
    return text if len(text) <= 200 else "..." + text[-197:]


class FileObjects:
    """The files below a directory, each complete and on disk before it gets its name. See `Objects` in log.py."""

    def __init__(self, path: str, *, create: bool = True) -> None:
        self._path = path
        if not create and not os.path.isdir(f"{path}/log"):
            raise BadReplica(f"{path}: no log (expected file:///DIR of one)")
        try:
            for folder in (path, f"{path}/staging"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
        except OSError as error:
            raise BadReplica(f"{path}: {error.strerror} (expected a directory that can be made)") from None
        self._folders = {path}  # not made again: if the directory was moved, its contents are elsewhere
        self._failed = ""  # why a name may not be on disk: it is seen, and a later sync would not report it

    def create(self, name: str, data: bytes) -> None:
        """Make a file, durably. Raises Refused if it exists."""
        try:
            self._make(name, data, os.link)
        except FileExistsError:
            raise Refused from None

    def put(self, name: str, data: bytes) -> None:
        self._make(name, data, os.replace)

    def _make(self, name: str, data: bytes, give_name: Callable[[str, str], None]) -> None:
        staged, path = f"{self._path}/staging/{uuid.uuid4()}", f"{self._path}/{name}"
        self._check()
        try:
            self._make_folder(os.path.dirname(path))
            with open(staged, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with self._synced(os.path.dirname(path)):
                give_name(staged, path)
        except FileExistsError:
            raise
        except OSError as error:
            raise NoAnswer(f"{path}: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(staged)

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders and not os.path.isdir(folder):
            self._make_folder(os.path.dirname(folder))
            with self._synced(os.path.dirname(folder)), contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        self._folders.add(folder)

    @contextlib.contextmanager
    def _synced(self, folder: str) -> Iterator[None]:
        """Sync a folder after the block made a name in it. It is opened first: only the sync can fail then."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield
            try:
                os.fsync(fd)
            except OSError as error:
                self._failed = f"{folder}: not synced: {error.strerror}"
                self._check()
        finally:
            os.close(fd)

    def _check(self) -> None:
        if self._failed:
            raise BadReplica(f"{self._failed} (expected a disk that works, and a new start)")

    def get(self, name: str) -> bytes | None:
        self._check()
        try:
            with open(f"{self._path}/{name}", "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NoAnswer(f"{name}: {error.strerror}") from None

    def list(self, prefix: str, after: str = "", most: int = 0) -> Sequence[str]:
        folder = prefix.rpartition("/")[0]
        found = []
        for path, _, files in os.walk(f"{self._path}/{folder}", onerror=_not_listed):
            below = os.path.relpath(path, self._path)
            found += [name for file in files if (name := f"{below}/{file}").startswith(prefix) and name > after]
        return sorted(found)[: most or None]

    def delete(self, *names: str) -> None:
        for name in names:
            try:
                os.unlink(f"{self._path}/{name}")
            except FileNotFoundError:
                pass
            except OSError as error:
                raise NoAnswer(f"{name}: {error.strerror}") from None

    def remove_stale_uploads(self) -> None:
        """Remove staged files that did not get their names. A suspended process that still names one gets NoAnswer."""
        try:
            with os.scandir(f"{self._path}/staging") as found:
                for file in islice(found, limits.REPLICA_PAGE):
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - file.stat().st_mtime > limits.REPLICA_UPLOAD_S:
                            self.delete(f"staging/{file.name}")
        except OSError as error:
            raise NoAnswer(f"{self._path}/staging: {error.strerror}") from None


def _not_listed(error: OSError) -> None:
    """Raise NoAnswer for an incomplete list: names that it lacks would count as missing objects."""
    if not isinstance(error, FileNotFoundError):
        raise NoAnswer(f"{error.filename}: {error.strerror}") from None


def split(url: str) -> tuple[str, str, str, str]:
    """Split a URL into scheme, directory (of file:), bucket and prefix. Raises BadReplica."""
    parts = urllib.parse.urlsplit(url)
    path = parts.path.strip("/")
    if parts.scheme == "file":
        if parts.netloc or not path:
            raise BadReplica(f"--replica {url!r}: not an absolute directory (expected file:///DIR)")
        return "file", "/" + path, "", ""
    if not parts.netloc or not path or parts.query or parts.fragment or "@" in parts.netloc:
        shown = url.rpartition("@")[2]
        raise BadReplica(f"--replica {shown!r}: no bucket and name (expected {parts.scheme}://BUCKET/NAME)")
    return parts.scheme, "", parts.netloc, path


class ObjectLog:
    """See `ReplicatedLog` in log.py."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        scheme, folder, *_ = split(url)
        self.objects = FileObjects(folder, create=create) if scheme == "file" else StoreObjects(url)
        self.name = url
        self.pace_s = limits.REPLICA_PACE_S if scheme == "file" else limits.REPLICA_OBJECT_S
        self._is_file = scheme == "file"
        self._reported_s = 0.0
        self._pool = ThreadPoolExecutor(_AHEAD, "frames")
        self._asked: dict[int, Future[bytes | None]] = {}  # requests under way, by number of the frame
        self._trimmed_to = 0  # up to that number there are only takeovers
        self._found = self._next = 0  # frames in a row that were there when requested, and the number after them
        try:
            self.objects.list("standby/")  # an engine that cannot be reached is an error now
            if create and not self._is_file:
                self._check_condition()
        except NoAnswer as error:
            raise BadReplica(f"--replica {url}: not reachable: {error}") from None

    def _check_condition(self) -> None:
        """Raise BadReplica if an object that exists can be created again: such a store cannot fence."""
        for _ in range(_PROBES):
            name = f"probe/{uuid.uuid4()}"
            try:
                self.objects.create(name, b"")
                self.objects.create(name, b"")
            except Refused:
                return
            except NoAnswer:
                continue  # no answer proves nothing, as with an append
            finally:
                with contextlib.suppress(NoAnswer):
                    self.objects.delete(name)
            raise BadReplica(f"--replica {self.name}: cannot fence: no conditional writes (expected If-None-Match)")

    def append(self, data: bytes, after: int, own: int, *, takeover: bool) -> None:
        self.objects.create(_name(after + 1), data)

    def get(self, number: int) -> bytes | None:
        return self.objects.get(_name(number))

    def newest(self, after: int) -> LogRecord | None:
        while names := self.objects.list("log/", _name(after)):
            if (data := self.objects.get(names[-1])) is not None:  # otherwise it was trimmed meanwhile
                return LogRecord(_number(names[-1]), data)
        return None

    def read(self, after: int, wait_s: float) -> Sequence[LogRecord]:
        if (data := self._get_ahead(after + 1)) is None:
            return self._wait(after, wait_s)
        found, size = [LogRecord(after + 1, data)], len(data)
        while len(found) < _ROW and size < limits.REPLICA_PART_BYTES:
            number = after + len(found) + 1
            if (data := self._at_hand(number)) is None:
                break
            found.append(LogRecord(number, data))
            size += len(data)
        return found

    def _at_hand(self, number: int) -> bytes | None:
        """Return that frame if that costs no wait: from a directory, or if an object store has answered already. The
        frames read so far must not wait for it. A failure is raised when this frame is the next one."""
        asked = self._asked.get(number)
        if not self._is_file and (asked is None or not asked.done() or asked.exception() or asked.result() is None):
            return None
        try:
            return self._get_ahead(number)
        except NoAnswer:
            return None

    def _wait(self, after: int, wait_s: float) -> Sequence[LogRecord]:
        until, pause_s = time.monotonic() + wait_s, 0.05
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 1.0)
            if (data := self._get_ahead(after + 1)) is not None:
                return [LogRecord(after + 1, data)]
        later = self.objects.list("log/", _name(after))  # none, unless frames were trimmed
        return [LogRecord(_number(name), data) for name in later[:1] if (data := self.objects.get(name)) is not None]

    def _get_ahead(self, number: int) -> bytes | None:
        """Return that frame, and request further ones: the more frames in a row were there, the more."""
        asked, self._asked = self._asked, {}
        found, self._found = self._found if number == self._next else 0, 0  # reset, after an error too
        future = asked.pop(number, None)
        data = future.result() if future is not None else None
        if data is None and (data := self.objects.get(_name(number))) is None:
            return None
        self._found, self._next = found + 1, number + 1
        for n in range(number + 1, number + min(self._found, _AHEAD)):
            self._asked[n] = asked.get(n) or self._pool.submit(self.objects.get, _name(n))
        return data

    def trim(self, before: int) -> None:
        """Remove frames below `before`, except takeovers. Epochs only grow, and a takeover is the first frame of its
        epoch, so only some frames are read to find them."""
        while names := self.objects.list("log/", _name(self._trimmed_to), limits.REPLICA_PAGE):
            below = [name for name in names if _number(name) < before]
            self.objects.delete(*self._without_takeovers(below))
            if below:
                self._trimmed_to = _number(below[-1])
            if len(below) < len(names):
                break

    def _without_takeovers(self, names: Sequence[str]) -> list[str]:
        """Return the names of frames that are no takeovers. Frames that another server removes meanwhile, and objects
        that are no frames, are left out."""
        found, at = list[str](), 0
        while at < len(names):
            frame, begin = self._frame(names[at]), at
            if frame is None:
                at += 1
                continue
            at = self._end_of_epoch(names, begin, frame.epoch)
            found += names[begin + (frame.owner is not None) : at]
        return found

    def _end_of_epoch(self, names: Sequence[str], begin: int, epoch: int) -> int:
        """Return where a later epoch begins in `names`, whose entry `begin` is of `epoch`; often there is none. Names
        without a frame before that place count as later, so none of them is removed with this epoch."""
        low, high, middle = begin + 1, len(names), len(names) - 1
        while low < high:
            frames = ((n, self._frame(names[n])) for n in range(middle, high))
            at, frame = next((found for found in frames if found[1] is not None), (middle, None))
            if frame is not None and frame.epoch <= epoch:
                low = at + 1
            else:
                high = middle
            middle = (low + high) // 2
        return high

    def _frame(self, name: str) -> Frame | None:
        """Return the frame of that name if it is whole: the check sum covers its epoch, too. None if there is none."""
        data = self.objects.get(name)
        try:
            return None if data is None else decode(data)
        except BadReplica:
            return None

    def report(self, name: str, report: Report) -> None:
        if self._is_file or time.monotonic() - self._reported_s >= self.pace_s:
            self._reported_s = time.monotonic()
            self.objects.put(f"standby/{name}", report.encode())

    def reports(self) -> dict[str, Report]:
        names = self.objects.list("standby/")
        found = {name.rpartition("/")[2]: Report.decode(self.objects.get(name) or b"") for name in names}
        return {name: report for name, report in found.items() if report is not None}

    def promises(self) -> Sequence[str]:
        if self._is_file:
            return ["every frame is synced to that directory", "as safe as its disk"]
        return [
            "every frame is an object that is created if absent",
            "two requests a second, and one for each sync replica",
        ]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _name(number: int) -> str:
    return f"log/{number:0{_DIGITS}d}"


def _number(name: str) -> int:
    digits = name.removeprefix("log/")
    if len(digits) != _DIGITS or not digits.isdecimal():
        raise BadReplica(f"{name!r}: foreign object (expected log/ and {_DIGITS} digits)")
    return int(digits)
