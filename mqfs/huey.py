"""huey over mqfs: its queue, its schedule, its results, locks and counters.

    from mqfs.huey import MqfsHuey
    huey = MqfsHuey("shop")                      # as mqfs.connect(): $MQFS_ADDRESS, else ./mqfs.sock

Its data is in groups below the one of huey's name, here `shop`:

    tasks/queue             a work queue, `deliver one`: a task is a claim until it was executed
    schedule/queue          a row for each delayed task in the server, which expires by its ttl when the task is due
    data/KEY, counters/KEY  a stream for each result, lock, revocation and counter: the newest message is the value
    revoked/any             exists from the first revocation on: until then workers look for no revocations

A worker that is killed loses its claims at once, and other workers execute its tasks. huey's own storages lose these
tasks, as they remove a task when it is dequeued. So does `MqfsStorage` with another class than `MqfsHuey`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import compress
from math import inf
from typing import Any
from weakref import WeakSet

from huey import Huey
from huey.constants import EmptyData
from huey.signals import SIGNAL_INTERRUPTED, SIGNAL_SCHEDULED
from huey.storage import BaseStorage

from mqfs.client import Claim, Claims, Client, Group, Message, connect
from mqfs.client.large import PIECE_BYTES, place_of
from mqfs.errors import Conflict, FellBehind, MqfsError, NotFound, Stale, TooLong
from mqfs.syntax.lines import quote_word
from mqfs.syntax.names import stream_name

QUEUE = "queue"
_VERSIONS = 64  # messages of a key: older values, or the parts of one value
_VALUES = ("replay all", f"depth {_VERSIONS}", "idle 1m")
_SETTINGS = {
    "tasks": ("deliver one", "replay off"), "schedule": ("replay all",), "data": _VALUES, "counters": _VALUES,
    "revoked": ("replay all", "depth 1"),
}  # fmt: skip
_ANY = "any"
_REVOCATIONS = ("r:", "rt:")  # prefixes of the keys of revocations
_SOON_S = 0.05  # wait for the next task before the revocation of the last one is looked up
_FRESH_S = 0.005  # validity of an answer, received after a claim, that nothing is revoked
_DUE = "eta"  # a row's header: when its task is due, UNIX seconds
_SEQUENCE = "delayed"  # a row's header: the sequence of the delayed message
_HIGHEST = 9  # priority of mqfs
_EXECUTE = Huey._execute.__code__
log = logging.getLogger("mqfs.huey")


class Values(BaseStorage):  # type: ignore[misc]
    """The part of a storage with results, locks and counters, and its connection, which is made on first use."""

    def __init__(
        self,
        name: str = "huey",
        *,
        address: str | None = None,
        token: str = "",
        utc: bool = True,
        read_timeout: float = 1.0,
    ) -> None:
        """Prepare a storage.

        Args:
            name: The path of its group, which is made if it is missing.
            address: See `mqfs.connect`.
            token: See `mqfs.connect`.
            utc: Whether times without a zone are UTC, as in `Huey`; False: local time.
            read_timeout: How long `dequeue` waits for a task, in seconds.
        """
        super().__init__(name)
        self._connect = partial(connect, address, token=token)
        self._zone = UTC if utc else None
        self._read_timeout = read_timeout
        self._has_mark = False  # whether there was a revocation, made here or elsewhere
        self._begin()
        _storages.add(self)

    def _begin(self) -> None:
        """Start without a connection, also in a forked child, where a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        # `key`: that `delete_soon` has to delete; `unrevoked`: monotonic time until which nothing counts as revoked.
        self._later = threading.local()
        self._client: Client | None = None
        self._claims: Claims | None = None
        self._groups: dict[str, Group] = {}

    def close(self) -> None:
        """Close the connection; the next call makes another."""
        self._later.key = None
        with self._lock:
            client, self._client, self._claims, self._groups = self._client, None, None, {}
        if client is not None:
            client.close()

    def _group(self, name: str) -> Group:
        """Return a group of the storage, after pending deletions; it is made, with its settings, if it is missing."""
        self._finish_deletion()
        return self._open_group(name)

    def _open_group(self, name: str) -> Group:
        with self._lock:
            if name not in self._groups:
                if self._client is None:
                    self._client = self._connect()
                self._groups[name] = self._client._require(f"{self.name}/{name}", _SETTINGS[name])
            return self._groups[name]

    def _look_up(self, group: Group, *keys: str | bytes) -> Callable[[], list[bool]]:
        """Send one request for whether keys may exist, and return a function that returns the answer. Most keys that
        huey asks for are missing."""
        return group._link.look_up([f"{group.path}/{stream_name(_text(key))}" for key in keys])

    def _versions(self, group: Group, key: str | bytes) -> list[Message]:
        """Return the messages of a key, the newest last."""
        text = _text(key)
        if not self._look_up(group, key)()[0]:
            return []
        return [message for message in _retained(group, text) if message.topic == text]

    def put_data(self, key: str | bytes, value: bytes, is_result: bool = False) -> None:
        most = _VERSIONS * PIECE_BYTES
        if len(value) > most:
            raise TooLong(f"result {_text(key)!r}: {len(value)} bytes (expected at most {most})")
        if _text(key).startswith(_REVOCATIONS) and not self._has_mark:  # have workers look for revocations
            self._group("revoked").publish(_ANY, b"yes")
            self._has_mark = True
        self._group("data").publish(_text(key), value)

    def peek_data(self, key: str | bytes) -> Any:
        versions = self._versions(self._group("data"), key)
        return versions[-1].body if versions else EmptyData

    def peek_many(self, keys: Sequence[str | bytes]) -> dict[str | bytes, Any]:
        """Return the values of those keys that have one. Most are missing, so all are looked up in one round trip; if
        nothing was ever revoked, revocations need none."""
        if all(_text(key).startswith(_REVOCATIONS) for key in keys) and not self._is_any_revoked():
            self._later.key = None
            return {}
        data = self._group("data")
        values = {key: self.peek_data(key) for key in compress(keys, self._look_up(data, *keys)())}
        return {key: value for key, value in values.items() if value is not EmptyData}

    def _is_any_revoked(self) -> bool:
        if self._has_mark or time.monotonic() < getattr(self._later, "unrevoked", 0.0):
            return self._has_mark
        self._open_group("data")
        assert self._client is not None
        if self._client._link.look_up([self._mark])()[0]:
            self._has_mark = True
        return self._has_mark

    @property
    def _mark(self) -> str:
        return f"{self.name}/revoked/{_ANY}"

    def delete_soon(self, key: str | bytes) -> None:
        """Delete a revocation, which mostly does not exist, later: before the next call of this thread that does more
        than look for revocations of the next task."""
        self._finish_deletion()
        self._later.key, self._later.unrevoked = key, 0.0

    def _finish_deletion(self) -> None:
        key = getattr(self._later, "key", None)
        if key is None:
            return
        self._later.key = None
        if self._is_any_revoked():
            self.pop_data(key)

    def pop_data(self, key: str | bytes) -> Any:
        """Remove a key and return its value; of several callers only one gets it."""
        versions = self._versions(self._group("data"), key)
        if not versions:
            return EmptyData
        parts = [range(v.sequence, v.sequence + max(1, place_of(v)[1])) for v in versions]
        is_ours = _drop(self._group("data"), _text(key), *(str(sequence) for part in parts for sequence in part))
        return versions[-1].body if is_ours else EmptyData

    def has_data_for_key(self, key: str | bytes) -> bool:
        return bool(self._versions(self._group("data"), key))

    def wait_result(
        self, key: str | bytes, timeout: float | None = None, backoff: float = 1.15, max_delay: float = 1.0
    ) -> bool:
        with self._group("data").subscribe(_text(key), existing=True) as values:
            try:
                values.get(timeout)
            except TimeoutError:
                return False
        return True

    def put_if_empty(self, key: str | bytes, value: bytes, ttl: float | None = None) -> bool:
        try:
            self._group("data").publish(_text(key), value, ttl=ttl, expect=0)
        except Conflict:
            return False
        return True

    def incr(self, key: str | bytes, amount: int = 1) -> int:
        while True:
            versions = self._versions(self._group("counters"), key)
            sequence, value = (versions[-1].sequence, int(versions[-1].body)) if versions else (0, 0)
            if amount:
                try:
                    self._group("counters").publish(_text(key), str(value + amount), expect=sequence)
                except Conflict:
                    continue
            return value + amount

    def delete_counter(self, key: str | bytes) -> None:
        with contextlib.suppress(NotFound):
            self._group("counters").remove(_text(key))

    def result_store_size(self) -> int:
        return sum(1 for stream in self._group("data").stats().streams.values() if stream.messages)

    def result_items(self) -> dict[str, bytes]:
        return {message.topic: message.body for message in _retained(self._group("data"))}

    def flush_results(self) -> None:
        self._group("data").purge()

    def flush_counters(self) -> None:
        self._group("counters").purge()


