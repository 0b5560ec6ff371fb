"""Message queues as files: directories are groups, files are streams, plain read and write is the API.

The library and the classes of its errors are attributes of this module. Each is loaded on first use, so that
`import mqfs` alone costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from mqfs import errors
    from mqfs.client import (
        LATER,
        BodyWriter,
        Claim,
        Claims,
        Client,
        Consumer,
        ConsumerInfo,
        Group,
        Message,
        Outgoing,
        Queue,
        Receipt,
        Registration,
        ScheduleInfo,
        Settings,
        Singles,
        Stats,
        StreamStats,
        Subscription,
        Worker,
        aio,
        connect,
        escape,
        open,
        unescape,
    )
    from mqfs.errors import (
        Again,
        BadAddress,
        BadCommand,
        BadConfig,
        BadFid,
        BadFrame,
        BadName,
        BadReplica,
        BadRequest,
        BadRing,
        BadStore,
        BadTokens,
        Busy,
        Conflict,
        Damaged,
        Denied,
        Disconnected,
        DiskFailed,
        DiskFull,
        Exists,
        FellBehind,
        Interrupted,
        IsDirectory,
        MountError,
        MqfsError,
        NoAttribute,
        NoAuthentication,
        NotDirectory,
        NotEmpty,
        NotFound,
        NotPermitted,
        OverLimit,
        OverQuota,
        ReadOnly,
        RemoteError,
        Stale,
        Standby,
        StreamFull,
        TooLong,
        Unsupported,
    )
    from mqfs.server.inside import serve

__all__ = [
    "Again", "BadAddress", "BadCommand", "BadConfig", "BadFid", "BadFrame", "BadName", "BadReplica",
    "BadRequest", "BadRing", "BadStore", "BadTokens", "Busy", "Conflict", "Damaged", "Denied", "Disconnected",
    "DiskFailed", "DiskFull", "Exists",
    "FellBehind", "Interrupted", "IsDirectory", "MountError", "MqfsError", "NoAttribute", "NoAuthentication",
    "NotDirectory", "NotEmpty", "NotFound", "NotPermitted", "OverLimit", "OverQuota", "ReadOnly", "RemoteError",
    "Stale", "Standby", "StreamFull", "TooLong", "Unsupported",
]  # fmt: skip
_PLACES = dict.fromkeys(__all__, "mqfs.errors") | {"serve": "mqfs.server.inside"}
__all__ += [
    "LATER", "BodyWriter", "Claim", "Claims", "Client", "Consumer", "ConsumerInfo", "Group", "Message", "Outgoing",
    "Queue", "Receipt", "Registration", "ScheduleInfo", "Settings", "Singles", "Stats", "StreamStats", "Subscription",
    "Worker", "connect", "escape", "open", "unescape",
]  # fmt: skip
_PLACES = dict.fromkeys(__all__, "mqfs.client") | _PLACES
__all__ += ["aio", "errors", "serve"]
_MODULES = {
    "aio": "mqfs.client.aio",
    "errors": "mqfs.errors",
    "testing": "mqfs.testing",
    "tracing": "mqfs.client.tracing",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load an attribute on its first use."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _PLACES:
        raise AttributeError(f"module 'mqfs' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
