"""A registration for messages that go to one receiver each: threads that claim them, and call the handler.

A claim is of one stream. So for a pattern, and for a name of which there is no stream yet, a thread looks for streams
to come each LOOK_S, as qlobber-fsq polls its folder. It ends when all that is named was found.

    on(["a", "log.*"], single=True): `a` is there -> handles on it; `log.*` -> look; `log.x` is made -> handles on it
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import attrs

from mqfs import limits
from mqfs.client.callbacks import HandlerGone, Listener, Shared, call_with_claims
from mqfs.client.delivery import Claim, Claims
from mqfs.errors import Denied, Disconnected, MqfsError, NotFound, OverLimit
from mqfs.syntax.patterns import Words, compile_selection, has_wildcard

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
        call_with_claims(claims, self._call, self._listener.report)
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
