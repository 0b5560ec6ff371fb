"""The folders of new groups: made on the committer's thread, and those that are asked for meanwhile together.

    staging/7/00000000000000000001.log    the log with its first state, synced; then its folder
    buckets/07/7                          that folder, renamed; then the sync of the folder above

A folder has its final name only when its log is on disk. What a stop leaves in staging/ is removed by the next start.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from mqfs import limits
from mqfs.model import Step, Wait
from mqfs.store.api import Bucket
from mqfs.store.appender import write_head
from mqfs.store.disk import remove_tree

if TYPE_CHECKING:
    from mqfs.store.store import DiskStore

log = logging.getLogger("mqfs.store")

_AT_ONCE = 64  # groups: the descriptors that they need


def folder_of(path: str, number: int) -> str:
    """The folder of a bucket."""
    return f"{path}/buckets/{number & 255:02x}/{number}"


class NewGroups:
    """Groups that are asked for while the committer makes some are made next, together."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._asked: deque[tuple[int, bytes, Wait[Bucket]]] = deque()  # number, state
        self._tried: deque[tuple[int, OSError | None, Wait[Bucket]]] = deque()

    def make(self, number: int, state: bytes) -> Step[Bucket]:
        """A new bucket whose first record is that state, once it is on disk."""
        wait: Wait[Bucket] = Wait()
        self._asked.append((number, state, wait))
        self._request()
        return wait.result() if wait.settled else wait

    def _request(self) -> None:
        self._store.committer.request(self, self._make_some, self._answer, 0.0)

    def _make_some(self) -> None:
        """On the committer's thread."""
        some = [self._asked.popleft() for _ in range(min(len(self._asked), _AT_ONCE))]
        failed: Mapping[int, OSError] = {number: OSError(errno.EIO, "not made") for number, _, _ in some}
        try:
            failed = make_folders(self._store, {number: state for number, state, _ in some})
        finally:
            self._tried.extend((number, failed.get(number), wait) for number, _, wait in some)

    def _answer(self, _: OSError | None) -> None:
        """On the engine's thread."""
        while self._tried:
            number, failed, wait = self._tried.popleft()
            try:
                wait.follow_call(partial(self._store.open_new, number, failed))
            except Exception:  # its maker's; the others are answered
                log.exception("group %d: its maker was not answered", number)
        if self._asked:
            self._request()


def make_folders(store: DiskStore, states: Mapping[int, bytes]) -> dict[int, OSError]:
    """Make the folders of new groups, durably. All have taken one step before one takes the next: the first sync of a
    step does most of the work of the others. Returns why numbers failed."""
    return _Making(store, states).run()


class _Making:
    """New groups on their way."""

    def __init__(self, store: DiskStore, states: Mapping[int, bytes]) -> None:
        self._store, self._disk, self._states = store, store.disk, states
        self._left, self._failed = list(states), dict[int, OSError]()
        self._logs: dict[int, int] = {}  # descriptors
        self._has_new_name = False  # in the folder of all

    def run(self) -> dict[int, OSError]:
        self._each(self._write)
        self._each(self._sync_log)
        self._sync(self._made)
        self._each(self._make_above)
        if self._has_new_name:
            self._sync(lambda number: os.path.dirname(self._above(number)))
        self._each(lambda number: self._disk.rename(self._made(number), self._final(number)))
        renamed = list(self._left)
        self._sync(self._above)
        for number in renamed:
            if number in self._failed:
                with contextlib.suppress(OSError):  # its maker gets an error: it is not to be there
                    self._disk.rename(self._final(number), self._made(number))
        for number in self._failed:
            with contextlib.suppress(OSError):
                remove_tree(self._disk, self._made(number))
        return self._failed

    def _each(self, step: Callable[[int], None]) -> None:
        """Each group that did not fail takes a step."""
        for number in list(self._left):
            try:
                step(number)
            except OSError as error:
                self._fail(number, error)

    def _sync(self, folder: Callable[[int], str]) -> None:
        """Sync a folder of each group: once where some share it, for a failure is reported once."""
        shared: dict[str, list[int]] = {}
        for number in self._left:
            shared.setdefault(folder(number), []).append(number)
        for path, numbers in shared.items():
            try:
                self._disk.sync_folder(path)
            except OSError as error:
                for number in numbers:
                    self._fail(number, error)

    def _fail(self, number: int, error: OSError) -> None:
        self._failed[number] = error
        self._left.remove(number)

    def _made(self, number: int) -> str:
        return f"{self._store.staging}/{number}"

    def _final(self, number: int) -> str:
        return folder_of(self._store.path, number)

    def _above(self, number: int) -> str:
        return os.path.dirname(self._final(number))

    def _write(self, number: int) -> None:
        made = self._made(number)
        if self._disk.exists(made):
            remove_tree(self._disk, made)  # of an attempt that failed
        self._disk.mkdir(made)
        reserve = 1 + limits.SEQUENCE_BLOCK
        _, _, self._logs[number] = write_head(self._store, made, number, 1, self._states[number], reserve, 0)

    def _sync_log(self, number: int) -> None:
        try:
            self._disk.fdatasync(self._logs[number])
        finally:
            self._disk.close(self._logs[number])

    def _make_above(self, number: int) -> None:
        if not self._disk.exists(self._above(number)):
            self._disk.mkdir(self._above(number))
            self._has_new_name = True
