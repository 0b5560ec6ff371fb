"""The call that opens an awaited client."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from mqfs.client.aio import AsyncClient

Opening = Callable[[], AbstractAsyncContextManager[AsyncClient]]
