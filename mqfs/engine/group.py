"""A group: one log, and the parts that publish, retain and deliver its messages.

Group composes the parts, makes, removes and renames streams, and changes settings. GroupLog is the only writer of the
log and its state.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mqfs import errors, limits
from mqfs.engine.core.log import GroupCounts, GroupLog, ShownLog
from mqfs.engine.core.portions import CommandQueue, Portions
from mqfs.engine.core.timers import Refusals, Refused
from mqfs.engine.delivery.fanout import Fanout
from mqfs.engine.delivery.priorities import PriorityIndex
from mqfs.engine.delivery.registry import Consumers
from mqfs.engine.delivery.waiting import Waiting
from mqfs.engine.language.settings import NO_DEPTH, SYNC_REPLICA, Settings, parse_settings
from mqfs.engine.publishing.admission import DeduplicationWindow
from mqfs.engine.publishing.delayed import DelayedMessages
from mqfs.engine.publishing.publisher import Publisher
from mqfs.engine.publishing.transactions import Transactions
from mqfs.engine.retention.retention import Retention, is_per_key, renew_newest
from mqfs.engine.routing import ViewRegistry
from mqfs.engine.stream import Stream
from mqfs.model import NEVER, QTDIR, Qid, User
from mqfs.state import group as group_state
from mqfs.state.group import Change, GroupState
from mqfs.store.api import Bucket, RingPort

if TYPE_CHECKING:
    from mqfs.engine.tree.tree import Tree

NO_REPLICA = "sync replica: the server has no replica (expected --replica URL at its start, or another 'sync')"
_RESHAPE = frozenset({"remove", "rename", "bind", "unbind", "consumer", "forget"})  # see routing_version
_SHOWS = frozenset({"attributes", "rename", "bind", "unbind", "ctl"})  # see reach_version
_LOOSENS = frozenset({"remove", "floor", "drop", "ctl", "forget"})  # changes after which messages may be trimmed


class Group:
    """A directory. Made and removed by the tree."""

    directory = True

    def __init__(self, tree: Tree, bucket: Bucket, own: GroupState) -> None:
        self.tree, self.state = tree, own
        self.clock, self.timers, self.faults, self.staging = tree.clock, tree.timers, tree.timers.faults, tree.staging
        self.in_memory, self.kept_quotas = not tree.store.path, tree.kept_quotas
        self.mark_dirty = partial(tree.dirty_groups.add, self)
        self._stored = bucket  # the log in the store, whatever `log.bucket` is
        self.number = own.group
        self.parent: Group = self  # set by the tree
        self.removed = False
        self.settings = parse_settings(own.ctl)
        self.log = GroupLog(bucket, own, self.settings, tree.clock)
        self.log.on_changed = self._changed
        self.groups: dict[str, Group] = {}
        self.streams: dict[str, Stream] = {}
        self.numbers: dict[int, Stream] = {}
        self.unlinked = (0, 0), 0  # the last call of `unlink_nothing`: process and path of the qid; engine time
        self.waiting = Waiting()
        self.ring: RingPort | None = None  # shared memory in which other processes publish and follow this log
        self.past_rings: set[RingPort] = set()  # ended rings whose followers have not switched to the log yet
        self.refusals = Refusals()
        self.counts = GroupCounts()
        self.catalog_version = 0  # grows with every change of names and permissions
        self.routing_version = 0  # grows when other views or consumers than before may cover a stream
        self.reach_version = 0  # grows when the readers of existing messages may have changed
        self.order_version = 0  # grows when consumers may deliver other messages, or in another order
        self.ranks = PriorityIndex(self)
        self.retention: Retention = Retention(self)
        self.held = DelayedMessages(self)
        self.ids = DeduplicationWindow(self.log, self.clock)
        self.views: ViewRegistry = ViewRegistry(self)
        self.consumers = Consumers(self)
        self.log.on_acknowledged = self.consumers.on_acknowledged
        self.fanout: Fanout = Fanout(self)
        self.views.on_refreshed, self.views.on_removed = self.consumers.on_coverage_changed, self.fanout.close_view
        self.retention.overtake_cursors = self.fanout.overtake_cursors
        self.retention.interests += [self.fanout.low_watermark, self.consumers.floor, self._ring_low_watermark]
        self.portions = Portions(self.timers, self, self.clock)
        self.commands = CommandQueue(self.portions, tree.memory)
        self.publisher = Publisher(self)
        self.transactions = Transactions(self)
        for row in own.streams.values():
            self._enter(Stream(self, row))
        self.views.load()
        self.consumers.load()
        self.update_must_retain()
        bucket.writer.state = self._encoded
        bucket.upkeep.on_rolled(self._rolled)
        self.log.on_all_shown = self._select_storage
        self._select_storage()

    def _encoded(self) -> bytes:
        """Encode the state for a STATE record, after owed work is complete."""
        self.portions.finish()
        if self.retention.newest is not None:
            self.retention.newest.save()
        return self.state.encode()

    def _rolled(self) -> None:
        """Mark the newest messages of keys as saved: the last encoded state is at the head of the newest segment."""
        if self.retention.newest is not None:
            self.retention.newest.saved()

    def _enter(self, stream: Stream) -> None:
        self.streams[stream.name] = stream
        self.numbers[stream.number] = stream

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def group(self) -> Group:
        return self

    @property
    def qid(self) -> Qid:
        return Qid(QTDIR, 0, self.number << 32)

    def _select_storage(self) -> None:
        """Select the bucket that `keep` and `sync` call for. `keep` can change only while no message is retained."""
        settings, log = self.settings, self.log
        if log.shown is not None and not log.shown.end.held and settings.sync != SYNC_REPLICA:
            log.use(self._stored)
        if settings.keep == "ring" and log.bucket is self._stored:
            log.use(self.tree.store.in_memory(self._stored))
        elif settings.keep == "disk" and self.ring is None and log.shown is None:
            replica, lacking = settings.sync == SYNC_REPLICA, OSError(NO_REPLICA)
            is_copied = self.tree.store.replication is not None
            log.use(ShownLog(self._stored, None if is_copied else lacking) if replica else self._stored)

    # ------------------------------------------------------------ retention

    def before_trim(self) -> dict[int, int]:
        """Forget expired ids. Returns the lowest sequence of a delayed message by the file number of `.put`: the log
        has delayed messages under this number. Empty without delayed messages."""
        self.ids.forget()
        return {group_state.PUT: self.held.floor} if self.held.floor else {}

    def _ring_low_watermark(self, stream: object) -> int:
        """Return the lowest sequence that a process which follows a ring may not have read."""
        return min((ring.floor for ring in (*self.past_rings, self.ring) if ring is not None), default=NEVER)

    def update_must_retain(self) -> None:
        """Update `log.must_retain` after a change of settings, or of whether there are consumers."""
        settings = self.settings
        kept = settings.replay != "off" or settings.deliver == "one" or bool(self.consumers)
        self.log.must_retain = kept or settings.sync == SYNC_REPLICA

    def is_retaining(self, stream: Stream) -> bool:
        """Whether a message written to the stream now has a reader: a present one, or a later one."""
        if self.log.must_retain or self.fanout.has_live_readers([stream]):
            return True
        return self._ring_low_watermark(stream) != NEVER

    # ------------------------------------------------------------ changes

    def _changed(self, changes: Sequence[Change]) -> None:
        """Update versions, retention and the ring after changes were recorded and applied."""
        for change in changes:
            self.routing_version += change["do"] in _RESHAPE
            self.reach_version += change["do"] in _SHOWS
            if change["do"] in _LOOSENS:
                self.retention.retention_changed(change)
        if self.ring is not None:
            self.ring.changed(changes)
        self.catalog_version += 1
        self.mark_dirty()

    def no_stream(self, name: str) -> errors.NotFound:
        """Return the error for a stream name that does not exist."""
        return errors.NotFound(f"no stream {name!r} in group {self.name!r}")

    def make_stream(self, name: str, mode: int, user: User) -> Stream:
        if len(self.streams) >= limits.STREAMS:
            raise errors.OverLimit(f"too many streams (expected at most {limits.STREAMS} in a group)")
        if name in self.views:
            raise errors.Exists(f"name {name!r}: taken by a view")
        if name in self.groups or self.tree.is_making(self, name):
            raise errors.Exists(f"name {name!r}: taken by a group")
        number = self.state.next_stream
        self.log.change(
            {
                "do": "make",
                "stream": number,
                "name": name,
                "mode": mode & 0o1777,
                "uid": user.uid,
                "gid": user.gid,
                "time": self.clock.wall_ns(),
            }
        )
        stream = Stream(self, self.state.streams[number])
        stream.kept.count = stream.kept.newest = 0
        self._enter(stream)
        return stream

    def remove_stream(self, stream: Stream) -> None:
        is_held = {"held": True} if self.held.bytes_of(stream.number) else {}
        self.log.change({"do": "remove", "stream": stream.number, **is_held})
        del self.streams[stream.name], self.numbers[stream.number]
        stream.end()
        for cursor in [cursor for cursor in self.fanout.cursors if cursor.over]:
            cursor.end()
        for reads in self.consumers.scopes.waiting():
            reads.serve()
        self.consumers.on_routing_changed()

    def remove_temporary(self, stream: Stream) -> None:
        """Remove a temporary stream. If the log refuses the change, the next start removes it."""
        try:
            self.remove_stream(stream)
        except errors.MqfsError as error:
            self.faults.report(self.number, f"temporary stream {stream.name!r} cannot be removed: {error}")

    def rename_stream(self, stream: Stream, name: str) -> None:
        """Rename a stream. Raises Busy for the stream of dead letters, if its letters would be trimmed under another
        name."""
        old, dead = stream.name, self.settings.dead
        if old == dead:
            self.require_no_dead_letters("rename", self.settings)
        if name == dead:  # trimmed messages must not reappear when it retains all
            stream.kept.update_low_watermark()
            self.retention.persist_low_watermarks({stream.number: stream.state.floor})
        self.log.change({"do": "rename", "stream": stream.number, "name": name})
        del self.streams[old]
        self.streams[name] = stream
        if dead in (old, name):
            renew_newest(self.retention, self)  # dead letters are not kept by keys
        self.consumers.scopes.rename(old)
        stream.kept.recount()  # other views may show it now
        self.consumers.on_coverage_changed("", name, *self.views.of(stream))

    def require_no_dead_letters(self, what: str, *settings: Settings) -> None:
        """Check that there are no dead letters, unless any stream keeps all its messages under all of `settings`.
        Raises Busy, naming `what`: the stream would retain its letters no longer than other messages."""
        letters_of = self.streams.get(self.settings.dead)
        if letters_of is None or all(map(_keeps_all, settings)):
            return
        if self.ring is not None:
            self.ring.drain()
        letters_of.kept.update_low_watermark()
        if (count := letters_of.kept.count + letters_of.kept.held_count) > 0:
            raise errors.Busy(
                f"{what}: stream {letters_of.name!r} has {count} dead letters ('redrive' or 'clear' them first)"
            )

    def put_in_force(self, settings: Settings) -> None:
        """Apply settings that are recorded in the log."""
        self.routing_version += settings.dead != self.settings.dead  # for new `words` views are refreshed
        self.order_version += 1
        before, deliver, sync = self.settings, self.settings.deliver, self.settings.sync
        self.settings = self.log.settings = settings
        if is_per_key(settings) != is_per_key(before) or settings.dead != before.dead:
            renew_newest(self.retention, self)
        if sync == SYNC_REPLICA != settings.sync:
            self.log.stop_holding()
        if settings.deliver != deliver:
            self.consumers.on_deliver_changed()
        if settings.dead != before.dead:
            self.consumers.on_coverage_changed("", *self.views)
        self.update_must_retain()
        self._select_storage()

    # ------------------------------------------------------------ start, retries and end

    def start(self) -> None:
        """Start timers of delayed messages and consumers, and remove temporary streams, after the log was read."""
        if self.settings.keep == "ring":
            self.state.ids.clear()  # their messages were in memory only
        self.faults.contain(self, "finding delayed messages", self.held.start)
        self.faults.contain(self, "starting its consumers", self.consumers.start)
        if self.retention.newest is not None:
            self.portions.later(self.retention.newest.follow_in_steps())
        for stream in [stream for stream in self.streams.values() if stream.is_temporary]:
            self.remove_temporary(stream)

    def refuse(self, user: User, file: str, text: str) -> None:
        """Count a refused write, and keep its reason for `.errors`."""
        self.counts.refused += 1
        self.refusals.add(Refused(self.clock.wall_ns(), user.uid, user.pid, file, text))

    def unblock(self, look: bool = True) -> None:
        """Retry blocked writers, as there may be room now; with `look`, due messages and schedules before them.

        First serve reads that waited for a message of the same key, as it may have been removed.
        """
        if self.consumers.keyed:
            self.consumers.on_removals()
        if look and (self.held.overdue or self.held.schedules.waiting):
            self.held.retry()
        if self.publisher.blocked.streams:
            self.publisher.blocked.retry(self.held.overdue)

    def end(self) -> None:
        """Answer all waiting calls: the group was removed, or the server stops."""
        gone = errors.NotFound("the group was removed") if self.removed else errors.Interrupted("the server stops")
        if not self.removed:
            self.commands.finish()
            self.log.end_waits(OSError(errno.EINTR, "the server stops"))
        self.portions.end(gone)
        self.fanout.end()
        for consumer in self.consumers.every():
            consumer.reads.close()
        self.transactions.end()


def _keeps_all(settings: Settings) -> bool:
    """Whether every stream retains its messages until a command, `ttl` or an acknowledgement removes them."""
    is_cut = settings.depth is not NO_DEPTH and settings.full == "drop-old"
    return (settings.replay == "all" or settings.deliver == "one") and not is_cut
