"""Progress of a command that may take long: one line on a terminal's standard error, and nothing elsewhere.

The line appears after `DELAY_S`, is drawn by a thread of rich, and is gone at the end; where Ctrl-C ends the command
its text says how far that was. Whatever else is written to the terminal is written within `paused()`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

DELAY_S = 0.5  # a command that ends sooner shows nothing
_A_SECOND = 5  # times that the line is drawn


class Progress:
    """The line. Called with the text that it has from then on."""

    def __init__(self) -> None:
        self.text = ""
        self._started = time.monotonic()
        self._live: Live | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()  # of the two above

    def __call__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> Progress:
        global _shown
        if sys.stderr is not None and sys.stderr.isatty():
            self._timer = threading.Timer(DELAY_S, self._show)
            self._timer.daemon = True
            self._timer.start()
            _shown = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _shown
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._live is not None:
                self._live.stop()
            self._timer = self._live = _shown = None
        if kind is KeyboardInterrupt:
            print(f"mqfs: interrupted{': ' if self.text else ''}{self.text}", file=sys.stderr)

    def _show(self) -> None:
        from rich.console import Console  # here: most commands end sooner, or have no terminal
        from rich.live import Live

        with self._lock:
            if self._timer is not None:
                console = Console(stderr=True, highlight=False)
                self._live = Live(
                    console=console,
                    get_renderable=self._line,
                    refresh_per_second=_A_SECOND,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start(refresh=True)

    def _line(self) -> RenderableType:
        from rich.text import Text

        seconds = time.monotonic() - self._started
        return Text(f"{seconds:5.1f} s   {self.text}   Ctrl-C ends it", no_wrap=True, overflow="ellipsis")

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """The line is not there meanwhile."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
            try:
                yield
            finally:
                if self._live is not None:
                    self._live.start(refresh=True)


_shown: Progress | None = None


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """For a line of another kind: it comes above the one of progress."""
    shown = _shown  # another thread may end it
    with shown.away() if shown is not None else contextlib.nullcontext():
        yield
