"""Who a request acts as: the peer of its socket, or the user of its token.

Owns the count of wrong tokens of each address.
"""

from __future__ import annotations

import base64
from collections.abc import Hashable

from mqfs import limits
from mqfs.errors import Denied, MqfsError
from mqfs.http.refusals import NoToken, Unauthorized
from mqfs.model import User
from mqfs.net import identity
from mqfs.net.peer import TOKEN_NEEDED, Peer

OPEN = ((".web",), (".health",))  # first names that who has no token may ask for, too: nothing of the tree is there
CHALLENGES = [("WWW-Authenticate", 'Bearer realm="mqfs"'), ("WWW-Authenticate", 'Basic realm="mqfs"')]


class Gate:
    """Of one front end."""

    def __init__(self) -> None:
        self._failures: dict[Hashable, int] = {}  # by address, the one that failed longest ago first

    def user(self, peer: Peer, authorization: str | None) -> User:
        """Raises Unauthorized, Denied."""
        if peer.refused:
            raise Denied(peer.refused)
        if authorization is None and peer.needs_token:
            raise NoToken(TOKEN_NEEDED)
        if not peer.fixed or authorization is None:
            return peer.itself()  # whom the kernel, its certificate or --tcp-user names
        secret = _secret(authorization)
        grant = peer.tokens.user(secret, f"{peer.where} {peer.account}") if peer.tokens is not None and secret else None
        if grant is None:
            self._count(peer.account)
            raise Unauthorized
        return identity.user(grant.uid, peer.where, grant=grant)

    @staticmethod
    def explain(error: MqfsError, peer: Peer, known: tuple[str | None, User] | None) -> MqfsError:
        """A refusal that says whose rights were asked, where the client did not. `known`: what it said, and who it is
        by that."""
        if type(error) is not Denied or not peer.fixed or known is None or known[0] is not None:
            return error
        name = identity.user_name(known[1].uid)
        return Denied(f"{error.detail} (a client without a token is {name!r}: see --tcp-user and --token-file)")

    def delay(self, peer: Peer) -> float:
        """Seconds until a wrong token of that address is answered."""
        return limits.HTTP_FAILURE_S if self._failures.get(peer.account, 0) > limits.HTTP_FAILURES else 0.0

    def _count(self, account: Hashable) -> None:
        self._failures[account] = self._failures.pop(account, 0) + 1
        if len(self._failures) > limits.HTTP_ADDRESSES:
            del self._failures[next(iter(self._failures))]


def _secret(authorization: str) -> bytes:
    """The token of an Authorization header: of Bearer, or the password of Basic. Empty: there is none."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip().encode()
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""
