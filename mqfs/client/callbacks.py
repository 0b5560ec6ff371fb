"""Registrations: handlers that are called with each message of their patterns.

A registration queues messages, calls its handler, and drops duplicates that another registration of that handler got.
The messages come from a dispatcher (dispatching.py).

One for messages that go to one receiver each has threads that claim them, and call the handler. A claim is of one
stream. So for a pattern, and for a name of which there is no stream yet, a thread looks for streams to come each
LOOK_S, as qlobber-fsq polls its folder. It ends when all that is named was found.

    on(["a", "log.*"], single=True): `a` is there -> handles on it; `log.*` -> look; `log.x` is made -> handles on it
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias

import attrs

from mqfs import limits
from mqfs.client.delivery import Claim, Claims
from mqfs.client.message import Message
from mqfs.client.types import Filter
from mqfs.client.waiting import Backoff
from mqfs.errors import Denied, Disconnected, MqfsError, NotFound, OverLimit, Stale
from mqfs.syntax.patterns import Words, compile_selection, has_wildcard

log = logging.getLogger("mqfs.client")

Handler: TypeAlias = Callable[[Message], object]
OnError: TypeAlias = Callable[[Exception, Message | None], object]
Report: TypeAlias = Callable[[BaseException, Message | None], object]
DEDUPLICATION_WINDOW = 16_384  # messages by which a pattern of a handler may lag behind another
QUEUED = 1_024  # messages for one handler: one that is slower gets a subscription of its own
# Registrations and workers whose handler is running: it may end its own, which then does not wait for it.
inside: ContextVar[frozenset[object]] = ContextVar("inside", default=frozenset())


class Later(enum.Enum):
    """The answer of a filter that wants to be asked again."""

    LATER = "later"


LATER = Later.LATER
# Which handlers of a group are called: (message, handlers) to those; None: all. On the thread of the dispatcher.
HandlerFilter: TypeAlias = Callable[[Message, set[Handler]], Iterable[Handler] | Literal[Later.LATER] | None]


class HandlerGone(Exception):
    """A handler was cancelled, or the event loop that it runs in has ended: it is called no more, and its claims are
    released."""


def log_error(error: Exception, message: Message | None, source: str = "subscription") -> None:
    """The `on_error` of registrations and workers without one."""
    at = f"message {message.sequence} of {message.stream}" if message is not None else source
    log.error("%s: %s", at, error, exc_info=error if message is not None else None)


def report(on_error: OnError, error: BaseException, message: Message | None) -> None:
    """Call an `on_error`. What it raises ends no thread of the library, and neither does a SystemExit of a handler."""
    if not isinstance(error, Exception):
        cause, error = error, RuntimeError(f"the handler raised {error!r} (expected an Exception)")
        error.__cause__ = cause
    try:
        on_error(error, message)
    except HandlerGone:
        pass
    except BaseException:
        log.exception("on_error raised")


class Deduplication:
    """The state that the listeners of one handler share: each message is for the first that receives it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[int, None] = OrderedDict()

    def is_first(self, message: Message) -> bool:
        with self._lock:
            if message.sequence in self._seen:
                return False
            self._seen[message.sequence] = None
            if len(self._seen) > DEDUPLICATION_WINDOW:
                self._seen.popitem(last=False)
            return True


class Shared:
    """The state that the listeners of one group share. `changed` guards all their states."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._process = os.getpid()
        self.threads = Threads()
        self.filters: list[HandlerFilter] = []
        self.on_closed: Callable[[Listener], None]

    @property
    def is_of_parent(self) -> bool:
        """Whether a forked child has this: no handlers run here, and a lock may be a thread's that is not here."""
        return self._process != os.getpid()

    def choose(self, message: Message, listeners: Sequence[Listener]) -> Sequence[Listener] | Later:
        """The listeners whose handlers pass the group's filters. Raises what a filter raises."""
        for passes in list(self.filters):
            chosen = passes(message, {listener.shown for listener in listeners})
            if isinstance(chosen, Later):
                return chosen
            if chosen is not None:
                left = set(chosen)
                listeners = [listener for listener in listeners if listener.shown in left]
        return listeners


class Registration:
    """A handler and its patterns, from `Group.on`. `unsubscribe` ends it; with `once` the first message does.

    Attributes:
        handler: The function that is called.
        patterns: Its streams, views and patterns; none: everything.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener, self.handler, self.patterns = listener, listener.handler, listener.patterns

    def __repr__(self) -> str:
        state = "active" if self.active else "ended"
        return f"<mqfs registration of {self._listener.shown!r} for {' '.join(self.patterns) or '#'!r}, {state}>"

    @property
    def active(self) -> bool:
        """Whether calls may follow or are under way."""
        return self._listener.active

    def unsubscribe(self, wait: bool = True) -> None:
        """Start no more calls.

        Args:
            wait: Whether to wait until the calls under way return, unless this is called by one of them.
        """
        self._listener.unsubscribe(wait)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end: by `once`, `unsubscribe`, or the removal of its group.

        Args:
            timeout: The most seconds to wait. None: without limit.
        """
        self._listener.join(timeout)


