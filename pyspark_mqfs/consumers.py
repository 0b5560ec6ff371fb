"""The consumers of a query, one a group, so that `.stats` shows its lag and retention waits for it.

Owns creating and moving them. They are private and one is held open, so that two queries cannot share them. Claims no
message.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress

from mqfs.errors import Busy, Denied, Disconnected, MqfsError, NotFound, NotPermitted
from mqfs.limits import MESSAGE_BYTES
from mqfs.ninep.blocking import Client, File
from mqfs.syntax.quoting import quote_word
from pyspark_mqfs.catalog import Group, ServerCatalog, path_of
from pyspark_mqfs.options import OptionError

log = logging.getLogger(__name__)
PAUSE_S = 0.1  # from try to try to open a consumer


class Consumers:
    """One consumer a group, all of the same name."""

    def __init__(self, *, required: bool, patience_s: float) -> None:
        """`required`: option consumer names it, so that a refusal is an error. `timeout_s`: the wait for another query,
        as the connection of a killed driver ends a little later."""
        self.required, self.patience_s = required, patience_s
        self._held: tuple[Client, File, str] | None = None  # its connection, file and path
        self._over: dict[str, frozenset[str]] = {}  # by group: the streams of its consumer
        self._at: dict[str, int] = {}  # by group: the position of its consumer
        self._without: set[str] = set()  # groups that refuse a consumer

    def move(self, client: Client, name: str, survey: ServerCatalog, positions: Mapping[str, int]) -> None:
        """Move the consumers to these positions, creating them where missing. Raises OptionError, Disconnected."""
        for path, group in survey.groups.items():
            mine = [positions[key] for stream in group.streams if (key := path_of(path, stream)) in positions]
            if mine and path not in self._without and not self._is_at(client, group, min(mine)):
                self._try(client, name, group, min(mine))
                self._at[path] = min(mine)

    def leave(self, client: Client, name: str, survey: ServerCatalog) -> None:
        """Remove the consumers of that name and their views."""
        self._let_go()
        self._over.clear()
        self._at.clear()
        for path, group in survey.groups.items():
            with suppress(MqfsError):
                client.remove(path_of(path, f".consumers/{name}"))
            if self._there(client, path_of(path, name)):
                with suppress(MqfsError):
                    self._command(client, group, f"unbind {quote_word(name)}\n")

    def _is_at(self, client: Client, group: Group, position: int) -> bool:
        """Whether the consumer of the group has the position and streams already, by this connection."""
        held = self._held is not None and self._held[0] is client
        same = self._over.get(group.path) == frozenset(group.streams)
        return held and same and self._at.get(group.path) == position

    def _try(self, client: Client, name: str, group: Group, position: int) -> None:
        try:
            known = self._over.get(group.path) == frozenset(group.streams)
            self._make(client, name, group, position)
            self._hold(client, name, group)
            self._seek(client, name, group, position)
            if not known:  # just created, or by a killed driver
                with suppress(NotFound):
                    client.remove(path_of(group.path, f".consumers/{_meanwhile(name)}"))
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
            self._without.add(group.path)

    def _hold(self, client: Client, name: str, group: Group) -> None:
        """Hold the consumer of the first group open for the life of the connection. Raises Busy."""
        if self._held and self._held[0] is client:
            return
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                path = path_of(group.path, f".consumers/{name}")
                self._held = client, client.open(path, "r+"), path
                return
            except Busy:
                if time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE_S)

    def _make(self, client: Client, name: str, group: Group, position: int) -> None:
        """Create the consumer: of the whole group, of one stream, or of a view of several. An existing one gets new
        streams: by its view, or by being replaced with one of a view."""
        streams = frozenset(group.streams)
        there = self._there(client, path_of(group.path, f".consumers/{name}"))
        if there and self._over.get(group.path) == streams:
            return
        views = "".join(f"bind {quote_word(name)} {quote_word(stream)}\n" for stream in sorted(streams))
        if there:
            if self._there(client, path_of(group.path, name)):
                self._command(client, group, views)
            elif self._is_over_less(client, name, group):
                self._make_anew(client, name, group, position, views)
        elif group.whole:
            self._make_of_all(client, name, group)
        elif len(streams) == 1:
            self._command(client, group, f"consumer {quote_word(name)} {quote_word(next(iter(streams)))} private\n")
        else:
            self._command(client, group, f"{views}consumer {quote_word(name)} {quote_word(name)} private\n")
        self._over[group.path] = streams

    def _is_over_less(self, client: Client, name: str, group: Group) -> bool:
        """Whether the consumer is of one stream, and the query reads others."""
        with client.open(path_of(group.path, ".stats")) as file:
            told = json.loads(b"".join(iter(lambda: file.receive(MESSAGE_BYTES), b"")))
        over = told["consumers"][name]["over"]
        return over is not None and any(stream != over for stream in group.streams)

    def _make_anew(self, client: Client, name: str, group: Group, position: int, views: str) -> None:
        """Replace it with a consumer of a view. A placeholder retains the messages until its position is restored."""
        other = _meanwhile(name)
        self._hold(client, name, group)  # raises Busy if another query has it
        self._let_go()
        self._make_of_all(client, other, group)
        self._seek(client, other, group, position)
        self._command(
            client,
            group,
            f"remove {quote_word(name)}\n{views}consumer {quote_word(name)} {quote_word(name)} private\n",
        )

    def _seek(self, client: Client, name: str, group: Group, position: int) -> None:
        path, command = path_of(group.path, f".consumers/{name}"), f"seek {position}\n".encode()
        if self._held is not None and self._held[0] is client and self._held[2] == path:
            self._held[1].write(command)  # private: a second open is refused
            return
        with client.open(path, "w") as file:
            file.write(command)

    def _let_go(self) -> None:
        if self._held is not None:
            with suppress(OSError, MqfsError):
                self._held[1].close()
        self._held = None

    def _make_of_all(self, client: Client, name: str, group: Group) -> None:
        """Create a consumer of the whole group. Without permission to write `ctl` it is not private."""
        try:
            self._command(client, group, f"consumer {quote_word(name)} private\n")
        except (Denied, NotPermitted):
            client.create(path_of(group.path, f".consumers/{name}"), "w").close()

    def _there(self, client: Client, path: str) -> bool:
        try:
            client.stat(path)
        except NotFound:
            return False
        return True

    def _command(self, client: Client, group: Group, lines: str) -> None:
        with client.open(path_of(group.path, "ctl"), "w") as file:
            file.write(lines.encode())


def _meanwhile(name: str) -> str:
    """The name of the placeholder while a consumer is replaced."""
    return f"{name}-meanwhile"


__all__ = ["Consumers"]
