"""Locks of files: first among the processes of this mount, then at the server, where others see them.

Over 9P there is one kind of lock, and no wait for one. So flock(2) is a lock of one byte that no file reaches, and a
lock that is waited for is asked for again and again. After a restart the locks that are held are taken again.

    process -- take --> MountLocks -- granted there --> Tlock, again while BLOCKED --> granted
                            ^                             |  refused, interrupted
                            +-------- restore ------------+
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from mqfs.errors import MqfsError
from mqfs.model import Step, Wait
from mqfs.ninep.client.machine import check
from mqfs.ninep.codec import linux_messages as linux
from mqfs.ninep.codec.linux_messages import READ_LOCK, UNLOCK, WRITE_LOCK
from mqfs.ninep.codec.messages import Fcall
from mqfs.remote.link import Link
from mqfs.remote.session import Procedure, Session
from mqfs.state.file_locks import END, Held, Key, Locks

if TYPE_CHECKING:
    from mqfs.remote.files import OpenFile

log = logging.getLogger("mqfs.mount")
FLOCK_BYTE = 1 << 62  # of a file: POSIX locks end below it
ASK_S, ASK_MOST_S = 0.01, 0.2  # between two requests for a lock that another client holds, doubling


class MountLocks(Locks):
    """The locks of this mount's processes, each with the open file through which it was taken."""

    def owned(self, key: Key, owner: Any) -> list[Held]:
        """What an owner holds of a file."""
        ranges = self._held.get(key)
        return [] if ranges is None else list(ranges._owned.get(owner, ()))

    def taken_through(self, file: OpenFile) -> Iterator[tuple[Key, Held]]:
        for key in keys_of(file):
            if (ranges := self._held.get(key)) is not None:
                for lock in ranges.through(file):
                    yield key, lock

    def restore(self, key: Key, taken: Held, before: list[Held]) -> None:
        """Undo a take: the owner has of that range what it had before."""
        self._cut(key, taken.owner, taken.start, taken.end)
        for lock in before:
            self._put(key, lock)
        self._serve(key, taken.start, taken.end)


class LockRequest(Wait[bool]):
    """A lock that is taken: here, then at the server. Its result: whether it was granted."""

    __slots__ = ("_before", "_file", "_key", "_locks", "_step", "_wait", "_wanted")

    def __init__(
        self, locks: RemoteLocks, file: OpenFile, key: Key, wanted: Held, before: list[Held], wait: bool
    ) -> None:
        """`before`: what its owner holds of that range. Raises OverLimit."""
        super().__init__(lambda _: self._step.cancel())
        self._locks, self._file, self._key, self._wanted, self._wait = locks, file, key, wanted, wait
        self._before = before
        step = locks.local.take(key, wanted, wait=wait)
        if isinstance(step, Wait):
            self._step: Wait[Any] = step
            step.subscribe(self._ask)
        elif step is False:
            self.resolve(False)
        else:
            self._ask(None)

    def _ask(self, _: object) -> None:
        locks = self._locks
        self._step = call = locks.session.call(partial(_take, self._file, self._key, self._wanted, self._wait))
        call.subscribe(self._answered)

    def _answered(self, call: Wait[bool]) -> None:
        locks, key, wanted, error = self._locks, self._key, self._wanted, None
        try:
            granted = call.result()
        except MqfsError as failure:
            granted, error = False, failure
        if not granted:
            locks.local.restore(key, wanted, self._before)
        if error is None:
            self.resolve(granted)
            return
        if not self._before:  # it may have been granted, or taken again after a restart
            locks.session.call(partial(_release, self._file, key, wanted))
        self.fail(error)


