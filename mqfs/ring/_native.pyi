"""The ring's part in C. docs/explanation/ring.md says what holds between processes."""

from collections.abc import Iterable
from typing import Literal, SupportsFloat, TypeAlias, final

Buffer: TypeAlias = bytes | bytearray | memoryview
Draft: TypeAlias = tuple[int, int, Buffer] | tuple[int, int, Buffer, Buffer]  # as types.Draft
RecordTuple: TypeAlias = tuple[int, int, int, int, int, bytes, bytes]  # as types.Record
Timeout: TypeAlias = SupportsFloat | None  # seconds; 0: never wait, not even for the lock; None: for ever

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
        """How often a publisher was found to have died with the lock."""
    @property
    def retired(self) -> bool: ...
    @property
    def final(self) -> int | None:
        """What `end` said."""
    @property
    def next(self) -> int:
        """The sequence that the next message takes; while others publish it may be any that was. 0: damaged."""
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
        """Publish one record; returns the sequence it carries. errors.Again where it could not in time."""
    def publish_many(self, stream: int, bodies: Iterable[Buffer], timeout: Timeout = None, /) -> int:
        """Publish messages of one stream, in order; others' may come between. Returns the last one's sequence.
        Of none it is 0. An error tells as its `published` how many were published before it."""
    def publish_drafts(self, drafts: Iterable[Draft], timeout: Timeout = None, /) -> int:
        """As publish_many, of records of any kind and stream."""
    def publish_unit(self, drafts: Iterable[Draft], timeout: Timeout = None, flags: int = 0, /) -> int:
        """Publish records that are seen together or not at all, each with these flags too. Returns the last one's
        sequence."""
    def consumer(
        self,
        *,
        gates: bool = False,
        kept: bool = False,
        hold: bool = False,
        wait: Literal["spin", "yield", "block"] = "block",
    ) -> Consumer:
        """A consumer that begins at the tail. `gates`: publishers wait for it while it lives. `kept`: there is one,
        which gates dead or alive, and begins where the last one stopped. `hold`: only `release` tells that records are
        done with. errors.Busy where no seat is free."""
    def wait_committed(self, sequence: int, timeout: Timeout = None, /) -> bool:
        """Wait until the message is as durable as its group asks; False where it is not yet."""
    def commit(self, sequence: int, /) -> None:
        """Tell that all messages up to that one are."""
    def grant(self, sequence: int, /) -> None:
        """Let sequences below that one be given; publishers of others wait. None is withheld at first."""
    def retire(self, timeout: Timeout = None, /) -> bool:
        """Nothing more is to be published here. True: nobody is inside any more. Until `end` is called publishers that
        came too late, and readers, wait."""
    def end(self, position: int, /) -> None:
        """What is below that position was taken; what is not was never published: errors.Stale for who published it,
        and for readers there."""
    def wait(self, position: int, timeout: Timeout = None, /) -> bool:
        """Wait until the tail is not there, or the ring is retired; whether it is not there."""
    def seats(self) -> list[tuple[int, int, int, bool, bool]]:
        """Of each consumer: seat, process, position, whether it gates, whether it lives."""
    def fileno(self) -> int:
        """To be passed to another process, which gives it to `attach`."""
    def close(self) -> None: ...

@final
class Consumer:
    """A reader. Raises errors.FellBehind once where publishers overtook it and goes on at the tail; errors.Damaged,
    each time, where what lies at its position is no record; errors.Stale at the end of a ring that was retired."""

    @property
    def seat(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def sequence(self) -> int:
        """Of the last record taken by `body`, `record` and their like; 0 before the first."""
    def body(self, timeout: Timeout = None, /) -> bytes | None:
        """The body of the next message; records of other kinds are passed over."""
    def bodies(self, most: int, timeout: Timeout = None, /) -> list[bytes]:
        """What is there, waiting for the first only."""
    def record(self, timeout: Timeout = None, /) -> RecordTuple | None: ...
    def records(self, most: int, timeout: Timeout = None, /) -> list[RecordTuple]: ...
    def range(self, most_bytes: int, timeout: Timeout = None, /) -> bytes | None:
        """A copy of whole records, at most so many bytes if more than one; their CRCs are not checked: `scan` does."""
    def release(self) -> None:
        """Let publishers have what was read."""
    def skip(self) -> None:
        """Go on at the tail."""
    def close(self) -> None: ...

def create(size: int, *, generation: int = 1, sequence: int = 1, time_ns: int = 0) -> Ring:
    """Make a ring for `size` bytes of records; its first message takes `sequence`, and no record's time is before
    `time_ns`. errors.DiskFull where there is no memory."""

def attach(fd: int, generation: int | None = None) -> Ring:
    """Another handle of the ring behind `fd`, which stays open. errors.BadRing says why it is none."""

def scan(buffer: Buffer, base: int = 0, /) -> tuple[int, *tuple[bytearray, ...]]: ...
def crc32c(data: Buffer, crc: int = 0, table: bool = False, /) -> int:
    """CRC-32C of `data`, going on from `crc`."""

def _allocate(fd: int, size: int, /) -> None: ...
def _stop_at(point: int, signal: int, /) -> None:
    """Test: send ourselves that signal where we next come by that point (`enum ring_stop`)."""

RECORD_HEAD: int
HEAD_BYTES: int
STOPS: int
SEATS: int
CRC_BY_CPU: int
SOURCE: str  # SHA-256 of what it was built from; empty where setup.py did not build it
