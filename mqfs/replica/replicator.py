"""The primary's thread: bytes that the store wrote become frames, with one append in flight.

    store's thread    write m1  write m2 ........ write m3     confirmed: callers of m1 and m2 are answered
    this thread            take [m1] append ...... take [m2 m3] append
    local disk             fdatasync ...           fdatasync

The local sync runs beside the append. A series of portions ends with a frame without MORE, and counts only with that.
An idle primary appends an empty frame a second, so that a standby knows that it is there. A second thread records how
far the disk is, and makes checkpoints.
"""

from __future__ import annotations

import glob
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from errno import EMFILE, ENFILE
from functools import partial

import attrs

from mqfs import limits
from mqfs.errors import BadReplica, DiskFailed, MqfsError
from mqfs.replica import checkpoint, state, takeover
from mqfs.replica.checkpoint import Checkpointer, Damaged, Overtaken
from mqfs.replica.frame import HEAD_BYTES, RUN_BYTES, Entry
from mqfs.replica.log import Fenced, NoAnswer, Position, Report, Stopped
from mqfs.replica.state import End, Have
from mqfs.replica.takeover import Driver, Primary
from mqfs.store.group_commit import Post
from mqfs.store.replication import LogBytes, Portion, Replication
from mqfs.store.store import folder_of

log = logging.getLogger("mqfs.replica")
_ROOM = limits.REPLICA_FRAME_BYTES - HEAD_BYTES
_CONFIRM_WARNING_S = 10.0


