"""Exchanges of fq as groups: bindings, the receivers of messages, and queues that outlive their clients.

Every action for a client checks the permissions of the client's user, who owns the groups, streams and consumers that
it makes. A queue is shared by the users with r and w on all its consumers and their groups. Only its owner may change
it between permanent and transient.

Three actions run as the server's user, none at the request of a client. The group of all exchanges is made. Remains of
queues of an earlier run are removed. With its last client the views and consumers of a queue are removed: all of a
transient queue, those of a permanent one only where it is not bound any more.
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
from mqfs.fq.queues import VIEW, Queue, QueueOptions, Refused, owns, points
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
_CACHED = 65_536  # names of an exchange with cached receivers


@attrs.define(eq=False)
class BrokerCounts:
    """Counters of one client, of one exchange, or of the broker."""

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
    """A program of a queue. `text`: as the client sent it. `before`: the exchange's count of messages when it was
    bound. `since`: the first sequence that it selects."""

    route: int
    queue: Queue
    text: str
    program: Program
    permanent: bool
    before: int
    since: int = 0

    @property
    def prefix(self) -> str:
        """The string after the colon: the route, or the prefix of routes, that the program selects."""
        return self.text.partition(":")[2].partition(" ")[0].strip('"')


@attrs.frozen
class Wanted:
    """The receivers of messages of one name: bound queues, or others in the tree."""

    queues: tuple[Queue, ...]
    others: bool


NONE = Wanted((), False)


@attrs.define
class _Name:
    """A name of a stream that may not exist, for a look-up of its views."""

    name: str
    views: Any = None
    number: int = -1


class Exchange:
    """An exchange. It stays the same when its group is renamed."""

    def __init__(self, group: Group) -> None:
        self.group, self.counts = group, BrokerCounts()
        self.bindings: dict[int, Binding] = {}  # by route
        self._programs: dict[Queue, dict[str, Binding]] = {}  # by the program's text: a queue may have thousands
        self.since: dict[Queue, int] = {}  # by queue, the `since` of its newest binding
        self._queues: dict[str, Queue] = {}  # by view
        self._wanted: dict[str, Wanted] = {}
        self._version = -1  # the group's routing version of `_wanted`

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
        """Return the bindings of a queue, by the text of their translated programs."""
        return self._programs.get(queue, {})

    def selects(self, queue: Queue, name: str, body: bytes, sequence: int) -> bool:
        """Whether a program that was bound before a message selects it. The view also has earlier messages."""
        mine = (binding.program for binding in self.of(queue).values() if binding.since <= sequence)
        most = self.group.views.search_bytes
        return any(program.selects(name, body, sequence, most) for program in mine)

    def wanted(self, name: str) -> Wanted:
        """Return the receivers of messages of that name."""
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
    """All exchanges, which are the groups in one group, and all queues."""

    def __init__(self, tree: Tree, root: str) -> None:
        self.tree, self.path = tree, tuple(root.split("/"))
        self.server_user = User(os.geteuid(), os.getegid(), frozenset(os.getgroups()), os.getpid(), "fq")
        self.queues: dict[bytes, Queue] = {}
        self.counts = BrokerCounts()
        self._by_group: dict[Group, Exchange] = {}  # exchanges that were looked up, until their group is removed
        self._routes = itertools.count(1)
        self._changing: WeakValueDictionary[bytes, trio.Lock] = WeakValueDictionary()  # by queue
        self._making: WeakValueDictionary[bytes, trio.Lock] = WeakValueDictionary()  # by exchange

    def changing(self, queue: bytes) -> trio.Lock:
        """Return the lock for changes of a queue, its bindings or its checkpoints that await more than once."""
        return self._changing.setdefault(queue, trio.Lock())

    # ------------------------------------------------------------ exchanges

    async def start(self) -> None:
        """Make the group of all exchanges if it is missing, load the bindings of permanent queues, and remove
        the remains of others. Raises MqfsError; Standby on a standby."""
        node: Any = self.tree.root
        for name in self.path:
            mode = self.tree.stat(node).mode & 0o777
            try:
                node = node.groups.get(name) or await await_step(self.tree.mkdir(self.server_user, node, name, mode))
            except Exists:  # other front ends already serve clients, and one has made it meanwhile
                node = node.groups[name]
        for group in list(node.groups.values()):
            self._take_up(group)
            await self._remove_stale(group)

    @property
    def root(self) -> Group:
        """The group of all exchanges. Raises NotFound if it was removed; Standby."""
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
        """Return the exchange of that name, also one whose group was made in the tree, or None."""
        try:
            groups = self.root.groups
        except NotFound:
            return None
        if (group := groups.get(escape(name))) is None:
            return None
        if (known := self._by_group.get(group)) is not None:
            return known
        if len(self._by_group) >= len(groups):  # then some of them were removed
            self._forget_removed()
        return self._take_up(group)

    def bound(self, queue: Queue) -> list[Exchange]:
        """Return the exchanges that a queue is bound to."""
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
        """Remove a queue that has neither clients nor bindings: it could receive no message."""
        if not queue.members and not queue.exchanges and self.queues.get(queue.name) is queue:
            del self.queues[queue.name]

    async def _make(self, user: User, name: bytes) -> Exchange:
        """Make an exchange. Raises MqfsError."""
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
        """Write lines to the group's `ctl` for a user whose permissions were checked: fq clients need r and w on the
        group, not w on that file. Raises MqfsError."""
        maker = _maker(user, group)
        with closing(self.tree.open(maker, self.tree.walk(maker, group, "ctl"), os.O_WRONLY, made=True)) as handle:
            await await_step(handle.write(command_lines(*lines)))

    def _take_up(self, group: Group) -> Exchange:
        """Make the exchange of a group, and load the bindings of permanent queues from its views. A queue that has
        clients already is bound only to exchanges where its owner made the consumer."""
        exchange = self._by_group[group] = Exchange(group)
        for view in list(group.views.values()):
            if not view.name.startswith(VIEW) or (consumer := _permanent(group, view.name)) is None:
                continue
            if not view.programs:  # a view with patterns only was not made for a queue
                continue
            name, state = text_of(consumer.name), consumer.state
            options = QueueOptions("", state.private, "block" if state.full == "block" else "drop", state.backlog, True)
            queue = self.queues.setdefault(name, Queue(name, state.uid, options, permanent=True))
            if queue.members and (queue.owner != state.uid or not queue.permanent):
                continue
            for program in view.programs:
                self._enter(exchange, queue, program.text, program, permanent=True)
            queue.on_bound(exchange)
        return exchange

    async def _remove_stale(self, group: Group) -> None:
        """Remove views of queues of an earlier run that are not permanent, then consumers and checkpoints without such
        a view."""
        names = [view.name for view in group.views.values() if view.name.startswith(VIEW)]
        for gone in [name for name in names if _permanent(group, name) is None]:
            await self._remove_each(group, f"unbind {quote(gone)}")
        overs = [(consumer.name, consumer.state.over) for consumer in group.consumers.values()]
        for gone in [name for name, over in overs if over.startswith(VIEW) and over not in group.views]:
            await self._remove_each(group, f"remove {quote(gone)}")

    async def _remove_each(self, group: Group, *lines: str) -> None:
        """Write commands that remove parts of a queue, each alone: one may fail, as a consumer may hold claims of other
        programs."""
        for line in lines:
            try:
                await self.command(self.server_user, group, line)
            except MqfsError as error:
                log.warning("%s: left of a removed queue, %s: %s", group.name, line, error)

    # ------------------------------------------------------------ queues

    async def join(self, user: User, name: bytes, options: QueueOptions, make: Callable[[Queue], Client]) -> Client:
        """Add a client to a queue, which is made if it is missing. Raises Refused, MqfsError."""
        _ = self.tree.root  # raises Standby
        async with self.changing(name):
            queue = self.queues.get(name)
            if queue is None:
                check_name(VIEW + escape(name))
                queue = self.queues[name] = Queue(name, user.uid, options)
            for exchange in self.bound(queue):
                self.require(user, exchange, queue)
            queue.admit(options)
            if options.permanent is not None and options.permanent != queue.permanent:
                await self._change_permanence(user, queue, options.permanent)
            if not queue.options.type:
                queue.options = attrs.evolve(queue.options, type=options.type)
            member = make(queue)
            queue.members.append(member)
            self.queues[name] = queue  # it was dropped if its last exchange was removed meanwhile
            return member

    async def _change_permanence(self, user: User, queue: Queue, permanent: bool) -> None:
        """Make a queue permanent or transient. Raises Refused for another user's queue; MqfsError."""
        bound = self.bound(queue)
        left = [exchange for exchange in queue.unbound if not exchange.group.removed]
        bound += [exchange for exchange in left if exchange.consumer(queue) is not None]
        consumers = [consumer for exchange in bound if (consumer := exchange.consumer(queue)) is not None]
        if not all(owns(user, owner) for owner in {queue.owner, *(consumer.state.uid for consumer in consumers)}):
            words = ("transient", "permanent")
            raise Refused(f"requested {words[permanent]}, queue is {words[queue.permanent]}")
        changed = attrs.evolve(queue, permanent=permanent)  # shares `holds` with `queue`
        for exchange in bound:
            await self.command(user, exchange.group, changed.line(exchange.consumer(queue)))
            self._hold(user, exchange, changed)
        queue.permanent = permanent  # at last, so that a request after an error repeats all of it

    async def leave(self, queue: Queue) -> None:
        """Clean up after a client of a queue disconnected. With the last one a transient queue is removed, and of a
        permanent one the parts in exchanges where it is not bound any more."""
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
                if self.queues.get(queue.name) is queue:  # else this one was dropped, and a client made another
                    del self.queues[queue.name]
            for exchange in gone:
                await self._remove(exchange, queue)

    def _hold(self, user: User, exchange: Exchange, queue: Queue) -> None:
        """Hold the transient consumer of a queue open, so that it stays while the queue has clients. Raises NotFound if
        it was removed with its last reader before; MqfsError."""
        maker, again = _maker(user, exchange.group), None
        if not queue.permanent:
            if (consumer := exchange.consumer(queue)) is None:
                raise NotFound(f"consumer {queue.consumer!r}: removed with its last reader (expected another bind)")
            again = self.tree.open(maker, consumer, os.O_RDONLY)
        queue.release(exchange)  # after the open, as this may be the last handle
        if again is not None:
            queue.holds[exchange] = again.close

    async def _remove(self, exchange: Exchange, queue: Queue) -> None:
        for binding in list(exchange.of(queue).values()):
            exchange.leave(binding.route)
        group, consumer = exchange.group, exchange.consumer(queue)
        if consumer is not None and (consumer.state.transient == queue.permanent or consumer.state.over != queue.view):
            return  # the consumer was changed by other means
        lines = [f"unbind {quote(queue.view)}"] if queue.view in group.views else []
        names = [queue.consumer] if consumer is not None else []
        lines += [f"remove {quote(name)}" for name in [*names, *points(queue, group.consumers)]]
        await self._remove_each(group, *lines)

    # ------------------------------------------------------------ bindings

    async def bind(self, user: User, queue: Queue, exchange_name: bytes, program: bytes, permanent: bool) -> int:
        """Bind a program to a queue, and make the exchange if it is missing. Returns the number of the route, the same
        for the same program. Raises MqfsError."""
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
                if queue.options.type == "disk" and exchange.group.settings.sync == -1:
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
                queue.on_bound(exchange)
            return route

    def _enter(
        self, exchange: Exchange, queue: Queue, text: str, program: Program, permanent: bool, since: int = 0
    ) -> int:
        route = next(self._routes)
        exchange.enter(Binding(route, queue, text, program, permanent, exchange.counts.msgs_in, since))
        queue.exchanges.add(exchange)
        return route

    async def unbind(self, user: User, queue: Queue, exchange_name: bytes, route: int) -> None:
        """Unbind a program from a queue by its route. Raises MqfsError."""
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
        """Make a stream for a user, without waiting for its sync. Raises BadName, Denied, OverLimit."""
        group = exchange.group
        self.tree.access(user, group, os.W_OK | os.X_OK)
        maker = attrs.evolve(_maker(user, group), uid=user.uid or group.state.uid)  # for root the group's owner
        self.tree.create(maker, group, name, group.state.mode & STREAM_MODE)


