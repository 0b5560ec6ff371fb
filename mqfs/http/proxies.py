"""Reverse proxies: what they say of a client's address, and of the way it came.

Owns what X-Forwarded-For and X-Forwarded-Proto mean. Only the proxies of `--http-proxy` are believed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from mqfs.errors import BadAddress
from mqfs.net import identity

Network = IPv4Network | IPv6Network
USER = "user:"


def parse_proxy(text: str) -> Network | int:
    """A network, or the number of a user. Raises BadAddress."""
    if text.startswith(USER):
        uid = identity.user_number(text.removeprefix(USER))
        if uid is None:
            raise BadAddress(f"unknown user {text!r} (expected {USER} and one of getent passwd)")
        return uid
    try:
        return ip_network(text)
    except ValueError:
        expected = f"such as 10.1.2.0/24 or ::1/128, or {USER}NAME"
        raise BadAddress(f"invalid network {text!r} (expected {expected})") from None


class Proxies:
    """Networks, and users of this machine who come by a unix socket, whose connections are those of proxies."""

    def __init__(self, proxies: Iterable[str] = ()) -> None:
        """Raises BadAddress."""
        parsed = list(map(parse_proxy, proxies))
        self._networks = tuple(one for one in parsed if not isinstance(one, int))
        self._users = frozenset(one for one in parsed if isinstance(one, int))

    def has(self, account: Hashable) -> bool:
        """Whether connections of a host, or of a user by a unix socket, are a proxy's."""
        if not isinstance(account, str):
            return account in self._users
        address = _address(account) if self._networks else None
        return address is not None and any(address in network for network in self._networks)

    def client(self, host: Hashable, forwarded: str) -> Hashable:
        """The rightmost address that is no proxy's: each proxy adds at the right who came to it. `host`: of the
        connection, or its user; `forwarded`: the header, of which a client may have written all but what proxies
        added."""
        words = forwarded.split(",")
        while words and self.has(host):
            address = _address(words.pop().strip())
            if address is None:
                break
            host = str(address)
        return host


def is_encrypted(proto: str) -> bool:
    """Whether a request came over TLS all the way, by X-Forwarded-Proto."""
    return all(word.strip().lower() == "https" for word in proto.split(","))


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """None: it is none, or names no host."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
