"""The registry of rings: which groups have one, and which clients are attached to it.

It makes, retires and abandons rings, permits attachments, and resumes the rings of a server that was killed. It runs on
the engine's thread. intake.py copies records from a ring into the log; clients connect in attach_socket.py.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mqfs import errors, limits, ring
from mqfs.engine.group import Group
from mqfs.engine.language.permissions import R, W, X, require, require_scope
from mqfs.engine.language.settings import NO_DEPTH, SYNC_REPLICA, Settings, parse_settings
from mqfs.model import Step, User, Wait
from mqfs.net.sockets import let_client_run
from mqfs.quotas import require_share
from mqfs.ring.server.intake import hold_room
from mqfs.ring.server.keeper_link import KeeperLink
from mqfs.ring.server.ring_log import RingLog
from mqfs.store.api import Store
from mqfs.store.group_commit import Post

if TYPE_CHECKING:
    from mqfs.engine.tree.tree import Tree
    from mqfs.ring import Ring

log = logging.getLogger("mqfs.ring")

_NOT_ITS_FAULT = (errors.DiskFull, errors.DiskFailed, errors.ReadOnly, errors.OverLimit, OSError)  # the machine's
_TAIL_AT, _KEPT_POSITION_AT = 256, 776  # bytes of a ring's memory: ring.h


class GroupRing:
    """A group's ring and its clients."""

    def __init__(self, ring_log: RingLog) -> None:
        self.ring_log = ring_log
        self.attached: set[Attachment] = set()
        self.follower: Follower | None = None
        self.alone_since = time.monotonic()


