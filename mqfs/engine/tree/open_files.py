"""The open files of a tree by group, their number by user, and the kind of handle that a file gets.

Also the audit lines of the tree's calls: one for each change, and each refusal.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import wraps
from typing import Any

from mqfs import errors
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.files import put
from mqfs.engine.files.claiming import PeekHandle, WorkStreamHandle
from mqfs.engine.files.consumer import ConsumerHandle
from mqfs.engine.files.ctl import CtlHandle
from mqfs.engine.files.cursor import Cursor
from mqfs.engine.files.handle import OpenFile
from mqfs.engine.files.metering import Meters
from mqfs.engine.files.put import BatchHandle, PutHandle
from mqfs.engine.files.readers import OrderHandle, ViewHandle
from mqfs.engine.files.status import TextHandle
from mqfs.engine.files.stream import SnapshotHandle, StreamHandle
from mqfs.engine.group import Group
from mqfs.engine.nodes import Meta, SnapshotNode, StagedStream, TakeFile, TxnCtl, path_of
from mqfs.engine.routing import View
from mqfs.engine.stream import Stream
from mqfs.model import Step, User
from mqfs.net.audit import REFUSALS
from mqfs.quotas import UserLimits
from mqfs.syntax.lines import print_path

File = Stream | View | Consumer | Meta | SnapshotNode | TakeFile | StagedStream

_OPENS: dict[str, type[OpenFile]] = {
    "ctl": CtlHandle, "order": OrderHandle, ".cursor": Cursor, ".put": PutHandle, ".batch": BatchHandle
}  # fmt: skip


class OpenFiles:
    """The open files of a tree, counted by user."""

    def __init__(self, meters: Meters | None) -> None:
        self.meters = meters
        self._handles: dict[Group, set[OpenFile]] = {}
        self._shares = UserLimits("open files", "HANDLES")

    def open(self, user: User, node: File, reads: bool, writes: bool) -> OpenFile:
        """Open a file and count the handle. Raises Denied, OverLimit, OverQuota, and as the kind of file."""
        kind = _kind(node, reads, writes)
        meter = self.meters.of(user.uid) if self.meters is not None else None
        if meter is not None:
            meter.admit(user, node.group, node.name, self._shares.of(user.uid))
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
        for name in ("read", "write"):  # wrappers of metered and audited handles: they form reference cycles
            vars(handle).pop(name, None)

    def quota_use(self, uid: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the number of each user with a quota, as text, and its use; `uid`: of this user only."""
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
    """Return the class of handle for a file and an access mode. Raises Denied."""
    if isinstance(node, Stream):
        if node.group.log.settings.deliver == "one" and reads:
            return WorkStreamHandle if writes else PeekHandle
        return StreamHandle
    if isinstance(node, Consumer | TakeFile):
        return ConsumerHandle if writes else PeekHandle
    if isinstance(node, StagedStream | TxnCtl):
        return put.kind(node)
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


def audit_writes(handle: OpenFile) -> None:
    """Write an audit line for each accepted write to a handle from now on (`--audit all`)."""
    write = handle.write

    def audited(data: bytes, offset: int = 0) -> Step[int]:
        step = write(data, offset)
        handle.audit("publish", f"{len(data)} bytes")
        return step

    handle.write = audited  # type: ignore[method-assign]


# ------------------------------------------------------------ audited calls


LOOKS = ("walk", "access", "entries", "open")
CHANGES = ("create", "mkdir", "unlink", "rmdir", "rename", "setattr")


def audit_calls(tree: Any) -> None:
    """Wrap the tree's methods whose first arguments are a user and a node, so that they write audit lines. A tree
    without an audit is not slowed down."""
    for name in LOOKS:
        setattr(tree, name, _refusals(tree, getattr(tree, name)))
    for name in CHANGES:
        setattr(tree, name, _changes(tree, getattr(tree, name)))


def _refusals(tree: Any, method: Any) -> Any:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except REFUSALS as error:
            user, path, _ = explain(method, args, kwargs)
            tree.audit.note(user, method.__name__, path, error.detail, status="refused")
            raise

    return call


def _changes(tree: Any, method: Any) -> Any:
    refusals = _refusals(tree, method)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        user, path, detail = explain(method, args, kwargs)  # before the call, which may remove the node
        done = refusals(*args, **kwargs)
        tree.audit.note(user, method.__name__, path, detail)
        return done

    return call


def explain(method: Any, args: Any, kwargs: Any) -> tuple[User, str, str]:
    """Return the user of a call, the path of the file, and the other arguments as text."""
    given: dict[str, Any] = {**dict(zip(inspect.signature(method).parameters, args, strict=False)), **kwargs}
    user, node, *_ = given.values()
    path = (*path_of(node), given.pop("name")) if "name" in given else path_of(node)
    return user, print_path(path), _print(given)


def _print(given: dict[str, Any]) -> str:
    """Print the arguments that are names or numbers."""
    known = {key: value for key, value in given.items() if isinstance(value, str | int)}
    return ", ".join(f"{key} {value:o}" if key == "mode" else f"{key} {value}" for key, value in known.items())