class Listener:
    """The state of a registration: the messages that wait for its handler, and the calls."""

    __slots__ = (
        "_concurrency", "_deduplication", "_filters", "_once", "_running", "_shared", "_start", "_waiting", "closed",
        "dedup", "handler", "on_error", "options", "patterns", "registration", "single", "withdraw",
    )  # fmt: skip

    def __init__(
        self,
        shared: Shared,
        patterns: tuple[str, ...],
        handler: Handler,
        *,
        filters: Sequence[Filter],
        concurrency: int,
        once: bool,
        dedup: bool,
        single: bool,
        on_error: OnError | None,
    ) -> None:
        self.patterns, self.handler, self.single = patterns, handler, single
        self.registration = Registration(self)
        self.withdraw: Callable[[Listener], None] | None = None  # be offered no more messages; the lock is held
        self._shared, self._filters, self._concurrency = shared, filters, concurrency
        self._once, self.dedup, self.on_error = once, dedup, on_error or log_error
        self.options: Mapping[str, object] = {}  # that it was registered with
        self._deduplication: Deduplication | None = None
        self._waiting: deque[Message] | None = None
        self._start = -1  # the first sequence that it gets; -1: not known yet
        self._running = 0  # calls
        self.closed = False  # to new messages

    @property
    def shown(self) -> Handler:
        """The handler as its user knows it."""
        shown: Handler = getattr(self.handler, "shown", self.handler)
        return shown

    @property
    def active(self) -> bool:
        return not self.closed or bool(self._running or self._waiting)

    def share(self, others: Sequence[Listener]) -> None:
        """Call the handler once with a message that several of its listeners get."""
        if others:
            shared = others[0]._deduplication or Deduplication()
            for listener in (self, *others):
                listener._deduplication = shared

    def unsubscribe(self, wait: bool) -> None:
        if self._shared.is_of_parent:
            return
        changed = self._shared.changed
        with changed:
            self._waiting = None
            self.close()
            if wait and self not in inside.get():
                changed.wait_for(lambda: not self._running)

    def join(self, timeout: float | None) -> None:
        changed = self._shared.changed
        with changed:
            changed.wait_for(lambda: not self.active, timeout)

    def close(self) -> None:
        """Take no more messages; call the handler with those that wait. The lock is held."""
        if not self.closed:
            self.closed = True
            self._shared.on_closed(self)
            if self.withdraw is not None:
                self.withdraw(self)
        self._shared.changed.notify_all()

    # ------------------------------------------------------------ messages

    def wants(self, message: Message) -> bool:
        """Whether its filters pass a message."""
        return not self._filters or all(passes(message) for passes in self._filters)

    def _is_first(self, message: Message) -> bool:
        """Whether no other listener of the handler got a message: this one is about to."""
        return self._deduplication is None or self._deduplication.is_first(message)

    def begin(self, start: int) -> None:
        """Call the handler with the messages from that sequence on, those that wait already too."""
        with self._shared.changed:
            mine = (m for m in self._waiting or () if m.sequence >= start and self._is_first(m))
            early = list(islice(mine, 1 if self._once else None))
            if self._once and early:
                self.close()
            self._start, self._waiting = start, deque(early) if early else None
            for _ in range(min(len(early), self._concurrency)):
                self._call_on_thread()

    def offer(self, message: Message) -> bool:
        """Queue a call of the handler with a message. False: the queue is full."""
        with self._shared.changed:
            if self.closed or message.sequence < self._start:
                return True
            if self._waiting is not None and len(self._waiting) >= QUEUED:
                return False
            if self._start >= 0 and not self._is_first(message):  # before `begin` it may fail, and get none
                return True
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append(message)
            if self._start >= 0:
                if self._running < self._concurrency:
                    self._call_on_thread()
                if self._once:
                    self.close()
            return True

    def wait_until_free(self) -> None:
        """Wait until the handler would be called at once."""
        changed = self._shared.changed
        with changed:
            changed.wait_for(lambda: self.closed or (self._running < self._concurrency and not self._waiting))

    def report(self, error: BaseException, message: Message | None) -> None:
        report(self.on_error, error, message)

    # ------------------------------------------------------------ calls

    def call(self, message: Message) -> None:
        """Call the handler on this thread. Raises what it raises, and HandlerGone where it receives no more."""
        changed, token = self._shared.changed, inside.set(inside.get() | {self})
        with changed:
            if self.closed:
                raise HandlerGone("the registration has ended")
            self._running += 1
            if self._once:
                self.close()
        try:
            self.handler(message)
        finally:
            inside.reset(token)
            with changed:
                self._running -= 1
                changed.notify_all()

    def _call_on_thread(self) -> None:
        self._running += 1
        self._shared.threads.run(self._call_all)

    def _call_all(self) -> None:
        changed, token = self._shared.changed, inside.set(inside.get() | {self})
        while True:
            with changed:
                if not self._waiting:
                    self._waiting = None
                    self._running -= 1
                    changed.notify_all()
                    break
                message = self._waiting.popleft()
            try:
                self.handler(message)
            except HandlerGone:
                self.unsubscribe(wait=False)
            except BaseException as error:
                self.report(error, message)
        inside.reset(token)


