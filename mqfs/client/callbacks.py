"""Registrations: handlers that are called with each message of their patterns.

A registration queues messages, calls its handler, and drops messages that another registration of that handler got
already. The messages come from a dispatcher (dispatching.py).

A registration with `single` has threads that claim messages and call the handler. A claim is of one stream. So for a
pattern, and for a name without a stream, a thread looks for new streams every LOOK_S, as qlobber-fsq polls its folder.
That thread ends when there is no pattern and a stream of each name was found.

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
QUEUED = 1_024  # messages for one handler: with more it gets a subscription of its own
# Registrations and workers whose handler runs in this context: a handler may end its own, which does not wait for it.
inside: ContextVar[frozenset[object]] = ContextVar("inside", default=frozenset())


class Later(enum.Enum):
    """The answer of a filter that is to be called again later with the message."""

    LATER = "later"


LATER = Later.LATER
# A filter of a group: it returns which of the handlers are called with the message; None: all. It runs on the thread of
# the dispatcher.
HandlerFilter: TypeAlias = Callable[[Message, set[Handler]], Iterable[Handler] | Literal[Later.LATER] | None]


class HandlerGone(Exception):
    """A handler was cancelled, its event loop has ended, or its registration has. It is not called again, and its
    claims are released."""


def log_error(error: Exception, message: Message | None, source: str = "subscription") -> None:
    """Log an error: the default `on_error` of registrations and workers."""
    at = f"message {message.sequence} of {message.stream}" if message is not None else source
    log.error("%s: %s", at, error, exc_info=error if message is not None else None)


def report(on_error: OnError, error: BaseException, message: Message | None) -> None:
    """Call an `on_error`. Neither its own exceptions nor a SystemExit of a handler end a thread of the library."""
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
    """The state that the listeners of one handler share: a message is for the first listener that receives it."""

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
        """Whether this process is a forked child: no handlers run in it, and a lock may be held by a thread that only
        the parent has."""
        return self._process != os.getpid()

    def choose(self, message: Message, listeners: Sequence[Listener]) -> Sequence[Listener] | Later:
        """Return the listeners whose handlers pass the group's filters, or LATER. Raises the errors of filters."""
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
        patterns: The streams, views and patterns; none: everything.
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
        """End the registration: no more calls start.

        Args:
            wait: Whether to wait until running calls return; one of these calls itself does not wait.
        """
        self._listener.unsubscribe(wait)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the registration: by `once`, `unsubscribe`, or the removal of its group.

        Args:
            timeout: The most seconds to wait. None: without limit.
        """
        self._listener.join(timeout)


class Listener:
    """The state of a registration: the queued messages and the running calls of its handler."""

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
        self.withdraw: Callable[[Listener], None] | None = None  # stops offers of messages; called with the lock held
        self._shared, self._filters, self._concurrency = shared, filters, concurrency
        self._once, self.dedup, self.on_error = once, dedup, on_error or log_error
        self.options: Mapping[str, object] = {}  # the options of its registration
        self._deduplication: Deduplication | None = None
        self._waiting: deque[Message] | None = None
        self._start = -1  # the first sequence for it; -1: unknown until `begin`
        self._running = 0  # running calls
        self.closed = False  # for new messages

    @property
    def shown(self) -> Handler:
        """The handler that the program registered."""
        shown: Handler = getattr(self.handler, "shown", self.handler)
        return shown

    @property
    def active(self) -> bool:
        return not self.closed or bool(self._running or self._waiting)

    def share(self, others: Sequence[Listener]) -> None:
        """Share the deduplication of other listeners of the handler, which is called once for a message that several of
        them receive."""
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
        """Accept no more messages; the handler is still called with the queued ones. The caller holds the lock."""
        if not self.closed:
            self.closed = True
            self._shared.on_closed(self)
            if self.withdraw is not None:
                self.withdraw(self)
        self._shared.changed.notify_all()

    # ------------------------------------------------------------ messages

    def wants(self, message: Message) -> bool:
        """Whether the listener's filters pass a message."""
        return not self._filters or all(passes(message) for passes in self._filters)

    def _is_first(self, message: Message) -> bool:
        """Whether no other listener of the handler got a message before; records that this one does."""
        return self._deduplication is None or self._deduplication.is_first(message)

    def begin(self, start: int) -> None:
        """Call the handler with the messages from sequence `start` on, including queued ones."""
        with self._shared.changed:
            mine = (m for m in self._waiting or () if m.sequence >= start and self._is_first(m))
            early = list(islice(mine, 1 if self._once else None))
            if self._once and early:
                self.close()
            self._start, self._waiting = start, deque(early) if early else None
            for _ in range(min(len(early), self._concurrency)):
                self._call_on_thread()

    def offer(self, message: Message) -> bool:
        """Queue a call of the handler with a message, if it is for this listener. Returns False if the queue is
        full."""
        with self._shared.changed:
            if self.closed or message.sequence < self._start:
                return True
            if self._waiting is not None and len(self._waiting) >= QUEUED:
                return False
            if self._start >= 0 and not self._is_first(message):  # not before `begin`, which may fail
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
        """Wait until the handler could be called at once, or the listener is closed."""
        changed = self._shared.changed
        with changed:
            changed.wait_for(lambda: self.closed or (self._running < self._concurrency and not self._waiting))

    def report(self, error: BaseException, message: Message | None) -> None:
        report(self.on_error, error, message)

    # ------------------------------------------------------------ calls

    def call(self, message: Message) -> None:
        """Call the handler on this thread. Raises the handler's errors, and HandlerGone if the listener is closed."""
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

