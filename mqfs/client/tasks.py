"""The public name of the async library: aio.py."""

from mqfs.client.aio import AsyncClient, AsyncGroup, AsyncReading, connect, open
from mqfs.client.async_handles import (
    AsyncClaim,
    AsyncClaims,
    AsyncRegistration,
    AsyncSubscription,
    AsyncWorker,
    AsyncWriter,
)

__all__ = [
    "AsyncClaim",
    "AsyncClaims",
    "AsyncClient",
    "AsyncGroup",
    "AsyncReading",
    "AsyncRegistration",
    "AsyncSubscription",
    "AsyncWorker",
    "AsyncWriter",
    "connect",
    "open",
]
