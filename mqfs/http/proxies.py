"""Reverse proxies: what they say of a client's address, and of the way it came.

Owns what X-Forwarded-For and X-Forwarded-Proto mean. Only the proxies of `--http-proxy` are believed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from mqfs.errors import BadAddress

Network = IPv4Network | IPv6Network


def parse_network(text: str) -> Network:
    """Raises BadAddress."""
    try:
        return ip_network(text)
    except ValueError:
        raise BadAddress(f"invalid network {text!r} (expected such as 10.1.2.0/24 or ::1/128)") from None


class Proxies:
    """Networks whose connections are those of proxies."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        """Raises BadAddress."""
        self._networks = tuple(map(parse_network, networks))

    def has(self, host: Hashable) -> bool:
        """Whether connections of a host are a proxy's; those of a unix socket's peer never."""
        address = _address(host) if isinstance(host, str) and self._networks else None
        return address is not None and any(address in network for network in self._networks)

    def client(self, host: str, forwarded: str) -> str:
        """The rightmost address that is no proxy's: each proxy adds at the right who came to it. `host`: of the
        connection; `forwarded`: the header, of which a client may have written all but what proxies added."""
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