def _permanent(group: Group, view: str) -> Any:
    """Return the consumer of the permanent queue with that view, or None."""
    consumer = group.consumers.get(escape(text_of(view.removeprefix(VIEW))))
    return consumer if consumer is not None and not consumer.state.transient and consumer.state.over == view else None


def _maker(user: User, group: Group) -> User:
    """Return the user as it makes files, after its permissions were checked: without its token, which could narrow it,
    and with the gid of the directory, so that users who share the directory share the files."""
    return attrs.evolve(user, gid=group.state.gid, grant=None)


# ---------------------------------------------------------------- translation of fq programs for views

# In a program of fq the string after the colon is part of a route: bytes up to a blank, or between quotes. Views have
# escaped names. The engine's parser checks the rest, which both languages share.

_HEAD = re.compile(r'\s*(exact|prefix):(?:"([^"]*)"|(\S*))\s*')
_STRING_OR_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|[A-Za-z_][A-Za-z0-9_]*', re.DOTALL)
_NOT_PLAIN = re.compile(r'["\\]|[^\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]')
_TORN = re.compile(rb"[\xc2-\xdf]\Z|[\xe0-\xef][\x80-\xbf]?\Z|[\xf0-\xf4][\x80-\xbf]{0,2}\Z")  # cut UTF-8 at the end


def translate(program: bytes) -> str:
    """Translate a program of fq into one for a view. Raises BadCommand if it is invalid."""
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
    """Translate a string or a name of an expression."""
    part = match.group()
    if part.startswith('"'):
        return _NOT_PLAIN.sub(lambda char: char.group() if char.group() in '"\\' else _byte(char.group()), part)
    return "escaped_contains" if part == "route_contains" else part


def _byte(char: str) -> str:
    return f"\\x{char.encode(errors='surrogateescape')[0]:02x}"


def _quote(text: str) -> str:
    return '"' + _NOT_PLAIN.sub(lambda char: _byte(char.group()), text) + '"'
