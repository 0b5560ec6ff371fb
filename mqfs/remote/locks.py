"""Locks of files: first among the processes of this mount, then at the server, where others see them.

Over 9P there is one kind of lock, and no wait for one. So flock(2) is a lock of one byte that no file reaches, and a
lock that is waited for is asked for again and again. After a restart the locks that are held are taken again.
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
from mqfs.ninep.codec.messages import Fcall
from mqfs.remote.link import Link
from mqfs.remote.session import Procedure, Session
from mqfs.state.file_locks import Held, Key, Locks

if TYPE_CHECKING:
    from mqfs.remote.files import OpenFile

log = logging.getLogger("mqfs.mount")
FLOCK_BYTE = 1 << 62  # of a file: POSIX locks end below it
READ_LOCK, WRITE_LOCK, UNLOCK = 0, 1, 2
ASK_S, ASK_MOST_S = 0.01, 0.2  # between two requests for a lock that another client holds, doubling


class RemoteLocks:
    """The locks that processes of this mount hold or wait for."""

    def __init__(self, session: Session) -> None:
        self._session, self._local = session, Locks()
        self._held: dict[tuple[Key, Any], dict[OpenFile, list[Held]]] = {}  # by file and owner: through which open file

    def __len__(self) -> int:
        return len(self._local)

    def conflict(self, file: OpenFile, key: Key, wanted: Held) -> Step[Held | None]:
        """A lock of another that stands in the way."""
        mine = self._local.conflict(key, wanted)
        if mine is not None:
            return mine
        return self._session.call(partial(self._conflict, file, key, wanted))

    def _conflict(self, file: OpenFile, key: Key, wanted: Held, link: Link, repeated: bool) -> Procedure[Held | None]:
        kind = WRITE_LOCK if wanted.exclusive else READ_LOCK
        start, length = _range(key, wanted)
        (reply,) = yield [linux.Tgetlock(0, file.require_fid(), kind, start, length, wanted.pid, _client(wanted))]
        it: Any = check(reply)
        if it.type == UNLOCK:
            return None
        end = it.start + it.length if it.length else FLOCK_BYTE
        return Held(None, it.type == WRITE_LOCK, it.start, end, it.proc_id)

    def take(self, file: OpenFile, key: Key, wanted: Held, *, wait: bool) -> Step[bool]:
        """Take a lock; False: another has one in its way, and it is not to be waited for. Raises OverLimit."""
        step = self._local.take(key, wanted, wait=wait)
        if step is False:
            return False
        if not isinstance(step, Wait):
            return self._session.call(partial(self._take, file, key, wanted, wait))
        whole: Wait[bool] = Wait(lambda _: step.cancel())

        def granted(_: Any) -> None:
            whole.follow(self._session.call(partial(self._take, file, key, wanted, wait)))

        step.subscribe(granted)
        return whole

    def _take(self, file: OpenFile, key: Key, wanted: Held, wait: bool, link: Link, repeated: bool) -> Procedure[bool]:
        pause_s = ASK_S
        try:
            while True:
                (reply,) = yield [_request(file.require_fid(), key, wanted)]
                if not check(reply).status:  # type: ignore[attr-defined]
                    self._held.setdefault((key, wanted.owner), {}).setdefault(file, []).append(wanted)
                    return True
                if not wait:
                    break
                yield pause_s
                pause_s = min(pause_s * 2, ASK_MOST_S)
        except MqfsError:
            self._local.release(key, wanted.owner, wanted.start, wanted.end)
            raise
        self._local.release(key, wanted.owner, wanted.start, wanted.end)
        return False

    def release(self, file: OpenFile, key: Key, owner: Any, start: int = 0, end: int = FLOCK_BYTE) -> Step[None]:
        """Release what an owner holds of a range."""
        self._local.release(key, owner, start, end)
        held = self._held.get((key, owner))
        if held is None:
            return None
        pid = next(lock.pid for locks in held.values() for lock in locks)
        for through, locks in list(held.items()):
            held[through] = locks = [lock for lock in locks if lock.start < start or lock.end > end]
            if not locks:
                del held[through]
        if not held:
            del self._held[key, owner]
        return self._session.call(partial(self._release, file, key, Held(owner, False, start, end, pid)))

    def _release(self, file: OpenFile, key: Key, lock: Held, link: Link, repeated: bool) -> Procedure[None]:
        if file.link is link:
            yield [_request(file.fid, key, lock, UNLOCK)]

    def taken_through(self, file: OpenFile) -> Iterator[tuple[Key, Held]]:
        for (key, _), held in self._held.items():
            for lock in held.get(file, ()):
                yield key, lock

    def retake(self, file: OpenFile, fid: int) -> Procedure[None]:
        """Take the locks of an open file again, at a server that started again."""
        locks = list(self.taken_through(file))
        if not locks:
            return
        replies: Any = yield [_request(fid, key, lock) for key, lock in locks]
        for reply in replies:
            if getattr(reply, "status", 1):
                log.warning("%s: lock lost: another took it while the server was gone", file.node.name)

    def forget(self, file: OpenFile) -> None:
        """An open file was closed: its locks went with it."""
        for (key, owner), held in list(self._held.items()):
            for lock in held.pop(file, ()):
                self._local.release(key, owner, lock.start, lock.end)
            if not held:
                del self._held[key, owner]


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