class RingRegistry:
    """All rings of a server. Made before the tree, which calls `resume` for each group it has read."""

    def __init__(self, store: Store, post: Post) -> None:
        self._store, self._post = store, post
        self._tree: Tree | None = None
        self._rings: dict[Group, GroupRing] = {}
        self._ending: dict[RingLog, GroupRing] = {}
        self._draining: dict[RingLog, float] = {}  # ended rings that readers still need -> since when
        self._generations: dict[int, int] = {}
        # By `_whose`: when rings were corrupt or locked too long.
        self._cooldown: dict[tuple[str, int], deque[float]] = {}
        self._closing: Wait[None] | None = None
        self._unreadable: dict[int, Exception] = {}  # why the log of a group with a ring cannot be read now
        self._keeper = KeeperLink(store.path) if store.path else None
        self._held = self._take_over()
        self._unresumed = {*self._held, *self._unreadable}  # groups whose rings stay with the keeper

    # ------------------------------------------------------------ after a kill

    def _take_over(self) -> dict[int, list[Ring]]:
        """Return the rings that survived the last server, by group, the oldest generation first. The sequences of their
        groups continue where the rings end."""
        if self._keeper is None or ring.MISSING:
            return {}
        held: dict[int, list[Ring]] = {}
        for (number, generation), fd in sorted(KeeperLink.held(self._store.path).items()):
            self._generations[number] = max(self._generations.get(number, 0), generation)
            try:
                held.setdefault(number, []).append(self._attach_held(number, generation, fd))
            except _NOT_ITS_FAULT as error:
                self._unreadable[number] = error
            except Exception as error:
                self._abandon(number, generation, fd, error)
            finally:
                os.close(fd)
        return held

    def _attach_held(self, number: int, generation: int, fd: int) -> Ring:
        held = ring.attach(fd, generation)
        try:
            self._store.open(number).ranges.continue_at(_first_untaken(held))
        except BaseException:
            held.close()
            raise
        return held

    def _abandon(self, number: int, generation: int, fd: int, error: Exception) -> None:
        """Abandon a ring that cannot be resumed: copy its bytes to quarantine, and have the keeper drop it, so that no
        later start meets it again."""
        log.error("ring of group %d abandoned: %s: %s", number, type(error).__name__, error)
        try:
            self._store.open(number).ranges.quarantine(_untaken(fd), "a ring that could not be resumed")
        except (errors.MqfsError, OSError) as failed:
            log.error("ring of group %d not quarantined: %s", number, failed)
        self._drop(number, generation)

    def resume(self, group: Group) -> None:
        """Resume a group's ring, if it has one, before anything is written to the group.

        Raises the errors of its log and of the machine: then the ring stays with the keeper for the next start, and the
        group is read-only until then, as the ring has the sequences that its next messages would take.
        """
        self._tree = group.tree
        generations, last = self._held.pop(group.number, []), group.log.end.next - 1
        try:
            ring_log = self._begin_held(group, generations)
        except _NOT_ITS_FAULT as error:
            for kept in generations:
                kept.close()
            group.log.upkeep.fail(OSError(errno.EIO, f"ring not resumed: {error}"))
            raise
        self._unresumed.discard(group.number)
        for ended in generations[:-1]:
            group.log.upkeep.sync(functools.partial(self._finish_ended, group.number, ended, last))
        if ring_log is None:
            return
        log.info("ring of group %d resumed", group.number)
        ring_log.pump()
        ring_log.commit()  # the last server may have ingested more than it committed
        if not ring_log.ended and ring_log.ring.retired:
            ring_log.retire("the last server had begun to retire it")

    def _begin_held(self, group: Group, generations: list[Ring]) -> RingLog | None:
        """Begin the ring log of the newest generation; None if there is no ring, or it was abandoned."""
        if (why := self._unreadable.pop(group.number, None)) is not None:
            raise why
        if not generations:
            return None
        newest = generations[-1]
        try:
            return self._begin(group, newest).ring_log
        except _NOT_ITS_FAULT:
            raise
        except Exception as error:  # for example, another process has the server's consumer slot
            self._abandon(group.number, newest.generation, newest.fileno(), error)
            newest.close()
            return None

    def _finish_ended(self, number: int, ended: Ring, last: int, error: OSError | None) -> None:
        """Commit and drop a generation that the last server had emptied before it made the next one."""
        if error is None:
            ended.commit(last)
        self._drop(number, ended.generation)
        ended.close()

    # ------------------------------------------------------------ attaching

    def attach(self, user: User, path: str) -> Attachment:
        """Attach a client to the ring of a group, which is made if there is none. Raises NotFound, NotDirectory,
        Denied, Unsupported, DiskFull, OverLimit, Busy."""
        assert self._tree is not None
        if ring.MISSING:
            raise errors.Unsupported(f"rings: the extension in C was not built ({ring.MISSING})")
        group = self._tree.find(user, path)
        if not isinstance(group, Group):
            raise errors.NotDirectory(f"{path!r}: a file, not a group")
        self._tree.access(user, group, R | X)
        self._admit(user, group)
        own = self._current(group) or self._make(group)
        self._require_place(group, own, user)
        attachment = Attachment(user, group, own.ring_log, self._left)
        own.attached.add(attachment)
        return attachment

    def _admit(self, user: User, group: Group) -> None:
        require_scope(user, W, group.name)
        if is_excluded(group, group.settings, user):
            raise errors.Denied("the group has 'ring owner' (expected its owner, or 'ring all' in its ctl)")
        if group.log.end.failed is not None:
            raise errors.ReadOnly(f"the disk failed: {group.log.end.failed}")
        if why := why_not(group.settings, group.consumers.bounds()):
            raise errors.Unsupported(why)
        failures = self._cooldown.get(_whose(group))
        often = failures is not None and len(failures) == failures.maxlen
        if failures is not None and often and time.monotonic() - failures[0] < limits.RING_REST_S:
            raise errors.Unsupported(
                "rings: corrupt or locked too long three times in a minute (expected a pause of a minute)"
            )
        # Last, as it takes longest with many streams, and a client may repeat its request.
        for stream in group.numbers.values():
            require(user, stream.state, R | W, stream.name)
        if why := why_unseen(group.tree, user, (stream.state.uid for stream in group.numbers.values())):
            raise errors.Unsupported(why)

    def _require_place(self, group: Group, own: GroupRing, user: User) -> None:
        """Raise OverLimit if there is no place for another client. With `ring all` each user has a share of the places;
        otherwise all are the owner's."""
        if len(own.attached) >= limits.ATTACHMENTS:
            raise errors.OverLimit(f"too many clients of the ring (expected at most {limits.ATTACHMENTS})")
        if group.settings.ring == "all":
            mine = sum(other.user.uid == user.uid for other in own.attached) + 1
            require_share("attachments to the ring", limits.ATTACHMENTS, user.uid, mine, len(own.attached) + 1)

    def _current(self, group: Group) -> GroupRing | None:
        """Return the ring unless it is retired. None: a new one may be made. Raises Busy or DiskFull while the last one
        is being ended."""
        own = self._rings.get(group)
        if own is None or not own.ring_log.why:
            return own
        own.ring_log.tick()
        if not own.ring_log.ended:
            if blocked := own.ring_log.intake.blocked:
                raise errors.DiskFull(f"no ring: the last one is not in the log yet: {blocked}")
            raise errors.Busy("the last generation of the ring is not in the log yet (expected a retry)")
        if self._rings.get(group) is own:  # not committed yet, but the next ring may be made
            self._ending[own.ring_log] = self._rings.pop(group)
        return None

    def _left(self, attachment: Attachment) -> None:
        """Note that a client has detached."""
        own = self._rings.get(attachment.group)
        if own is not None:
            own.attached.discard(attachment)
            own.alone_since = time.monotonic()

    # ------------------------------------------------------------ making and ending rings

    def _make(self, group: Group) -> GroupRing:
        self._make_room(group.state.uid)
        number = group.number
        generation = max(self._generations.get(number, 0) + 1, time.time_ns() // 10**6)
        bucket = group.log.bucket
        try:
            hold_room(bucket, limits.RING_BYTES)
        except errors.DiskFull:
            raise errors.DiskFull(f"no ring: the log has no room for its {limits.RING_BYTES} bytes") from None
        made = None
        try:
            made = ring.create(
                limits.RING_BYTES, generation=generation, sequence=bucket.end.next, time_ns=bucket.end.last_ns
            )
            self._generations[number] = generation
            own = self._begin(group, made)
        except BaseException:
            if made is not None:
                made.close()
            bucket.ranges.hold_room(0)
            raise
        if self._keeper is not None:
            try:
                self._keeper.keep(number, generation, made.fileno())
            except OSError as error:  # out of descriptors
                own.ring_log.retire(f"it would not survive the server: {error}")
                raise errors.OverLimit(f"fd keeper: {error} (expected a free descriptor)") from error
        return own

    def _make_room(self, owner: int) -> None:
        """Make room for another ring of an owner: retire the one unused for longest if needed. Raises OverLimit."""
        owners = [ring_log.group.state.uid for ring_log in (*(own.ring_log for own in self._all()), *self._draining)]
        mine = owners.count(owner)
        try:
            require_share("rings", limits.RINGS, owner, mine + 1, len(owners) + 1)
        except errors.OverLimit:
            whose = {owner} if mine >= limits.RINGS // 2 else set(owners)
            draining = [ring_log for ring_log in self._draining if ring_log.group.state.uid in whose]
            unused = [own for own in self._rings.values() if not own.attached and own.ring_log.group.state.uid in whose]
            if draining:
                self._release(draining[0])
            elif unused:
                min(unused, key=lambda own: own.alone_since).ring_log.retire("another group needs its place")
            else:
                raise

    def _begin(self, group: Group, made: Ring) -> GroupRing:
        ring_log = RingLog(group, made, lambda change: self._judge(group, change), self._on_end)
        own = self._rings[group] = GroupRing(ring_log)
        try:
            own.follower = Follower(ring_log, self._post)
        except RuntimeError as error:
            del self._rings[group]
            ring_log.detach()
            raise errors.OverLimit(f"thread of the ring: {error} (expected a machine with room for one)") from None
        return own

    def _judge(self, group: Group, change: Mapping[str, Any]) -> str:
        """Return why a change of its group ends the ring; "" if it does not."""
        what = change["do"]
        if what in ("remove", "rename", "attributes"):
            return f"{what} of a stream"
        if what == "ctl":
            settings = parse_settings(change["lines"])
            if any(is_excluded(group, settings, attachment.user) for attachment in self._rings[group].attached):
                return "'ring owner' was set, and other users are attached"
            return why_ended(group.settings, settings, group.consumers.bounds())
        if what == "consumer" and change.get("backlog") and (why := why_not(group.settings, [change.get("full", "")])):
            return why
        if what == "make":
            stream = group.state.streams[change["stream"]]
            try:
                for attachment in self._rings[group].attached:
                    require(attachment.user, stream, R | W, stream.name)
                    if why_unseen(group.tree, attachment.user, [stream.uid]):
                        return f"{stream.name} was made, whose owner has a quota of kept bytes"
            except errors.Denied:
                return f"{stream.name} was made, and a client may not read and write it"
        return ""

    def _on_end(self, ring_log: RingLog) -> None:
        """Clean up after a ring that has ended, and whose messages are committed."""
        own = self._ending.pop(ring_log, None) or self._rings.pop(ring_log.group)
        if ring_log.corrupt or ring_log.held_up:
            whose = self._cooldown.setdefault(_whose(ring_log.group), deque(maxlen=limits.RING_CORRUPT))
            whose.append(time.monotonic())
        if own.follower is not None:
            own.follower.stop()
        self._drop(ring_log.group.number, ring_log.ring.generation)
        if ring_log in ring_log.group.past_rings and self._closing is None:
            self._draining[ring_log] = time.monotonic()
        else:
            ring_log.release()
        if self._closing is not None and not self._closing.settled and not self._is_committing():
            self._closing.resolve(None)

    def _release(self, ring_log: RingLog) -> None:
        """Close an ended ring that its readers no longer need."""
        self._draining.pop(ring_log)
        ring_log.release()

    def _drop(self, number: int, generation: int) -> None:
        if self._keeper is not None:
            self._keeper.drop(number, generation)

    # ------------------------------------------------------------ periodic maintenance, and the end

    def tick(self) -> None:
        """Maintain all rings; called once a second."""
        now = time.monotonic()
        if self._keeper is not None:
            self._keeper.ensure_alive()
        for own in self._all():
            self._contain(own.ring_log, "maintaining its ring", own.ring_log.tick)
            if not own.attached and not own.ring_log.why and now - own.alone_since >= limits.RING_IDLE_S:
                own.ring_log.retire("no client is attached")
        for ring_log, since in list(self._draining.items()):
            if now - since >= limits.RING_CHANGE_S or not ring_log.intake.readers.update():
                self._release(ring_log)

    def close(self) -> Step[None]:
        """Retire all rings, so that published messages are in the log. The keeper keeps a ring that was not resumed, or
        whose messages the log has no room for. The step is done when all waiting publishers are answered."""
        for own in self._all():
            self._contain(own.ring_log, "ending its ring", functools.partial(own.ring_log.retire, "server stopped"))
        if self._keeper is not None and not self._unresumed and all(own.ring_log.ended for own in self._all()):
            self._keeper.quit()
            self._keeper = None
        for ring_log in list(self._draining):
            self._release(ring_log)
        if not self._is_committing():
            return None
        self._closing = Wait(lambda _: True)
        return self._closing

    def _contain(self, ring_log: RingLog, what: str, act: Callable[[], None]) -> None:
        ring_log.group.faults.contain(ring_log.group, what, act)

    def _all(self) -> list[GroupRing]:
        return [*self._rings.values(), *self._ending.values()]

    def _is_committing(self) -> bool:
        return any(own.ring_log.ended for own in self._all())


def _whose(group: Group) -> tuple[str, int]:
    """Return the key of a pause after a corrupt ring: the owner, who alone has access, or with `ring all` the group."""
    return ("group", group.number) if group.settings.ring == "all" else ("owner", group.state.uid)


def _untaken(fd: int) -> bytes:
    """Return the bytes of a ring that no server has ingested, by the positions in its memory, which may be invalid as a
    ring. If these make no sense all its bytes are returned; of a file of another size than our rings, none."""
    size = os.fstat(fd).st_size - ring.HEAD_BYTES
    if not 0 < size <= limits.RING_BYTES:
        return b""
    begin, tail = (int.from_bytes(os.pread(fd, 8, at), "little") for at in (_KEPT_POSITION_AT, _TAIL_AT))
    count, at = (tail - begin, begin % size) if begin <= tail <= begin + size else (size, 0)
    data = os.pread(fd, min(count, size - at), ring.HEAD_BYTES + at)
    return data + os.pread(fd, count - len(data), ring.HEAD_BYTES)


def _first_untaken(held: Ring) -> int:
    """Return the sequence of the first record that the last server may not have ingested; 0 if that is corrupt."""
    taker = held.consumer(kept=True, hold=True)
    try:
        following = held.next  # first: a client may publish meanwhile
        data = taker.range(1, 0)
        if not data:
            return following
        rows = ring.scan(data)
        return rows.sequences[0] if len(rows.sequences) else 0
    except errors.Damaged:
        return 0
    finally:
        taker.close()


# ---------------------------------------------------------------- which groups may have a ring, which users may attach


def is_excluded(group: Group, settings: Settings, user: User) -> bool:
    """Whether `ring owner` excludes a user. All clients of a ring must trust each other with the group's messages: with
    `ring owner` these are the owner, root and the server's user."""
    return settings.ring == "owner" and user.uid not in (group.state.uid, 0, os.geteuid())


def why_ended(now: Settings, settings: Settings, bounds: Iterable[str]) -> str:
    """Return why new settings end a ring; "" if they do not."""
    for name in ("ttl", "keep", "words"):  # clients and the ring log have read them
        if getattr(settings, name) != getattr(now, name):
            return f"{name} changed"
    return why_not(settings, bounds)


def why_not(settings: Settings, bounds: Iterable[str]) -> str:
    """Return why a group with these settings has no ring: each write must be checked before it is appended. "": it may
    have one. `bounds`: the policy of each consumer with a backlog; "": the group's."""
    if settings.ring == "off":
        return "rings: not with 'ring off' (expected 'ring owner' or 'ring all')"
    if settings.sender:
        return "rings: not with 'sender on'"
    if settings.sync == SYNC_REPLICA:
        return "rings: not with 'sync replica'"
    if settings.data != "message":
        return f"rings: not with 'data {settings.data}' (expected 'data message')"
    if settings.full != "drop-old" and settings.depth is not NO_DEPTH:
        return f"rings: not with 'depth' and 'full {settings.full}' (expected 'full drop-old')"
    for policy in (own or settings.full for own in bounds):
        if policy != "drop-old":
            return f"rings: not with a consumer's 'backlog' and 'full {policy}' (expected 'full drop-old')"
    return ""


def why_unseen(tree: Tree, user: User, owners: Iterable[int]) -> str:
    """Return why a user may not publish in shared memory, where neither quotas nor the audit apply; "" if it may.
    `owners`: of the streams."""
    if tree.audit.publishes:
        return "rings: not with '--audit all'"
    quotas = tree.quotas
    if quotas is None:
        return ""
    if (quota := quotas.of(user.uid)) is not None and (quota.messages or quota.bytes):
        return "rings: the user has a quota of messages or bytes a second"
    bounded = quotas.bound_kept and any((own := quotas.of(uid)) is not None and own.kept for uid in set(owners))
    return "rings: the owner of a stream has a quota of kept bytes" if bounded else ""


# ---------------------------------------------------------------- the thread of a ring

_CHECK_S = 0.25  # between two checks of the ring's lock
_CHECK_AGAIN_S = 0.05  # the same while the lock is held
_RETRY_S = 0.25  # after the log had no room
_PASS_S = 0.002  # in which the ring's readers pass some of the records left to them


class Follower:
    """The thread of one ring: it sleeps until something is published, and has the engine ingest that."""

    def __init__(self, ring_log: RingLog, post: Post) -> None:
        self._ring_log, self._ring, self._post = ring_log, ring_log.ring, post
        self._position = ring_log.ring.tail
        self._again = threading.Semaphore(0)
        self._stopped = threading.Event()
        self._held: tuple[int, int, float] = (0, 0, 0.0)  # (thread, tail, since when)
        self._thread = threading.Thread(target=self._follow, name="ring", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; when this returns it does not use the ring any more."""
        self._stopped.set()
        self._again.release()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._ring.wait(self._position, _CHECK_AGAIN_S if self._held[0] else _CHECK_S):
                    self._ask("taking from its ring", self._take)
                elif self._is_held_too_long():
                    self._ask("ending its ring", self._retire)
                if self._ring.retired:
                    return
        except RuntimeError:
            log.debug("ring of group %d published after the end of the loop", self._ring_log.group.number)

    def _ask(self, what: str, call: Callable[[], None]) -> None:
        """Call that on the engine's thread, and wait for it. A failure there ends the ring at most."""
        ring_log, failed = self._ring_log, False

        def run() -> None:
            nonlocal failed
            group = ring_log.group
            try:
                failed = not group.faults.contain(group, what, call)
                if failed and group.log.end.failed is not None:
                    retire = functools.partial(ring_log.retire, "its group is read-only")
                    group.faults.contain(group, "ending its ring", retire)
            finally:
                self._again.release()

        self._post(run)
        self._again.acquire()
        intake = ring_log.intake
        if intake.blocked or intake.leaves or failed:
            self._stopped.wait(_RETRY_S if intake.blocked or failed else _PASS_S)

    def _take(self) -> None:
        """Ingest published records, and for a moment those that follow. A publisher that waited for the commit
        publishes again as soon as it runs, which is sooner than another wake-up of this thread and the loop."""
        intake, until = self._ring_log.intake, time.monotonic() + limits.TURN_S
        while True:
            self._ring_log.pump(limits.RING_TURN_BYTES, may_leave=True)
            if self._ring_log.ended:
                break
            self._position = intake.position
            let_client_run()
            if intake.blocked or intake.leaves or self._ring.tail == self._position or time.monotonic() >= until:
                break

    def _is_held_too_long(self) -> bool:
        """Whether one thread has held the lock, and published nothing, for longer than limits.RING_HOLD_S."""
        now = time.monotonic()
        thread, tail, since = self._held
        if not self._ring.holder or (self._ring.holder, self._ring.tail) != (thread, tail):
            self._held = self._ring.holder, self._ring.tail, now
            return False
        return now - since >= limits.RING_HOLD_S

    def _retire(self) -> None:
        self._ring_log.held_up = True
        self._ring_log.retire(f"thread {self._held[0]} held its lock too long")


class Attachment:
    """One client's right to use a group's ring, for one generation."""

    def __init__(self, user: User, group: Group, ring_log: RingLog, left: Callable[[Attachment], None]) -> None:
        self.user, self.group, self._ring_log, self._left = user, group, ring_log, left
        self.generation = ring_log.ring.generation

    def fileno(self) -> int:
        """Return the descriptor of the ring's memory."""
        return self._ring_log.ring.fileno()

    def number(self, name: str) -> int | None:
        """Return the number of a stream; None for a view. Raises NotFound, DiskFailed; Stale if the ring was retired;
        DiskFull while the log has no room for published messages."""
        self._require()
        if blocked := self._ring_log.intake.blocked:
            raise errors.DiskFull(f"the ring is not in the log yet: {blocked}")
        if self._ring_log.why:
            raise errors.Stale(f"ring retired: {self._ring_log.why} (expected a new attachment)")
        stream = self.group.streams.get(name)
        if stream is not None:
            return stream.number
        if name in self.group.views:
            return None
        raise self.group.no_stream(name)

    def is_retaining(self, number: int) -> bool:
        """Whether a message of that stream would be retained for any reader now."""
        return self.group.is_retaining(self.group.numbers[number])

    def name(self, number: int) -> str:
        """Return the name of a stream, also after the ring was retired. Raises NotFound, DiskFailed."""
        self._require()
        stream = self.group.numbers.get(number)
        if stream is None:
            raise errors.NotFound(f"no stream with number {number} in group {self.group.name!r}")
        return stream.name

    def _require(self) -> None:
        if self.group.log.end.failed is not None:
            raise errors.DiskFailed(f"the disk failed: {self.group.log.end.failed}")

    def close(self) -> None:
        self._left(self)
