"""Message queues as files: directories are groups, files are streams, plain read and write is the API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mqfs.version import __version__ as __version__

if TYPE_CHECKING:
    from mqfs import errors
    from mqfs.client import (
        LATER,
        Claim,
        Claims,
        Client,
        Group,
        Kept,
        Message,
        Outgoing,
        Registration,
        Subscription,
        Worker,
        aio,
        connect,
        escape,
        open,
        unescape,
    )
    from mqfs.server.inside import serve

__all__ = [
    "LATER",
    "Claim",
    "Claims",
    "Client",
    "Group",
    "Kept",
    "Message",
    "Outgoing",
    "Registration",
    "Subscription",
    "Worker",
    "aio",
    "connect",
    "errors",
    "escape",
    "open",
    "serve",
    "unescape",
]


_MODULES = {"aio": "mqfs.client.aio", "errors": "mqfs.errors"}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """The library, loaded when it is first asked for: `import mqfs` alone costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'mqfs' has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name == "serve":
        from mqfs.server import inside  # which the rest does without

        return inside.serve
    from mqfs import client

    return getattr(client, name)
