"""Message queues as files: directories are groups, files are streams, plain read and write is the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mqfs.version import __version__ as __version__

if TYPE_CHECKING:
    from mqfs.client import Claim, Client, Group, Message, Outgoing, connect, open

__all__ = ["Claim", "Client", "Group", "Message", "Outgoing", "connect", "open"]


def __getattr__(name: str) -> Any:
    """The library, loaded when it is first asked for: `import mqfs` alone costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'mqfs' has no attribute {name!r}")
    from mqfs import client

    return getattr(client, name)
