"""The tree: groups in groups, and every call of a front end on names.

Tree walks, opens, makes, removes and renames names, and checks permissions. It counts open files and parked calls, and
runs maintenance. It never appends to a log: groups do.
"""

from __future__ import annotations

import logging
import os
import stat as modes
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from mqfs import errors, limits
from mqfs.clock import Clock, ProcessWatcher
from mqfs.engine import nodes
from mqfs.engine.core.log import NOT_REPLICATED, answering
from mqfs.engine.core.portions import Work, exhaust
from mqfs.engine.core.timers import LOOKING, Alarm, Faults, Timers
from mqfs.engine.delivery.consumer import Consumer
from mqfs.engine.files.handle import OpenFile
from mqfs.engine.files.metering import Meters
from mqfs.engine.group import NO_REPLICA, Group
from mqfs.engine.language.permissions import ADMIN, R, X, require, require_unsticky
from mqfs.engine.language.settings import SYNC_REPLICA, parse_settings
from mqfs.engine.nodes import (
    FOLDERS,
    Folder,
    Meta,
    Node,
    SnapshotNode,
    StagingFolder,
    TakeFile,
    not_found,
    unlink_nothing,
)
from mqfs.engine.publishing.batch import Staging
from mqfs.engine.publishing.kept_quotas import KeptQuotas
from mqfs.engine.publishing.publisher import refuse_all
from mqfs.engine.stream import Stream
from mqfs.engine.tree.attributes import (
    CHANGE,
    attributes,
    depth,
    files_in,
    find_in_folder,
    find_in_group,
    permit,
    permit_open,
    permit_staging,
    permit_walk,
    require_unprotected,
    set_attributes,
    stat_of,
)
from mqfs.engine.tree.open_files import OpenFiles, audit_calls
from mqfs.engine.tree.recovery import Place, Unserved, adopt, new_state, read_states
from mqfs.model import Stat, Step, User, Wait
from mqfs.net import audit
from mqfs.net.audit import Audit
from mqfs.quotas import Quotas, UserLimits, require_share
from mqfs.state.file_locks import Locks
from mqfs.state.group import ROOT, GroupState
from mqfs.store.api import Bucket, Store
from mqfs.syntax.names import check_name

T = TypeVar("T")
_Making = tuple[int, list[Callable[[], None]]]  # of a group being made: its owner, and calls that wait for it


