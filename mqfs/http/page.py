"""The page at `/.web/`: files of the package, sent as they are. What it shows comes from the other routes."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from mqfs.errors import NotFound
from mqfs.http.answers import Answer, Headers
from mqfs.http.call import Call

PLACE = "/.web/"
KINDS = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_SECURE: Headers = [
    (
        "Content-Security-Policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
]


@cache
def _file(name: str) -> tuple[bytes, str]:
    """A file of the page, and its entity tag."""
    data = files("mqfs.http").joinpath("web", name).read_bytes()
    return data, f'"{urlsafe_b64encode(sha256(data).digest()[:12]).decode()}"'


async def serve(call: Call) -> Answer:
    """A file of the page. Raises NotFound."""
    if call.path.text + "/" == PLACE:
        return Answer(308, headers=[("Location", PLACE)])
    name = call.target.name or "index.html"
    if name not in KINDS:
        raise NotFound(name)
    data, tag = _file(name)
    head = [("ETag", tag), *_SECURE]
    if call.has_tag(tag):
        return Answer(304, headers=head)
    return Answer(200, data, KINDS[name], head)


def lead_to(path: str) -> Answer:
    """The way to what the page shows of a group."""
    return Answer(303, headers=[("Location", f"{PLACE}#{path}"), ("Vary", "Accept"), ("Cache-Control", "no-store")])
