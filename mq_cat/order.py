"""OrderedMerge: several streams in the order of publication, from `order` and the streams alone.

`order` and a stream cannot be opened at the same moment. A message written in between is in one of the two only, and
pairing the n-th name with the n-th message would be wrong from then on. So `order` is opened first, and no message of a
stream is returned until the two are aligned:

1. read `order` to its present end; 2. read the stream to its present end; 3. read `order` again.

If step 3 reads no further name of the stream, nothing was written to it between 1 and 3. Unpaired names and messages
then end at the same message: they are paired from the end, and a surplus on one side was written before the other was
opened. From then on one name is one message. A message missing though named, or present though not named (it expired,
was cleared, or the reader was overtaken), makes the stream unaligned again. A message whose position is unknown is left
out, with a warning.
"""

from __future__ import annotations

import errno
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from mq_tools.cursor import READ_BYTES, Message, read_all
from mq_tools.errors import ToolError, alarm, close, reason

BUFFER_BYTES = 64 << 20  # of messages whose position is not yet known
BUFFER_NAMES = 1 << 20  # unpaired names
NAMES_PER_READ = 4096  # names read before messages are returned
_NAME_BYTES = 4096  # more than any name
_ANSWER_S = 5  # a longer read means that O_NONBLOCK is ignored: such a tree cannot be read in order


class MergeSource:
    """One open stream of a merge."""

    def __init__(self, path: str) -> None:
        self.fd = _open(path)
        self.aligned = False
        self.buffer: deque[bytes] = deque()

    def read(self) -> bytes | None:
        """Return the next message; None if there is none. Skips EOF markers, which `order` omits. Raises EOFError."""
        for _ in range(1000):
            data = read_all(self.fd)
            if data is None or data:
                return data
        raise EOFError

    def close(self) -> None:
        close(self.fd)


class OrderedMerge:
    """A reader of a group without `.cursor`, or with --order. `warn` prints a line for a person."""

    def __init__(self, group: str, streams: Sequence[str], warn: Callable[[str], None]) -> None:
        self.group = group
        self._wanted = frozenset(streams)
        self._warn = warn
        self._sources: dict[str, MergeSource] = {}
        self._names: deque[str] = deque()  # read from `order`, not yet paired
        self._count: Counter[str] = Counter()  # unpaired names by stream
        self._unreadable: set[str] = set()  # streams without permission, warned of
        self._unchecked: set[str] = set()  # streams read since the last idle check
        self.fd = _open(os.path.join(group, "order"))
        with alarm(_ANSWER_S, ToolError(f"{group}: reads with O_NONBLOCK block (expected a tree with .cursor)")):
            self._read_order(1)

    def open(self, streams: Sequence[str]) -> None:
        """Open these streams; others are opened when `order` first names them."""
        for name in streams:
            self._open_source(name)

    def read(self) -> list[Message] | None:
        """Return the next messages; None if there are none yet. Raises EOFError if the group was removed."""
        at_end = self._read_order()
        if at_end:
            for name in [n for n, source in self._sources.items() if not source.aligned]:
                self._align(name)
        messages = list(self._paired())
        if at_end and not messages and not self._names:
            self._check_idle()
            if all(source.aligned for source in self._sources.values()):
                return None
        return messages

    def _read_order(self, count: int = NAMES_PER_READ) -> bool:
        """Read at most `count` names; return whether the present end was reached."""
        for _ in range(count):
            try:
                data = os.read(self.fd, _NAME_BYTES)
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self._fell_behind(self._sources)
                continue
            if not data:
                raise EOFError
            self._add_name(data)
        return False

    def _add_name(self, data: bytes) -> None:
        names = [name for name in data.split(b"\0") if name]
        if len(names) != 1:
            raise ToolError(f"{self.group}: cannot read in order with 'data coalesce' (use .cursor)")
        name = os.fsdecode(names[0])
        if not self._wanted or name in self._wanted:
            self._names.append(name)
            self._count[name] += 1
            if len(self._names) > BUFFER_NAMES:
                self._fail_too_fast()
            self._open_source(name)

    def _open_source(self, name: str) -> None:
        if name in self._sources:
            return
        try:
            self._sources[name] = MergeSource(os.path.join(self.group, name))
        except OSError as error:
            if error.errno != errno.ENOENT and (error.errno != errno.EACCES or name in self._wanted):
                raise
            if error.errno == errno.EACCES and name not in self._unreadable:
                self._unreadable.add(name)
                self._warn(f"{name}: {reason(error)}")
            self._drop_names(name, self._count[name])

    def _align(self, name: str) -> None:
        """Do steps 2 and 3 of the module's docstring, after step 1."""
        source = self._sources[name]
        before = self._count[name]
        try:
            size = sum(len(body) for other in self._sources.values() for body in other.buffer)
            while (body := source.read()) is not None:
                source.buffer.append(body)
                size += len(body)
                if size > BUFFER_BYTES:
                    self._fail_too_fast()
        except EOFError:
            self._reopen(name)
            return
        except OSError as error:
            self._check_overtaken(name, error)
            return
        if self._read_order() and self._sources.get(name) is source and self._count[name] == before:
            self._pair_from_the_end(name, source)

    def _pair_from_the_end(self, name: str, source: MergeSource) -> None:
        surplus = self._count[name] - len(source.buffer)
        if surplus > 0:
            self._drop_names(name, surplus)
        elif surplus < 0:
            for _ in range(-surplus):
                source.buffer.popleft()
            self._warn(f"{name}: {-surplus} retained messages left out: unknown position in the order")
        source.aligned = True

    def _drop_names(self, name: str, count: int) -> None:
        """Drop the first `count` names of the stream."""
        self._count[name] -= count
        others: deque[str] = deque()
        for other in self._names:
            if other == name and count:
                count -= 1
            else:
                others.append(other)
        self._names = others

    def _paired(self) -> Iterator[Message]:
        """Yield messages from the front, up to the first name of an unaligned stream."""
        size = 0
        while self._names and size < READ_BYTES:
            name = self._names[0]
            source = self._sources[name]
            if not source.aligned:
                return
            try:
                body = source.buffer.popleft() if source.buffer else source.read()
            except EOFError:
                self._reopen(name)
                continue
            except OSError as error:
                self._check_overtaken(name, error)
                return
            if body is None:  # named, but missing
                source.aligned = False
                return
            self._names.popleft()
            self._count[name] -= 1
            self._unchecked.add(name)
            size += len(body)
            yield Message(0, 0, name, body)

    def _check_idle(self) -> None:
        """Check, at the end of `order`, that no stream has an unnamed message."""
        for name in self._unchecked:
            source = self._sources.get(name)
            if source is not None and not source.buffer:
                try:
                    body = source.read()
                except (EOFError, OSError):
                    body = None  # handled at the next name
                if body is not None:
                    source.buffer.append(body)
                    source.aligned = False
        self._unchecked.clear()

    def _check_overtaken(self, name: str, error: OSError) -> None:
        if error.errno != errno.EPIPE:
            raise error
        self._fell_behind([name])

    def _fell_behind(self, names: Sequence[str] | dict[str, MergeSource]) -> None:
        self._warn("reader fell behind")
        for name in names:
            self._sources[name].aligned = False

    def _reopen(self, name: str) -> None:
        """Close a removed stream, and open its successor, if there is one."""
        self._sources.pop(name).close()
        self._open_source(name)

    def _fail_too_fast(self) -> NoReturn:
        raise ToolError(f"{self.group}: written too fast to merge by order (use .cursor)")

    def close(self) -> None:
        close(self.fd)
        for source in self._sources.values():
            source.close()


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
