"""The ring's extension in C. The guarantees between processes are in docs/explanation/ring.md."""

from collections.abc import Iterable, Sequence
from typing import Literal, SupportsFloat, TypeAlias, final

Buffer: TypeAlias = bytes | bytearray | memoryview
Draft: TypeAlias = tuple[int, int, Buffer] | tuple[int, int, Buffer, Buffer]  # as types.Draft
RecordTuple: TypeAlias = tuple[int, int, int, int, int, bytes, bytes]  # as types.Record
Timeout: TypeAlias = SupportsFloat | None  # seconds; 0: never wait, not even for the lock; None: without limit

@final
class Ring:
    """A handle of a ring. One thread at a time publishes through it; its consumers may be read meanwhile."""

    @property
    def size(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def tail(self) -> int:
        """The position up to which records are published."""
    @property
    def committed(self) -> int: ...
    @property
    def recovered(self) -> int:
        """How often a publisher was found to have died while it held the lock."""
    @property
    def retired(self) -> bool: ...
    @property
    def final(self) -> int | None:
        """The position given to `end`; None before."""
    @property
    def next(self) -> int:
        """The sequence of the next message; it may be outdated while others publish. 0: the ring is corrupt."""
    @property
    def holder(self) -> int:
        """The number of the thread that holds the lock; 0: none."""
    def publish(
        self,
        stream: int,
        body: Buffer,
        headers: Buffer = b"",
        kind: int = 1,
        flags: int = 0,
        timeout: Timeout = None,
        /,
    ) -> int:
        """Publish one record and return its sequence. Raises errors.Again if that was not possible in time."""
    def publish_now(self, numbers: dict[str, int], stream: str, body: object, /) -> int | None:
        """Publish a message of bytes, at most 64 KiB, to a stream of `numbers`, if that needs no wait. Return its
        sequence; None: nothing was published. Raises errors.Stale, errors.Disconnected as `publish` does."""
    def publish_many(self, stream: int, bodies: Iterable[Buffer], timeout: Timeout = None, /) -> int:
        """Publish messages to one stream, in order; messages of other publishers may lie between them. Return the
        sequence of the last one; 0: there were none. An error has the number published before it as `published`."""
    def publish_pairs(
        self, numbers: dict[str, int], pairs: Sequence[object], most: int, timeout: Timeout = None, /
    ) -> int | None:
        """Publish pairs of a stream's name and a body of bytes, as `publish_many` does. Return None, with nothing
        published, if an item is not a pair, its stream is not in `numbers`, or its body is empty or longer than `most`
        bytes."""
    def publish_unit(self, drafts: Iterable[Draft], timeout: Timeout = None, flags: int = 0, /) -> int:
        """Publish records as an atomic batch, each also with `flags`. Return the sequence of the last one."""
    def consumer(
        self,
        *,
        gates: bool = False,
        kept: bool = False,
        hold: bool = False,
        wait: Literal["spin", "yield", "block"] = "block",
    ) -> Consumer:
        """Make a consumer that begins at the tail. `gates`: publishers wait for it while it lives. `kept`: the one
        consumer that gates dead or alive, and begins where its predecessor stopped. `hold`: only `release` gives room
        back to publishers. Raises errors.Busy if no slot is free."""
    def wait_committed(self, sequence: int, timeout: Timeout = None, /) -> bool:
        """Wait until a message is as durable as its group requires. Return False if it is not in time."""
    def commit(self, sequence: int, /) -> None:
        """Record that all messages up to a sequence are as durable as their group requires."""
    def grant(self, sequence: int, /) -> None:
        """Permit the sequences below `sequence`; publishers wait for all others. At first all are permitted."""
    def retire(self, timeout: Timeout = None, /) -> bool:
        """End publishing. Return True if no publisher holds the lock any more, False if one still does at the timeout.
        Late publishers, and readers at the tail, wait until `end` is called."""
    def end(self, position: int, /) -> None:
        """Set the final position: the log has the records below it. Records from there on count as never published:
        their publishers, and readers there, get errors.Stale."""
    def wait(self, position: int, timeout: Timeout = None, /) -> bool:
        """Wait until the tail is not at `position` or the ring is retired. Return whether the tail is not there."""
    @property
    def awaited(self) -> bool:
        """Whether a process sleeps until a commit, or did so at the last commit."""
    def slots(self) -> list[tuple[int, int, int, bool, bool]]:
        """Return slot, process, position, whether it gates and whether it lives, of each consumer."""
    def fileno(self) -> int:
        """Return a descriptor for another process, which passes it to `attach`."""
    def close(self) -> None: ...

@final
class Consumer:
    """A reader. Its reads raise errors.FellBehind once after publishers overtook it, and then continue at the tail;
    errors.Damaged, each time, if there is no record at its position; errors.Stale at the end of a retired ring."""

    @property
    def slot(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def sequence(self) -> int:
        """The sequence of the last record read by `body`, `bodies`, `record` or `records`; 0 before the first."""
    def body(self, timeout: Timeout = None, /) -> bytes | None:
        """Return the body of the next message, or None if none came in time; other kinds are skipped."""
    def bodies(self, most: int, timeout: Timeout = None, /) -> list[bytes]:
        """Return the bodies that are there, at most `most`; wait only for the first."""
    def record(self, timeout: Timeout = None, /) -> RecordTuple | None: ...
    def records(self, most: int, timeout: Timeout = None, /) -> list[RecordTuple]: ...
    def range(self, most_bytes: int, timeout: Timeout = None, /) -> bytes | None:
        """Return a copy of whole records: several of at most `most_bytes`, or one. `scan` checks their CRCs."""
    def release(self) -> None:
        """Give the room of the records that were read back to publishers."""
    def skip(self) -> None:
        """Continue at the tail."""
    def close(self) -> None: ...

def create(size: int, *, generation: int = 1, sequence: int = 1, time_ns: int = 0) -> Ring:
    """Make a ring for `size` bytes of records. Its first message gets `sequence`, and no record a time before
    `time_ns`. Raises errors.DiskFull if there is no memory."""

def attach(fd: int, generation: int | None = None) -> Ring:
    """Return another handle of the ring behind `fd`, which stays open. Raises errors.BadRing."""

def bell(ring: bool = False, /) -> int:
    """Return the number of this process's bell. `ring`: change it first, so that each `wait_any` returns."""

def wait_any(rings: list[tuple[Ring, int]], bell: int, timeout: float, /) -> bool:
    """Wait until a ring is retired or its tail not at its position, the bell's number is not `bell`, or `timeout`
    seconds are over; it may return earlier. Only the first 127 rings are watched. False: the kernel cannot wait so
    (before Linux 5.16)."""

def scan(buffer: Buffer, base: int = 0, /) -> tuple[int, *tuple[bytearray, ...]]: ...
def ordered(sequences: Buffer, times: Buffer, /) -> bool: ...
def plain(
    bodies: Buffer, headers: Buffer, kinds: Buffer, flags: Buffer, streams: Buffer, most: int, first: int, next: int, /
) -> bool: ...
def shift(positions: Buffer, by: int, /) -> bytearray: ...
def crc32c(data: Buffer, crc: int = 0, table: bool = False, /) -> int:
    """Return the CRC-32C of `data`, continued from `crc`."""

def _allocate(fd: int, size: int, /) -> None: ...
def _stop_at(point: int, signal: int, /) -> None:
    """For tests: send this process a signal at a point (`enum ring_stop`)."""

RECORD_HEAD: int
HEAD_BYTES: int
STOPS: int
SLOTS: int
CRC_BY_CPU: int
SOURCE: str  # SHA-256 of its sources; empty where setup.py did not build it
