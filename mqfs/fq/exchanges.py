"""Exchanges of fq as groups: what is bound there, which messages are wanted, and queues that outlive their clients.

Every act that a client causes asks the rights of the client's user, and what it makes is that user's: groups,
streams, consumers. A queue is shared by those who have r and w on all its consumers and their groups; permanent or
transient is for its owner to say. As the server's user only three things are done, none of them at a client's wish:
the group of all exchanges is made, what an earlier run left of queues is removed, and what a queue has made is removed
with its last client: all of it where the queue is transient, else where it is bound no more.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import attrs
import trio

from mqfs.engine.group import Group
from mqfs.engine.language import programs
from mqfs.engine.language.programs import Program, parse
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadCommand, Exists, MqfsError, NotFound
from mqfs.fq.queues import VIEW, Queue, Refused, Wish, owns, points
from mqfs.model import User
from mqfs.serving.await_step import await_step
from mqfs.syntax.lines import command_lines, quote
from mqfs.syntax.names import check_name, escape, escape_prefix, text_of

if TYPE_CHECKING:
    from mqfs.fq.connection import Client

log = logging.getLogger("mqfs.fq")
SETTINGS = ("idle 1h", "sync off", "retries 0", "dead %.dead")
DISK_SYNC = "sync 10ms"
STREAM_MODE = 0o666
_CACHED = 65_536  # names of an exchange whose queues are remembered


@attrs.define(eq=False)
class BrokerCounts:
    """Counters of one client, one exchange, or all."""

    dropped_in: int = 0
    no_exchange: int = 0
    no_route: int = 0
    routed: int = 0
    dropped: int = 0
    size_dropped: int = 0
    msgs_in: int = 0
    msgs_out: int = 0
    octets_in: int = 0
    octets_out: int = 0

    def items(self) -> list[tuple[str, int]]:
        return list(attrs.asdict(self).items())


@attrs.frozen(eq=False)
class Binding:
    """A program of a queue. `text` is as the client sent it; `before`: messages of the exchange until then, `since`:
    the first sequence that it is for."""

    route: int
    queue: Queue
    text: str
    program: Program
    permanent: bool
    before: int
    since: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of the routes that it selects."""
        return self.text.partition(":")[2].partition(" ")[0].strip('"')


@attrs.frozen
class Wanted:
    """The receivers of messages of one name: bound queues, or others in the tree."""

    queues: tuple[Queue, ...]
    others: bool


NONE = Wanted((), False)


@attrs.define
class _Name:
    """A stream that may not exist, as views look at it."""

    name: str
    views: Any = None
    number: int = -1


class Exchange:
    """A group, whatever name it gets."""

    def __init__(self, group: Group) -> None:
        self.group, self.counts = group, BrokerCounts()
        self.bindings: dict[int, Binding] = {}  # by route
        self._programs: dict[Queue, dict[str, Binding]] = {}  # by their text: a queue may have thousands
        self.since: dict[Queue, int] = {}  # where the newest binding of each begins
        self._queues: dict[str, Queue] = {}  # by view
        self._wanted: dict[str, Wanted] = {}
        self._version = -1  # of the group's routing

    @property
    def name(self) -> bytes:
        return text_of(self.group.name)

    def enter(self, binding: Binding) -> None:
        self.bindings[binding.route] = binding
        self._programs.setdefault(binding.queue, {})[binding.program.text] = binding
        self._queues[binding.queue.view] = binding.queue
        self.since[binding.queue] = max(binding.since, self.since.get(binding.queue, 0))
        self._wanted.clear()

    def leave(self, route: int) -> None:
        binding = self.bindings.pop(route)
        queue = binding.queue
        del self._programs[queue][binding.program.text]
        if not self._programs[queue]:
            del self._programs[queue], self._queues[queue.view], self.since[queue]
            queue.exchanges.discard(self)
        self._wanted.clear()

    def of(self, queue: Queue) -> Mapping[str, Binding]:
        """The bindings of a queue, by the text of their programs for a view."""
        return self._programs.get(queue, {})

    def selects(self, queue: Queue, name: str, body: bytes, sequence: int) -> bool:
        """Whether a program selects a message that was bound before it. A view has those from before, too."""
        mine = (binding.program for binding in self.of(queue).values() if binding.since <= sequence)
        most = self.group.views.search_bytes
        return any(program.selects(name, body, sequence, most) for program in mine)

    def wanted(self, name: str) -> Wanted:
        """The receivers of messages of that name."""
        if self._version != self.group.routing_version or len(self._wanted) > _CACHED:
            self._wanted.clear()
            self._version = self.group.routing_version
        found = self._wanted.get(name)
        if found is None:
            found = self._wanted[name] = self._look_up(name)
        if found is NONE and (stream := self.group.streams.get(name)) is not None and stream.opens:
            return Wanted((), True)
        return found

    def _look_up(self, name: str) -> Wanted:
        views = self.group.views.of(_Name(name))
        queues = tuple(queue for view, queue in self._queues.items() if view in views)
        others = len(views) > len(queues) or any(
            consumer.state.over in ("", name) for consumer in self.group.consumers.values()
        )
        return Wanted(queues, others) if queues or others else NONE

    def consumer(self, queue: Queue) -> Any:
        return self.group.consumers.get(queue.consumer)