class RemoteLocks:
    """The locks that processes of this mount hold or wait for."""

    def __init__(self, session: Session) -> None:
        self.session, self.local = session, MountLocks()

    def __len__(self) -> int:
        return len(self.local)

    def conflict(self, file: OpenFile, key: Key, wanted: Held) -> Step[Held | None]:
        """A lock of another that stands in the way."""
        mine = self.local.conflict(key, wanted)
        if mine is not None:
            return mine
        return self.session.call(partial(_conflict, file, key, wanted))

    def take(self, file: OpenFile, key: Key, wanted: Held, *, wait: bool) -> Step[bool]:
        """Take a lock; False: another has one in its way, and it is not to be waited for. Raises OverLimit."""
        own = self.local.owned(key, wanted.owner)
        if key.flock and own and own[0].exclusive != wanted.exclusive:  # released first, as flock(2) says
            self.release(file, key, wanted.owner)
            own = []
        before = [
            lock._replace(start=max(lock.start, wanted.start), end=min(lock.end, wanted.end))
            for lock in own
            if lock.start < wanted.end and wanted.start < lock.end
        ]
        wanted = wanted._replace(through=file, pid=own[0].pid if own else wanted.pid)  # the server knows owners by both
        return LockRequest(self, file, key, wanted, before, wait)

    def release(self, file: OpenFile, key: Key, owner: Any, start: int = 0, end: int = END) -> Step[None]:
        """Release what an owner holds of a range. Raises OverLimit."""
        own = self.local.owned(key, owner)
        self.local.release(key, owner, start, end)
        if not any(lock.start < end and start < lock.end for lock in own):
            return None
        return self.session.call(partial(_release, file, key, Held(owner, False, start, end, own[0].pid)))

    def retake(self, file: OpenFile, fid: int) -> Procedure[None]:
        """Take the locks of an open file again, at a server that started again."""
        locks = list(self.local.taken_through(file))
        if not locks:
            return
        replies: Any = yield [_request(fid, key, lock) for key, lock in locks]
        for reply in replies:
            if getattr(reply, "status", 1):
                log.warning("%s: lock lost: another took it while the server was gone", file.node.name)

    def forget(self, file: OpenFile) -> None:
        """An open file was closed: its locks went with it."""
        for key in keys_of(file):
            self.local.release_through(key, file)


def keys_of(file: OpenFile) -> tuple[Key, Key]:
    ino = file.node.qid.path
    return Key(ino, False), Key(ino, True)


def _conflict(file: OpenFile, key: Key, wanted: Held, link: Link, repeated: bool) -> Procedure[Held | None]:
    kind = WRITE_LOCK if wanted.exclusive else READ_LOCK
    start, length = _range(key, wanted)
    (reply,) = yield [linux.Tgetlock(0, file.require_fid(), kind, start, length, wanted.pid, _client(wanted))]
    it: Any = check(reply)
    if it.type == UNLOCK:
        return None
    end = it.start + it.length if it.length else FLOCK_BYTE
    return Held(None, it.type == WRITE_LOCK, it.start, end, it.proc_id)


def _take(file: OpenFile, key: Key, wanted: Held, wait: bool, link: Link, repeated: bool) -> Procedure[bool]:
    pause_s = ASK_S
    while True:
        (reply,) = yield [_request(file.require_fid(), key, wanted)]
        if not check(reply).status:  # type: ignore[attr-defined]
            return True
        if not wait:
            return False
        yield pause_s
        pause_s = min(pause_s * 2, ASK_MOST_S)


def _release(file: OpenFile, key: Key, lock: Held, link: Link, repeated: bool) -> Procedure[None]:
    if file.link is link:
        yield [_request(file.fid, key, lock, UNLOCK)]


def _client(lock: Held) -> str:
    return f"{lock.owner:x}"


def _range(key: Key, lock: Held) -> tuple[int, int]:
    """Start and length, as 9P has them."""
    if key.flock:
        return FLOCK_BYTE, 1
    return lock.start, min(lock.end, FLOCK_BYTE) - lock.start


def _request(fid: int, key: Key, lock: Held, kind: int | None = None) -> Fcall:
    if kind is None:
        kind = WRITE_LOCK if lock.exclusive else READ_LOCK
    start, length = _range(key, lock)
    return linux.Tlock(0, fid, kind, 0, start, length, lock.pid if lock.pid < 1 << 32 else 0, _client(lock))