class Tree:
    """All groups of one store. `owner` owns the root of a new store; `defaults` are the ctl lines of new groups;
    `prepare` is called for each group that was read, before anything is written to it."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        owner: User,
        umask: int = 0o022,
        defaults: Sequence[str] = (),
        prepare: Callable[[Group], None] | None = None,
        audit: Audit = audit.OFF,
        quotas: Quotas | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.store, self.clock, self.audit, self.quotas = store, clock, audit, quotas
        self.faults = Faults(clock)
        self.timers = Timers(self.faults)
        settings = parse_settings(defaults)
        if settings.sync == SYNC_REPLICA and store.replication is None:
            raise errors.BadCommand(NO_REPLICA)
        self.defaults = settings.lines(given=True)
        self.locks = Locks()
        self.kept_quotas = KeptQuotas(quotas) if quotas is not None and quotas.bound_kept else None
        self.memory = UserLimits("bytes in the server's memory", "HELD_BYTES")
        self.staging = Staging(store, self.kept_quotas, self.memory)
        self._maintenance = Maintenance(store, clock, self.faults, self.timers)
        self.dirty_groups = self._maintenance.dirty
        self.closing, self.unserved, self._prepare = False, Unserved(), prepare
        self.processes: ProcessWatcher | None = None  # set by a front end that knows the reading process
        self.groups: dict[int, Group] = {}
        self._making: dict[tuple[Group, str], _Making] = {}  # by parent and name, until the disk has the group
        self.open_files = OpenFiles(Meters(quotas, self) if quotas is not None else None)
        self.waits = UserLimits("reads and writes that wait", "PARKED")  # charged by the front ends
        self._load(owner, umask, progress)
        if audit.changes:
            audit_calls(self)

    # ------------------------------------------------------------ loading

    def _load(self, owner: User, umask: int, progress: Callable[[int, int], None] | None) -> None:
        states = read_states(self.store, self.unserved, progress)
        self.clock.resume([(s.anchors[-1][1], bucket.end.last_ns) for bucket, s in states if s.anchors])
        for bucket, state in states:
            self._build(bucket, state)
        if ROOT not in self.groups:
            self._make_root(owner, umask)
        self.root = self.groups[ROOT]
        self._maintenance.begin(self.root)
        for number in sorted(self.groups):
            adopt(self.groups[number], self.groups)
        self._begin(self.groups.values())

    def _begin(self, groups: Collection[Group]) -> None:
        for group in groups:
            if self._prepare is not None:
                self.faults.contain(group, "going on with its ring", partial(self._prepare, group))
            group.start()
        if self.kept_quotas is not None:
            for group in groups:
                self.kept_quotas.begin(group)
        self.dirty_groups.update(groups)

    def _build(self, bucket: Bucket, state: GroupState) -> None:
        """Serve a group, if its settings and names are valid and its parent is served."""
        try:
            if state.parent in self.unserved:
                raise errors.BadStore(f"its parent is not served: group {state.parent}")
            group = self.groups[bucket.id] = Group(self, bucket, state)
            if bucket.upkeep.lost:
                group.refuse(User(state.uid, state.gid), group.name, str(bucket.end.failed))
        except Exception as error:
            self.unserved.leave(bucket.id, error, Place(state.parent, state.name, known=True))

    def _build_late(self, bucket: Bucket, state: GroupState) -> None:
        self._build(bucket, state)
        if (group := self.groups.get(bucket.id)) is not None:
            adopt(group, self.groups)
            self._begin([group])

    def _find(self, group: Group, name: str) -> Node | None:
        """Return the file of that name in a group, or None. Raises DiskFailed for a group that is not served."""
        if (found := find_in_group(group, name)) is None and self.unserved:
            self.unserved.read_again(self.store, self.clock.engine_ns(), self._build_late)
            if (found := find_in_group(group, name)) is None:
                self.unserved.require_free(group.number, name)
        return found

    def is_making(self, parent: Group, name: str) -> bool:
        """Whether a group of that name is being made."""
        return (parent, name) in self._making

    def _make_root(self, owner: User, umask: int) -> None:
        state = new_state(self.clock, self.defaults, ROOT, ROOT, "/", 0o775 & ~umask, owner)
        self.store.number()  # uses up ROOT in a new store; a later number if making the store was interrupted
        self.groups[ROOT] = Group(self, self.store.make(ROOT, state.encode()), state)

    # ------------------------------------------------------------ look-up

    def walk(self, user: User, node: Node, name: str) -> Node:
        """Return the file of that name in a directory; ".." is its parent. Raises NotFound, NotDirectory, Denied."""
        if not isinstance(node, Group | Folder):
            raise errors.NotDirectory(f"{node.name!r}: a file, not a group")
        if node.removed:
            raise errors.NotFound(f"{node.name!r}: removed")
        group = node.group
        if isinstance(node, StagingFolder):
            require(user, group.state, X, node.name)
        permit_walk(user, node, name)
        if name == "..":
            return self.parent(node)
        found = find_in_folder(node, name) if isinstance(node, Folder) else self._find(group, name)
        if found is None:
            raise not_found(node, name)
        return found

    def find(self, user: User, path: str) -> Node:
        """Return the file at a path from the root. Raises as `walk`."""
        node: Node = self.root
        for name in path.split("/"):
            if name not in ("", "."):
                node = self.walk(user, node, name)
        return node

    def access(self, user: User, node: Node, mask: int) -> None:
        """Check that the user has all permissions of `mask` (os.R_OK, W_OK, X_OK). Raises Denied."""
        permit(user, node, mask)

    def entries(self, user: User, directory: Group | Folder) -> Work[list[Node]]:
        """Return work that lists the nodes of a directory by name. Raises Denied at once, not in the work."""
        permit(user, directory, R)
        if isinstance(directory, StagingFolder) and not directory.removed:
            require(user, directory.group.state, X, directory.name)
        return files_in(directory)

    def stat(self, node: Node) -> Stat:
        return stat_of(node)

    def parent(self, node: Node) -> Group | Folder:
        """Return the directory of a file."""
        return nodes.parent(node)

    # ------------------------------------------------------------ opening

    def open(self, user: User, node: Node, flags: int, *, made: bool = False) -> OpenFile:
        """Open a file. Only the access mode of `flags` counts. Raises Denied, IsDirectory, NotFound, OverLimit.

        `made`: the same call of the user made the file, so its mode is not checked, as in open(2).
        """
        if isinstance(node, Group | Folder):
            raise errors.IsDirectory(f"{node.name!r}: a directory, not a file")
        if node.removed:
            raise errors.NotFound(f"{node.name!r}: removed")
        access = flags & os.O_ACCMODE
        reads, writes = access in (os.O_RDONLY, os.O_RDWR), access in (os.O_WRONLY, os.O_RDWR)
        permit_open(user, node, reads, writes, made=made)
        if (ring := node.group.ring) is not None:
            ring.drain()
        return self.open_files.open(user, node, reads, writes)

    # ------------------------------------------------------------ making and removing

    def create(self, user: User, directory: Group | Folder, name: str, mode: int) -> Step[Node]:
        """Make a stream; in `.consumers` a consumer of the whole group. Raises Exists, BadName, Denied, OverLimit."""
        group = directory.group
        if isinstance(directory, Group):
            if (making := self._making.get((directory, name))) is not None:
                return _after(making, lambda: self.create(user, directory, name, mode))
            self._require_new(user, directory, name, CHANGE & ~ADMIN if mode & modes.S_ISVTX else CHANGE)
            made: Node = group.make_stream(name, mode, user)
            return group.log.after_metadata_sync(made)
        if isinstance(directory, StagingFolder):
            directory.create(user, name)  # refuses
        if directory.name != ".consumers":
            raise errors.NotPermitted(f"cannot create files in {directory.name}")
        permit(user, directory, CHANGE)
        if directory.removed:
            raise not_found(directory, name)
        if name in group.consumers:
            raise errors.Exists(f"consumer {name!r}: exists already")
        check_name(name)
        make: Callable[[], Any] = partial(group.consumers.make, name, user, mode)
        if (newest := group.retention.newest) is None or newest.is_complete:
            return cast(Step[Node], exhaust(make()))
        group.commands.admit(user.uid, len(name))
        return group.commands.run(make, user.uid, len(name))

    def mkdir(
        self, user: User, group: Group | Folder, name: str, mode: int, settings: Sequence[str] = ()
    ) -> Step[Node]:
        """Make a group, which is on disk when the step is done; in `.txn` a part. `settings`: its first ctl lines, on
        top of the defaults. Raises Exists, BadName, Denied, OverLimit, BadCommand, DiskFailed."""
        if isinstance(group, StagingFolder):
            permit_staging(user, group)
            return group.mkdir(user, name, mode)
        if isinstance(group, Folder):
            raise errors.NotPermitted(f"cannot make groups in {group.name}")
        if (making := self._making.get((group, name))) is not None:
            return _after(making, lambda: self.mkdir(user, group, name, mode, settings))
        self._require_new(user, group, name)
        self.unserved.require_known(group.number, f"make {name!r}")
        mine = used = len(self.groups) + len(self._making) + 1
        if used > limits.GROUPS // 2:  # with fewer in all no user can have too many, so they are not counted
            mine = sum(other.state.uid == user.uid for other in self.groups.values()) + 1
            mine += sum(uid == user.uid for uid, _ in self._making.values())
        require_share("groups", limits.GROUPS, user.uid, mine, used)
        if depth(group) >= limits.PATH_GROUPS:
            raise errors.OverLimit(
                f"cannot make group {name!r}: path too deep (expected at most {limits.PATH_GROUPS} groups)"
            )
        try:
            number = self.store.number()
            ctl = parse_settings([*self.defaults, *settings]).lines(given=True) if settings else self.defaults
            state = new_state(self.clock, ctl, number, group.number, name, mode, user)
            step = self.store.make_soon(number, state.encode())
        except OSError as error:
            raise errors.DiskFailed(f"cannot make group {name!r}: {error.strerror or error}") from error
        if not isinstance(step, Wait):
            return self._add_made(group, step, state)
        self._making[group, name] = user.uid, []
        group.catalog_version += 1  # the name is taken from now on
        made: Wait[Node] = Wait()

        def then(done: Wait[Bucket]) -> None:
            _, retries = self._making.pop((group, name))
            made.follow_call(lambda: self._add_made(group, done.result(), state))
            for retry in retries:
                retry()

        step.subscribe(then)
        return made

    def _add_made(self, parent: Group, bucket: Bucket, state: GroupState) -> Step[Node]:
        """Serve a new group."""
        made = self.groups[bucket.id] = parent.groups[state.name] = Group(self, bucket, state)
        made.parent = parent
        parent.catalog_version += 1
        made.start()
        return made.log.after_metadata_sync(made) if made.settings.sync == SYNC_REPLICA else made

    def _require_new(self, user: User, group: Group, name: str, mask: int = CHANGE) -> None:
        if group.removed:
            raise errors.NotFound(f"group {group.name!r}: removed")
        permit(user, group, mask)
        if (group, name) in self._making or self._find(group, name) is not None:
            raise errors.Exists(f"{name!r}: exists already in group {group.name!r}")
        check_name(name)

    def unlink(self, user: User, directory: Group | Folder, name: str) -> Step[None]:
        """Remove a stream, a consumer, or a view with all its bindings. A group's own file stays, without an error, so
        that `rm -r` works. Raises Busy for a consumer that holds claims."""
        pid = user.pid if user.where == "fuse" else 0  # a 9P client has one pid for all its processes
        if isinstance(directory, StagingFolder):
            directory.unlink(user, name, pid)
            return None
        group = directory.group
        permit(user, directory, CHANGE)
        if directory.removed:
            raise not_found(directory, name)
        node = find_in_group(group, name) if isinstance(directory, Group) else find_in_folder(directory, name)
        if node is None:
            raise not_found(directory, name)
        if node.directory:
            raise errors.IsDirectory(f"{name!r}: a directory, not a file (remove it by rmdir)")
        if isinstance(node, Meta):
            unlink_nothing(group, node, pid)
            return None
        if isinstance(node, SnapshotNode):
            return None
        if isinstance(node, TakeFile):
            raise errors.NotPermitted(f"cannot remove {name}: it belongs to its stream")
        require_unsticky(user, group.state, attributes(node), name)
        require_unprotected(group)
        if isinstance(node, Stream):
            group.remove_stream(node)
        elif isinstance(node, Consumer):
            group.consumers.remove(node)
        else:
            group.views.unbind(name)
        return group.log.after_metadata_sync(None)

    def unmake(self, stream: Stream) -> None:
        """Remove a stream that was made for a write that was then refused, unless it is in use meanwhile."""
        group = stream.group
        if stream.removed or stream.opens or group.fanout.is_selected(stream):
            return
        if stream in group.publisher.blocked.of_batches():
            return
        remove = partial(_remove_if_empty, group, stream, "a new stream is taken back")
        self.faults.contain(group, f"taking back stream {stream.name!r}", remove)

    def require_removable(self, user: User, stream: Stream) -> None:
        """Check that the user may `unlink` a stream. Raises Denied, NotPermitted."""
        permit(user, stream.group, CHANGE)
        require_unsticky(user, stream.group.state, stream.state, stream.name)
        require_unprotected(stream.group)

    def rmdir(self, user: User, group: Group | Folder, name: str, *, is_unmade: bool = False) -> Step[None]:
        """Remove a group without streams and groups; on disk when the step is done. `.consumers`, `.kept` and `.txn`
        stay, without an error; a part in `.txn` is aborted. `is_unmade`: the group was made for a request that was then
        refused, so `protect` is not checked."""
        if isinstance(group, StagingFolder):
            permit_staging(user, group)
            group.rmdir(user, name)
            return None
        permit(user, group, CHANGE)
        if isinstance(group, Folder):
            raise errors.NotDirectory(f"{name!r}: not a group")
        if name in FOLDERS and not group.removed:
            return None
        victim = group.groups.get(name)
        if victim is None or victim.removed:
            if victim is None and find_in_group(group, name) is not None:
                raise errors.NotDirectory(f"{name!r}: a file, not a group")
            raise not_found(group, name)
        require_unsticky(user, group.state, victim.state, name)
        if not is_unmade:
            require_unprotected(group)
            require_unprotected(victim)
        if victim.groups or victim.streams or any(group is victim for group, _ in self._making):
            raise errors.NotEmpty(f"group {name!r}: has streams or groups (remove them first)")
        self.unserved.require_empty(victim.number, name)
        if victim.ring is not None:
            victim.ring.changed([{"do": "remove"}])
        victim.removed = True  # no call may start in it while the disk is waited for
        copied: Wait[None] = Wait()
        try:
            step = self.store.remove(victim.number, answering(copied, None, NOT_REPLICATED))
        except errors.MqfsError:
            victim.removed = False
            raise
        if not isinstance(step, Wait):
            return self._forget(victim, copied)
        removed: Wait[None] = Wait()
        step.subscribe(lambda done: removed.follow_call(lambda: self._end_removal(victim, done, copied)))
        return removed

    def _end_removal(self, victim: Group, done: Wait[None], copied: Wait[None]) -> Step[None]:
        """Complete a removal that the disk has, or restore the group if the disk failed."""
        try:
            done.result()
        except errors.MqfsError:
            victim.removed = False
            self.dirty_groups.add(victim)
            raise
        return self._forget(victim, copied)

    def _forget(self, victim: Group, copied: Wait[None]) -> Step[None]:
        """Take a removed group out of the tree, and answer its waiting calls."""
        parent = victim.parent
        del parent.groups[victim.name], self.groups[victim.number]
        parent.catalog_version += 1
        self.dirty_groups.discard(victim)
        victim.end()
        return copied if victim.settings.sync == SYNC_REPLICA and not copied.settled else None

    def rename(self, user: User, group: Group | Folder, name: str, to: Group | Folder, new: str) -> Step[None]:
        """Rename a stream or group inside its group. Raises NotPermitted for another group or a fixed file, Exists for
        a name in use, NotFound, Denied."""
        permit(user, group, CHANGE)
        if isinstance(group, Folder):
            raise errors.NotPermitted(f"cannot rename {name!r}")
        node = group.streams.get(name) or group.groups.get(name)
        if node is None:
            if find_in_group(group, name) is not None:
                raise errors.NotPermitted(f"cannot rename {name!r}")
            raise not_found(group, name)
        if isinstance(node, Group) and node.removed:  # its removal waits for the disk
            raise not_found(group, name)
        if to is not group:
            raise errors.NotPermitted("cannot move a file into another group")
        require_unsticky(user, group.state, node.state, name)
        require_unprotected(group)
        if isinstance(node, Group):
            require_unprotected(node)
        if new == name:
            return None
        self._require_new(user, group, new)
        if isinstance(node, Stream):
            group.rename_stream(node, new)
            return group.log.after_metadata_sync(None)
        self.unserved.require_known(group.number, f"rename {name!r}")
        node.log.change({"do": "rename", "stream": 0, "name": new})
        del group.groups[name]
        group.groups[new] = node
        group.catalog_version += 1
        return node.log.after_metadata_sync(None)

    def setattr(
        self, user: User, node: Node, *, mode: int | None = None, uid: int | None = None, gid: int | None = None
    ) -> Step[None]:
        """Change mode, owner or group of a file, for its owner. Only root may change the owner; the new group must be
        one of the user's. Raises NotFound, NotPermitted, Denied."""
        return set_attributes(user, node, mode, uid, gid)

    def sync(self, node: Node) -> Step[None]:
        """Wait until everything written to the node's group so far is on disk."""
        return node.group.log.after_sync(None)

    # ------------------------------------------------------------ house-keeping

    def tick(self) -> None:
        """Run maintenance, retry groups that are not served, and measure quotas. Called once a second."""
        self._maintenance.tick(self.groups)
        self.unserved.read_again(self.store, self.clock.engine_ns(), self._build_late)
        if self.kept_quotas is not None:
            self.kept_quotas.tick()

    def run_timers(self) -> None:
        """Ring the timers that are due: delayed messages, leases, retries."""
        self.timers.run(self.clock)

    def close(self) -> None:
        """Answer all parked calls: reads with end-of-file, blocked writers with an error. Claims are released."""
        self.closing = True
        for group in self.groups.values():
            self.faults.contain(group, "answering its readers", partial(self._close_streams, group))
            self.faults.contain(group, "stopping", group.end)
        for handle in self.open_files.all():
            self.faults.contain(handle.group, f"closing {handle.node.name}", handle.close)

    def _close_streams(self, group: Group) -> None:
        for stream in group.numbers.values():
            stream.end_reads()
            refuse_all(stream, errors.Interrupted("the server stops"))


