"""`mqfs bridge fsq`: the parts of a bridge, each on a thread, and their end.

Singles are moved from the folder into the group, as many as readers wait for; fsq's own workers may get the others.
Each is locked as fsq does, published with an id, and then removed. So it is published once, even if a bridge is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import attrs

from mqfs import limits
from mqfs.bridge.exporter import FileWriter, Lifetimes, MultiExporter, SinglesExporter
from mqfs.bridge.folder import Changes, Folder, NotPlain, Origin, Topics
from mqfs.bridge.importer import Arrival, Importer, Seen, Singles, append_large, append_whole, outgoing
from mqfs.bridge.link import LATER, GroupLink
from mqfs.errors import BadCommand, BadConfig, Interrupted, MqfsError, TooLong
from mqfs.syntax.duration import parse_duration, print_duration
from mqfs.syntax.lines import split
from mqfs.syntax.patterns import Words, compile_pattern, compile_selection, has_wildcard

log = logging.getLogger("mqfs.bridge")

MOST_EACH = 16  # singles moved for one reader at once: moved ones are lost to fsq's workers

Covers = Callable[[str], bool]


class SinglesImporter:
    """The move of singles from a folder into a group. `waiting`: the singles that scans found. `own`: the bridge's
    consumer."""

    def __init__(self, folder: Folder, link: GroupLink, waiting: Singles, own: str) -> None:
        self._folder, self._link, self._waiting, self._own = folder, link, waiting, own
        self._deliver_one = link.settings()["deliver"] == "one"
        self._passed: set[str] = set()
        self._warned: set[type[MqfsError]] = set()  # errors for lack of room that were logged
        self._each = 1  # singles to move for each parked reader

    def run(self) -> bool:
        """Move singles for parked readers: one for each, and twice as many each time while readers wait, up to
        MOST_EACH. Whether any was moved."""
        if not any(self._waiting.values()):
            self._each = 1
            return False
        readers = self._readers()
        for reader in readers:
            reader.parked *= self._each
        self._each = min(2 * self._each, MOST_EACH) if readers else 1  # the next time
        moved = False
        for arrival in self._oldest():
            if not readers:
                break
            able = [reader for reader in readers if reader.covers(arrival.stream)]
            if able and self._move(arrival):
                moved = True
                able[0].parked -= 1
                if not able[0].parked:
                    readers.remove(able[0])
        return moved

    def _oldest(self) -> Iterator[Arrival]:
        """Yield the singles found, from the buckets in random order, in each by expiry time."""
        buckets = list(self._waiting.values())
        random.shuffle(buckets)
        for bucket in buckets:
            for file, arrival in sorted(bucket.copy().items(), key=lambda item: item[1].name.expires_ms):
                if arrival.ttl_ms() <= 0:
                    bucket.pop(file, None)
                elif file not in self._passed:
                    yield arrival

    # ------------------------------------------------------------ readers

    def _readers(self) -> list[Readers]:
        """Return the parked readers. Those of a stream with waiting singles are left out: they need no others."""
        stats = self._link.stats()
        if self._deliver_one:
            rows = ((name, row, row["consumer"]) for name, row in stats["streams"].items())
            found = [
                Readers(name.__eq__, own["parked"] + row["waiting"])
                for name, row, own in rows
                if own["waiting"] == own["delayed"]
            ]
        else:
            found = self._consumers(stats)
        return [reader for reader in found if reader.parked]

    def _consumers(self, stats: dict[str, Any]) -> list[Readers]:
        views, words = self._views(), self._link.words()
        singles = {name: row["singles"] for name, row in stats["streams"].items() if "singles" in row}
        full = {name for name, row in singles.items() if row["first"]}
        found = [Readers(name.__eq__, row["parked"]) for name, row in singles.items() if name not in full]
        for name, row in stats["consumers"].items():
            if name != self._own and row["parked"]:
                found.append(Readers(_covering(row["over"], stats["streams"], views, words, full), row["parked"]))
        return found

    def _views(self) -> dict[str, list[str]]:
        """Return the patterns and programs of each view."""
        found: dict[str, list[str]] = {}
        for line in self._link.lines("ctl"):
            word, *rest = split(line)
            if word == "bind":
                found.setdefault(rest[0], []).append(rest[1])
        return found

    # ------------------------------------------------------------ one single

    def _move(self, arrival: Arrival) -> bool:
        """Append a single and remove its files. Whether this bridge did it."""
        try:
            return self._move_locked(arrival)
        except (NotPlain, PermissionError) as error:
            log.warning("%s: passed over: %s", arrival.file, error)
            self._passed.add(arrival.file)
            return False

    def _move_locked(self, arrival: Arrival) -> bool:
        bucket, file = arrival.bucket, arrival.file
        with self._folder.lock(bucket, file) as opened:
            if opened is None:
                return False
            try:
                self._link.repeat(lambda: self._append(arrival, opened))
            except Interrupted:
                raise
            except LATER as error:
                if type(error) not in self._warned:
                    log.warning("%s: %s (it stays in the folder until there is room)", file, error)
                self._warned.add(type(error))
                return False
            except MqfsError as error:
                log.warning("%s: %s", file, error)
                self._passed.add(file)
                return False
            self._folder.finish(bucket, file, opened)
            self._waiting[bucket].pop(file, None)
            return True

    def _append(self, arrival: Arrival, file: IO[bytes]) -> None:
        size = os.fstat(file.fileno()).st_size - 1
        if size > limits.MESSAGE_BYTES:
            if not self._deliver_one:
                raise TooLong(f"single of {size} bytes (expected at most {limits.MESSAGE_BYTES}, or 'deliver one')")
            append_large(self._link, arrival, file)
            return
        file.seek(1)
        append_whole(self._link, outgoing(arrival, file.read(), single=not self._deliver_one))


@attrs.define
class Readers:
    """The parked readers of one consumer, and the streams that it covers."""

    covers: Covers
    parked: int


def _covering(over: str, streams: Iterable[str], views: dict[str, list[str]], words: Words, full: set[str]) -> Covers:
    """Return a function: whether a consumer over `over` gets the messages of a stream that is not in `full`. A program
    counts as selecting any."""
    if not over or over in streams:
        return lambda stream: stream not in full and over in ("", stream)
    matches = [_pattern(text, words) for text in views.get(over, [])]
    return lambda stream: stream not in full and any(match(stream) for match in matches)


def _pattern(text: str, words: Words) -> Covers:
    try:
        return compile_pattern(text, words) if has_wildcard(text, words) else text.__eq__
    except BadCommand:
        return lambda stream: True


# ------------------------------------------------------------ the parts of a bridge

FIRST_LOOK_S = 0.005  # pause before a check for parked readers; doubled each time, up to the poll interval


@attrs.frozen(kw_only=True)
class Options:
    """Options of the command. Durations in ns."""

    folder: str
    address: str
    group: str
    topics: Topics
    inwards: bool = True
    outwards: bool = True
    singles: bool = True
    sync: bool = True
    expire: bool = False
    patterns: tuple[str, ...] = ()
    poll: int = 10**9
    window: int = 600 * 10**9
    multi_ttl: int = 60 * 10**9
    single_ttl: int = 3_600 * 10**9
    state: str = ""
    consumer: str = "fsq"
    user: str = ""
    token: str = ""


def run(options: Options) -> int:
    """Carry messages until SIGTERM or SIGINT. Raises BadConfig, MqfsError, OSError."""
    bridge = Bridge(options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: bridge.stop())
    return bridge.run()


class Bridge:
    """A bridge between one folder and one group."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._stopping = threading.Event()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._failure: BaseException | None = None
        self._folder = Folder(options.folder, sync=options.sync)
        self._link = GroupLink(
            options.address, options.group, user=options.user, token=options.token, stopping=self._stopping
        )
        stats = self._link.stats()
        self._origin = Origin(stats["store"], stats["group"])
        self._selects = compile_selection(options.patterns, self._link.words())
        self._singles: Singles = {}  # singles found, but not imported
        self._found = threading.Event()  # set when there may be some
        self._check()
        if os.geteuid() == 0 and (owner := self._folder.owner) != 0:
            log.warning(
                "%s: belongs to uid %d, and the bridge runs as root (expected that user, who needs no more rights)",
                options.folder, owner,
            )  # fmt: skip

    def _check(self) -> None:
        """Check that the group's settings can keep the guarantees. Raises BadConfig."""
        options, settings = self._options, self._link.settings()
        self._deliver_one = settings["deliver"] == "one"
        if not options.inwards:
            return
        if parse_duration(settings["dedup"]) < options.window:
            window = print_duration(options.window)
            raise BadConfig(f"{options.group}: dedup {settings['dedup']} (expected {window} or more, or --window)")
        if options.singles and options.sync and settings["sync"] != "always":
            raise BadConfig(f"{options.group}: sync {settings['sync']} (expected always, --no-singles, or --no-sync)")

    # ------------------------------------------------------------ threads

    def run(self) -> int:
        if self._options.outwards:
            self._writer().remove_leftovers()
        parts = [*self._inwards(), *self._outwards()]
        threads = [threading.Thread(target=self._guard, args=(part,), name=part.__name__) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._link.close()
        if self._failure is not None:
            raise self._failure
        return 0

    def stop(self) -> None:
        """Stop the bridge. If a part waits for a disk or a server that does not answer, SIGALRM kills the process after
        BRIDGE_STOP_S, which is safe at any moment. A signal handler may call it."""
        signal.setitimer(signal.ITIMER_REAL, limits.BRIDGE_STOP_S)
        self._stopping.set()
        self._found.set()
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"\0")

    def _guard(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Interrupted:
            pass
        except BaseException as error:
            self._failure = self._failure or error
            self.stop()

    def _inwards(self) -> Iterator[Callable[[], None]]:
        if self._options.inwards:
            yield self._import
            if self._options.singles:
                yield self._import_singles

    def _outwards(self) -> Iterator[Callable[[], None]]:
        if self._options.outwards:
            if not self._deliver_one:
                yield self._export
            if self._options.singles:
                yield self._export_singles

    # ------------------------------------------------------------ parts

    def _import(self) -> None:
        options, closing = self._options, contextlib.closing
        state = options.state or default_state(self._folder.path, self._origin)
        singles = self._singles if options.singles else None
        with closing(Seen(state)) as seen, closing(Changes(self._folder)) as changes:
            importer = Importer(
                self._folder, self._link, options.topics, self._origin, seen,
                changes=changes, selects=self._selects, singles=singles, expire=options.expire,
            )  # fmt: skip
            while not self._stopping.is_set():
                importer.scan(changes.wait(options.poll / 10**9, self._wake[0]))
                if any(self._singles.values()):
                    self._found.set()

    def _import_singles(self) -> None:
        importer = SinglesImporter(self._folder, self._link, self._singles, self._options.consumer)
        pause_s, poll_s = 0.0, self._options.poll / 10**9
        while not self._stopping.is_set():
            if not any(self._singles.values()):
                self._found.wait()
                self._found.clear()
                pause_s = 0.0
            pause_s = 0.0 if importer.run() else min(max(2 * pause_s, FIRST_LOOK_S), poll_s)
            self._stopping.wait(pause_s)

    def _export(self) -> None:
        options, link = self._options, self._link
        MultiExporter(link, self._writer(), options.consumer, self._selects, options.poll / 10**9).run()

    def _export_singles(self) -> None:
        exporter = SinglesExporter(self._link, self._writer(), self._selects)
        while not self._stopping.is_set():
            if not exporter.run():
                self._stopping.wait(self._options.poll / 10**9)

    def _writer(self) -> FileWriter:
        lifetimes = Lifetimes(self._options.multi_ttl // 10**6, self._options.single_ttl // 10**6)
        return FileWriter(self._folder, self._link, self._options.topics, self._origin, lifetimes)


def default_state(folder: str, origin: Origin) -> str:
    """Return the path of the state file of the bridges between a folder and a group."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    digest = hashlib.sha256(f"{folder}\0{origin.store}\0{origin.group}".encode()).hexdigest()[:16]
    return f"{base}/mqfs/fsq-{digest}"