# ---------------------------------------------------------------- threads

IDLE = 8  # threads that stay


class Threads:
    """Threads for handlers: one for each call that runs, of which IDLE stay for the next calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = 0
        self._closed = False
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def run(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._calls.put(call)
                return
        threading.Thread(target=self._work, args=(call,), name="mqfs-handler", daemon=True).start()

    def _work(self, call: Callable[[], object] | None) -> None:
        while call is not None:
            call()
            with self._lock:
                if self._closed or self._idle >= IDLE:
                    return
                self._idle += 1
            call = self._calls.get()

    def close(self) -> None:
        """End the idle ones, and the others when their calls return."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, 0
        for _ in range(idle):
            self._calls.put(None)


class ClaimCalls:
    """The calls of a handler with the claims of one handle. A refusal that passes, as of a full disk, does not end
    them: they pause, settle what was not settled, and go on."""

    def __init__(self, claims: Claims, handler: Callable[[Claim], object], on_error: Report) -> None:
        """`on_error`: called with what fails; it raises nothing."""
        self._claims, self._handler, self._on_error = claims, handler, on_error
        self._raised: Claim | None = None  # the last claim, where its handler has raised

    def run(self) -> None:
        """Call the handler on this thread until there are no more claims or it raises HandlerGone; then close them."""
        try:
            with self._claims:
                self._call_all()
        except MqfsError as error:
            self._on_error(error, None)

    def _call_all(self) -> None:
        """Raises what ends them: Denied, Disconnected, NotFound."""
        backoff = Backoff(True, self._claims._closed)
        while True:
            try:
                self._settle_again()
                claim = next(self._claims, None)
            except (Denied, Disconnected, NotFound):
                raise
            except Stale as error:  # of the last acknowledgement: that message is redelivered
                self._on_error(error, None)
            except MqfsError as error:
                self._on_error(error, None)
                if self._claims._at_end:
                    return
                with suppress(MqfsError):  # closed meanwhile
                    backoff.wait(error)
            else:
                if claim is None or not self._call(claim):
                    return
                backoff = Backoff(True, self._claims._closed)

    def _settle_again(self) -> None:
        """Settle the last claim where that was refused: no other program gets it until then."""
        if not self._claims._closed.is_set():
            for claim in [*self._claims._open_claims]:
                with suppress(Disconnected):  # which requeues it; the next read connects again
                    if claim is self._raised:
                        claim.nack()
                    else:
                        claim.ack()

    def _call(self, claim: Claim) -> bool:
        """False: the handler is to be called no more."""
        try:
            with claim:
                self._raised = claim
                try:
                    self._handler(claim)
                except HandlerGone:
                    with suppress(MqfsError):  # it is settled, or requeued already
                        claim.release()
                    raise
                self._raised = None
        except HandlerGone:
            return False
        except BaseException as error:  # of the handler, or its claim is gone
            self._on_error(error, claim.message)
        return True


