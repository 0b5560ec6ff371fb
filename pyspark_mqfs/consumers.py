"""A query as a consumer of the groups it reads: its position where `.stats` shows it, and retention heeds it.

Owns the making and moving of those consumers. It claims no message.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mqfs.client.words import quote
from mqfs.errors import Disconnected, MqfsError, NotFound
from mqfs.ninep.blocking import Client
from pyspark_mqfs.options import OptionError
from pyspark_mqfs.survey import Group, Survey, path_of

log = logging.getLogger(__name__)


class Consumers:
    """One consumer a group, all of one name."""

    def __init__(self, *, required: bool) -> None:
        """`required`: it was asked for by name, so that not being permitted to have it is an error."""
        self.required = required
        self._over: dict[str, frozenset[str]] = {}  # of each group, the streams its consumer was made over
        self._without: set[str] = set()  # groups where there can be none

    def move(self, client: Client, name: str, survey: Survey, positions: Mapping[str, int]) -> None:
        """Everything below the positions is done."""
        for path, group in survey.groups.items():
            mine = [positions[key] for stream in group.streams if (key := path_of(path, stream)) in positions]
            if mine and path not in self._without:
                self._try(client, name, group, min(mine))

    def _try(self, client: Client, name: str, group: Group, position: int) -> None:
        try:
            self._make(client, name, group)
            with client.open(path_of(group.path, f".consumers/{name}"), "w") as file:
                file.write(f"seek {position}\n".encode())
        except Disconnected:
            raise
        except MqfsError as error:
            where = f"consumer {name} of group {group.path or '/'}"
            if self.required:
                raise OptionError(
                    f"option consumer: {where}: {error}; a name and a user that may have it are right"
                ) from None
            log.warning("no %s shows the lag of this query, or keeps what it has not read: %s", where, error)
            self._without.add(group.path)

    def _make(self, client: Client, name: str, group: Group) -> None:
        """A consumer over what is read of the group: all, one stream, or a view of some. One that is there stays what
        it is, but a view gets the streams that are new."""
        streams = frozenset(group.streams)
        there = self._there(client, path_of(group.path, f".consumers/{name}"))
        if there and self._over.get(group.path) == streams:
            return
        views = "".join(f"bind {quote(name)} {quote(stream)}\n" for stream in sorted(streams))
        if there:
            if self._there(client, path_of(group.path, name)):
                self._command(client, group, views)
        elif group.whole:
            client.create(path_of(group.path, f".consumers/{name}"), "w").close()
        elif len(streams) == 1:
            self._command(client, group, f"consumer {quote(name)} {quote(next(iter(streams)))}\n")
        else:
            self._command(client, group, f"{views}consumer {quote(name)} {quote(name)}\n")
        self._over[group.path] = streams

    def _there(self, client: Client, path: str) -> bool:
        try:
            client.stat(path)
        except NotFound:
            return False
        return True

    def _command(self, client: Client, group: Group, lines: str) -> None:
        with client.open(path_of(group.path, "ctl"), "w") as file:
            file.write(lines.encode())


__all__ = ["Consumers"]
