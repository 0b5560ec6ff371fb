"""The async library by its public name; see aio.py."""

from mqfs.client.aio import (
    AsyncClaim,
    AsyncClaims,
    AsyncClient,
    AsyncGroup,
    AsyncReading,
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
    "AsyncWriter",
    "connect",
    "open",
]