class Replicator:
    """Copies one store into its log."""

    def __init__(
        self,
        primary: Primary,
        path: str,
        post: Post,
        on_end: Callable[[Fenced | DiskFailed], None],
        *,
        standbys: int,
        keep_s: float,
        on_asked: Callable[[str], None] | None = None,
    ) -> None:
        """`post` runs a function on the store's thread. `on_end` is called there, with the reason, when copying has
        ended. `standbys`: how many must have a frame on their disks before it counts. `keep_s`: seconds that a restore
        can go back. `on_asked` is called there once, with the address of a standby that is to be the primary: the store
        must be closed then, and once all is copied that standby has the log. None: handovers are not looked for."""
        self._log, self._post, self._on_end, self._standbys = primary.log, post, on_end, standbys
        self._on_asked = on_asked
        self._request: takeover.HandoverRequest | None = None  # a handover that this server carries out
        self._seen: list[takeover.HandoverRequest | None] = []  # of the last look: a request from before it is ignored
        self._looked_s = 0.0
        self._stop = threading.Event()
        self._closing = False  # the store is closed: copy the rest without a pause, then end
        self._driver = Driver(primary.log, primary.writer, self._stop)
        self._wake = threading.Event()
        self._idle: list[Callable[[], None]] = []
        self._is_open = False  # whether the logs are open: until then only empty frames are appended
        self._replication: Replication | None = None
        self._appended_s = time.monotonic()
        self._keeper = Keeper(primary, path, self._stop, keep_s)
        self._thread = threading.Thread(target=self._run, name="replicator", daemon=True)

    def notify(self) -> None:
        """Wake the thread: there is something to copy."""
        self._wake.set()

    def start(self, replication: Replication) -> None:
        """Begin with empty frames: standbys must not take over while the logs are opened, which may take long."""
        self._replication = replication
        replication.silent_s = lambda: self._driver.silent_s
        replication.on_closed = self._finish
        self._thread.start()
        self._keeper.start(replication)

    def copy(self, when_idle: Callable[[], None]) -> None:
        """Copy the logs, which are all open now. `when_idle` is called once on the store's thread, when all that they
        have now is in the log."""
        self._idle.append(when_idle)
        self._is_open = True
        self._wake.set()

    def stop(self) -> None:
        """End both threads. The store is closed already."""
        self._finish()
        self._log.close()

    def _finish(self) -> None:
        """Copy the rest after the store was closed and synced. If the engine does not answer, or the log lacks some of
        the store's first content, the rest is given up, and so is an append under way, which a start finds out."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            is_given_up = self._driver.silent_s or self._idle or not self._is_open
            within_s = limits.REPLICA_CALL_S if self._request is None else limits.REPLICA_HANDOVER_S
            self._thread.join(0.0 if is_given_up else within_s)
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._keeper.stop()

    def _run(self) -> None:
        try:
            self._reports()  # subscribes: reports are received from now on
            closing = False
            while not closing and not self._stop.is_set():
                if not self._closing:
                    self._wake.wait(limits.REPLICA_BEAT_S)
                self._wake.clear()
                closing = self._closing
                self._copy()
                self._look_for_request()
            if self._request is not None and not self._stop.is_set():
                self._hand_over(self._request)
        except Stopped:
            pass
        except Fenced:
            log.error("replica %s: another server took over: this one is no longer the primary", self._log.name)
            self._end(Fenced("this server is no longer the primary"))
        except DiskFailed as error:
            self._end(DiskFailed(f"not replicated: {error} (run mqfs check)"))
        except Exception:
            log.exception("the replicator failed")
            self._end(DiskFailed("not replicated: the replicator failed (see the log)"))

    def _look_for_request(self) -> None:
        """Check now and then whether a standby asks to be the primary. A request from before the first look, or of
        another epoch, was left by a command that has ended."""
        now = time.monotonic()
        if self._on_asked is None or self._request is not None or self._closing or self._idle or not self._is_open:
            return
        if now - self._looked_s < limits.REPLICA_LOOK_S:
            return
        self._looked_s = now
        try:
            found = takeover.read_request(self._log.objects)
        except (NoAnswer, BadReplica):
            self._seen = []
            return
        is_new, self._seen = self._seen != [] and self._seen != [found], [found]
        if is_new and found is not None and found.own == self._driver.writer.position.own:
            self._request = found
            self._post(partial(self._on_asked, found.address))

    def _hand_over(self, request: takeover.HandoverRequest) -> None:
        """Append the takeover of the standby that asked, when all is copied and nothing more is written."""
        self._driver.writer.take_over(request.address, time.time_ns(), request.run)
        self._driver.finish()
        log.warning("replica %s: handed over to %s", self._log.name, request.address or "another server")

    def _end(self, why: Fenced | DiskFailed) -> None:
        self._call(partial(self._on_end, why))

    def _copy(self) -> None:
        """Append all that the log lacks; if that is nothing, an empty frame once a second."""
        assert self._replication is not None
        copied = begun = False  # begun: a series whose end is not appended yet
        is_open = self._is_open
        while is_open and not self._stop.is_set():
            if not begun:
                self._pace()
                self._keeper.begin()
            portion = self._take()
            if portion is None:
                break
            self._append(portion.entries, more=portion.more)
            copied, begun = True, portion.more
            if not begun:
                self._confirm()
                self._look_for_request()
        if not copied and not self._closing and time.monotonic() - self._appended_s >= 0.9 * limits.REPLICA_BEAT_S:
            self._append([], more=False)
        while is_open and self._idle:
            self._call(self._idle.pop())

    def _take(self) -> Portion | None:
        """Return what the log lacks. Without a free descriptor to read it, wait until the process has one again."""
        assert self._replication is not None
        waited_s = 0.0
        while True:
            try:
                return self._replication.take(_ROOM - 64 * RUN_BYTES)
            except DiskFailed as error:
                if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in (EMFILE, ENFILE):
                    raise
                if waited_s % limits.REPLICA_WARNING_S < limits.REPLICA_RETRY_S:
                    log.warning("replica %s: %s: tried again", self._log.name, error)
            waited_s += limits.REPLICA_RETRY_S
            if self._stop.wait(limits.REPLICA_RETRY_S):
                raise Stopped

    def _append(self, entries: Sequence[Entry], *, more: bool) -> None:
        pieces = list(split(entries, _ROOM))
        for number, piece in enumerate(pieces, 1):
            self._driver.writer.append(piece, time.time_ns(), more=more or number < len(pieces))
            self._driver.finish()
            self._appended_s = time.monotonic()
            self._keeper.note(piece)
        if not more:
            self._keeper.end(self._driver.writer.position)

    def _pace(self) -> None:
        """Wait, so that writes are gathered into fewer frames, unless a caller waits for one."""
        assert self._replication is not None
        while (wait_s := self._appended_s + self._log.pace_s - time.monotonic()) > 0:
            if self._stop.is_set():
                raise Stopped
            if self._replication.expected or self._idle or self._closing:
                break
            self._wake.wait(wait_s)
            self._wake.clear()

    def _confirm(self) -> None:
        """Have the store answer its callers; the next series is taken after that."""
        assert self._replication is not None
        at = self._driver.writer.position
        self._wait_for_standbys(Report(at.number, at.crc))
        if not self._closing:
            self._call(self._replication.confirm)

    def _wait_for_standbys(self, last: Report) -> None:
        """Wait until enough standbys have the last frame; nothing is appended meanwhile. Raises Fenced if another
        server appended a frame."""
        if not self._standbys:
            return
        since, warned, pause_s = time.monotonic(), False, 0.0005
        looked = since
        while list(self._reports().values()).count(last) < self._standbys and not self._closing:
            now = time.monotonic()
            if not warned and now - since > _CONFIRM_WARNING_S:
                warned, name = True, self._log.name
                log.warning(
                    "replica %s: no standby confirms frame %d (--confirm %d)", name, last.number, self._standbys
                )
            if now - looked > limits.REPLICA_BEAT_S:
                looked = now
                if self._is_followed(last.number):
                    raise Fenced
            if self._stop.wait(pause_s):
                raise Stopped
            pause_s = min(2 * pause_s, 0.05 + self._log.pace_s / 2)

    def _reports(self) -> dict[str, Report]:
        if not self._standbys:
            return {}
        try:
            return self._log.reports()
        except (NoAnswer, BadReplica):
            return {}

    def _is_followed(self, number: int) -> bool:
        try:
            return self._log.newest(number) is not None
        except (NoAnswer, BadReplica):
            return False

    def _call(self, do: Callable[[], None]) -> None:
        """Run `do` on the store's thread, and wait for the end, but not once the store is closed. Raises what `do`
        raises: a half recorded copy ends the copying."""
        done, failed = threading.Event(), list[Exception]()

        def run() -> None:
            try:
                do()
            except Exception as error:
                failed.append(error)
            finally:
                done.set()

        self._post(run)
        while not done.wait(0.2):
            if self._stop.is_set() or self._closing:
                return
        if failed:
            raise failed[0]


def split(entries: Sequence[Entry], room: int) -> Iterator[list[Entry]]:
    """Split the entries of a portion into those of frames, at least one."""
    piece: list[Entry] = []
    left = room
    for entry in entries:
        size = RUN_BYTES + (len(entry.data) if isinstance(entry, LogBytes) else 0)
        if size > left and piece:
            yield piece
            piece, left = [], room
        piece.append(entry)
        left -= size
    yield piece


class Keeper:
    """Records how far this disk is, and makes checkpoints, on a thread of its own: both may take long."""

    def __init__(self, primary: Primary, path: str, stop: threading.Event, keep_s: float) -> None:
        self._log, self._path, self._stop, self._keep_s = primary.log, path, stop, keep_s
        self._state = primary.state
        self._lock = threading.Lock()
        self._touched: set[tuple[int, int]] = set()  # segments with bytes that may not be on disk
        self._open: list[Entry | End] = []  # entries of the batch that has not ended, without their data
        self._bytes = self._frames = 0  # since the last checkpoint
        self._begun = self._ended = 0  # batches: the last one that began, and the last one that is in the log
        self._position, self._have = attrs.evolve(primary.writer.position), dict(primary.state.have)
        self._unsure = False  # a sync failed: what is on disk is unknown
        self._trouble = ""  # the last trouble that was logged
        self._has_base = primary.writer.position.epoch == 1  # a log that this server began
        self._checkpoints = Checkpointer(primary.log, path, stop)
        self._replication: Replication | None = None
        self._thread = threading.Thread(target=self._run, name="replica keeper", daemon=True)

    def start(self, replication: Replication) -> None:
        self._replication = replication
        self._thread.start()

    def begin(self) -> None:
        """Begin a batch: it has what is in the store from now on."""
        self._begun += 1

    def note(self, entries: Sequence[Entry]) -> None:
        """Record entries that are in the log."""
        with self._lock:
            self._frames += 1
            for entry in entries:
                if isinstance(entry, LogBytes):
                    self._bytes += len(entry.data)
                    self._open.append(End(entry.group, entry.first, entry.position + len(entry.data)))
                else:
                    self._open.append(entry)

    def end(self, position: Position) -> None:
        """Record that a batch ended there."""
        with self._lock:
            self._touched.update((entry.group, entry.first) for entry in self._open if isinstance(entry, End))
            state.note(self._have, self._open)
            self._open = []
            self._position = attrs.evolve(position)
            self._ended = self._begun

    def _take(self) -> tuple[Position, Have, set[tuple[int, int]]]:
        """Return where the log is. The segments that are the newest there keep their bytes until `_release`: a
        checkpoint has their first bytes, and the frames after it add the later ones."""
        with self._lock:  # before a later segment counts as copied
            touched, self._touched = self._touched, set()
            have = dict(self._have)
            if self._replication is not None:
                self._replication.held = have
            return self._position, have, touched

    def _release(self) -> None:
        if self._replication is not None:
            self._replication.held = {}

    def _run(self) -> None:
        while not self._stop.wait(limits.REPLICA_STATE_S):
            is_due = False
            try:
                self._look_for_base()
                size, frames = self._bytes, self._frames  # counted first: the checkpoint may have more
                is_due = size >= limits.REPLICA_CHECKPOINT_BYTES or frames >= limits.REPLICA_CHECKPOINT_FRAMES
                position, have, touched = self._take()
                self._note(position, have, touched)
                if is_due:
                    try:
                        self._make_checkpoint(position, have)
                    except Damaged as error:  # the next one reads all segments again, so it is not made at once
                        self._tell(f"no checkpoint: {error}")
                    with self._lock:
                        self._bytes -= size
                        self._frames -= frames
            except Stopped:
                break
            except Overtaken as error:  # the next position has the removal
                log.info("replica %s: no checkpoint: group %s was removed meanwhile", self._log.name, error)
            except (NoAnswer, MqfsError, OSError) as error:
                self._tell(f"no checkpoint: {error}" if is_due else str(error), is_due=is_due)
            except Exception:
                log.exception("the replica's keeper failed")
            finally:
                self._release()

    def _tell(self, trouble: str, *, is_due: bool = True) -> None:
        """Log a failure, each once until a checkpoint is made. "": one was made. `is_due`: whether a checkpoint was
        due."""
        if trouble and trouble != self._trouble:
            log.warning("replica %s: %s", self._log.name, trouble)
        self._trouble = trouble
        if is_due and self._replication is not None:
            self._replication.has_no_checkpoint = bool(trouble)

    def _look_for_base(self) -> None:
        """Make a checkpoint due now if there is none and the frames may not have everything. A server that was killed
        just after it had begun the log with an older store left the older segments out."""
        if self._has_base:
            return
        folders = [folder_of(self._path, group) for group in list(self._have)]
        if checkpoint.newest(self._log) is None and any(len(glob.glob("*.log", root_dir=it)) > 1 for it in folders):
            with self._lock:
                self._frames += limits.REPLICA_CHECKPOINT_FRAMES
        self._has_base = True

    def _note(self, position: Position, have: Have, touched: set[tuple[int, int]]) -> None:
        if position.number == self._state.position.number or self._unsure:
            return
        try:
            for group, first in touched:
                self._sync(folder_of(self._path, group), first)
        except OSError as error:
            if error.errno in (EMFILE, ENFILE):  # the process may get descriptors again
                with self._lock:
                    self._touched |= touched
            else:
                self._unsure = True
                words = "its state is not written any more, and after a crash it may be copied again"
                log.error("replica %s: %s: not synced: %s: %s", self._log.name, self._path, error.strerror, words)
            raise
        found = attrs.evolve(self._state, position=position, have=have)
        state.write(self._path, found)
        self._state = found  # only now: a checkpoint removes frames, and a start needs those after the position on disk

    def _sync(self, folder: str, first: int) -> None:
        """Sync a segment, and its name; a segment that was removed meanwhile is skipped."""
        for path, flags in ((f"{folder}/{first:020d}.log", os.O_RDONLY), (folder, os.O_RDONLY | os.O_DIRECTORY)):
            try:
                fd = os.open(path, flags)
            except FileNotFoundError:
                return
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _make_checkpoint(self, position: Position, have: Have) -> None:
        started = time.monotonic()
        made = self._checkpoints.make(position, have, self._follow)
        log.info("replica %s: %s made in %.1f s", self._log.name, made.name, time.monotonic() - started)
        self._tell("")
        try:
            self._checkpoints.prune(self._keep_s, made.time_s)
        except (NoAnswer, BadReplica) as error:
            log.warning("replica %s: old frames and checkpoints not all removed: %s", self._log.name, error)

    def _follow(self) -> int:
        """Wait for a batch that begins from now on; return the number of its last frame, or of a later one."""
        before = self._begun
        while self._ended <= before:
            if self._stop.wait(0.05):
                raise Stopped
        return self._position.number

    def stop(self) -> None:
        """Record the end position, after the store was closed and synced."""
        if self._thread.ident is not None:
            self._thread.join()
        position, have, touched = self._take()
        try:
            self._note(position, have, touched)
        except (MqfsError, OSError) as error:
            log.warning("replica %s: its state was not written: %s", self._log.name, error)
