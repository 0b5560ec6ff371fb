"""The nodes of `.txn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mqfs import errors, group_state
from mqfs.engine.language.permissions import X, require
from mqfs.engine.publishing.staged_batch import StagedBatch, StagingFolder
from mqfs.engine.nodes.own_files import Folder, Meta
from mqfs.group_state import Attributes
from mqfs.model import User

if TYPE_CHECKING:
    from mqfs.engine.group import Group
    from mqfs.engine.publishing.transactions import Transactions


class TxnFolder(StagingFolder):
    """`.txn`: who may enter the group may open a part, as in /tmp."""

    __slots__ = ()

    @property
    def attributes(self) -> Attributes:
        own = self.group.state
        return Attributes(0o1777, own.uid, own.gid)

    @property
    def _transactions(self) -> Transactions:
        return self.group.transactions

    def find(self, name: str) -> StagedBatch | TxnCtl | None:
        return self._transactions.ctl if name == "ctl" else self._transactions.parts.get(name)

    def files(self) -> Sequence[StagedBatch | TxnCtl]:
        return [self._transactions.ctl, *self._transactions.parts.values()]

    def times(self) -> tuple[int, int, int, int]:
        made = self.group.state.made_ns
        return max(self.group.log.end.last_ns, made), made, 0, 2 + len(self._transactions.parts)

    def mkdir(self, user: User, name: str, mode: int) -> StagedBatch:
        require(user, self.group.state, X, self.group.name)
        return self._transactions.make(user, name, mode)

    def rmdir(self, user: User, name: str) -> None:
        if name == "ctl":
            raise errors.NotDirectory(name)
        self._transactions.abort(user, [name])


class TxnCtl(Meta):
    """`.txn/ctl`."""

    __slots__ = ()

    def __init__(self, group: Group) -> None:
        self.group, self.name, self.number, self.default_mode = group, "ctl", group_state.TXN_CTL, 0o666

    @property
    def parent(self) -> Folder:  # type: ignore[override]
        return self.group.folders[".txn"]
