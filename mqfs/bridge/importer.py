"""Import from the folder into the group: multis, and bodies of any size.

A message is published with an id made from its file's name. So a repeat, after a kill or by another bridge, adds
nothing while the group's `dedup` remembers the id. `Seen` is the file of imported messages.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import IO, NamedTuple

import attrs

from mqfs import limits
from mqfs.bridge.folder import (
    DIRECT,
    SINGLE,
    TOPIC_HEADER,
    Changes,
    Folder,
    Name,
    NotPlain,
    Origin,
    Topics,
    id_of,
    parse,
)
from mqfs.bridge.link import LATER, GroupLink, discarded
from mqfs.client.large import PIECE_BYTES
from mqfs.client.publisher import Outgoing
from mqfs.errors import Again, BadRequest, Disconnected, Interrupted, MqfsError, NotFound, StreamFull, TooLong

log = logging.getLogger("mqfs.bridge")

NAME_HEADER = "fsq-name"
BATCH, BATCH_BYTES = 1_024, 8 << 20  # messages under way at once, and about their bytes
LONGEST_MS = 10 * 365 * 86_400_000  # the longest lifetime; names may have ends in thousands of years
FORGET_S = 60.0  # between two removals of expired entries
CLOCK_S = 2.0  # by which the clocks of writers may differ
Selects = Callable[[str], bool]


@attrs.frozen
class Arrival:
    """A message's file in the folder."""

    bucket: str
    file: str
    name: Name
    stream: str
    topic: str

    @property
    def headers(self) -> dict[str, str]:
        return {NAME_HEADER: self.file, TOPIC_HEADER: self.topic}

    def ttl_ms(self) -> int:
        """Return the remaining lifetime in ms; 0 or less: it has expired."""
        return self.name.expires_ms - time.time_ns() // 10**6


Singles = dict[str, dict[str, Arrival]]  # by bucket and file