class Worker:
    """Threads, one a handle on a consumer, that call a handler with each claim, from `Group.work` to `stop`."""

    def __init__(
        self, handles: Sequence[Claims], handler: Callable[[Claim], object], on_error: OnError | None = None
    ) -> None:
        self._handles, self._handler = handles, handler
        self._on_error = on_error or partial(log_error, source="worker")
        self._threads = [threading.Thread(target=self._run, args=(claims,), daemon=True) for claims in handles]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        state = "running" if any(thread.is_alive() for thread in self._threads) else "stopped"
        return f"<mqfs worker of {self._handles[0].name!r}, {len(self._handles)} threads, {state}>"

    def _run(self, claims: Claims) -> None:
        inside.set(frozenset((self,)))
        ClaimCalls(claims, self._handler, partial(report, self._on_error)).run()

    def stop(self) -> None:
        """Claim no more, and wait for the handlers under way, unless this is called by one of them."""
        for claims in self._handles:
            claims.finish()
        if self not in inside.get():
            self.join()

    def close(self) -> None:
        """Stop it: `stop` by the name that subscriptions and claims have for it."""
        self.stop()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of its threads: by `stop`, or the removal of the consumer.

        Args:
            timeout: The most seconds to wait for each. None: without limit.
        """
        for thread in self._threads:
            thread.join(timeout)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


LOOK_S = 1.0  # between two looks for new streams


@attrs.frozen
class Streams:
    """The streams that names and patterns select, now and later."""

    names: Sequence[str]  # none: all
    words: Words
    existing: Callable[[], Sequence[str]]
    take: Callable[[str], Claims]

    def plain(self) -> set[str]:
        """Those that are no patterns."""
        return {name for name in self.names if not has_wildcard(name, self.words)}

    def present(self) -> list[str]:
        """Those that may be there. Raises NotFound where the group is removed."""
        plain = self.plain()
        if self.names and len(plain) == len(self.names):
            return sorted(plain)
        return [*filter(compile_selection(self.names, self.words), self.existing())]


class Taking:
    """Threads for a listener's handles on each stream. It ends with the listener, or ends it with the last handle."""

    def __init__(self, shared: Shared, listener: Listener, streams: Streams, concurrency: int) -> None:
        """Raises what opening a stream does that is there."""
        self._shared, self._listener, self._streams, self._concurrency = shared, listener, streams, concurrency
        self._handles: dict[Claims, str] = {}
        self._refused: set[str] = set()
        self._left = streams.plain() if streams.names else set()  # not found yet
        self._has_patterns = not streams.names or len(self._left) < len({*streams.names})
        self._looks = True
        self._ended = threading.Event()
        listener.withdraw = self.remove
        try:
            self._look(Denied)
        except BaseException:
            self._finish()
            raise
        self._looks = self._has_patterns or bool(self._left)
        if self._looks:
            threading.Thread(target=self._watch, name="mqfs-streams", daemon=True).start()

    def remove(self, listener: Listener) -> None:
        self._ended.set()
        self._shared.threads.run(self._finish)  # not here: the lock is held

    def _finish(self) -> None:
        self._ended.set()
        for claims in list(self._handles):
            claims.finish()

    # ------------------------------------------------------------ streams

    def _watch(self) -> None:
        fails = False
        try:
            while (self._has_patterns or self._left) and not self._ended.wait(LOOK_S):
                try:
                    self._look()
                    fails = False
                except (NotFound, Denied):
                    raise
                except Disconnected as error:
                    if error.final:
                        raise
                except MqfsError as error:  # a limit, say: the next look may have more success
                    if not fails:
                        self._listener.report(error, None)
                    fails = True
        except MqfsError as error:
            if not self._ended.is_set():
                self._listener.report(error, None)
        with self._shared.changed:
            self._looks = False
            self._end_without_handles()

    def _look(self, *raised: type[MqfsError]) -> None:
        """Open handles on streams that have none. `raised`: errors that are raised, and not reported."""
        known = {*self._handles.values()} | self._refused
        for name in self._streams.present():
            if name in known:
                continue
            try:
                self._open(name)
            except NotFound:
                continue
            except Denied as error:
                if raised:
                    raise
                self._refused.add(name)
                self._listener.report(error, None)
            self._left.discard(name)

    def _open(self, name: str) -> None:
        if len(self._handles) + self._concurrency > limits.HANDLER_THREADS:
            raise OverLimit(
                f"on failed: stream {name!r} (expected at most {limits.HANDLER_THREADS} threads of a handler, "
                f"{self._concurrency} for each stream)"
            )
        with ExitStack() as opened:
            handles = [opened.enter_context(self._streams.take(name)) for _ in range(self._concurrency)]
            opened.pop_all()
        with self._shared.changed:
            self._handles.update(dict.fromkeys(handles, name))
        for claims in handles:
            threading.Thread(target=self._run, args=(claims,), name="mqfs-listener", daemon=True).start()
        if self._ended.is_set():
            self._finish()  # meanwhile

    # ------------------------------------------------------------ messages

    def _run(self, claims: Claims) -> None:
        ClaimCalls(claims, self._call, self._listener.report).run()
        with self._shared.changed:
            del self._handles[claims]
            self._end_without_handles()

    def _end_without_handles(self) -> None:
        if not self._handles and not self._looks:
            self._listener.close()

    def _call(self, claim: Claim) -> None:
        try:
            self._listener.call(claim.message)
        except HandlerGone:
            self._ended.set()  # no stream is looked for any more
            raise
