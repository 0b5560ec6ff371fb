"""A primary in this process: a store, its replicator, and the test's thread as the store's. A standby, on a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from mqfs.errors import BadReplica, NotFound
from mqfs.model import Draft, Kind
from mqfs.replica.log import NoAnswer, ReplicatedLog, open_log
from mqfs.replica.replicator import Replicator
from mqfs.replica.restore import Point, Restored, restore
from mqfs.replica.takeover import Primary, Standby, become_primary
from mqfs.store.disk import Disk
from mqfs.store.store import DiskBucket, DiskStore
from tests.support.eventually import HANG_S, eventually

STATE = b'{"group":%d,"parent":1,"name":"g%d","streams":[]}'


def start(path: Path, url: str) -> Primary | None:
    """Take over; None where the engine did not answer: a server ends then, and is started again."""
    log: ReplicatedLog | None = None
    try:
        return become_primary(log := open_log(url), str(path), "tcp!a!5640")
    except (NoAnswer, BadReplica) as error:
        if log is not None:
            log.close()
        if isinstance(error, BadReplica) and "not reachable" not in str(error):
            raise
        return None


class LocalPrimary:
    """`acknowledged`: of each group, the bodies whose callers heard that they are on disk and in the log."""

    def __init__(
        self,
        path: Path,
        url: str,
        primary: Primary | None = None,
        *,
        standbys: int = 0,
        disk: Disk | None = None,
        keep_s: float = 0,
    ) -> None:
        self.path, self.acknowledged, self.failed = path, dict[int, list[bytes]](), 0
        self._posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.fenced = self._idle = False
        self.why: Exception | None = None  # nothing is copied any more
        self.primary = primary or eventually(lambda: start(path, url), "the engine")
        self.replicator = Replicator(
            self.primary, str(path), self._posted.put, self._on_fenced, standbys=standbys, keep_s=keep_s
        )
        self.store = DiskStore(str(path), self._posted.put, disk, self.replicator.notify)
        assert self.store.replication is not None
        self.store.replication.begin(self.primary.state.have)
        self.replicator.start(self.store.replication)
        list(self.store.replication.open_all())
        self.replicator.copy(self._on_idle)
        self.run(lambda: self._idle or self.fenced)

    def _on_idle(self) -> None:
        self._idle = True

    def _on_fenced(self, why: Exception) -> None:
        self.fenced, self.why = True, why
        assert self.store.replication is not None
        self.store.replication.fail(OSError(5, str(why)))

    def run(self, until: Callable[[], bool]) -> None:
        """Do what is posted until that holds."""
        end = time.monotonic() + HANG_S
        while not until():
            assert time.monotonic() < end
            try:
                self._posted.get(timeout=0.05)()
            except queue.Empty:
                pass

    def bucket(self, number: int) -> DiskBucket:
        """The log of a group, which is made where it is not there."""
        state = STATE % (number, number)
        try:
            bucket = self.store.open(number)
        except NotFound:
            while self.store.number() < number:
                pass
            bucket = self.store.make(number, state)
        bucket.writer.state = lambda: state
        return bucket

    def append(self, number: int, *bodies: bytes) -> None:
        """One atomic batch; it is acknowledged by and by."""
        bucket = self.bucket(number)
        bucket.writer.append_batch([Draft(Kind.MESSAGE, 16, body, b"") for body in bodies], time.time_ns())

        def then(error: OSError | None) -> None:
            self.failed += error is not None
            if error is None:
                self.acknowledged.setdefault(number, []).extend(bodies)

        bucket.upkeep.replicate(then)

    def wait(self, number: int, count: int) -> None:
        self.run(lambda: len(self.acknowledged.get(number, ())) >= count or self.fenced)

    def stop_copying(self) -> None:
        """Later appends are on this disk alone."""
        self.replicator._stop.set()
        self.replicator._wake.set()
        self.replicator._thread.join()

    def kill(self) -> None:
        """As kill -9: nothing more is written, and the lock is free."""
        self.stop_copying()
        self.replicator._keeper._thread.join()
        self.primary.log.close()
        self.store.committer.stop()
        self.store.disk.close(self.store._lock)

    def stop(self) -> None:
        self.store.close()
        self.replicator.stop()


def opened(url: str) -> ReplicatedLog:
    """The log, once the engine answers."""

    def attempt() -> ReplicatedLog | None:
        with suppress(BadReplica):
            return open_log(url)
        return None

    return eventually(attempt, url)


class LocalStandby:
    """A standby on a thread."""

    def __init__(self, path: Path, url: str, failover_s: float = 60.0) -> None:
        self.path, self.log = path, opened(url)
        self.standby = Standby(self.log, str(path), "tcp!b!5640", failover_s)
        self.primary = None
        self.failed: Exception | None = None
        self.closed = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.primary = self.standby.run()
        except Exception as error:
            self.failed = error

    def stop(self) -> None:
        self.standby.stop()
        self.thread.join()
        if self.primary is None and not self.closed:
            self.closed = True
            self.log.close()

    def promote(self, url: str) -> LocalPrimary:
        self.standby.promote(0.0)  # by force: the primary here does not hand over
        self.thread.join()
        assert self.primary is not None, self.failed
        return LocalPrimary(self.path, url, self.primary)


def restored(url: str, to: Path) -> Restored:
    """Make a store of all that the log has."""
    with closing(open_log(url)) as log:
        return restore(log, str(to), Point())


def bodies_of(path: Path, number: int) -> list[bytes]:
    """What a store has in a group, without a replica."""
    store = DiskStore(str(path))
    try:
        bucket, found, at = store.open(number), list[bytes](), 0
        while (record := bucket.reader.scan(at)) is not None:
            found.append(record.body)
            at = record.sequence + 1
        return found
    finally:
        store.close()
