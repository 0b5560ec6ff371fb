"""The open files of a tree: who has which, how many each user, and what kind of handle a file gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mqfs import errors
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.files import txn
from mqfs.engine.files.claiming import PeekHandle, WorkStreamHandle
from mqfs.engine.files.consumer import ConsumerHandle
from mqfs.engine.files.ctl import CtlHandle
from mqfs.engine.files.cursor import Cursor
from mqfs.engine.files.handle import OpenFile
from mqfs.engine.files.kept import SnapshotHandle
from mqfs.engine.files.metering import Meters
from mqfs.engine.files.put import BatchHandle, PutHandle
from mqfs.engine.files.readers import OrderHandle, ViewHandle
from mqfs.engine.files.status import TextHandle
from mqfs.engine.files.stream import StreamHandle
from mqfs.engine.group import Group
from mqfs.engine.nodes import Meta, SnapshotNode, StagedStream, TakeFile, TxnCtl, group_of
from mqfs.engine.routing.views import View
from mqfs.engine.stream import Stream
from mqfs.model import Step, User
from mqfs.quotas import UserLimits

File = Stream | View | Consumer | Meta | SnapshotNode | TakeFile | StagedStream

_OPENS: dict[str, type[OpenFile]] = {
    "ctl": CtlHandle, "order": OrderHandle, ".cursor": Cursor, ".put": PutHandle, ".batch": BatchHandle
}  # fmt: skip


class OpenFiles:
    """The open files of a tree, counted for each user."""

    def __init__(self, meters: Meters | None = None) -> None:
        self.meters = meters
        self._handles: dict[Group, set[OpenFile]] = {}
        self._shares = UserLimits("open files", "HANDLES")

    def open(self, user: User, node: File, reads: bool, writes: bool) -> OpenFile:
        """A new handle, counted. Raises Denied, OverLimit, OverQuota, and what the file refuses."""
        kind = _kind(node, reads, writes)
        meter = self.meters.of(user.uid) if self.meters is not None else None
        if meter is not None:
            meter.admit(user, group_of(node), node.name, self._shares.of(user.uid))
        self._shares.acquire(user.uid)
        try:
            handle = kind(node, user, reads, writes)
            handle.on_opened()
        except BaseException:
            self._shares.release(user.uid)
            raise
        self._handles.setdefault(handle.group, set()).add(handle)
        if meter is not None:
            meter.attach(handle)
        if handle.publishes and writes and handle.group.tree.audit.publishes:
            audit_writes(handle)
        return handle

    def closed(self, handle: OpenFile) -> None:
        mine = self._handles.get(handle.group, set())
        mine.discard(handle)
        if not mine:
            self._handles.pop(handle.group, None)
        self._shares.release(handle.user.uid)
        if self.meters is not None and (meter := self.meters.of(handle.user.uid)) is not None:
            meter.detach(handle)
        for name in ("read", "write"):  # of a handle that is metered or audited: they refer to it
            vars(handle).pop(name, None)

    def quota_use(self, uid: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """The use of quotas, each with the number of the user; of one user or of all."""
        meters = self.meters.all() if self.meters is not None else []
        return ((str(m.uid), m.use(self._shares.of(m.uid))) for m in meters if uid in (None, m.uid))

    def of(self, group: Group) -> Iterator[OpenFile]:
        return iter(self._handles.get(group, ()))

    @property
    def count(self) -> int:
        return sum(map(len, self._handles.values()))

    def all(self) -> list[OpenFile]:
        return [handle for mine in self._handles.values() for handle in mine]


def _kind(node: File, reads: bool, writes: bool) -> type[OpenFile]:
    """What an open file of that kind is. Raises Denied."""
    if isinstance(node, Stream):
        if node.group.log.settings.deliver == "one" and reads:
            return WorkStreamHandle if writes else PeekHandle
        return StreamHandle
    if isinstance(node, Consumer | TakeFile):
        return ConsumerHandle if writes else PeekHandle
    if isinstance(node, StagedStream | TxnCtl):
        return txn.kind(node)
    if writes and not (isinstance(node, Meta) and node.default_mode & 0o222):
        raise errors.Denied(f"{node.name!r}: cannot be written")
    if isinstance(node, View):
        return ViewHandle
    if isinstance(node, SnapshotNode):
        return SnapshotHandle
    if node.name == ".cursor" and not (reads and writes):
        raise errors.Denied(".cursor: opened for one of reading and writing (expected both)")
    return _OPENS.get(node.name, TextHandle) if writes or node.name != "ctl" else TextHandle


# ------------------------------------------------------------ audited writes

# Audit lines of publishes: `--audit all`.


def audit_writes(handle: OpenFile) -> None:
    """Leave a line for each write to a handle from now on that is accepted."""
    write = handle.write

    def audited(data: bytes, offset: int = 0) -> Step[int]:
        step = write(data, offset)
        handle.audit("publish", f"{len(data)} bytes")
        return step

    handle.write = audited  # type: ignore[method-assign]