class Exchanges:
    """All below one group, and all queues."""

    def __init__(self, tree: Tree, root: str) -> None:
        self.tree, self.path = tree, tuple(root.split("/"))
        self.server_user = User(os.geteuid(), os.getegid(), frozenset(os.getgroups()), os.getpid(), "fq")
        self.queues: dict[bytes, Queue] = {}
        self.counts = BrokerCounts()
        self._by_group: dict[Group, Exchange] = {}  # those that were looked up, until their group is removed
        self._routes = itertools.count(1)
        self._changing: WeakValueDictionary[bytes, trio.Lock] = WeakValueDictionary()  # by queue
        self._making: WeakValueDictionary[bytes, trio.Lock] = WeakValueDictionary()  # by exchange

    def changing(self, queue: bytes) -> trio.Lock:
        """To be held by a change of that queue, its bindings or its checkpoints, which awaits more than once."""
        return self._changing.setdefault(queue, trio.Lock())

    # ------------------------------------------------------------ exchanges

    async def start(self) -> None:
        """Make the group of all exchanges where it is missing, and load its bindings. Raises MqfsError, of a standby
        Standby."""
        node: Any = self.tree.root
        for name in self.path:
            mode = self.tree.stat(node).mode & 0o777
            try:
                node = node.groups.get(name) or await await_step(self.tree.mkdir(self.server_user, node, name, mode))
            except Exists:  # clients of other front ends are served already, and one has made it meanwhile
                node = node.groups[name]
        for group in list(node.groups.values()):
            self._take_up(group)
            await self._remove_stale(group)

    @property
    def root(self) -> Group:
        """The group of all exchanges. Raises NotFound where it was removed, and Standby."""
        node: Group = self.tree.root
        for name in self.path:
            if (found := node.groups.get(name)) is None:
                raise NotFound(f"no group {'/'.join(self.path)!r} (expected it to be made: it has all exchanges)")
            node = found
        return node

    def __iter__(self) -> Iterator[Exchange]:
        self._forget_removed()
        return (exchange for exchange in list(self._by_group.values()) if self.find(exchange.name) is exchange)

    def find(self, name: bytes) -> Exchange | None:
        """The exchange that has that name now, those too that were made in the tree."""
        try:
            groups = self.root.groups
        except NotFound:
            return None
        if (group := groups.get(escape(name))) is None:
            return None
        if (known := self._by_group.get(group)) is not None:
            return known
        if len(self._by_group) >= len(groups):  # so some were removed
            self._forget_removed()
        return self._take_up(group)

    def bound(self, queue: Queue) -> list[Exchange]:
        """The exchanges that a queue is bound to."""
        for exchange in list(queue.exchanges):
            if exchange.group.removed:
                self._forget(exchange)
        return [exchange for exchange in queue.exchanges if not exchange.group.removed]

    def _forget_removed(self) -> None:
        for exchange in list(self._by_group.values()):
            if exchange.group.removed:
                self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        self._by_group.pop(exchange.group, None)
        for queue in list(self.queues.values()):
            queue.exchanges.discard(exchange)
            queue.unbound.discard(exchange)
            queue.release(exchange)
            self._drop_unused(queue)

    def _drop_unused(self, queue: Queue) -> None:
        """Remove a queue without a client and a binding: no message could get into it."""
        if not queue.members and not queue.exchanges and self.queues.get(queue.name) is queue:
            del self.queues[queue.name]

    async def _make(self, user: User, name: bytes) -> Exchange:
        """Raises MqfsError."""
        tree, root = self.tree, self.root
        tree.access(user, root, os.W_OK | os.X_OK)
        check_name(escape(name))
        maker = _maker(user, root)
        try:
            await await_step(tree.mkdir(maker, root, escape(name), tree.stat(root).mode & 0o777, SETTINGS))
        except Exists:  # made in the tree meanwhile
            if (made := self.find(name)) is None:
                raise
            return made
        if (made := self.find(name)) is None:
            raise NotFound(f"no group {escape(name)!r} (it was removed as soon as it was made)")
        return made

    def require(self, user: User, exchange: Exchange, queue: Queue) -> None:
        """Check r, w and x on the exchange's group, and r and w on the queue's consumer there. Raises Denied."""
        self.tree.access(user, exchange.group, os.R_OK | os.W_OK | os.X_OK)
        if (consumer := exchange.consumer(queue)) is not None:
            self.tree.access(user, consumer, os.R_OK | os.W_OK)

    async def command(self, user: User, group: Group, *lines: str) -> None:
        """Write lines to the group's `ctl` for a user whose rights were asked: of fq's clients r and w on the group is
        asked, not w on that file. Raises MqfsError."""
        maker = _maker(user, group)
        with closing(self.tree.open(maker, self.tree.walk(maker, group, "ctl"), os.O_WRONLY, made=True)) as handle:
            await await_step(handle.write(command_lines(*lines)))

    def _take_up(self, group: Group) -> Exchange:
        """The exchange of a group, which may be served from now on only: permanent queues of an earlier run are still
        bound. One that has clients already is so only to its owner's."""
        exchange = self._by_group[group] = Exchange(group)
        for view in list(group.views.values()):
            if not view.name.startswith(VIEW) or (consumer := _permanent(group, view.name)) is None:
                continue
            if not view.programs:  # patterns are no queue's: made by other means
                continue
            name, state = text_of(consumer.name), consumer.state
            wish = Wish("", state.private, "block" if state.full == "block" else "drop", state.backlog, True)
            queue = self.queues.setdefault(name, Queue(name, state.uid, wish, permanent=True))
            if queue.members and (queue.owner != state.uid or not queue.permanent):
                continue
            for program in view.programs:
                self._enter(exchange, queue, program.text, program, permanent=True)
            queue.tell(exchange)
        return exchange

    async def _remove_stale(self, group: Group) -> None:
        """Remove the views of queues of an earlier run that are not permanent, and then consumers and checkpoints of
        queues that have no view."""
        names = [view.name for view in group.views.values() if view.name.startswith(VIEW)]
        for gone in [name for name in names if _permanent(group, name) is None]:
            await self._remove_each(group, f"unbind {quote(gone)}")
        overs = [(consumer.name, consumer.state.over) for consumer in group.consumers.values()]
        for gone in [name for name, over in overs if over.startswith(VIEW) and over not in group.views]:
            await self._remove_each(group, f"remove {quote(gone)}")

    async def _remove_each(self, group: Group, *lines: str) -> None:
        """Remove the rest of a queue, line by line: a consumer that others hold open may have claims."""
        for line in lines:
            try:
                await self.command(self.server_user, group, line)
            except MqfsError as error:
                log.warning("%s: left of a removed queue, %s: %s", group.name, line, error)

    # ------------------------------------------------------------ queues

    async def join(self, user: User, name: bytes, wish: Wish, make: Callable[[Queue], Client]) -> Client:
        """A new member of a queue, which is made where it is missing. Raises Refused, MqfsError."""
        _ = self.tree.root  # raises Standby
        async with self.changing(name):
            queue = self.queues.get(name)
            if queue is None:
                check_name(VIEW + escape(name))
                queue = self.queues[name] = Queue(name, user.uid, wish)
            for exchange in self.bound(queue):
                self.require(user, exchange, queue)
            queue.admit(wish)
            if wish.permanent is not None and wish.permanent != queue.permanent:
                await self._change_permanence(user, queue, wish.permanent)
            if not queue.wish.type:
                queue.wish = attrs.evolve(queue.wish, type=wish.type)
            member = make(queue)
            queue.members.append(member)
            self.queues[name] = queue  # its last exchange may be removed meanwhile
            return member

    async def _change_permanence(self, user: User, queue: Queue, permanent: bool) -> None:
        """Raises Refused for another's queue, MqfsError."""
        bound = self.bound(queue)
        left = [exchange for exchange in queue.unbound if not exchange.group.removed]
        bound += [exchange for exchange in left if exchange.consumer(queue) is not None]
        consumers = [consumer for exchange in bound if (consumer := exchange.consumer(queue)) is not None]
        if not all(owns(user, owner) for owner in {queue.owner, *(consumer.state.uid for consumer in consumers)}):
            words = ("transient", "permanent")
            raise Refused(f"requested {words[permanent]}, queue is {words[queue.permanent]}")
        changed = attrs.evolve(queue, permanent=permanent)  # with the same holds
        for exchange in bound:
            await self.command(user, exchange.group, changed.line(exchange.consumer(queue)))
            self._hold(user, exchange, changed)
        queue.permanent = permanent  # not before: asked again after an error, all of it is done

    async def leave(self, queue: Queue) -> None:
        """A client has disconnected. With the last one a transient queue is removed, and what a permanent one has where
        it is bound no more."""
        async with self.changing(queue.name):
            if queue.members:
                return
            for exchange in list(queue.holds):
                queue.release(exchange)
            gone = [exchange for exchange in queue.unbound if not exchange.group.removed]
            queue.unbound.clear()
            if queue.permanent:
                self._drop_unused(queue)
            else:
                gone += self.bound(queue)
                if self.queues.get(queue.name) is queue:  # not another, which a client made after this was forgotten
                    del self.queues[queue.name]
            for exchange in gone:
                await self._remove(exchange, queue)

    def _hold(self, user: User, exchange: Exchange, queue: Queue) -> None:
        """Have the consumer stay while the queue has clients, also without a reader. Raises NotFound where its last
        reader left before that, and MqfsError."""
        maker, again = _maker(user, exchange.group), None
        if not queue.permanent:
            if (consumer := exchange.consumer(queue)) is None:
                raise NotFound(f"consumer {queue.consumer!r}: removed with its last reader (expected another bind)")
            again = self.tree.open(maker, consumer, os.O_RDONLY)
        queue.release(exchange)  # not before: it may be the last handle
        if again is not None:
            queue.holds[exchange] = again.close

    async def _remove(self, exchange: Exchange, queue: Queue) -> None:
        for binding in list(exchange.of(queue).values()):
            exchange.leave(binding.route)
        group, consumer = exchange.group, exchange.consumer(queue)
        if consumer is not None and (consumer.state.transient == queue.permanent or consumer.state.over != queue.view):
            return  # it was made to stay, or to go, by other means
        lines = [f"unbind {quote(queue.view)}"] if queue.view in group.views else []
        names = [queue.consumer] if consumer is not None else []
        lines += [f"remove {quote(name)}" for name in [*names, *points(queue, group.consumers)]]
        await self._remove_each(group, *lines)

    # ------------------------------------------------------------ bindings

    async def bind(self, user: User, queue: Queue, exchange_name: bytes, program: bytes, permanent: bool) -> int:
        """The number of the route; the same for the same program. Raises MqfsError."""
        text = translate(program)
        async with self.changing(queue.name):
            async with self._making.setdefault(exchange_name, trio.Lock()):
                exchange = self.find(exchange_name) or await self._make(user, exchange_name)
            self.require(user, exchange, queue)
            if (binding := exchange.of(queue).get(text)) is not None:
                return binding.route
            lines = [f"bind {quote(queue.view)} {quote(text)}"]
            if first := not exchange.of(queue):
                queue.require_same_permanence(user, exchange.consumer(queue))
                lines.append(queue.line(exchange.consumer(queue)))
                if queue.wish.type == "disk" and exchange.group.settings.sync == -1:
                    lines.append(DISK_SYNC)
            since = exchange.group.log.end.next
            route = self._enter(exchange, queue, program.decode(errors="replace"), parse(text), permanent, since)
            try:
                await self.command(user, exchange.group, *lines)
            except BaseException:
                exchange.leave(route)
                raise
            if first:
                try:
                    self._hold(user, exchange, queue)
                except BaseException:
                    await self._remove(exchange, queue)
                    raise
                queue.unbound.discard(exchange)
                queue.tell(exchange)
            return route

    def _enter(
        self, exchange: Exchange, queue: Queue, text: str, program: Program, permanent: bool, since: int = 0
    ) -> int:
        route = next(self._routes)
        exchange.enter(Binding(route, queue, text, program, permanent, exchange.counts.msgs_in, since))
        queue.exchanges.add(exchange)
        return route

    async def unbind(self, user: User, queue: Queue, exchange_name: bytes, route: int) -> None:
        """Raises MqfsError."""
        async with self.changing(queue.name):
            exchange = self.find(exchange_name)
            binding = exchange.bindings.get(route) if exchange is not None else None
            if exchange is None or binding is None or binding.queue is not queue:
                raise NotFound(f"unknown route {route}")
            self.require(user, exchange, queue)
            await self.command(user, exchange.group, f"unbind {quote(queue.view)} {quote(binding.program.text)}")
            exchange.leave(route)
            if exchange not in queue.exchanges:
                queue.unbound.add(exchange)

    # ------------------------------------------------------------ streams

    def make_stream(self, user: User, exchange: Exchange, name: str) -> None:
        """Raises BadName, Denied, OverLimit."""
        group = exchange.group
        self.tree.access(user, group, os.W_OK | os.X_OK)
        maker = attrs.evolve(_maker(user, group), uid=user.uid or group.state.uid)  # root's messages are for the owner
        self.tree.create(maker, group, name, group.state.mode & STREAM_MODE)  # its sync is not waited for


