"""Which groups have rings, and who is attached to them.

Owns making, retiring and giving up rings, the rights of who attaches, and taking rings over from a server that was
killed. On the engine's thread, but for the small thread of each ring that sleeps until something is published. What
is taken from a ring, and how, is ring_log.py's; how clients come here is attach_socket.py's.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mqfs import errors, limits, ring
from mqfs.engine.group import Group, Tree
from mqfs.engine.language.permissions import R, W, X, require
from mqfs.engine.language.settings import NO_DEPTH, Settings, parse_settings
from mqfs.model import User
from mqfs.ring.server.keeper_link import KeeperLink
from mqfs.ring.server.ring_log import RingLog
from mqfs.seams import Store
from mqfs.shares import require_share
from mqfs.wait import Step, Wait

if TYPE_CHECKING:
    from mqfs.ring import Ring

log = logging.getLogger("mqfs.ring")

Post = Callable[[Callable[[], None]], None]
_LOOK_S = 0.25  # how often the thread of a ring looks who holds its lock
_LOOK_AGAIN_S = 0.05  # while somebody does
_RETRY_S = 0.25  # when the log had no room


# but the disk's or the machine's
_NOT_ITS_FAULT = (errors.DiskFull, errors.DiskFailed, errors.ReadOnly, errors.OverLimit, OSError)


class Follower:
    """The thread that sleeps until something is published in a ring, and then has the engine take it."""

    def __init__(self, journal: RingLog, post: Post) -> None:
        self._journal, self._ring, self._post = journal, journal.ring, post
        self._position = journal.ring.tail
        self._again = threading.Semaphore(0)
        self._stopped = threading.Event()
        self._held: tuple[int, int, float] = (0, 0, 0.0)  # (thread, tail, since when)
        self._thread = threading.Thread(target=self._follow, name="ring", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when it uses the ring no more, in a moment."""
        self._stopped.set()
        self._again.release()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._ring.wait(self._position, _LOOK_AGAIN_S if self._held[0] else _LOOK_S):
                    self._ask(self._take)
                elif self._is_held_too_long():
                    self._ask(self._abandon)
                if self._ring.retired:
                    return
        except RuntimeError:
            log.debug("something was published after the end of the loop")

    def _ask(self, call: Callable[[], None]) -> None:
        self._post(call)
        self._again.acquire()
        if self._journal.blocked:
            self._stopped.wait(_RETRY_S)

    def _take(self) -> None:
        try:
            self._journal.pump(limits.RING_TURN_BYTES)
            if not self._journal.ended:
                self._position = self._journal.position
        except Exception:
            log.exception("ring of group %d: taking from it failed", self._journal.group.number)
            self._stopped.set()
        finally:
            self._again.release()

    def _is_held_too_long(self) -> bool:
        """Whether one thread has had the lock, and published nothing, for longer than anybody may."""
        now = time.monotonic()
        thread, tail, since = self._held
        if not self._ring.holder or (self._ring.holder, self._ring.tail) != (thread, tail):
            self._held = self._ring.holder, self._ring.tail, now
            return False
        return now - since >= limits.RING_HOLD_S

    def _abandon(self) -> None:
        self._journal.held_up = True
        self._journal.retire(f"thread {self._held[0]} held its lock too long")
        self._again.release()


class Attachment:
    """One client's right to use a group's ring, as long as the generation lasts."""

    def __init__(self, rings: RingRegistry, user: User, group: Group, journal: RingLog) -> None:
        self._rings, self.user, self.group, self._journal = rings, user, group, journal
        self.generation = journal.ring.generation

    def fileno(self) -> int:
        """The ring's memory, to be passed on."""
        return self._journal.ring.fileno()

    def number(self, name: str) -> int | None:
        """Of a stream; None: that is a view. Raises NotFound; Stale where the ring was retired; DiskFailed."""
        self._require()
        if self._journal.why:
            raise errors.Stale(f"a newer generation takes the ring's place: {self._journal.why}")
        stream = self.group.streams.get(name)
        if stream is not None:
            return stream.number
        if name in self.group.views:
            return None
        raise errors.NotFound(name)

    def name(self, number: int) -> str:
        """Of the stream of that number, also when the ring was retired. Raises NotFound, DiskFailed."""
        self._require()
        stream = self.group.numbers.get(number)
        if stream is None:
            raise errors.NotFound(f"no stream has number {number}")
        return stream.name

    def _require(self) -> None:
        if self.group.log.end.failed is not None:
            raise errors.DiskFailed(f"the disk failed: {self.group.log.end.failed}")

    def close(self) -> None:
        self._rings.left(self)