class Importer:
    """The import from one folder into one group. `singles`: receives the singles found; None: they are ignored."""

    def __init__(
        self,
        folder: Folder,
        link: GroupLink,
        topics: Topics,
        origin: Origin,
        seen: Seen,
        *,
        changes: Changes,
        selects: Selects,
        singles: Singles | None,
        expire: bool,
    ) -> None:
        self._folder, self._link, self._topics, self._origin = folder, link, topics, origin
        self._seen, self._changes, self._selects, self._singles, self._expire = seen, changes, selects, singles, expire
        self._passed: dict[str, set[str]] = {bucket: set() for bucket in folder.buckets}  # files not to be imported
        self._torn: set[str] = set()  # files that could not be read once
        self._scanned: dict[str, float] = {}  # UNIX time of the last scan of each bucket
        self._again: set[str] = set()  # buckets with files to be tried again
        self._present: dict[str, set[str]] = {}  # ids in each bucket at its last scan
        self._forgot = time.monotonic()
        self._warned: set[str] = set()

    def scan(self, buckets: Iterable[str]) -> None:
        """Import new files of these buckets, and of those with files to be tried again."""
        due, self._again = {*buckets, *self._again}, set()
        if not due:
            return
        self._seen.refresh()
        arrivals = [arrival for bucket in sorted(due) for arrival in self._look(bucket)]
        arrivals.sort(key=lambda arrival: (arrival.name.expires_ms, arrival.file))
        batch: list[Outgoing] = []
        imports: list[Arrival] = []
        size = 0
        for arrival in arrivals:
            if self._link.stopping.is_set():
                return
            message = self._read(arrival)
            if message is not None:
                batch.append(message)
                imports.append(arrival)
                size += len(message.body)
            if len(batch) >= BATCH or size >= BATCH_BYTES:
                if not self._append(batch, imports):
                    self._again |= due
                    return
                batch, imports, size = [], [], 0
        if not self._append(batch, imports):
            self._again |= due
        self._forget()

    # ------------------------------------------------------------ finding files

    def _look(self, bucket: str) -> list[Arrival]:
        """Scan a bucket. Returns the multis to import; singles are entered in `singles`."""
        began, before, arrivals = time.time(), self._scanned.get(bucket), []
        self._changes.scanning(bucket)
        passed, present, seen = self._passed[bucket], set(self._folder.files(bucket)), self._seen
        singles = self._singles.setdefault(bucket, {}) if self._singles is not None else {}
        for file in singles.keys() - present:
            singles.pop(file, None)
        for file in present - passed - singles.keys():
            if id_of(file) in seen:
                continue
            arrival = self._recognize(bucket, file)
            if arrival is None:
                continue
            self._check_clock(arrival, before)
            if arrival.name.kind == SINGLE:
                singles[file] = arrival
            else:
                arrivals.append(arrival)
        passed &= present
        self._present[bucket] = {id_of(file) for file in present}
        self._scanned[bucket] = began
        return arrivals

    def _recognize(self, bucket: str, file: str) -> Arrival | None:
        """Return the message of a file if it is to be imported; None: it is not, or not now."""
        name = parse(file)
        if (
            name is None
            or name.kind == DIRECT
            or (name.kind == SINGLE and self._singles is None)
            or self._origin.wrote(name)
        ):
            self._passed[bucket].add(file)
            return None
        if name.expires_ms <= time.time_ns() // 10**6:
            if self._expire:
                self._folder.remove(bucket, file)
            return None
        try:
            topic = self._topics.topic(name, self._folder.read_rest(bucket, name))
        except (FileNotFoundError, NotPlain, PermissionError) as error:
            self._put_off(bucket, file, str(error))
            return None
        except BadRequest as error:
            self._pass_over(bucket, file, error.detail)
            return None
        stream = self._topics.stream(topic)
        if not self._selects(stream):
            self._passed[bucket].add(file)
            return None
        return Arrival(bucket, file, name, stream, topic)

    def _pass_over(self, bucket: str, file: str, reason: str) -> None:
        log.warning("%s: passed over: %s", file, reason)
        self._passed[bucket].add(file)

    def _put_off(self, bucket: str, file: str, reason: str) -> None:
        """Try a file again at the next scan, once; then pass it over."""
        if file in self._torn:
            self._torn.discard(file)
            self._pass_over(bucket, file, reason)
        else:
            self._torn.add(file)
            self._again.add(bucket)

    def _check_clock(self, arrival: Arrival, before: float | None) -> None:
        """Warn once if the time of a new file shows that a writer's clock differs from ours."""
        try:
            changed = self._folder.status(arrival.bucket, arrival.file).st_mtime
        except FileNotFoundError:
            return
        late = changed - time.time()
        early = changed - before if before is not None else 0.0
        off = late if late > CLOCK_S else early if early < -CLOCK_S else 0.0
        if off:
            self._warn("clock", f"the clock of a writer is {off:+.0f} s off ours (expected less than {CLOCK_S:.0f} s)")

    def _warn(self, about: str, text: str) -> None:
        """Log a warning once for each `about`."""
        if about not in self._warned:
            self._warned.add(about)
            log.warning("%s", text)

    # ------------------------------------------------------------ into the group

    def _read(self, arrival: Arrival) -> Outgoing | None:
        """Read the message of a file. None: it cannot be read now, or it was large and is appended already."""
        try:
            with self._folder.open(arrival.bucket, arrival.file) as file:
                size = os.fstat(file.fileno()).st_size - 1
                if size < 0:
                    self._passed[arrival.bucket].add(arrival.file)  # handled already
                    return None
                if size > limits.MESSAGE_BYTES:
                    self._append_one(arrival, partial(append_large, self._link, arrival, file))
                    return None
                body = file.read(size + 1)[1:]
        except FileNotFoundError:
            return None
        except OSError as error:
            self._put_off(arrival.bucket, arrival.file, str(error))
            return None
        return outgoing(arrival, body, single=False)

    def _append(self, batch: list[Outgoing], imports: list[Arrival]) -> bool:
        """Append messages, several under way at once. If one is refused, or may have been discarded, append them one
        after the other. Whether the group may have room for more."""
        if not batch:
            return True
        try:
            if not self._link.discards:
                self._link.repeat(lambda: self._link.group.publish_many(batch))
            if not self._link.may_discard():
                self._note(imports)
                return True
        except Interrupted:
            raise
        except MqfsError:
            pass
        singly = zip(batch, imports, strict=True)
        return all(self._append_one(a, partial(append_whole, self._link, m)) for m, a in singly)

    def _append_one(self, arrival: Arrival, append: Callable[[], object]) -> bool:
        """Append a message; without room try it at the next scan, after another error pass it over. Whether the group
        may have room for more."""
        try:
            self._link.repeat(append)
        except Interrupted:
            raise
        except LATER as error:
            self._warn(type(error).__name__, f"{error} (again at the next scan)")
            self._again.add(arrival.bucket)
            return isinstance(error, Again | StreamFull)
        except MqfsError as error:
            self._pass_over(arrival.bucket, arrival.file, str(error))
        else:
            self._note([arrival])
        return True

    def _note(self, imports: Sequence[Arrival]) -> None:
        self._seen.add([Import(id_of(arrival.file), arrival.name.expires_ms) for arrival in imports])

    # ------------------------------------------------------------ forgetting

    def _forget(self) -> None:
        """Forget imported messages that have expired and whose files were removed."""
        now = time.monotonic()
        if now - self._forgot < FORGET_S or len(self._present) < len(self._folder.buckets):
            return
        self._forgot = now
        present: set[str] = set().union(*self._present.values())
        wall_ms = time.time_ns() // 10**6
        self._seen.forget(lambda one: one.expires_ms < wall_ms and one.id not in present)