_storages = WeakSet[Values]()


def _begin_in_child() -> None:
    for storage in [*_storages]:
        storage._begin()


os.register_at_fork(after_in_child=_begin_in_child)


class MqfsStorage(Values):
    """A storage of huey."""

    blocking = True

    # ------------------------------------------------------------ the queue

    def enqueue(self, data: bytes, priority: float | None = None, id: str = "") -> None:
        """Publish a task. A repeated `id` publishes nothing."""
        self._group("tasks").publish(QUEUE, data, priority=_priority(priority), id=id)

    def claim(self) -> Claim | None:
        """Claim the next task.

        Returns:
            The claim, to be settled by the caller; None: there was no task within `read_timeout`.

        Raises:
            Disconnected: The server cannot be reached.
        """
        tasks = self._open_group("tasks")
        with self._lock:
            if self._claims is None:
                self._claims = tasks.take(QUEUE, renew=True)
            claims = self._claims
        claims._look_up = "" if self._has_mark else self._mark
        claim = self._next(claims)
        self._later.unrevoked = 0.0
        if claim is not None and claim._found is False:
            self._later.unrevoked = claim._asked_at + _FRESH_S
        return claim

    def _next(self, claims: Claims) -> Claim | None:
        try:
            if getattr(self._later, "key", None) is not None:
                with contextlib.suppress(TimeoutError):
                    return claims.get(min(_SOON_S, self._read_timeout))
                self._finish_deletion()
            return claims.get(self._read_timeout)
        except TimeoutError:
            return None
        except Stale as error:
            log.warning("an acknowledgement failed, its task is executed again: %s", error)
            return None

    def dequeue(self) -> bytes | None:
        claim = self.claim()
        if claim is None:
            return None
        claim.ack()
        return claim.body

    def queue_size(self) -> int:
        stats = self._group("tasks").stats().streams.get(QUEUE)
        return 0 if stats is None or stats.consumer is None else stats.consumer.waiting

    def enqueued_items(self, limit: int | None = None) -> list[bytes]:
        """Return the tasks of the queue, with those that are being executed."""
        tasks = _retained(self._group("tasks"), QUEUE)
        tasks.sort(key=lambda task: -int(task.headers["priority"]))
        return [task.body for task in tasks[: limit or None]]

    def flush_queue(self) -> None:
        with contextlib.suppress(NotFound):
            self._group("tasks").purge(QUEUE)

    # ------------------------------------------------------------ the schedule

    def _seconds(self, ts: datetime) -> float:
        return (ts if ts.tzinfo else ts.replace(tzinfo=self._zone)).timestamp()

    def add_to_schedule(self, data: bytes, ts: datetime, priority: float | None = None, id: str = "") -> None:
        """Publish a task that is due at `ts`. A repeated `id` publishes nothing."""
        due = self._seconds(ts)
        delay = due - time.time()  # by the local clock: a worker checks the ETA by its own, not the server's
        if delay <= 0:
            self.enqueue(data, priority)
            return
        task = self._group("tasks").publish(QUEUE, data, delay=delay, priority=_priority(priority), id=id)
        if not task.duplicate:
            headers = {_DUE: repr(due), _SEQUENCE: str(task.sequence)}
            self._group("schedule").publish(QUEUE, data, ttl=delay, headers=headers)

    def read_schedule(self, ts: datetime) -> list[bytes]:
        """Remove and return the tasks that will be due by `ts`. Tasks that are due now are in the queue already."""
        latest = self._seconds(ts)
        return self._unschedule(latest) if latest > time.time() else []

    def _unschedule(self, latest: float) -> list[bytes]:
        taken = []
        for row in self._scheduled():
            if float(row.headers[_DUE]) <= latest and _drop(self._group("tasks"), QUEUE, row.headers[_SEQUENCE]):
                _drop(self._group("schedule"), QUEUE, str(row.sequence))
                taken.append(row.body)
        return taken

    def _scheduled(self) -> list[Message]:
        now = time.time()
        rows = [(float(row.headers[_DUE]), row) for row in _retained(self._group("schedule"), QUEUE)]
        return [row for due, row in sorted(rows) if due > now]

    def schedule_size(self) -> int:
        return self._group("tasks").stats().held

    def scheduled_items(self, limit: int | None = None) -> list[bytes]:
        return [row.body for row in self._scheduled()[: limit or None]]

    def flush_schedule(self) -> None:
        self._unschedule(inf)


