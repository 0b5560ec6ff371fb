"""The consumers of a query, one in each group: `.stats` shows the query's lag, and retention waits for it.

They are private and one is held open, so that two queries cannot share them. They claim no message.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress

from mqfs.errors import Busy, Denied, Disconnected, MqfsError, NotFound, NotPermitted, OverLimit
from mqfs.limits import CTL_BYTES, VIEW_PATTERNS
from mqfs.ninep.client.connection import Client, File
from mqfs.syntax.lines import quote_word
from pyspark_mqfs.catalog import Group, ServerCatalog, path_of
from pyspark_mqfs.connection import read_text, write_text
from pyspark_mqfs.options import OptionError

log = logging.getLogger(__name__)
OTHER_LINES_BYTES = 4_096  # reserved in the write with the lines of a view
PAUSE_S = 0.1  # between two attempts to open a consumer


class Consumers:
    """The consumers of a query: one in each group, all of the same name."""

    def __init__(self, *, required: bool, timeout_s: float) -> None:
        """`required`: option consumer names it, so that a refusal is an error. `timeout_s`: seconds to wait for another
        query, since the connection of a killed driver ends a little later."""
        self.required, self.timeout_s = required, timeout_s
        self._open_file: tuple[Client, File, str] | None = None  # its connection, file and path
        self._sources: dict[str, frozenset[str]] = {}  # by group: the streams of its consumer
        self._positions: dict[str, int] = {}  # by group: the position of its consumer
        self._whole: set[str] = set()  # groups whose consumer covers the whole group
        self._refused: set[str] = set()  # groups that refuse a consumer

    def move(self, client: Client, name: str, catalog: ServerCatalog, positions: Mapping[str, int]) -> None:
        """Move the consumers to these positions, and create missing ones. Raises OptionError, Disconnected."""
        for path, group in catalog.groups.items():
            starts = [positions[key] for stream in group.streams if (key := path_of(path, stream)) in positions]
            if not starts or path in self._refused:
                continue
            position = min(starts)
            if path in self._whole and position >= group.end:
                position = group.next  # messages of other streams are not retained for this query
            if not self._is_current(client, group, position):
                self._move_group(client, name, group, position)
                self._positions[path] = position

    def remove(self, client: Client, name: str, catalog: ServerCatalog) -> None:
        """Remove the consumers of that name and their views."""
        self._close()
        self._sources.clear()
        self._positions.clear()
        self._whole.clear()
        for path, group in catalog.groups.items():
            with suppress(MqfsError):
                client.remove(path_of(path, f".consumers/{name}"))
            if self._exists(client, path_of(path, name)):
                with suppress(MqfsError):
                    write_text(client, path_of(group.path, "ctl"), f"unbind {quote_word(name)}\n")

    def are_held(self, client: Client) -> bool:
        """Whether this connection has a consumer open, so that no other query can use them."""
        return self._open_file is not None and self._open_file[0] is client

    def _is_current(self, client: Client, group: Group, position: int) -> bool:
        """Whether the consumer of the group has that position and the group's streams, and this connection holds the
        consumers."""
        same = self._sources.get(group.path) == frozenset(group.streams)
        return self.are_held(client) and same and self._positions.get(group.path) == position

    def _move_group(self, client: Client, name: str, group: Group, position: int) -> None:
        try:
            known = self._sources.get(group.path) == frozenset(group.streams)
            self._create_or_extend(client, name, group, position)
            self._open(client, name, group)
            self._seek(client, name, group, position)
            if not known:  # just created, or created by a killed driver
                with suppress(NotFound):
                    client.remove(path_of(group.path, f".consumers/{_placeholder(name)}"))
        except Disconnected:
            raise
        except Busy:
            raise OptionError(
                f"consumer {name} of group {group.path or '/'}: open by another query (expected another"
                f" {'consumer or ' if self.required else ''}checkpointLocation)"
            ) from None
        except MqfsError as error:
            where = f"consumer {name} of group {group.path or '/'}"
            if self.required:
                raise OptionError(f"option consumer: {where}: {error} (expected another name or user)") from None
            log.warning("%s cannot be created: no lag in .stats, no retention for this query: %s", where, error)
            self._refused.add(group.path)

    def _open(self, client: Client, name: str, group: Group) -> None:
        """Hold the consumer of the first group open for the life of the connection. Raises Busy."""
        if self.are_held(client):
            return
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                path = path_of(group.path, f".consumers/{name}")
                self._open_file = client, client.open(path, "r+"), path
                return
            except Busy:
                if time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE_S)

    def _create_or_extend(self, client: Client, name: str, group: Group, position: int) -> None:
        """Create the consumer: of the whole group, of one stream, or of a view of several. An existing consumer gets
        new streams through its view. If that is not possible it is replaced with a consumer of a view, or of the whole
        group."""
        streams = frozenset(group.streams)
        exists = self._exists(client, path_of(group.path, f".consumers/{name}"))
        if exists and self._sources.get(group.path) == streams:
            return
        view = _view(name, group)
        if exists:
            self._extend(client, name, group, position, view)
        elif group.is_whole:
            self._create_for_group(client, name, group)
        elif len(streams) == 1:
            write_text(client, path_of(group.path, "ctl"), _consumer(name, next(iter(streams))))
        elif not view:
            self._create_for_group(client, name, group)
        else:
            write_text(client, path_of(group.path, "ctl"), view + _consumer(name, name))
        self._sources[group.path] = streams
        whole = not self._source(client, name, group) if exists else group.is_whole or (len(streams) > 1 and not view)
        if whole:
            self._whole.add(group.path)

    def _extend(self, client: Client, name: str, group: Group, position: int, view: str) -> None:
        """Give an existing consumer the streams. Its view keeps removed streams, so it may be full: then the consumer
        is replaced, too."""
        has_view = self._exists(client, path_of(group.path, name))
        if has_view and view:
            try:
                write_text(client, path_of(group.path, "ctl"), view)
                return
            except OverLimit:
                pass
        else:
            source = self._source(client, name, group)
            if not source or all(stream == source for stream in group.streams):
                return
        remove = f"remove {quote_word(name)}\n" + (f"unbind {quote_word(name)}\n" if has_view else "")
        self._replace(client, name, group, position, remove + view + _consumer(name, name if view else ""))

    def _source(self, client: Client, name: str, group: Group) -> str:
        """Return the stream or view of the consumer; "" for the whole group."""
        stats = json.loads(read_text(client, path_of(group.path, ".stats")))
        source: str = stats["consumers"][name]["over"]
        return source

    def _replace(self, client: Client, name: str, group: Group, position: int, lines: str) -> None:
        """Replace the consumer by these lines of `ctl`. A placeholder retains the messages until its position is
        restored."""
        other = _placeholder(name)
        self._open(client, name, group)  # raises Busy if another query has it
        self._close()
        self._create_for_group(client, other, group)
        self._seek(client, other, group, position)
        write_text(client, path_of(group.path, "ctl"), lines)

    def _seek(self, client: Client, name: str, group: Group, position: int) -> None:
        path, command = path_of(group.path, f".consumers/{name}"), f"seek {position}\n"
        if self._open_file is not None and self._open_file[0] is client and self._open_file[2] == path:
            self._open_file[1].write(command.encode())  # private: a second open would be refused
        else:
            write_text(client, path, command)

    def _close(self) -> None:
        if self._open_file is not None:
            with suppress(OSError, MqfsError):
                self._open_file[1].close()
        self._open_file = None

    def _create_for_group(self, client: Client, name: str, group: Group) -> None:
        """Create a consumer of the whole group. Without permission to write `ctl` it is not private."""
        try:
            write_text(client, path_of(group.path, "ctl"), _consumer(name, ""))
        except (Denied, NotPermitted):
            client.create(path_of(group.path, f".consumers/{name}"), "w").close()

    def _exists(self, client: Client, path: str) -> bool:
        try:
            client.stat(path)
        except NotFound:
            return False
        return True


def _consumer(name: str, source: str) -> str:
    """Return the line that creates a consumer of a stream or view, or of the whole group."""
    return f"consumer {quote_word(name)} {f'{quote_word(source)} ' if source else ''}private\n"


def _view(name: str, group: Group) -> str:
    """Return the lines that bind a view of the streams; "" if that is not possible: a stream's name could be read as a
    pattern, or the lines are too many for a view or for one write."""
    names = sorted(group.streams)
    if len(names) > VIEW_PATTERNS or any(char in stream for char in group.wildcards for stream in names):
        return ""
    lines = "".join(f"bind {quote_word(name)} {quote_word(stream)}\n" for stream in names)
    return lines if len(lines.encode()) <= CTL_BYTES - OTHER_LINES_BYTES else ""


def _placeholder(name: str) -> str:
    """Return the name of the placeholder for a consumer that is being replaced."""
    return f"{name}-meanwhile"
