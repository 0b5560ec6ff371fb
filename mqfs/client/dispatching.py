"""Dispatching of messages from subscriptions to the listeners of a group, one for each registration.

One dispatcher, a subscription with a thread and a trie of the patterns, serves most listeners. Others have a
subscription of their own: over views, from retained messages on, or with a handler that lags behind.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, TypeAlias

from mqfs.client.callbacks import LATER, Handler, Later, Listener, OnError, Registration, Shared, Streams, Taking
from mqfs.client.message import Message
from mqfs.client.origin import Origin
from mqfs.client.subscription import all_of, require_name
from mqfs.client.types import File, Filters, Subscription, parse_answer
from mqfs.errors import BadCommand, BadRequest, MqfsError, NotFound
from mqfs.syntax.lines import command_lines, quote_word
from mqfs.syntax.patterns import Patterns, Words, has_wildcard

LATER_S = 0.1  # until a filter that answered LATER is called again
LATER_MOST = 1_024  # messages for which filters are called again; with more, no message is read
COVERED = 64  # names that the server selects; with more the dispatcher reads everything
FOUND = 16_384  # streams whose listeners are cached

_Held: TypeAlias = tuple[Message, Sequence[Listener]]


class Own:
    """A subscription and a thread for one listener."""

    def __init__(self, shared: Shared, listener: Listener, subscription: Subscription) -> None:
        self._shared, self._listener, self._subscription = shared, listener, subscription
        listener.withdraw = self.remove
        threading.Thread(target=self._run, name="mqfs-listener", daemon=True).start()

    def remove(self, listener: Listener) -> None:
        self._shared.threads.run(self._subscription.close)  # on another thread: its own may wait for the lock

    def _run(self) -> None:
        try:
            while self._step(self._listener):
                pass
        finally:
            self._subscription.close()
            with self._shared.changed:
                self._listener.close()

    def _step(self, listener: Listener) -> bool:
        listener.wait_until_free()
        try:
            message = next(self._subscription, None)
        except MqfsError as error:
            listener.report(error, None)
            return not self._subscription.lost(error)
        if message is None or listener.closed:
            return False
        while not listener.closed and self._choose(listener, message) is LATER:
            time.sleep(LATER_S)
        return True

    def _choose(self, listener: Listener, message: Message) -> object:
        try:
            chosen = self._shared.choose(message, [listener])
            if isinstance(chosen, Later):
                return chosen
            if chosen and listener.wants(message):
                listener.offer(message)
        except BaseException as error:  # of a filter
            listener.report(error, message)
        return None


class Dispatcher:
    """One subscription for many listeners. The removal of the last one ends it."""

    def __init__(self, origin: Origin, shared: Shared, words: Words, first: Listener) -> None:
        self.words = words
        self.ended = False
        self._origin, self._shared = origin, shared
        self._patterns: Patterns[Listener] = Patterns(words)
        self._found: dict[str, tuple[Listener, ...]] = {}  # by stream
        self._all: dict[Listener, None] = {}
        self._later: deque[_Held] = deque()
        self._names: Counter[str] | None = Counter()  # selected names; None: everything
        self._widen(first.patterns)
        self._subscription = origin.cover(tuple(self._names or ()))
        self._thread = threading.Thread(target=self._run, name="mqfs-dispatcher", daemon=True)
        self._thread.start()

    def _widen(self, patterns: Sequence[str]) -> bool:
        """Count the patterns of a new listener. Returns whether the subscription has to read more than before."""
        if self._names is None:
            return False
        before = len(self._names)
        self._names.update(patterns)
        if not patterns or self.words.many in patterns or len(self._names) > COVERED:
            self._names = None
        return self._names is None or len(self._names) > before

    def add(self, listener: Listener) -> bool:
        """Add a listener. Returns False if the dispatcher has ended."""
        patterns = listener.patterns or (self.words.many,)
        with self._shared.changed:
            if self.ended:
                return False
            for pattern in patterns:
                self._patterns.add(pattern, listener)
            self._all[listener] = None
            self._found.clear()
            listener.withdraw = self.remove
            wider = self._widen(listener.patterns)
        if wider:
            self._subscription.cover(tuple(self._names or ()))
        return True

    def remove(self, listener: Listener) -> None:
        if listener not in self._all:
            return
        del self._all[listener]
        patterns = listener.patterns or (self.words.many,)
        for pattern in patterns:
            self._patterns.remove(pattern, listener)
            if self._names is not None:
                self._names[pattern] -= 1
                if not self._names[pattern]:
                    del self._names[pattern]  # its messages are read until the selection changes
        self._found.clear()
        if not self._all and not self.ended:
            self.ended = True
            self._shared.threads.run(self._subscription.close)

    def stop(self) -> None:
        self._subscription.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------ messages

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            self._subscription.close()
            with self._shared.changed:
                self.ended = True
                for listener in list(self._all):
                    listener.close()

    def _step(self) -> bool:
        try:
            message = self._next()
        except EOFError:
            return False
        except MqfsError as error:
            with self._shared.changed:
                heard = {listener.on_error: listener for listener in self._all}
            for listener in heard.values():
                listener.report(error, None)
            return not self._subscription.lost(error)
        if message is not None:
            self._dispatch(message, self._matching(message.stream))
        return not self.ended

    def _next(self) -> Message | None:
        """Return the next message. None: none came while messages wait for filters; these were dispatched again. Raises
        EOFError, and the errors of the subscription."""
        if not self._later:
            return next(self._subscription, None) or self._end()
        message = None
        if len(self._later) < LATER_MOST:
            with suppress(TimeoutError):
                message = self._subscription.get(LATER_S)
        else:
            time.sleep(LATER_S)
        if message is None:
            held, self._later = self._later, deque()
            for late, listeners in held:
                self._dispatch(late, listeners)
        return message

    @staticmethod
    def _end() -> Message:
        raise EOFError

    def _matching(self, stream: str) -> Sequence[Listener]:
        found = self._found.get(stream)
        if found is None:
            with self._shared.changed:
                if len(self._found) >= FOUND:
                    self._found.clear()
                found = self._found[stream] = tuple(self._patterns.match(stream))
        return found

    def _dispatch(self, message: Message, listeners: Sequence[Listener]) -> None:
        if self._shared.filters:
            try:
                chosen = self._shared.choose(message, listeners)
            except BaseException as error:
                for listener in listeners[:1]:
                    listener.report(error, message)
                return
            if isinstance(chosen, Later):
                self._later.append((message, listeners))
                return
            listeners = chosen
        for listener in listeners:
            try:
                if listener.wants(message) and not listener.offer(message):
                    self._give_own(listener, message)
            except BaseException as error:  # of a filter
                listener.report(error, message)

    def _give_own(self, listener: Listener, message: Message) -> None:
        """Move a listener to a subscription of its own, from `message` on: its handler is slower than the
        publishers."""
        with self._shared.changed:
            self.remove(listener)
        try:
            subscription = self._origin.subscribe(listener.patterns, str(message.sequence), is_patient=True)
        except MqfsError as error:
            listener.report(error, message)
            with self._shared.changed:
                listener.withdraw = None
                listener.close()
            return
        Own(self._shared, listener, subscription)


class Registry:
    """The listeners of one group."""

    def __init__(self, origin: Origin) -> None:
        self.shared = Shared()
        self._origin = origin
        self._adding = threading.Lock()
        self._dispatcher: Dispatcher | None = None
        self._by_handler: dict[object, tuple[Listener, ...]] = {}
        self.shared.on_closed = self._forget

    def add(
        self,
        patterns: tuple[str, ...],
        handler: Handler,
        *,
        existing: bool,
        filters: Filters,
        concurrency: int,
        once: bool,
        dedup: bool,
        single: Streams | None,
        on_error: OnError | None,
    ) -> Registration:
        """Return the registration of a handler for patterns, the existing one or a new one. `single`: the streams whose
        messages it claims; None: it gets every message. Raises BadRequest."""
        options = {
            "existing": existing, "filters": all_of(filters), "concurrency": concurrency, "once": once,
            "on_error": on_error,
        }  # fmt: skip
        with self._adding:
            same = [r for r in self._by_handler.get(_key(handler), ()) if dedup and r.dedup]
            same = [r for r in same if r.single == (single is not None)]
            present = next((r for r in same if r.patterns == patterns), None)
            if present is not None:
                _require_same(present, options)
                return present.registration
            new = Listener(
                self.shared, patterns, handler,
                filters=all_of(filters), concurrency=concurrency, once=once, dedup=dedup, single=single is not None,
                on_error=on_error,
            )  # fmt: skip
            new.options = options
            if single is not None:
                Taking(self.shared, new, single, concurrency)
            else:
                new.share(same)
                try:
                    self._start(new, existing)
                except BaseException:
                    new.unsubscribe(wait=False)
                    raise
            with self.shared.changed:
                if not new.closed:
                    self._by_handler[_key(handler)] = (*self._by_handler.get(_key(handler), ()), new)
            return new.registration

    def _forget(self, listener: Listener) -> None:
        key = _key(listener.handler)
        left = tuple(other for other in self._by_handler.get(key, ()) if other is not listener)
        if left:
            self._by_handler[key] = left
        else:
            self._by_handler.pop(key, None)

    def _start(self, listener: Listener, existing: bool) -> None:
        if existing:
            self._give_own(listener, "first")
            return
        with closing(self._origin.cursor()) as file:
            answer = self._ask(file, listener.patterns)
            if answer is None or answer["views"]:
                self._give_own(listener, "end")
                return
            self._dispatch_to(listener, Words(*answer["words"]))
            listener.begin(max(parse_answer(file.ask(b"selected\n"))["next"], self._origin.end()))

    def _give_own(self, listener: Listener, start: str) -> None:
        listener.begin(0)
        Own(self.shared, listener, self._origin.subscribe(listener.patterns, start))

    def _dispatch_to(self, listener: Listener, words: Words) -> None:
        dispatcher = self._dispatcher
        while dispatcher is None or dispatcher.words != words or not dispatcher.add(listener):
            dispatcher = self._dispatcher = Dispatcher(self._origin, self.shared, words, listener)

    @staticmethod
    def _ask(file: File, names: Sequence[str]) -> dict[str, Any] | None:
        """Return the answer of a cursor to `selected`, or None if the server lacks the command. Raises Denied,
        BadCommand, BadRequest."""
        select = [f"select {' '.join(map(quote_word, names))}"] if names else []
        try:
            answer = parse_answer(file.ask(command_lines(*select, "selected")))
        except NotFound:
            answer = parse_answer(file.ask(command_lines(select[0].replace("select", "cover", 1), "selected")))
            for name in names:
                if not has_wildcard(name, Words(*answer["words"])):
                    require_name(name)
        except BadCommand:
            return None
        return answer

    def end(self, patterns: tuple[str, ...] | None = None, handler: Handler | None = None) -> int:
        """End the listeners of patterns and handler (None: any), and wait for running calls. Returns their number."""
        if self.shared.is_of_parent:
            return 0
        with self.shared.changed:
            mine = self._by_handler.values() if handler is None else [self._by_handler.get(_key(handler), ())]
            ending = [r for some in mine for r in some if patterns in (None, r.patterns)]
        for listener in ending:
            listener.unsubscribe(wait=True)
        return len(ending)

    def close(self) -> None:
        if self.shared.is_of_parent:
            return
        self.end()
        if self._dispatcher is not None:
            self._dispatcher.stop()
        self.shared.threads.close()


def _require_same(present: Listener, options: Mapping[str, object]) -> None:
    """Raise BadRequest if the present registration of a handler and patterns has other options."""
    for name, value in options.items():
        if present.options[name] != value:
            raise BadRequest(
                f"on failed: {present.shown!r} is registered for {' '.join(present.patterns) or '#'} with another "
                f"{name} (expected the same options, dedup=False, or unsubscribe first)"
            )


def _key(handler: Callable[..., object]) -> object:
    try:
        hash(handler)
    except TypeError:
        return id(handler)
    return handler
