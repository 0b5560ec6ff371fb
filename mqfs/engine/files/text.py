"""Files made when they are opened: `.stats`, `.who`, `.errors`. What they say is in status_files.py."""

from __future__ import annotations

from collections.abc import Callable

from mqfs import errors
from mqfs.engine.files import status_files
from mqfs.engine.files.handle import OpenFile
from mqfs.engine.group import Group
from mqfs.engine.log.portions import Work
from mqfs.model import User
from mqfs.wait import Step, Wait


class TextHandle(OpenFile):
    """A file made when it is opened: `.stats`, `.who`, `.errors`. Finite and seekable. One that takes long is made in
    portions: until it is there its reads wait, and it has no `size`."""

    _MAKE: dict[str, Callable[[Group, User], Work[str]]] = {  # noqa: RUF012 - a table, never altered
        ".stats": status_files.stats,
        ".who": status_files.who,
        ".errors": status_files.refusals,
        "ctl": status_files.ctl,
    }

    parkable = True
    text: bytes | None = None  # not yet
    size: int | None = None
    _error: Exception | None = None  # why it could not be made

    def on_opened(self) -> None:
        self._reads: list[tuple[Wait[bytes], int, int]] = []
        self._making = self.group.portions.run(self._MAKE[self.node.name](self.group, self.user))
        if isinstance(self._making, Wait):
            self.opening = Wait()
            self._making.subscribe(self._made)
        else:
            self._keep(self._making, refuse=True)
        super().on_opened()

    def _keep(self, text: str, *, refuse: bool) -> None:
        data = text.encode()
        self.hold(len(data), refuse=refuse)
        self.text, self.size = data, len(data)

    def _made(self, work: Wait[str]) -> None:
        """Others were served meanwhile; perhaps its reads wait."""
        try:
            self._keep(work.result(), refuse=False)
        except Exception as error:  # else its reads would wait for ever
            self._error = error
            for wait, _, _ in self._reads:
                wait.fail(error)
        else:
            for wait, count, offset in self._reads:
                wait.settle(self.read(count, offset))  # type: ignore[arg-type]
        self._reads.clear()
        if isinstance(self.opening, Wait):
            self.opening.settle(None)

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        if self.text is not None:
            return self.text[offset : offset + count]
        if self._error is not None:
            raise self._error
        wait: Wait[bytes] = Wait(self._cancel)
        self._reads.append((wait, count, offset))
        return wait

    def _cancel(self, wait: Wait[bytes]) -> bool:
        self._reads = [read for read in self._reads if read[0] is not wait]
        return True

    def _end(self) -> None:
        if isinstance(self._making, Wait):
            self._making.cancel()
        for wait, _, _ in self._reads:
            wait.fail(errors.Interrupted(f"{self.node.name} was closed"))
