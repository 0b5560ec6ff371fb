"""The user of a request (of its socket, of its token, or named by a proxy), and what a browser's page may do."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

import attrs

from mqfs import limits
from mqfs.errors import BadAddress, Denied, MqfsError
from mqfs.http.answers import Answer, Headers, NoToken, Unauthorized
from mqfs.http.wire import Request
from mqfs.model import User
from mqfs.net import identity
from mqfs.net.peer import TOKEN_NEEDED, Peer

OPEN = ((".web",), (".health",))  # first names that need no token: they show nothing of the tree
CHALLENGES = [("WWW-Authenticate", 'Bearer realm="mqfs"'), ("WWW-Authenticate", 'Basic realm="mqfs"')]


class Gate:
    """The authentication of a front end's requests, with the count of wrong tokens of each address."""

    def __init__(self) -> None:
        self._failures: dict[Hashable, int] = {}  # by address; the least recent failure is first

    def user(self, peer: Peer, authorization: str | None) -> User:
        """Return the user of a request. Raises Unauthorized, Denied."""
        if peer.refused:
            raise Denied(peer.refused)
        if authorization is None and peer.needs_token:
            raise NoToken(TOKEN_NEEDED)
        if not peer.fixed or authorization is None:
            return peer.itself()  # named by the kernel, the certificate or --tcp-user
        secret = _secret(authorization)
        grant = peer.tokens.user(secret, f"{peer.where} {peer.account}") if peer.tokens is not None and secret else None
        if grant is None:
            self._count(peer.account)
            raise Unauthorized
        return identity.user(grant.uid, peer.where, grant=grant)

    @staticmethod
    def explain(error: MqfsError, peer: Peer, known: tuple[str | None, User] | None) -> MqfsError:
        """Return a refusal that names the user whose rights were checked, if the client gave no token; else `error`.
        `known`: the Authorization header of the client, and the user it stands for. Raises NotAnswered."""
        if type(error) is not Denied or not peer.fixed or known is None or known[0] is not None:
            return error
        name = identity.shown_user(known[1].uid)
        return Denied(f"{error} (a client without a token is {name!r}: see --tcp-user and --token-file)")

    def delay(self, peer: Peer) -> float:
        """Return the delay in seconds before a wrong token from the peer's address is answered."""
        return limits.HTTP_FAILURE_S if self._failures.get(peer.account, 0) > limits.HTTP_FAILURES else 0.0

    def _count(self, account: Hashable) -> None:
        self._failures[account] = self._failures.pop(account, 0) + 1
        if len(self._failures) > limits.HTTP_ADDRESSES:
            del self._failures[next(iter(self._failures))]


def _secret(authorization: str) -> bytes:
    """Return the token of an Authorization header, of Bearer or as the password of Basic; empty if it has none."""
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip().encode()
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


# ---------------------------------------------------------------- browsers

# Another site's page must not make a browser write here, nor read through a DNS name of its own. Host, Origin and
# Sec-Fetch-Site are checked; the headers of CORS name the permitted origins.

EXPOSED = (
    "Location, ETag, Mqfs-First, Mqfs-Next, Mqfs-Sequence, Mqfs-Time, Mqfs-Messages, Mqfs-Bytes, Stream-Next-Offset, "
    "Stream-Cursor, Stream-Up-To-Date, Stream-Closed, Stream-TTL, Stream-Expires-At, Stream-SSE-Data-Encoding, "
    "Producer-Epoch, Producer-Seq, Producer-Expected-Seq, Producer-Received-Seq"
)
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})  # the hosts of most requests, compared without parsing
_SAME = ("same-origin", "none")


