"""Singles from the folder into the group, as many as readers wait for: fsq's own workers may have the others.

Each is locked as fsq does, appended under an id, and then removed; so it is appended once, whoever is killed meanwhile.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from mqfs import limits
from mqfs.bridge.folder import Folder, NotPlain
from mqfs.bridge.importer import Arrival, Singles, append_large, append_whole, outgoing
from mqfs.bridge.link import LATER, GroupLink
from mqfs.errors import BadCommand, Interrupted, MqfsError, TooLong
from mqfs.syntax.patterns import Words, compile_pattern, has_wildcard
from mqfs.syntax.quoting import split

log = logging.getLogger("mqfs.bridge")

MOST_EACH = 16  # singles for a reader: appended, they are lost to fsq's workers

Covers = Callable[[str], bool]


class SinglesImporter:
    """Move singles of a folder into a group. `waiting`: those that scans found. `own`: the bridge's consumer."""

    def __init__(self, folder: Folder, link: GroupLink, waiting: Singles, own: str) -> None:
        self._folder, self._link, self._waiting, self._own = folder, link, waiting, own
        self._deliver_one = link.settings()["deliver"] == "one"
        self._passed: set[str] = set()
        self._warned: set[type[MqfsError]] = set()  # for which no single has room, reported once
        self._each = 1  # for a parked reader

    def run(self) -> bool:
        """Append singles for parked readers; whether there were any. One for each, and more where they are fast."""
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
        """Those that were found, of each bucket in the order of their ends; the buckets in any order."""
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
        """The parked readers. Those of a stream with singles that wait have no use for them."""
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
        """The patterns and programs of each view."""
        found: dict[str, list[str]] = {}
        for line in self._link.lines("ctl"):
            word, *rest = split(line)
            if word == "bind":
                found.setdefault(rest[0], []).append(rest[1])
        return found

    # ------------------------------------------------------------ one single

    def _move(self, arrival: Arrival) -> bool:
        """Append a single and remove its files; whether it was this bridge's to do."""
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


class Readers:
    """Parked readers of one consumer."""

    def __init__(self, covers: Covers, parked: int) -> None:
        self.covers, self.parked = covers, parked


def _covering(over: str, streams: Iterable[str], views: dict[str, list[str]], words: Words, full: set[str]) -> Covers:
    """Whether a consumer over that gets the messages of a stream, but for those. A program may select any."""
    if not over or over in streams:
        return lambda stream: stream not in full and over in ("", stream)
    matches = [_pattern(text, words) for text in views.get(over, [])]
    return lambda stream: stream not in full and any(match(stream) for match in matches)


def _pattern(text: str, words: Words) -> Covers:
    try:
        return compile_pattern(text, words) if has_wildcard(text, words) else text.__eq__
    except BadCommand:
        return lambda stream: True
