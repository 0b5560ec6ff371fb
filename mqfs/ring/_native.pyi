"""The ring's extension in C. docs/explanation/ring.md has the guarantees between processes."""

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
        """Times that a publisher was found to have died with the lock."""
    @property
    def retired(self) -> bool: ...
    @property
    def final(self) -> int | None:
        """The position given to `end`; None before."""
    @property
    def next(self) -> int:
        """The sequence that the next message takes, perhaps an outdated one while others publish. 0: corrupt."""
    @property
    def holder(self) -> int:
        """The thread that has the lock; 0: none."""
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
        """Publish one record; returns the sequence it carries. Raises errors.Again where it could not in time."""
    def publish_now(self, numbers: dict[str, int], stream: str, body: object, /) -> int | None:
        """Publish a message of bytes, at most 64 KiB, to one of some streams, if nothing is to be waited for. Returns
        its sequence. None: nothing was published. Raises errors.Stale, errors.Disconnected as `publish`."""
    def publish_many(self, stream: int, bodies: Iterable[Buffer], timeout: Timeout = None, /) -> int:
        """Publish messages of one stream, in order; others' may come between. Returns the last one's sequence, 0 of
        none. An error has as `published` how many were published before it."""
    def publish_pairs(
        self, numbers: dict[str, int], pairs: Sequence[object], most: int, timeout: Timeout = None, /
    ) -> int | None:
        """As publish_many, of pairs of a stream and bytes. None: one is not a pair, not of one of those streams, empty,
        or of more than `most` bytes, and nothing was published."""
    def publish_unit(self, drafts: Iterable[Draft], timeout: Timeout = None, flags: int = 0, /) -> int:
        """Publish records as an atomic batch, each with these flags, too. Returns the last one's sequence."""
    def consumer(
        self,
        *,
        gates: bool = False,
        kept: bool = False,
        hold: bool = False,
        wait: Literal["spin", "yield", "block"] = "block",
    ) -> Consumer:
        """A consumer that begins at the tail. `gates`: publishers wait for it while it lives. `kept`: the one that
        gates dead or alive, and begins where the last one stopped. `hold`: only `release` gives room back. Raises
        errors.Busy where no slot is free."""
    def wait_committed(self, sequence: int, timeout: Timeout = None, /) -> bool:
        """Wait until a message is as durable as its group asks; False if it is not yet."""
    def commit(self, sequence: int, /) -> None:
        """Publish that all messages up to a sequence are."""
    def grant(self, sequence: int, /) -> None:
        """Permit sequences below that one; publishers of others wait. At first all are permitted."""
    def retire(self, timeout: Timeout = None, /) -> bool:
        """Let nothing more be published. True: no publisher is inside any more. Until `end` is called late publishers,
        and readers, wait."""
    def end(self, position: int, /) -> None:
        """Set the final position: records below were taken. The others were never published: their publishers, and
        readers there, get errors.Stale."""
    def wait(self, position: int, timeout: Timeout = None, /) -> bool:
        """Wait until the tail is not at that position, or the ring is retired; whether it is not."""
    @property
    def awaited(self) -> bool:
        """Whether a process sleeps until something is committed, or did when the last commit was published."""
    def slots(self) -> list[tuple[int, int, int, bool, bool]]:
        """Slot, process, position, whether it gates and whether it lives, of each consumer."""
    def fileno(self) -> int:
        """A descriptor for another process, which passes it to `attach`."""
    def close(self) -> None: ...

@final
class Consumer:
    """A reader. Raises errors.FellBehind once where publishers overtook it, and continues at the tail; errors.Damaged,
    each time, where its position has no record; errors.Stale at the end of a retired ring."""

    @property
    def slot(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def sequence(self) -> int:
        """That of the last record read by `body`, `record` and the like; 0 before the first."""
    def body(self, timeout: Timeout = None, /) -> bytes | None:
        """The body of the next message; other kinds are skipped."""
    def bodies(self, most: int, timeout: Timeout = None, /) -> list[bytes]:
        """The bodies that are there; waits for the first only."""
    def record(self, timeout: Timeout = None, /) -> RecordTuple | None: ...
    def records(self, most: int, timeout: Timeout = None, /) -> list[RecordTuple]: ...
    def range(self, most_bytes: int, timeout: Timeout = None, /) -> bytes | None:
        """A copy of whole records, at most `most_bytes` of several. `scan` checks their CRCs."""
    def release(self) -> None:
        """Give the room of what was read back to publishers."""
    def skip(self) -> None:
        """Continue at the tail."""
    def close(self) -> None: ...

def create(size: int, *, generation: int = 1, sequence: int = 1, time_ns: int = 0) -> Ring:
    """Make a ring for `size` bytes of records; its first message takes `sequence`, and no record's time is before
    `time_ns`. Raises errors.DiskFull where there is no memory."""

def attach(fd: int, generation: int | None = None) -> Ring:
    """Another handle of the ring behind `fd`, which stays open. Raises errors.BadRing."""

def bell(ring: bool = False, /) -> int:
    """A number of this process that `ring` changes: then `wait_any` returns."""

def wait_any(rings: list[tuple[Ring, int]], bell: int, timeout: float, /) -> bool:
    """Wait until a ring's tail is not at its position, or the bell is not at that number; perhaps for less. At most
    127 rings are waited for. False: the kernel cannot (before Linux 5.16), and nothing was waited for."""

def scan(buffer: Buffer, base: int = 0, /) -> tuple[int, *tuple[bytearray, ...]]: ...
def ordered(sequences: Buffer, times: Buffer, /) -> bool: ...
def plain(
    bodies: Buffer, headers: Buffer, kinds: Buffer, flags: Buffer, streams: Buffer, most: int, first: int, next: int, /
) -> bool: ...
def shift(positions: Buffer, by: int, /) -> bytearray: ...
def crc32c(data: Buffer, crc: int = 0, table: bool = False, /) -> int:
    """CRC-32C of `data`, continued from `crc`."""

def _allocate(fd: int, size: int, /) -> None: ...
def _stop_at(point: int, signal: int, /) -> None:
    """Test: send this process a signal at a point (`enum ring_stop`)."""

RECORD_HEAD: int
HEAD_BYTES: int
STOPS: int
SLOTS: int
CRC_BY_CPU: int
SOURCE: str  # SHA-256 of its sources; empty where setup.py did not build it