class MqfsHuey(Huey):  # type: ignore[misc]
    """huey over mqfs: a task is acknowledged after it was executed.

    A task that cannot be executed, such as an unknown one, becomes a dead letter of the group; `mq redrive` sends it
    back.
    """

    def __init__(self, name: str = "huey", **options: Any) -> None:
        """Make an instance.

        Args:
            name: The path of its group on the server.
            **options: Options of `huey.Huey` and of `MqfsStorage`.
        """
        super().__init__(name, storage_class=MqfsStorage, **options)
        self.signal(SIGNAL_INTERRUPTED)(_release)

    def get_storage(self, **options: Any) -> Any:
        return super().get_storage(utc=self.utc, **options)

    def dequeue(self) -> Any:
        if not isinstance(self.storage, MqfsStorage):  # immediate mode
            return super().dequeue()
        claim = self.storage.claim()
        if claim is None:
            return None
        try:
            task = self.deserialize_task(claim.body)
        except Exception as error:
            try:
                claim._give_up(f"not a task of this program: {error!r}")
            except MqfsError as other:
                error.add_note(f"message {claim.sequence} is no dead letter: {other} (it is delivered again)")
            raise
        task.claim = claim
        return task

    def execute(self, task: Any, timestamp: datetime | None = None) -> Any:
        with getattr(task, "claim", contextlib.nullcontext()):
            return super().execute(task, timestamp)

    def delete(self, key: str) -> Any:
        if isinstance(self.storage, MqfsStorage) and sys._getframe(1).f_code is _EXECUTE:
            self.storage.delete_soon(key)  # the revocation of an executed task: huey does not use the result
            return None
        return super().delete(key)

    def add_schedule(self, task: Any) -> None:
        if task.eta is None or not isinstance(self.storage, MqfsStorage):
            super().add_schedule(task)
            return
        # A worker that is killed before it acknowledges this task leaves it to another, which schedules it again.
        claim = getattr(task, "claim", None)
        id = "" if claim is None else f"scheduled {claim.sequence}"
        try:
            self.storage.add_to_schedule(self.serialize_task(task), task.eta, task.priority, id)
        except TooLong as error:
            log.warning("task %s is executed at once, not at %s: %s", task.id, task.eta, error)
            task.eta = None
            self.storage.enqueue(self.serialize_task(task), task.priority, id)
            return
        self._emit(SIGNAL_SCHEDULED, task)


def _release(signal: str, task: Any) -> None:
    """Release the claim of a task whose worker is stopped while it executes it, so that another worker gets it."""
    claim = getattr(task, "claim", None)
    if claim is not None:
        claim.release()


def _priority(priority: float | None) -> int:
    return max(0, min(int(priority or 0), _HIGHEST))


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key


def _retained(group: Group, pattern: str = "#") -> list[Message]:
    """Return the retained messages, the newest last. Some may be evicted or removed meanwhile."""
    found: list[Message] = []
    with group.history(pattern=pattern) as messages:
        while True:
            try:
                found.extend(messages)
                return found
            except FellBehind:
                continue


def _drop(group: Group, stream: str, *sequences: str) -> bool:
    """Remove messages. False: one of them was removed before."""
    try:
        group.ctl(f"drop {quote_word(stream_name(stream))} {' '.join(sequences)}")
    except NotFound:
        return False
    return True
