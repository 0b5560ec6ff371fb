"""What a browser may not be made to do by another site's page: write here, or read through a name of its own.

Owns the checks of Host, Origin and Sec-Fetch-Site, and the headers of CORS.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import attrs

from mqfs.errors import Denied
from mqfs.http.answers import Answer, Headers
from mqfs.http.wire import Request

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})  # most requests come to these: they are not parsed
_SAME = ("same-origin", "none")


@attrs.frozen
class BrowserRules:
    """`origins` may read and write from their pages, `hosts` are names of this server beside those of loopback."""

    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def check(self, request: Request, rebindable: bool) -> None:
        """Raises Denied. `rebindable`: a page whose own name leads here now would reach it: no certificate says whose
        name it is."""
        host = request.headers.get("host", "")
        if rebindable and host and not self._is_ours(host):
            expected = "localhost, an address, or one of --http-host"
            raise Denied(f"host {host!r}: not a name of this server (expected {expected})")
        if request.method not in SAFE:
            self.check_change(request)

    def check_change(self, request: Request, encrypted: bool = True) -> None:
        """Check one that changes something, whatever its method. Raises Denied."""
        given = request.headers
        host, origin, site = given.get("host", ""), given.get("origin"), given.get("sec-fetch-site")
        if site in _SAME or (origin is not None and origin in self.origins):
            return
        if site is not None or (origin is not None and _host_of(origin) != host):
            raise Denied("a request of another site's page (expected one of --http-origin)")
        # A browser sends Origin with any other method, and Sec-Fetch-Site by TLS and to loopback. Of a GET by plain
        # HTTP it tells nothing: any page can have made it, but for a header that needs our leave.
        tells = encrypted or not host or _is_loopback(host)
        if request.method in SAFE and not tells and not _is_deliberate(request):
            raise Denied("a GET that changes something (expected POST, or the header X-Requested-With)")

    def _is_ours(self, host: str) -> bool:
        if host in LOCAL or (name := name_of(host)) in LOCAL or name in self.hosts or host in self.hosts:
            return True
        return name.lower() in LOCAL or _address(name) is not None

    def headers(self, request: Request) -> Headers:
        """Of every answer to a page of a listed origin."""
        origin = request.headers.get("origin")
        if not self.origins:
            return []
        if origin is None or origin not in self.origins:
            return [("Vary", "Origin")]
        exposed = "Location, ETag, Mqfs-First, Mqfs-Next, Mqfs-Sequence, Mqfs-Time, Mqfs-Messages, Mqfs-Bytes"
        return [
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Expose-Headers", exposed),
            ("Vary", "Origin"),
        ]

    def preflight(self, request: Request) -> Answer | None:
        """The answer to the question of a page of a listed origin whether it may; None: it is no such question."""
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
    """Without the port."""
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """None: it is a name, which may lead elsewhere tomorrow."""
    try:
        return ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    name = name_of(host).lower()
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _is_deliberate(request: Request) -> bool:
    """Whether it has a header that a page of another site may not send unasked."""
    given = request.headers
    return "x-requested-with" in given or given.get("authorization", "").lower().startswith("bearer ")


def _host_of(origin: str) -> str | None:
    """None where it has none, as that of a page in a sandbox."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None
