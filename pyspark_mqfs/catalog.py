"""The groups and streams of a server, by the command `streams` of a cursor, and the selection of a query.

Reads no message, changes nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import attrs

from mqfs.errors import MqfsError, NotDirectory, NotFound
from mqfs.limits import CTL_BYTES, CURSOR_NAMES, MESSAGE_BYTES
from mqfs.ninep.client.connection import Client, File
from mqfs.ninep.client.machine import Procedure
from mqfs.syntax.lines import quote_word
from pyspark_mqfs.options import OptionError, Options, invalid

ANY = 1 << 62  # messages or bytes
FORMS = "one of subscribe, subscribePattern and assign"


@attrs.frozen
class Stream:
    """One stream of a catalog."""

    floor: int  # below it no message is retained
    cut: int  # messages below it were evicted, or removed by `clear`
    first: int  # the oldest retained sequence; 0: there is none
    newest: int  # 0: there is none
    number: int = 0  # in the log

    @property
    def oldest(self) -> int:
        """The first sequence to read; 0 where no message is retained."""
        return max(self.first, self.floor) if self.first else 0


@attrs.frozen
class Group:
    """One group of a catalog, with its selected streams."""

    path: str
    next: int
    log_bytes: int
    streams: Mapping[str, Stream]
    is_whole: bool  # whether all its streams are selected
    number: int = 0  # number of its bucket
    plain: bool = False  # whether log and floors are enough to decide what to read
    wildcards: str = ""  # wildcard characters in patterns of streams

    @property
    def end(self) -> int:
        """The sequence after the newest message of its streams; 0 without one."""
        return max((stream.newest for stream in self.streams.values()), default=-1) + 1


@attrs.frozen
class ServerCatalog:
    """The groups with selected streams, by path."""

    store: str
    groups: Mapping[str, Group]

    def streams(self) -> Iterator[tuple[str, Group, Stream]]:
        """Yield each stream with its path and group."""
        for group in self.groups.values():
            for name, stream in group.streams.items():
                yield path_of(group.path, name), group, stream

    def numbers(self) -> dict[str, str]:
        """Return an identity of each stream, which a later stream of the same name does not have."""
        return {path: f"{group.number}.{stream.number}" for path, group, stream in self.streams()}


def path_of(group: str, name: str) -> str:
    return f"{group}/{name}" if group else name


def split(path: str) -> tuple[str, str]:
    """Split a stream's path into (group, name)."""
    group, _, name = path.rpartition("/")
    return group, name


@attrs.frozen
class Selection:
    """The streams of a query: paths, or a pattern that matches whole paths."""

    option: str
    paths: tuple[str, ...] = ()
    pattern: str = ""

    @classmethod
    def of(cls, options: Options) -> Selection:
        option = options.one_of("subscribe", "subscribePattern", "assign")
        if option is None:
            raise OptionError(f"no streams selected (expected {FORMS})")
        if option == "subscribePattern":
            pattern = options.text(option)
            try:
                re.compile(pattern)
            except re.error as error:
                raise invalid(option, pattern, f"a regular expression of Python: {error}") from None
            return cls(option, pattern=pattern)
        words = (
            [word.strip() for word in options.text(option).split(",")]
            if option == "subscribe"
            else _assigned_paths(options)
        )
        paths = tuple(dict.fromkeys(word.strip("/") for word in words))
        if not all(paths):
            raise invalid(option, options.text(option), "paths of streams, as jobs/mail,jobs/print")
        return cls(option, paths)

    def catalog(self, client: Client) -> ServerCatalog:
        """Read the present catalog; missing groups and streams are left out."""
        if self.paths:
            wanted: dict[str, set[str]] = {}
            for group, name in map(split, self.paths):
                wanted.setdefault(group, set()).add(name)
            return _read_catalog(client, list(wanted), lambda group, name: name in wanted[group], descend=False)
        match = re.compile(self.pattern).fullmatch
        return _read_catalog(client, [""], lambda group, name: bool(match(path_of(group, name))), descend=True)


def _assigned_paths(options: Options) -> list[str]:
    expected = '{"jobs/mail": [0], "jobs/print": [0]}'
    paths = options.object("assign", expected)
    if not paths or any(value not in ([0], [], None) for value in paths.values()):
        raise invalid("assign", options.text("assign"), f"{expected}: a stream has only partition 0")
    return list(paths)