class _Own:
    """A group's ring and who uses it."""

    def __init__(self, journal: RingLog) -> None:
        self.journal = journal
        self.attached: set[Attachment] = set()
        self.follower: Follower | None = None
        self.alone_since = time.monotonic()


class RingRegistry:
    """All rings of a server. Made before the tree: `resume` is what the tree calls for each group it has read."""

    def __init__(self, store: Store, post: Post) -> None:
        self._store, self._post = store, post
        self._tree: Tree | None = None
        self._rings: dict[Group, _Own] = {}
        self._ending: dict[RingLog, _Own] = {}
        self._draining: dict[RingLog, float] = {}  # ended, and followers are yet to change over: since when
        self._generations: dict[int, int] = {}
        self._cooldown: dict[tuple[str, int], deque[float]] = {}  # when whose (see _whose) were, or held the server up
        self._closing: Wait[None] | None = None
        self._unreadable: dict[int, Exception] = {}  # why the log of a group with a ring cannot be read now
        self._keeper = KeeperLink(store.path) if store.path else None
        self._held = self._take_over()
        self._unresumed = {*self._held, *self._unreadable}  # groups whose rings stay with the keeper

    # ------------------------------------------------------------ after a kill

    def _take_over(self) -> dict[int, list[Ring]]:
        """Rings that outlived the server before this one, by group, oldest generation first: the numbers of their
        groups' messages go on as they say."""
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
                self._give_up(number, generation, fd, error)
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

    def _give_up(self, number: int, generation: int, fd: int, error: Exception) -> None:
        """A ring that a start cannot go on with: what it has goes to quarantine, and no later start meets it again."""
        log.error("ring of group %d given up: %s: %s", number, type(error).__name__, error)
        try:
            kept = os.pread(fd, limits.RING_RANGE_BYTES, ring.HEAD_BYTES)
            self._store.open(number).ranges.quarantine(kept, "a ring that could not be resumed")
        except (errors.MqfsError, OSError) as failed:
            log.error("ring of group %d not copied: %s", number, failed)
        self._drop(number, generation)

    def resume(self, group: Group) -> None:
        """Go on with the ring that a group has, if it has. Before anything is written to the group. Raises what its
        log or the machine fails with: the ring stays with the keeper for the next start, and the group is read-only
        until then, as the ring holds the numbers that its next messages would take."""
        self._tree = group.tree
        generations, last = self._held.pop(group.number, []), group.log.end.next - 1
        try:
            journal = self._begin_held(group, generations)
        except _NOT_ITS_FAULT as error:
            for kept in generations:
                kept.close()
            group.log.upkeep.fail(OSError(errno.EIO, f"ring not resumed: {error}"))
            raise
        self._unresumed.discard(group.number)
        for ended in generations[:-1]:
            group.log.upkeep.sync(functools.partial(self._tell, group.number, ended, last))
        if journal is None:
            return
        log.info("the ring of group %d goes on", group.number)
        journal.pump()
        journal.commit()  # the server before may have taken more than it told
        if not journal.ended and journal.ring.retired:
            journal.retire("the server before had begun to")

    def _begin_held(self, group: Group, generations: list[Ring]) -> RingLog | None:
        """The journal of the newest generation; None where there is none, or it is given up."""
        if (why := self._unreadable.pop(group.number, None)) is not None:
            raise why
        if not generations:
            return None
        newest = generations[-1]
        try:
            return self._begin(group, newest).journal
        except _NOT_ITS_FAULT:
            raise
        except Exception as error:  # somebody else has the server's seat, say
            self._give_up(group.number, newest.generation, newest.fileno(), error)
            newest.close()
            return None

    def _tell(self, number: int, ended: Ring, last: int, error: OSError | None) -> None:
        """A generation of which the server before had taken all when it made the next: what it had not told yet."""
        if error is None:
            ended.commit(last)
        self._drop(number, ended.generation)
        ended.close()

    # ------------------------------------------------------------ who attaches

    def attach(self, user: User, path: str) -> Attachment:
        """Raises NotFound, NotDirectory, Denied, Unsupported, DiskFull, OverLimit, Busy."""
        assert self._tree is not None
        if ring.MISSING:
            raise errors.Unsupported(f"this server has no rings: its part in C was not built ({ring.MISSING})")
        group = self._tree.find(user, path)
        if not isinstance(group, Group):
            raise errors.NotDirectory(path)
        self._admit(user, group)
        own = self._current(group) or self._make(group)
        self._require_seat(group, own, user)
        attachment = Attachment(self, user, group, own.journal)
        own.attached.add(attachment)
        return attachment

    def _admit(self, user: User, group: Group) -> None:
        require(user, group.state, R | X, group.name)
        if is_excluded(group, group.settings, user):
            raise errors.Denied("the group has 'ring owner' (expected its owner, or 'ring all' in its ctl)")
        for stream in group.numbers.values():
            require(user, stream.state, R | W, stream.name)
        if group.log.end.failed is not None:
            raise errors.ReadOnly(f"the disk failed: {group.log.end.failed}")
        if why := why_not(group.settings, bool(group.consumers.bounded)):
            raise errors.Unsupported(why)
        spoilt = self._cooldown.get(_whose(group))
        often = spoilt is not None and len(spoilt) == spoilt.maxlen
        if spoilt is not None and often and time.monotonic() - spoilt[0] < limits.RING_REST_S:
            raise errors.Unsupported("corrupt rings, or locked too long, three times in a minute: none for a while")

    def _require_seat(self, group: Group, own: _Own, user: User) -> None:
        """Raises OverLimit. Of a ring for all each user has a share of the seats; another is its owner's whole."""
        if len(own.attached) >= limits.ATTACHMENTS:
            raise errors.OverLimit(f"at most {limits.ATTACHMENTS} clients are attached to a ring")
        if group.settings.ring == "all":
            mine = sum(other.user.uid == user.uid for other in own.attached) + 1
            require_share("attachments to one ring", limits.ATTACHMENTS, user.uid, mine, len(own.attached) + 1)

    def _current(self, group: Group) -> _Own | None:
        """The generation that is not retired."""
        own = self._rings.get(group)
        if own is None or not own.journal.why:
            return own
        own.journal.tick()
        if not own.journal.ended:
            raise errors.Busy("the ring's last generation is not all in the log yet: ask again")
        if self._rings.get(group) is own:  # it is not committed yet, but no longer in the way
            self._ending[own.journal] = self._rings.pop(group)
        return None

    def left(self, attachment: Attachment) -> None:
        """A client has gone."""
        own = self._rings.get(attachment.group)
        if own is not None:
            own.attached.discard(attachment)
            own.alone_since = time.monotonic()

    # ------------------------------------------------------------ rings come and go

    def _make(self, group: Group) -> _Own:
        self._make_room(group.state.uid)
        number = group.number
        generation = max(self._generations.get(number, 0) + 1, time.time_ns() // 10**6)
        bucket = group.log.bucket
        made = ring.create(
            limits.RING_BYTES, generation=generation, sequence=bucket.end.next, time_ns=bucket.end.last_ns
        )
        self._generations[number] = generation
        try:
            own = self._begin(group, made)
        except BaseException:
            made.close()
            raise
        if self._keeper is not None:
            self._keeper.keep(number, generation, made.fileno())
        return own

    def _make_room(self, owner: int) -> None:
        """Where a ring more of that owner is one too many, the one that was left longest ago goes. Raises OverLimit."""
        owners = [journal.group.state.uid for journal in (*(own.journal for own in self._all()), *self._draining)]
        mine = owners.count(owner)
        try:
            require_share("rings", limits.RINGS, owner, mine + 1, len(owners) + 1)
        except errors.OverLimit:
            whose = {owner} if mine >= limits.RINGS // 2 else set(owners)
            draining = [journal for journal in self._draining if journal.group.state.uid in whose]
            unused = [own for own in self._rings.values() if not own.attached and own.journal.group.state.uid in whose]
            if draining:
                self._let_go(draining[0])
            elif unused:
                min(unused, key=lambda own: own.alone_since).journal.retire("another group wants one")
            else:
                raise

    def _begin(self, group: Group, made: Ring) -> _Own:
        journal = RingLog(group, made, lambda change: self._judge(group, change), self._over)
        own = self._rings[group] = _Own(journal)
        try:
            own.follower = Follower(journal, self._post)
        except RuntimeError as error:
            del self._rings[group]
            journal.detach()
            raise errors.OverLimit(f"ring not followed: {error} (expected a machine with room for a thread)") from None
        return own

    def _judge(self, group: Group, change: Mapping[str, Any]) -> str:
        """Why the ring ends with a change of its group; "" where it goes on."""
        what = change["do"]
        if what in ("remove", "rename", "attributes"):
            return f"{what} of a stream"
        if what == "ctl":
            settings = parse_settings(change["lines"])
            if any(is_excluded(group, settings, attachment.user) for attachment in self._rings[group].attached):
                return "it is the owner's from now on, and others are attached"
            return why_ended(group.settings, settings, bool(group.consumers.bounded))
        if what == "consumer" and change.get("backlog") and (why := why_not(group.settings, True)):
            return why
        if what == "make":
            stream = group.state.streams[change["stream"]]
            try:
                for attachment in self._rings[group].attached:
                    require(attachment.user, stream, R | W, stream.name)
            except errors.Denied:
                return f"{stream.name} was made, which not everybody attached may read and write"
        return ""

    def _over(self, journal: RingLog) -> None:
        """It has ended, and what was in it is committed."""
        own = self._ending.pop(journal, None) or self._rings.pop(journal.group)
        if journal.corrupt or journal.held_up:
            whose = self._cooldown.setdefault(_whose(journal.group), deque(maxlen=limits.RING_SPOILT))
            whose.append(time.monotonic())
        if own.follower is not None:
            own.follower.stop()
        self._drop(journal.group.number, journal.ring.generation)
        if journal in journal.group.past_rings and self._closing is None:
            self._draining[journal] = time.monotonic()
        else:
            journal.release()
        if self._closing is not None and not self._closing.settled and not self._is_committing():
            self._closing.settle(None)

    def _let_go(self, journal: RingLog) -> None:
        """Whoever followed it has changed over, or is given up."""
        self._draining.pop(journal)
        journal.release()

    def _drop(self, number: int, generation: int) -> None:
        if self._keeper is not None:
            self._keeper.drop(number, generation)

    # ------------------------------------------------------------ house-keeping, and the end

    def tick(self) -> None:
        """Once a second."""
        now = time.monotonic()
        if self._keeper is not None:
            self._keeper.look()
        for own in self._all():
            self._contain(own.journal, "maintaining its ring", own.journal.tick)
            if not own.attached and not own.journal.why and now - own.alone_since >= limits.RING_IDLE_S:
                own.journal.retire("nobody is attached")
        for journal, since in list(self._draining.items()):
            if now - since >= limits.RING_CHANGE_S or not journal.is_needed():
                self._let_go(journal)

    def close(self) -> Step[None]:
        """What was published is in the log. Where that has no room, or a ring was not resumed, the keeper goes on
        holding it. The step comes when who waits for a commit was told of it."""
        for own in self._all():
            self._contain(own.journal, "ending its ring", functools.partial(own.journal.retire, "the server stops"))
        if self._keeper is not None and not self._unresumed and all(own.journal.ended for own in self._all()):
            self._keeper.quit()
            self._keeper = None
        for journal in list(self._draining):
            self._let_go(journal)
        if not self._is_committing():
            return None
        self._closing = Wait(lambda _: True)
        return self._closing

    def _contain(self, journal: RingLog, what: str, act: Callable[[], None]) -> None:
        journal.group.faults.contain(journal.group, what, act)

    def _all(self) -> list[_Own]:
        return [*self._rings.values(), *self._ending.values()]

    def _is_committing(self) -> bool:
        return any(own.journal.ended for own in self._all())


def _whose(group: Group) -> tuple[str, int]:
    """Whose rings rest where that group's were spoilt: the owner's, who alone has access; else the group's."""
    return ("group", group.number) if group.settings.ring == "all" else ("owner", group.state.uid)


def _first_untaken(held: Ring) -> int:
    """The sequence of what the server before had perhaps not taken; where that is no record, 0."""
    taker = held.consumer(kept=True, hold=True)
    try:
        data = taker.range(1, 0)
        if not data:
            return held.next
        rows = ring.scan(data)
        return rows.sequences[0] if len(rows.sequences) else 0
    except errors.Damaged:
        return 0
    finally:
        taker.close()


def is_excluded(group: Group, settings: Settings, user: User) -> bool:
    """Who attaches trusts the others who do, with all the group's messages: by `ring owner` they are one user, and
    those who could do as much without it."""
    return settings.ring == "owner" and user.uid not in (group.state.uid, 0, os.geteuid())


def why_ended(now: Settings, settings: Settings, bounded: bool) -> str:
    """Why new settings end a ring; "" where it goes on."""
    for name in ("ttl", "keep"):  # clients and the journal were told of them
        if getattr(settings, name) != getattr(now, name):
            return f"{name} has changed"
    return why_not(settings, bounded)


def why_not(settings: Settings, bounded: bool) -> str:
    """Why a group of such settings has no ring: each write has to be looked at before it is appended."""
    if settings.ring == "off":
        return "a group with 'ring off' has no ring"
    if settings.data != "message":
        return f"a group with 'data {settings.data}' has no ring"
    if settings.full != "drop-old" and settings.depth is not NO_DEPTH:
        return f"a group with 'depth' and 'full {settings.full}' has no ring"
    if settings.full in ("reject", "block", "drop-new") and bounded:
        return f"a group with 'full {settings.full}' and a consumer with a backlog has no ring"
    return ""


__all__ = ["Attachment", "RingRegistry", "why_not"]
