"""The peer of a connection, and the users as whom it may attach: mqfs(4), "Identity".

Over a unix socket the kernel names the peer. Over TCP every client without a token is one configured user; over TLS,
the user of its certificate. Names and numbers come from net.identity, secrets from net.tokens.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable

from mqfs.errors import Denied
from mqfs.model import User
from mqfs.net import identity
from mqfs.net.tokens import Tokens

TOKEN_NEEDED = "client over TCP without a token: refused by this server (expected a token)"


class Peer:
    """The user at the other end of one connection."""

    def __init__(
        self,
        where: str,
        uid: int,
        gid: int | None = None,
        pid: int = 0,
        *,
        groups: frozenset[int] | None = None,
        fixed: bool = False,
        host: str = "",
        tokens: Tokens | None = None,
    ) -> None:
        """`fixed`: a client without a token acts as `uid`, whatever it claims (TCP). `host`: its address. `groups`: of
        the peer's process, with `gid`; None: those of the system's database."""
        self.where, self.uid, self.gid, self.pid, self.fixed, self.tokens = where, uid, gid, pid, fixed, tokens
        self.groups = groups
        self.refused = ""  # why no attach is permitted
        self.certified = False  # identified as that user by its certificate
        self.account: Hashable = host or uid  # the account that its connection, fids and memory are charged to

    def attach(self, uname: str, n_uname: int) -> User:
        """Return the user of an attach. Raises Denied, NotAnswered."""
        if self.refused:
            raise Denied(self.refused)
        if self.needs_token:
            raise Denied(TOKEN_NEEDED)
        if self.fixed or identity.is_named(self.uid, uname, n_uname):
            return self.itself()
        if self.uid not in (0, os.geteuid()):
            wanted = uname if n_uname == identity.NONUNAME else n_uname  # the number as it is: a look-up may take long
            raise Denied(f"cannot attach as {wanted!r}: the connection is user {identity.shown_user(self.uid)!r}")
        uid = identity.user_number(uname) if n_uname == identity.NONUNAME else n_uname
        if uid is None:
            raise Denied(f"unknown user {uname!r}")
        return self.itself() if uid == self.uid else identity.user(uid, self.where, pid=self.pid)

    @property
    def needs_token(self) -> bool:
        """Whether no attach is permitted without a token."""
        return self.fixed and not self.certified and self.tokens is not None and self.tokens.required

    def charged_to(self, account: Hashable) -> Peer:
        """Return a copy of the peer for a request that it passes on, charged to the client at that address."""
        other = copy.copy(self)
        other.account = account
        return other

    def as_proxy(self, uid: int, tokens: Tokens | None) -> Peer:
        """Return the peer of a unix socket as a proxy: its clients act as clients over TCP do."""
        return Peer(self.where, uid, fixed=True, tokens=tokens).charged_to(self.account)

    def refuse(self, why: str) -> None:
        """Permit no attach, not even by a token."""
        self.refused, self.tokens = why, None

    def look_up(self) -> None:
        """Look up all names that an attach needs in the system's database. Raises NotAnswered."""
        gid = self.itself().gid
        identity.user_name(self.uid)
        identity.group_name(gid)

    def itself(self) -> User:
        """Return the user that the kernel names. Raises NotAnswered, but not after `look_up` succeeded."""
        if self.groups is None or self.gid is None:
            known = identity.user(self.uid, self.where, gid=self.gid, pid=self.pid)
            self.gid, self.groups = known.gid, known.groups  # for as long as the peer is connected
        return User(self.uid, self.gid, self.groups, self.pid, self.where)
