"""OrderedMerge: several streams in the order they were written, from `order` and the streams alone.

`order` and a stream are opened one after the other, so where a late reader starts at the end, a message written in
between is in one and not in the other, and a reader that pairs the n-th name with the n-th message is wrong for ever.
Here `order` is opened first and nothing of a stream is given out until the two were seen to agree:

1. read `order` until it has nothing more; 2. read the stream until it has nothing more; 3. read `order` again.

If step 3 found no further name of that stream, nothing was written to it between 1 and 3, so names and messages not yet
paired end at the same message: they are paired from the end, and what is left over on one side was written before the
other was opened. From then on one name is one message. A message that is not there although `order` names it, or is
there although `order` does not (it expired, or was cleared, or the reader was overtaken), sets the stream back to be
aligned once more. Never guesses: what has no known place is left out, and said so.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from mq_tools.cursor import READ_BYTES, Message, read_all
from mq_tools.errors import ToolError, close, reason

HELD_BYTES = 64 << 20  # messages held while their place is not yet known
HELD_NAMES = 1 << 20  # names held meanwhile
NAMES_AT_ONCE = 4096  # names read before messages are printed
_NAME_BYTES = 4096  # more than any name
_ANSWER_S = 5  # a read with O_NONBLOCK that has not come back by then is waiting


class MergeSource:
    """One stream, open for reading."""

    def __init__(self, path: str) -> None:
        self.fd = _open(path)
        self.aligned = False
        self.held: deque[bytes] = deque()

    def take(self) -> bytes | None:
        """The next message; None where there is nothing. End marks are passed over: `order` does not name them."""
        for _ in range(1000):
            data = read_all(self.fd)
            if data is None or data:
                return data
        raise EOFError

    def close(self) -> None:
        close(self.fd)


class OrderedMerge:
    """A reader of a group that has no `.cursor`, or is to be read as if it had none."""

    def __init__(self, group: str, streams: Sequence[str], tell: Callable[[str], None]) -> None:
        self.group = group
        self._wanted = frozenset(streams)
        self._tell = tell
        self._taps: dict[str, MergeSource] = {}
        self._names: deque[str] = deque()  # read from `order`, not yet paired
        self._count: Counter[str] = Counter()  # the same, counted
        self._barred: set[str] = set()  # streams that may not be read, and that was said
        self._touched: set[str] = set()  # streams read since the last still moment
        self.fd = _open(os.path.join(group, "order"))
        with _answers_within(group):
            self._read_order(1)

    def open(self, streams: Sequence[str]) -> None:
        """Open what is there; other streams of the group are opened when `order` first names them."""
        for name in streams:
            self._tap(name)

    def take(self) -> list[Message] | None:
        """The next messages; None where there is nothing yet. Raises EOFError where the group is gone."""
        still = self._read_order()
        if still:
            for name in [n for n, tap in self._taps.items() if not tap.aligned]:
                self._align(name)
        messages = list(self._paired())
        if still and not messages and not self._names:
            self._check_still()
            if all(tap.aligned for tap in self._taps.values()):
                return None
        return messages

    def _read_order(self, count: int = NAMES_AT_ONCE) -> bool:
        """The names there are now, so many at most; whether there are no more."""
        for _ in range(count):
            try:
                data = os.read(self.fd, _NAME_BYTES)
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self._fell_behind(self._taps)
                continue
            if not data:
                raise EOFError
            self._named(data)
        return False

    def _named(self, data: bytes) -> None:
        names = [name for name in data.split(b"\0") if name]
        if len(names) != 1:
            raise ToolError(f"{self.group}: 'data coalesce' runs messages together, their order cannot be told")
        name = os.fsdecode(names[0])
        if not self._wanted or name in self._wanted:
            self._names.append(name)
            self._count[name] += 1
            if len(self._names) > HELD_NAMES:
                self._too_fast()
            self._tap(name)

    def _tap(self, name: str) -> None:
        if name in self._taps:
            return
        try:
            self._taps[name] = MergeSource(os.path.join(self.group, name))
        except OSError as error:
            if error.errno != errno.ENOENT and (error.errno != errno.EACCES or name in self._wanted):
                raise
            if error.errno == errno.EACCES and name not in self._barred:
                self._barred.add(name)
                self._tell(f"{name}: {reason(error)}")
            self._forget(name, self._count[name])

    def _align(self, name: str) -> None:
        """Steps 2 and 3 of the module's head; step 1 was done."""
        tap = self._taps[name]
        before = self._count[name]
        try:
            size = sum(len(body) for other in self._taps.values() for body in other.held)
            while (body := tap.take()) is not None:
                tap.held.append(body)
                size += len(body)
                if size > HELD_BYTES:
                    self._too_fast()
        except EOFError:
            self._gone(name)
            return
        except OSError as error:
            self._lost(name, error)
            return
        if self._read_order() and self._taps.get(name) is tap and self._count[name] == before:
            self._pair_from_the_end(name, tap)

    def _pair_from_the_end(self, name: str, tap: MergeSource) -> None:
        surplus = self._count[name] - len(tap.held)
        if surplus > 0:
            self._forget(name, surplus)
        elif surplus < 0:
            for _ in range(-surplus):
                tap.held.popleft()
            self._tell(f"{name}: {-surplus} kept messages left out, their place in the order is not known")
        tap.aligned = True

    def _forget(self, name: str, count: int) -> None:
        """Drop the first `count` names of that stream."""
        self._count[name] -= count
        kept: deque[str] = deque()
        for other in self._names:
            if other == name and count:
                count -= 1
            else:
                kept.append(other)
        self._names = kept

    def _paired(self) -> Iterator[Message]:
        """Messages from the front, as long as the stream whose turn it is is aligned."""
        size = 0
        while self._names and size < READ_BYTES:
            name = self._names[0]
            tap = self._taps[name]
            if not tap.aligned:
                return
            try:
                body = tap.held.popleft() if tap.held else tap.take()
            except EOFError:
                self._gone(name)
                continue
            except OSError as error:
                self._lost(name, error)
                return
            if body is None:  # named, but not there
                tap.aligned = False
                return
            self._names.popleft()
            self._count[name] -= 1
            self._touched.add(name)
            size += len(body)
            yield Message(0, 0, name, body)

    def _check_still(self) -> None:
        """At a still moment no stream has a message that was not named."""
        for name in self._touched:
            tap = self._taps.get(name)
            if tap is not None and not tap.held:
                try:
                    body = tap.take()
                except (EOFError, OSError):
                    body = None  # seen again, and dealt with, at the next name
                if body is not None:
                    tap.held.append(body)
                    tap.aligned = False
        self._touched.clear()

    def _lost(self, name: str, error: OSError) -> None:
        if error.errno != errno.EPIPE:
            raise error
        self._fell_behind([name])

    def _fell_behind(self, names: Sequence[str] | dict[str, MergeSource]) -> None:
        self._tell("reader fell behind")
        for name in names:
            self._taps[name].aligned = False

    def _gone(self, name: str) -> None:
        """The stream was removed; there may be another of the same name by now."""
        self._taps.pop(name).close()
        self._tap(name)

    def _too_fast(self) -> NoReturn:
        raise ToolError(f"{self.group}: written faster than its order can be found out; try again")

    def close(self) -> None:
        close(self.fd)
        for tap in self._taps.values():
            tap.close()


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class _answers_within:
    """A tree that makes a non-blocking read wait cannot be read in order: say so rather than hang."""

    def __init__(self, group: str) -> None:
        self._group = group

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._late)
        signal.alarm(_ANSWER_S)

    def _late(self, _number: int, _frame: FrameType | None) -> None:
        raise ToolError(f"{self._group}: this tree has no .cursor and lets reads with O_NONBLOCK wait")

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self._before)
