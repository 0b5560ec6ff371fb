"""A query as a consumer of the groups it reads: its position where `.stats` shows it, and retention heeds it.

Owns the making and moving of those consumers, and that only one query at a time is the consumer: it is private, and
held open. It claims no message.
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
PAUSE_S = 0.1  # between two looks whether the consumer is free


class Consumers:
    """One consumer a group, all of one name."""

    def __init__(self, *, required: bool, patience_s: float) -> None:
        """`required`: it was asked for by name, so that not being permitted to have it is an error. `patience_s`: how
        long a query that has it is waited for; one that was killed may be there a little longer than its driver."""
        self.required, self.patience_s = required, patience_s
        self._held: tuple[Client, File, str] | None = None  # and its path
        self._over: dict[str, frozenset[str]] = {}  # of each group, the streams its consumer was made over
        self._at: dict[str, int] = {}  # of each group, where its consumer is
        self._without: set[str] = set()  # groups where there can be none

    def move(self, client: Client, name: str, survey: ServerCatalog, positions: Mapping[str, int]) -> None:
        """Everything below the positions is done."""
        for path, group in survey.groups.items():
            mine = [positions[key] for stream in group.streams if (key := path_of(path, stream)) in positions]
            if mine and path not in self._without and not self._is_at(client, group, min(mine)):
                self._try(client, name, group, min(mine))
                self._at[path] = min(mine)

    def leave(self, client: Client, name: str, survey: ServerCatalog) -> None:
        """Be no consumer of that name any more, and have none left."""
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
        """Whether nothing has changed of the group since it was moved last, over this connection."""
        held = self._held is not None and self._held[0] is client
        same = self._over.get(group.path) == frozenset(group.streams)
        return held and same and self._at.get(group.path) == position

    def _try(self, client: Client, name: str, group: Group, position: int) -> None:
        try:
            known = self._over.get(group.path) == frozenset(group.streams)
            self._make(client, name, group, position)
            self._hold(client, name, group)
            self._seek(client, name, group, position)
            if not known:  # made a moment ago, or by a driver that was killed
                with suppress(NotFound):
                    client.remove(path_of(group.path, f".consumers/{_meanwhile(name)}"))
        except Disconnected:
            raise
        except Busy:
            raise OptionError(
                f"consumer {name} of group {group.path or '/'} is another query's, which runs: two have the same option"
                f" {'consumer or ' if self.required else ''}checkpointLocation; one of its own is right"
            ) from None
        except MqfsError as error:
            where = f"consumer {name} of group {group.path or '/'}"
            if self.required:
                raise OptionError(
                    f"option consumer: {where}: {error}; a name and a user that may have it are right"
                ) from None
            log.warning("no %s shows the lag of this query, or keeps what it has not read: %s", where, error)
            self._without.add(group.path)

    def _hold(self, client: Client, name: str, group: Group) -> None:
        """Have the consumer of the first group open, as long as the connection lasts. Busy where another has it."""
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
        """A consumer over what is read of the group: all, one stream, or a view of some. One that is there gets the
        streams that are new: a view of it does, or it is made again over one."""
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
        """Whether it is over one stream and another is read, too."""
        with client.open(path_of(group.path, ".stats")) as file:
            told = json.loads(b"".join(iter(lambda: file.receive(MESSAGE_BYTES), b"")))
        over = told["consumers"][name]["over"]
        return over is not None and any(stream != over for stream in group.streams)

    def _make_anew(self, client: Client, name: str, group: Group, position: int, views: str) -> None:
        """Over a view. Until it is at its position again another consumer has what it had, or a group that keeps
        nothing else would lose that."""
        other = _meanwhile(name)
        self._hold(client, name, group)  # Busy where it is another query's
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
            self._held[1].write(command)  # private: nobody opens it a second time
            return
        with client.open(path, "w") as file:
            file.write(command)

    def _let_go(self) -> None:
        if self._held is not None:
            with suppress(OSError, MqfsError):
                self._held[1].close()
        self._held = None

    def _make_of_all(self, client: Client, name: str, group: Group) -> None:
        """Who may not write `ctl` can have one that is not private: then Spark alone tells two queries apart."""
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
    """Who stands in for a consumer while it is made anew."""
    return f"{name}-meanwhile"


__all__ = ["Consumers"]