def outgoing(arrival: Arrival, body: bytes, *, single: bool) -> Outgoing:
    """Return the message of a file, with its id and its remaining lifetime."""
    ttl = timedelta(milliseconds=min(max(arrival.ttl_ms(), 1), LONGEST_MS))
    return Outgoing(arrival.stream, body, ttl=ttl, headers=arrival.headers, id=id_of(arrival.file), single=single)


def append_whole(link: GroupLink, message: Outgoing) -> None:
    """Append a message, unless the group knows its id. Raises StreamFull, also if the group discards the message, as
    its file may be the only copy."""
    receipt = link.group.publish(
        message.stream, message.body, ttl=message.ttl, headers=message.headers, id=message.id, single=message.single
    )
    if (error := discarded(message, receipt)) is not None:
        raise error


def append_large(link: GroupLink, arrival: Arrival, file: IO[bytes]) -> None:
    """Append a body that is larger than a message, in parts. Raises TooLong under `full drop-new`, as no answer shows
    that parts were discarded."""
    if link.settings()["full"] == "drop-new":
        size = os.fstat(file.fileno()).st_size - 1
        raise TooLong(f"message of {size} bytes: with 'full drop-new' (expected at most {limits.MESSAGE_BYTES})")
    message = outgoing(arrival, b"", single=False)
    file.seek(1)
    connection = link.connection()
    try:
        with link.group.writer(message.stream, ttl=message.ttl, headers=message.headers, id=message.id) as body:
            shutil.copyfileobj(file, body, PIECE_BYTES)
    except NotFound:
        if link.connection() is connection:
            raise
        raise Disconnected("body incomplete: the server was restarted") from None


# ---------------------------------------------------------------- imported messages

# A line of the state file is an id and its expiry time, UNIX ms. The bridges of one machine, folder and group share the
# file: each appends its imports, and reads those of the others. If it is lost, `dedup` of the group finds repeats.

REWRITE_LINES = 10_000  # forgotten lines before the file is written again


class Import(NamedTuple):
    """An imported message."""

    id: str
    expires_ms: int


class Seen:
    """The file of imported messages. All calls raise OSError."""

    def __init__(self, path: str) -> None:
        self._path = path
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self._file = self._open()
        self._imports: dict[str, Import] = {}
        self._lines = 0  # lines of the file read so far
        self._rest = b""  # an incomplete line at its end
        self.refresh()

    def __contains__(self, id: str) -> bool:
        return id in self._imports

    def __len__(self) -> int:
        return len(self._imports)

    def _open(self) -> IO[bytes]:
        file = open(self._path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        file.seek(0)
        return file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file, open it again if another bridge replaced it, and read the lines of the others."""
        while True:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if self._is_current():
                break
            self._file.close()  # another bridge replaced it
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
        """Record imports, after their messages were appended to the group."""
        with self._locked():
            before = b"\n" if self._rest else b""  # ends the incomplete line of a killed bridge
            data = before + b"".join(map(_line, imports))
            while data:  # when the disk becomes full, the first write may be partial
                data = data[self._file.write(data) :]
            self._rest = b""
            self._lines += len(imports)
            self._imports.update((one.id, one) for one in imports)

    def refresh(self) -> None:
        """Read what other bridges have recorded."""
        with self._locked():
            pass

    def forget(self, is_over: Callable[[Import], bool]) -> None:
        """Forget the imports for which `is_over` is true. Their lines are removed when there are REWRITE_LINES."""
        self._imports = {one.id: one for one in self._imports.values() if not is_over(one)}
        if self._lines - len(self._imports) > REWRITE_LINES:
            self._rewrite()

    def _rewrite(self) -> None:
        with self._locked():
            fresh = f"{self._path}.new"
            with open(fresh, "wb") as file:
                file.writelines(map(_line, self._imports.values()))
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave an empty file
            os.replace(fresh, self._path)
        self.refresh()

    def close(self) -> None:
        self._file.close()


def _line(one: Import) -> bytes:
    return f"{one.id} {one.expires_ms}\n".encode()