def _permanent(group: Group, view: str) -> Any:
    """The consumer of a permanent queue of that view; None: there is none."""
    consumer = group.consumers.get(escape(text_of(view.removeprefix(VIEW))))
    return consumer if consumer is not None and not consumer.state.transient and consumer.state.over == view else None


def _maker(user: User, group: Group) -> User:
    """A user whose rights were asked, for what it makes there: also with a token that is no admin's, and with the group
    of its directory, so that those who share the directory share what is made."""
    return attrs.evolve(user, gid=group.state.gid, grant=None)


# ---------------------------------------------------------------- programs of fq's clients, as those of views

# In a program of fq the string after the colon is that of a route: bytes up to a blank, or between quotes. A view has
# names, which are escaped. The engine checks what both languages share.

_HEAD = re.compile(r'\s*(exact|prefix):(?:"([^"]*)"|(\S*))\s*')
_STRING_OR_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|[A-Za-z_][A-Za-z0-9_]*', re.DOTALL)
_NOT_PLAIN = re.compile(r'["\\]|[^\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]')
_TORN = re.compile(rb"[\xc2-\xdf]\Z|[\xe0-\xef][\x80-\xbf]?\Z|[\xf0-\xf4][\x80-\xbf]{0,2}\Z")  # of UTF-8, at an end


