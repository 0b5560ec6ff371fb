"""The names of a group, as routing needs them: a Protocol that the group is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from mqfs.engine.log.group_log import GroupLog


class NamedStream(Protocol):
    """A stream: its name, and the views that it was found to be in, with the routing version of then."""

    number: int
    views: tuple[int, frozenset[str], frozenset[str]] | None

    @property
    def name(self) -> str: ...


class Catalog(Protocol):
    """The streams of a group. `catalog_version` grows with every change of names and permissions, `routing_version`
    when other views or consumers than before may cover a stream."""

    log: GroupLog
    catalog_version: int
    routing_version: int

    @property
    def streams(self) -> Mapping[str, NamedStream]: ...

    @property
    def numbers(self) -> Mapping[int, NamedStream]: ...
