"""A server inside a program: the same as `mqfs serve`, on a thread of its own.

Without an address it listens on a temporary socket. Signals stay the program's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import trio

from mqfs.errors import BadConfig
from mqfs.server.app import Server, check_words
from mqfs.server.options import Options
from mqfs.server.web import is_on_standard_files


class InsideServer:
    """A server, from `mqfs.serve`. Serves from `start` to `close`, or in a `with` or `async with` block."""

    def __init__(self, options: Options) -> None:
        """Check the options. Raises BadConfig."""
        check_words(options)
        self._options, self._folder = options, ""
        self.addresses: tuple[str, ...] = ()  # of 9P, then of HTTP, with the ports that were chosen
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._server: Server | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the server, and return when it serves. Raises the errors with which `mqfs serve` ends."""
        if self._thread is not None:
            raise BadConfig("serve failed: started before (expected a new one)")
        options = self._options
        if is_on_standard_files(options):
            self._folder = tempfile.mkdtemp(prefix="mqfs-")
            options = attrs.evolve(options, listen=(f"unix!{self._folder}/socket",))
        self._thread = threading.Thread(target=self._run, args=(options,), name="mqfs-server", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    def __repr__(self) -> str:
        return f"<mqfs server at {' '.join(self.addresses)}>"

    @property
    def address(self) -> str:
        """The first of its addresses."""
        return self.addresses[0]

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, options: Options) -> None:
        try:
            trio.run(self._serve, options)
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self, options: Options) -> None:
        self._token = trio.lowlevel.current_trio_token()
        server = self._server = Server(options, self._on_state, owns_process=False)
        await server.run()

    def _on_state(self, state: str) -> None:
        if state == "READY=1" and self._server is not None:
            self.addresses = tuple(self._server.addresses)
            self._ready.set()

    def close(self) -> None:
        """Stop the server: pending calls are answered, everything is written to disk."""
        token, server = self._token, self._server
        if token is not None and server is not None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(server.stopping.set)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> InsideServer:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    async def __aenter__(self) -> InsideServer:
        await _in_thread(self.start)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await _in_thread(self.close)


async def _in_thread(call: Callable[[], None]) -> None:
    """Run a call to its end on a thread, under trio and asyncio."""
    import anyio  # here: `mqfs serve` does not need it

    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(call)


def serve(
    store: str | os.PathLike[str] | None = None,
    *,
    listen: str | Sequence[str] = (),
    mount: str | os.PathLike[str] | None = None,
    http: str | Sequence[str] = (),
    **options: Any,
) -> InsideServer:
    """Run a server in this process, on a thread of its own.

    It serves in a `with` or `async with` block, or from `start` to `close`.

    Args:
        store: The folder of its store, made if it is missing. None: in memory.
        listen: Addresses of 9P; `tcp!127.0.0.1!0` chooses a port. None, and no `mount` and no `http`: a temporary unix
            socket.
        mount: The folder to mount it at. None: nowhere.
        http: Addresses of HTTP.
        **options: As of `mqfs serve`, by their names in a configuration file with `_` for `-`.

    Returns:
        The server.

    Raises:
        BadConfig: An option is unknown, or its value invalid.
        BadStore: Another process has the store, or it is damaged. Raised by `start`, as what follows.
        BadAddress: It cannot listen at an address.
        MountError: It cannot mount.
    """
    known = {field.name for field in attrs.fields(Options)}
    if unknown := sorted(options.keys() - known):
        raise BadConfig(f"serve failed: unknown option {unknown[0]!r} (expected one of {' '.join(sorted(known))})")
    return InsideServer(
        Options(
            store=None if store is None else os.fspath(store),
            mount=None if mount is None else os.fspath(mount),
            listen=_all_of(listen),
            http=_all_of(http),
            **options,
        )
    )


def _all_of(addresses: str | Sequence[str]) -> tuple[str, ...]:
    return (addresses,) if isinstance(addresses, str) else tuple(addresses)