def stream_positions(client: Client, group: str) -> dict[str, object]:
    """Return the positions of the streams of a group, by name, in constant time a stream. Raises MqfsError."""
    return client.do(_stream_positions(client, group))


def _stream_positions(client: Client, group: str) -> Procedure[dict[str, object]]:
    file = yield from client.caller.open(path_of(group, ".cursor"), os.O_RDWR)
    try:
        yield from file.write(b"streams\n")
        reply = b""
        while not reply.endswith(b"\n"):
            reply += yield from file.read(MESSAGE_BYTES)
    except MqfsError:
        yield from client.caller.clunk(file.fid)
        raise
    yield from client.caller.clunk(file.fid)
    read: dict[str, object] = json.loads(reply)
    return read


def _read_catalog(
    client: Client, paths: list[str], wanted: Callable[[str, str], bool], *, descend: bool
) -> ServerCatalog:
    store, groups = "", {}
    queue = list(paths)
    while queue:
        wave, queue = queue, []
        for path, read in zip(wave, client.together(_stream_positions(client, path) for path in wave), strict=True):
            if isinstance(read, NotFound | NotDirectory):
                continue
            if isinstance(read, MqfsError):
                raise read
            store = str(read["store"])
            group = _group(path, read, wanted)
            if group.streams:
                groups[path] = group
            if descend:
                queue += [path_of(path, name) for name in read["groups"]]  # type: ignore[attr-defined]
    if not store:
        store = str(stream_positions(client, "")["store"])
    return ServerCatalog(store, dict(sorted(groups.items())))


def _group(path: str, read: Mapping[str, object], wanted: Callable[[str, str], bool]) -> Group:
    every: Mapping[str, Mapping[str, int | None]] = read["streams"]  # type: ignore[assignment]
    streams = {
        name: Stream(row["floor"] or 0, row["cut"] or 0, row["first"] or 0, row["newest"] or 0, row["number"] or 0)
        for name, row in every.items()
        if wanted(path, name)
    }
    next_, log_bytes, number = (int(str(read[key])) for key in ("next", "log_bytes", "group"))
    wildcards = "".join(read["words"][1:])  # type: ignore[index]
    return Group(path, next_, log_bytes, streams, len(streams) == len(every), number, bool(read["plain"]), wildcards)


class Split(NamedTuple):
    end: int
    messages: int
    size: int


def select(file: File, names: Iterable[str]) -> None:
    """Narrow a cursor to these streams, or show the whole group if one command cannot name all: the decoder skips
    other streams. Several commands name them first, as the server refuses a stream that may not be read."""
    lines: list[str] = []
    words, size = ["select"], 0
    for name in names:
        if "\n" in name:  # no command can have that name: show the whole group
            words = ["select"]
            lines = ["select"]
            break
        word = quote_word(name)
        if len(words) > CURSOR_NAMES or size + len(word.encode()) > CTL_BYTES // 2:
            lines.append(" ".join(words))
            words, size = ["select"], 0
        words.append(word)
        size += len(word.encode()) + 1
    for line in [*lines, " ".join(words)]:
        file.write(f"{line}\n".encode())
    if lines:
        file.write(b"select\n")


def measure(
    client: Client, group: str, names: Iterable[str], begin: str, end: int, step: str, *, first: bool = False
) -> list[Split]:
    """Return the splits of [begin, end) of a group; `begin` as for `seek`, `step` as for `measure`. `first`: only some
    of them, at least the first; that costs the same however many there are."""
    splits: list[Split] = []
    with client.open(path_of(group, ".cursor"), "r+") as file:
        select(file, names)
        while True:
            until = f"until {end - 1}\n" if end < ANY else ""
            file.write(f"seek {begin}\n{until}measure {step}\n".encode())
            reply = b""
            while not reply.endswith(b"\n\n") and reply != b"\n":
                reply += file.receive(MESSAGE_BYTES)
            part = [Split(*map(int, line.split())) for line in reply.decode().splitlines() if line]
            if len(part) > 1 and part[-1].end < end < ANY:
                part.pop()  # the end of the answer cut it short: measure it again
            splits += part
            if first or not part or part[-1].end >= end or end == ANY:
                return splits
            begin = str(part[-1].end)