def translate(program: bytes) -> str:
    """The program for a view. Raises BadCommand where it is none."""
    text = program.decode(errors="surrogateescape")
    head = _HEAD.match(text)
    if head is None:
        raise BadCommand("invalid program (expected exact: or prefix: first)")
    route = (head[2] if head[2] is not None else head[3]).encode(errors="surrogateescape")
    rest = _STRING_OR_NAME.sub(_part, text[head.end() :]).strip()
    if head[1] == "exact":
        start = escape(route)
    elif torn := _TORN.search(route):
        start = escape_prefix(route[: torn.start()])
        mine = f"escaped_prefix({_quote(head[2] if head[2] is not None else head[3])})"
        rest = f"{mine} && ({rest})" if rest else mine
    else:
        start = escape_prefix(route)
    found = f"{head[1]}:{_quote(start)} {rest}".rstrip()
    programs.parse(found)
    return found


def _part(match: re.Match[str]) -> str:
    """A string or a name of an expression."""
    part = match.group()
    if part.startswith('"'):
        return _NOT_PLAIN.sub(lambda char: char.group() if char.group() in '"\\' else _byte(char.group()), part)
    return "escaped_contains" if part == "route_contains" else part


def _byte(char: str) -> str:
    return f"\\x{char.encode(errors='surrogateescape')[0]:02x}"


def _quote(text: str) -> str:
    return '"' + _NOT_PLAIN.sub(lambda char: _byte(char.group()), text) + '"'