@attrs.define(eq=False)
class BrowserRules:
    """The rules for browsers. Pages of `origins` may read and write; `hosts` are names of this server beside those of
    loopback. Both may change while it serves."""

    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def check(self, request: Request, rebindable: bool) -> None:
        """Check the host of a request, and its origin if it changes something. Raises Denied.

        `rebindable`: a page of another site could reach this listener by pointing its own DNS name here, as no
        certificate proves the name."""
        host = request.headers.get("host", "")
        if rebindable and host and not self._is_ours(host):
            expected = "localhost, an address, or one of --http-host"
            raise Denied(f"host {host!r}: not a name of this server (expected {expected})")
        if request.method not in SAFE:
            self.check_change(request)

    def check_change(self, request: Request, encrypted: bool = True) -> None:
        """Check the origin of a request that changes something, whatever its method. Raises Denied."""
        given = request.headers
        host, origin, site = given.get("host", ""), given.get("origin"), given.get("sec-fetch-site")
        if site in _SAME or (origin is not None and origin in self.origins):
            return
        if site is not None or (origin is not None and _host_of(origin) != host):
            raise Denied("a request of another site's page (expected one of --http-origin)")
        # A browser sends Origin with unsafe methods, and Sec-Fetch-Site over TLS and to loopback. A GET over plain HTTP
        # has neither: any page can have sent it, unless it has a header that needs the permission of CORS.
        tells = encrypted or not host or _is_loopback(host)
        if request.method in SAFE and not tells and not _is_deliberate(request):
            raise Denied("a GET that changes something (expected POST, or the header X-Requested-With)")

    def _is_ours(self, host: str) -> bool:
        if host in LOCAL or (name := name_of(host)) in LOCAL or name in self.hosts or host in self.hosts:
            return True
        return name.lower() in LOCAL or _address(name) is not None

    def headers(self, request: Request) -> Headers:
        """Return the headers of CORS for an answer; empty where no origin is listed."""
        origin = request.headers.get("origin")
        if not self.origins:
            return []
        if origin is None or origin not in self.origins:
            return [("Vary", "Origin")]
        return [
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Expose-Headers", EXPOSED),
            ("Vary", "Origin"),
        ]

    def preflight(self, request: Request) -> Answer | None:
        """Return the answer to a preflight request of CORS, or None for any other request."""
        given = request.headers
        if request.method != "OPTIONS" or "access-control-request-method" not in given:
            return None
        if given.get("origin") not in self.origins:
            return Answer(204)
        return Answer(
            204,
            headers=[
                ("Access-Control-Allow-Methods", "GET, HEAD, PUT, POST, DELETE"),
                ("Access-Control-Allow-Headers", given.get("access-control-request-headers", "authorization")),
                ("Access-Control-Max-Age", "600"),
            ],
        )


def name_of(host: str) -> str:
    """Return a host without its port."""
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """Return the address, or None for a DNS name, which may resolve to another address later."""
    try:
        return ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    name = name_of(host).lower()
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _is_deliberate(request: Request) -> bool:
    """Whether a request has a header that a page of another site may send only after a preflight."""
    given = request.headers
    return "x-requested-with" in given or given.get("authorization", "").lower().startswith("bearer ")


def _host_of(origin: str) -> str | None:
    """Return the host of an origin, or None where it has none, as "null" of a sandboxed page."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


# ---------------------------------------------------------------- reverse proxies

# X-Forwarded-For and X-Forwarded-Proto have a client's address and protocol. They are trusted only from the proxies of
# `--http-proxy`.

Network = IPv4Network | IPv6Network
USER = "user:"


def parse_proxy(text: str) -> Network | int:
    """Return a network, or the number of a user. Raises BadAddress."""
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
    """The proxies: networks, and users of this machine that connect by a unix socket."""

    def __init__(self, proxies: Iterable[str] = ()) -> None:
        """Parse networks and users (`user:NAME`). Raises BadAddress."""
        parsed = list(map(parse_proxy, proxies))
        self._networks = tuple(one for one in parsed if not isinstance(one, int))
        self._users = frozenset(one for one in parsed if isinstance(one, int))

    def has(self, account: Hashable) -> bool:
        """Whether a host, or a user on a unix socket, is a proxy."""
        if not isinstance(account, str):
            return account in self._users
        address = _address_and_port(account) if self._networks else None
        return address is not None and any(address in network for network in self._networks)

    def client(self, host: Hashable, forwarded: str) -> Hashable:
        """Return the client: the rightmost address that is not a proxy's, as each proxy appends its client's address.

        `host`: the host of the connection, or its user. `forwarded`: the header; the client may have forged the part
        that proxies did not append."""
        words = forwarded.split(",")
        while words and self.has(host):
            address = _address_and_port(words.pop().strip())
            if address is None:
                break
            host = str(address)
        return host


def is_encrypted(proto: str) -> bool:
    """Whether a request used TLS all the way, by X-Forwarded-Proto."""
    return all(word.strip().lower() == "https" for word in proto.split(","))


def _address_and_port(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address, an IPv4 one where it is mapped to IPv6; None for other text, such as "unknown"."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