# ------------------------------------------------------------ maintenance

log = logging.getLogger("mqfs.engine")
_STREAMS = 256  # streams examined in one step


class Maintenance:
    """The periodic work of a tree; a fault concerns one group. `dirty`: the groups that need maintenance."""

    def __init__(self, store: Store, clock: Clock, faults: Faults, timers: Timers) -> None:
        self._store, self._clock, self._faults, self._timers = store, clock, faults, timers
        self.dirty: set[Group] = set()
        self._turn: list[Group] = []  # groups still to be maintained in this round
        self._idle: set[Group] = set()  # groups in which idle streams are being removed
        self._full: set[int] = set()  # groups that were reported as without room
        self._ahead_ns = clock.wall_ns() - clock.engine_ns()  # wall clock minus engine clock

    def begin(self, root: Group) -> None:
        """Start maintenance after the tree was loaded and the engine clock resumed."""
        self._ahead_ns = self._clock.wall_ns() - self._clock.engine_ns()
        self._root = root
        self._alarm = Alarm(self._timers, root, LOOKING, "maintenance", lambda _: self._look_at_groups())

    def tick(self, groups: Mapping[int, Group]) -> None:
        """Maintain the dirty groups: expire messages, remove idle streams, trim, unblock writers. Called once a
        second."""
        self._faults.contain(self._root, "noting a step of the clock", partial(self._look_at_clocks, groups))
        if not self._turn:
            self._turn = list(self.dirty)
            self._alarm.at(self._clock.engine_ns())
        self._timers.run(self._clock)
        self._report_full(groups)

    def _look_at_groups(self) -> None:
        """Maintain groups for at most SLICE_S at once; after the last one let the store do a portion of its work."""
        until = self._clock.engine_ns() + int(limits.SLICE_S * 1e9)
        while self._turn:
            if not (group := self._turn.pop()).removed:
                self._look_at(group)
            if self._clock.engine_ns() >= until:
                self._alarm.at(self._clock.engine_ns() + 1)
                return
        self._store.tick()

    def _look_at(self, group: Group) -> None:
        if not group.settings.ttl and not group.settings.idle:
            self.dirty.discard(group)
        succeeded = self._faults.contain(group, "maintenance", partial(self._maintain, group))
        if not succeeded and group.log.end.failed is None:  # a failed log is not retried
            self.dirty.add(group)

    def _report_full(self, groups: Mapping[int, Group]) -> None:
        """Report once for each group, in the log and in `.errors`, that the disk has no room; log when it has again."""
        full, before = set(self._store.full), self._full
        self._full = full
        for number in full ^ before:
            group = groups.get(number)
            if group is not None and number in full:
                log.error("group %d: no space left on device: writes are refused until there is room", number)
                text = "no space left on device: writes are refused until there is room"
                group.refuse(User(group.state.uid, group.state.gid), ".", text)
            elif group is not None:
                log.warning("group %d: the disk has room again", number)

    def _maintain(self, group: Group) -> None:
        if group.settings.idle and group not in self._idle:
            group.portions.run(self._remove_idle(group))
        group.retention.trim()
        group.unblock()

    def _look_at_clocks(self, groups: Mapping[int, Group]) -> None:
        """Record a step of the wall clock in the root's log, as the newest record of all logs sets the clock at the
        next start. Schedules compute their times again."""
        ahead = self._clock.wall_ns() - self._clock.engine_ns()
        if abs(ahead - self._ahead_ns) >= 10**9:
            self._ahead_ns = ahead
            self._root.log.times.note_step()
            for group in groups.values():
                group.held.schedules.on_clock_step()

    def _remove_idle(self, group: Group) -> Work[None]:
        limit = self._clock.engine_ns() - group.settings.idle
        self._idle.add(group)
        waited_for = group.publisher.blocked.of_batches()
        try:
            for count, stream in enumerate(list(group.streams.values())):
                if count % _STREAMS == _STREAMS - 1:
                    yield
                    waited_for = group.publisher.blocked.of_batches()
                if group.settings.protect or group.log.end.failed is not None:
                    return
                if stream.removed or stream.opens or stream.unused_since_ns > limit or stream in waited_for:
                    continue
                if not self._faults.contain(group, "maintenance", partial(_remove_if_empty, group, stream)):
                    return
        finally:
            self._idle.discard(group)


def _after(making: _Making, call: Callable[[], Step[Node]]) -> Wait[Node]:
    """Repeat a call once the making of a group of that name has ended, and return its result."""
    wait: Wait[Node] = Wait()
    making[1].append(lambda: wait.follow_call(call))
    return wait


def _remove_if_empty(group: Group, stream: Stream, why: str = "an idle stream is removed") -> None:
    if group.ring is not None:
        group.ring.drain()  # it may have messages for this stream
    if not _is_empty(group, stream):
        return
    if group.ring is not None:
        group.ring.retire(why)  # more messages could be published
        if group.ring is not None or not _is_empty(group, stream):
            return
    group.remove_stream(stream)


def _is_empty(group: Group, stream: Stream) -> bool:
    """Whether a stream has no retained, held, delayed or blocked message, and no receiver."""
    kept, own = stream.kept, stream.default_consumer
    kept.update_low_watermark()
    if kept.count or kept.held_count or group.held.bytes_of(stream.number):
        return False
    return not stream.blocked and (own is None or not own.opens)