IDLE = 8  # threads kept for later calls


class Threads:
    """The threads for handlers: one for each running call; up to IDLE are kept for later calls."""

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
        """End the idle threads now, and the others when their calls return."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, 0
        for _ in range(idle):
            self._calls.put(None)


class ClaimCalls:
    """The calls of a handler with the claims of one handle. A temporary refusal, by a full disk, for example, does not
    end them: after a pause the unsettled claim is settled, and the calls continue."""

    def __init__(self, claims: Claims, handler: Callable[[Claim], object], on_error: Report) -> None:
        """`on_error`: called with errors; it must not raise."""
        self._claims, self._handler, self._on_error = claims, handler, on_error
        self._raised: Claim | None = None  # the last claim, if its handler has raised

    def run(self) -> None:
        """Call the handler on this thread until the claims end or it raises HandlerGone; then close the claims."""
        try:
            with self._claims:
                self._call_all()
        except MqfsError as error:
            self._on_error(error, None)

    def _call_all(self) -> None:
        """Call the handler with each claim. Raises the errors that end the calls: Denied, Disconnected, NotFound."""
        backoff = Backoff(True, self._claims._closed)
        while True:
            try:
                self._settle_again()
                claim = next(self._claims, None)
            except (Denied, Disconnected, NotFound):
                raise
            except Stale as error:  # of the last acknowledgement; its message is redelivered
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
        """Settle the last claim again after a refusal: until then no other program gets its message."""
        if not self._claims._closed.is_set():
            for claim in [*self._claims._open_claims]:
                with suppress(Disconnected):  # this requeues it; the next read connects again
                    if claim is self._raised:
                        claim.nack()
                    else:
                        claim.ack()

    def _call(self, claim: Claim) -> bool:
        """Call the handler with a claim. Returns False if the handler must not be called again."""
        try:
            with claim:
                self._raised = claim
                try:
                    self._handler(claim)
                except HandlerGone:
                    with suppress(MqfsError):  # the claim is settled, or requeued already
                        claim.release()
                    raise
                self._raised = None
        except HandlerGone:
            return False
        except BaseException as error:  # of the handler, or of settling the claim
            self._on_error(error, claim.message)
        return True


class Worker:
    """Threads, each with a handle on a consumer, that call a handler with each claim, from `Group.work` to `stop`."""

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
        """Claim no more messages, and wait for running handlers; a handler that calls this does not wait."""
        for claims in self._handles:
            claims.finish()
        if self not in inside.get():
            self.join()

    def close(self) -> None:
        """Call `stop`; subscriptions and claims have the same name for it."""
        self.stop()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the worker's threads: by `stop`, or the removal of the consumer.

        Args:
            timeout: The most seconds to wait for each thread. None: without limit.
        """
        for thread in self._threads:
            thread.join(timeout)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


LOOK_S = 1.0  # between two searches for new streams


@attrs.frozen
class Streams:
    """The streams that names and patterns select, now and later."""

    names: Sequence[str]  # none: all
    words: Words
    existing: Callable[[], Sequence[str]]
    take: Callable[[str], Claims]

    def plain(self) -> set[str]:
        """Return the names that are not patterns."""
        return {name for name in self.names if not has_wildcard(name, self.words)}

    def present(self) -> list[str]:
        """Return the names of the streams to open: the matching existing streams, or without any pattern the names
        themselves, whose streams may be missing. Raises NotFound if the group was removed."""
        plain = self.plain()
        if self.names and len(plain) == len(self.names):
            return sorted(plain)
        return [*filter(compile_selection(self.names, self.words), self.existing())]


class Taking:
    """The handles of a listener on each stream, a thread each. They end with the listener, and the end of the last one
    closes the listener."""

    def __init__(self, shared: Shared, listener: Listener, streams: Streams, concurrency: int) -> None:
        """Open handles on the existing streams. Raises the errors of that, except NotFound."""
        self._shared, self._listener, self._streams, self._concurrency = shared, listener, streams, concurrency
        self._handles: dict[Claims, str] = {}
        self._refused: set[str] = set()
        self._left = streams.plain() if streams.names else set()  # names without a stream so far
        self._has_patterns = not streams.names or len(self._left) < len({*streams.names})
        self._looks = True
        self._ended = threading.Event()
        listener.withdraw = self.remove
        try:
            self._look(raises_denied=True)
        except BaseException:
            self._finish()
            raise
        self._looks = self._has_patterns or bool(self._left)
        if self._looks:
            threading.Thread(target=self._watch, name="mqfs-streams", daemon=True).start()

    def remove(self, listener: Listener) -> None:
        self._ended.set()
        self._shared.threads.run(self._finish)  # on another thread: the lock is held here

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
                except MqfsError as error:  # a limit, for example: the next look may succeed
                    if not fails:
                        self._listener.report(error, None)
                    fails = True
        except MqfsError as error:
            if not self._ended.is_set():
                self._listener.report(error, None)
        with self._shared.changed:
            self._looks = False
            self._end_without_handles()

    def _look(self, *, raises_denied: bool = False) -> None:
        """Open handles on streams without any. `raises_denied`: raise Denied instead of reporting it."""
        known = {*self._handles.values()} | self._refused
        for name in self._streams.present():
            if name in known:
                continue
            try:
                self._open(name)
            except NotFound:
                continue
            except Denied as error:
                if raises_denied:
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
            self._finish()  # ended meanwhile

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
            self._ended.set()  # stop looking for streams
            raise
