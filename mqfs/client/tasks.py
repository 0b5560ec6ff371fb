"""The public name of the async library: aio.py."""

from mqfs.client.aio import (
    AsyncClaim,
    AsyncClaims,
    AsyncClient,
    AsyncGroup,
    AsyncReading,
    AsyncRegistration,
    AsyncSubscription,
    AsyncWorker,
    AsyncWriter,
    connect,
    open,
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
