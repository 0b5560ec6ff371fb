"""The tree of a server on this machine: by 9P, and its groups' messages through their rings.

Owns the conditions of that. A ring is attached to by the first publish or subscribe, not before.
"""

from __future__ import annotations

import os
import threading

from mqfs.client.transport.ninep import NinepTransport
from mqfs.client.transport.ring_attachment import RingAttachment
from mqfs.client.transport.ring_group import RingGroup
from mqfs.client.types import Direct
from mqfs.net import identity
from mqfs.net.address import UnixAddress, parse_address
from mqfs.ninep.client.shared_connection import SharedConnection
from mqfs.ring import MISSING, protocol


def why_not(address: str, user: str) -> str:
    """The reason why there can be no rings; empty where there may be."""
    if MISSING:
        return f"C extension not built ({MISSING})"
    if not isinstance(parse_address(address), UnixAddress):
        return "server not on this machine (expected unix!PATH)"
    if user and identity.user_number(user) != os.geteuid():
        return f"user {user!r} is not the user of this process"
    return ""


class RingLink(NinepTransport):
    """See `Link`."""

    def __init__(
        self,
        address: str,
        *,
        user: str = "",
        aname: str = "",
        timeout: float | None = None,
        reconnect: bool | float = True,
        required: bool = False,
    ) -> None:
        self._required, self._limit, self._timeout = required, reconnect, timeout
        self._above = aname.strip("/")
        self._rings: dict[str, RingGroup] = {}
        self._making = threading.Lock()
        where = parse_address(address)
        assert isinstance(where, UnixAddress)
        self._socket_path = where.path + protocol.SUFFIX
        super().__init__(address, user=user, aname=aname, timeout=timeout, reconnect=reconnect is not False)

    def connection(self) -> SharedConnection:
        """See `NinepTransport`. A connection that ended unnoticed, while only rings were used, is replaced at once."""
        now = super().connection()
        if now.gone and self._reconnect:
            now.close("the server closed the connection")
            now = super().connection()
        return now

    def direct(self, path: str) -> Direct:
        with self._making:
            if path not in self._rings:
                self._rings[path] = self._group(path)
            return self._rings[path]

    def _group(self, path: str) -> RingGroup:
        name = "/".join(filter(None, (self._above, path)))
        attachment = RingAttachment(
            self, self._socket_path, name, required=self._required, reconnect=self._limit, timeout=self._timeout
        )
        return RingGroup(self, path, attachment)

    def close(self) -> None:
        with self._making:
            groups = list(self._rings.values())
        for group in groups:
            group.close()
        super().close()
