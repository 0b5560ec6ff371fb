"""Where the examples of one page are typed: a folder, a shell in it with the project's commands, a server if wanted.

Absolute paths of an example are taken to be below that folder: nothing outside of it is read or written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.docs.pages import Block, examples
from tests.support.clone import commands
from tests.support.eventually import eventually
from tests.support.server import Server, mounted, unmount
from tests.support.shell import Shell, shell

ABSOLUTE = re.compile(r"(?<![\w.])/(?=(?:backup|etc|mnt|run|srv|tmp|var)\b)")


class Scene:
    """One page's."""

    def __init__(self, folder: Path, page: Path, cleanup: ExitStack) -> None:
        self.folder, self.mount, self.page = folder, folder / "mq", page
        self.blocks = examples(page.read_text())
        self.lack = ""  # what this machine has not, so that an example was not typed
        self._cleanup = cleanup
        self._server: ExitStack | None = None
        self.path = f"{commands(folder / '.bin')}:/usr/bin:/bin"
        self.typing = self.shell()

    def shell(self) -> Shell:
        """One more shell, beside `typing`."""
        return self._cleanup.enter_context(shell(self.folder, self.path))

    def rooted(self, text: str) -> str:
        """With what is absolute below our folder."""
        return ABSOLUTE.sub(f"{self.folder}/", text)

    def block(self, begins: str) -> Block:
        """The page's only example that begins so, to be typed."""
        (found,) = [block for block in self.blocks if block.text.startswith(begins)]
        return Block([line._replace(typed=self.rooted(line.typed)) for line in found.lines])

    def type(self, line: str, code: int = 0) -> list[str]:
        """Type it, see it end with that exit code; what it shows."""
        said = self.typing.type(line)
        assert self.typing.code == code, f"{line}: exit code {self.typing.code}: {said}"
        return said

    def type_as_shown(self, block: Block, code: int = 0) -> None:
        """Type its lines: each shows what the page says, and ends with 0, but the last with `code`."""
        for line in block.lines:
            said = self.type(line.typed, code if line is block.lines[-1] else 0)
            assert said == line.shown, line.typed

    def serve(self, *arguments: str) -> Server:
        """`mqfs serve` of ./store at ./mq, until `stop` or the end."""
        self.mount.mkdir(exist_ok=True)
        self._server = self._cleanup.enter_context(ExitStack())
        words = ("--store", "store", "--listen", "unix!mqfs.sock", *arguments)
        return self._server.enter_context(Server(*words, cwd=self.folder, mount=self.mount))

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    def group(self, name: str, *ctl: str) -> Path:
        """A new group with those settings."""
        path = self.mount / name
        path.mkdir()
        (path / "ctl").write_text("".join(f"{line}\n" for line in ctl))
        return path

    def waiting(self, group: Path, readers: int = 1) -> None:
        """Wait until that many reads wait in the group."""
        eventually(lambda: f'"waiting": {readers}' in (group / ".stats").read_text(), f"{readers} waiting in {group}")

    def mounts(self, path: Path) -> None:
        """Wait for a mount; it is taken away at the end if it is still there."""
        self._cleanup.callback(unmount, path)
        eventually(lambda: mounted(path), f"a mount at {path}")

    def defer(self, undo: Callable[[], None]) -> None:
        """To be done at the end, while the server still runs."""
        self._cleanup.callback(undo)


@contextmanager
def scene(folder: Path, page: Path) -> Iterator[Scene]:
    with ExitStack() as cleanup:
        yield Scene(folder, page, cleanup)
