"""What a browser may not be made to do by another site's page: write here, or read through a name of its own.

Owns the checks of Host, Origin and Sec-Fetch-Site, and the headers of CORS.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import attrs

from mqfs.errors import Denied
from mqfs.http.answers import Answer, Headers
from mqfs.http.wire import Request

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SAME = ("same-origin", "none")


@attrs.frozen
class BrowserRules:
    """`origins` may read and write from their pages, `hosts` are names of this server beside those of loopback."""

    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def check(self, request: Request, loopback: bool) -> None:
        """Raises Denied. `loopback`: it came to an address that only this machine can reach."""
        host = request.headers.get("host", "")
        if loopback and host and not self._is_ours(host):
            raise Denied(f"host {host!r} (expected localhost, or one of --http-host)")
        if request.method not in SAFE:
            self.check_change(request)

    def check_change(self, request: Request) -> None:
        """Check one that changes something, whatever its method. Raises Denied."""
        given = request.headers
        host, origin, site = given.get("host", ""), given.get("origin"), given.get("sec-fetch-site")
        if site in _SAME or (origin is not None and origin in self.origins):
            return
        if site is not None or (origin is not None and _host_of(origin) != host):
            raise Denied("a request of another site's page (expected one of --http-origin)")

    def _is_ours(self, host: str) -> bool:
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return name.lower() in LOCAL or name in self.hosts or host in self.hosts

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


def _host_of(origin: str) -> str | None:
    """None where it has none, as that of a page in a sandbox."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None
