"""The options of `mqfs serve`, from the command line and from a TOML file.

Owns their names, their types and how the two are joined (the command line wins). Opens nothing, and checks nothing that
depends on the machine: that is app.py's.
"""

from __future__ import annotations

import os
import pwd
import tomllib
from collections.abc import Mapping
from typing import Any

import attrs

from mqfs.errors import BadConfig


@attrs.frozen
class Options:
    """As on the command line; None and () are not given."""

    store: str | None = None
    mount: str | None = None
    listen: tuple[str, ...] = ()
    http: tuple[str, ...] = ()
    http_origin: tuple[str, ...] = ()  # whose pages may use this server
    http_host: tuple[str, ...] = ()  # its names beside those of loopback
    http_proxy: tuple[str, ...] = ()  # reverse proxies, which say whose requests theirs are
    http_ntfy: tuple[str, ...] = ()  # GROUP=ADDRESS
    http_qpubs: bool = False
    fq: tuple[str, ...] = ()
    fq_group: str = "fq"  # whose groups are its exchanges
    fq_users: str | None = None
    fq_node: str | None = None  # None: an address of a listener, or of the store
    service: str | None = None  # -s: 9P on a unix socket of that name in the name space directory
    default: tuple[str, ...] = ()
    limit: tuple[str, ...] = ()
    tcp_user: str = "nobody"
    token_file: str | None = None
    require_token: bool = False  # of clients over TCP and TLS without a certificate
    tls_cert: str | None = None
    tls_key: str | None = None  # None: in the file of the certificate
    tls_client_ca: str | None = None
    audit: str = "off"
    insecure: bool = False
    allow_other: bool | None = None  # None: as root yes, else no
    trace: str = "off"  # classes, or on: of the front ends


_HTTP = ("http", "http-origin", "http-host", "http-proxy", "http-ntfy")
_FQ = ("fq-group", "fq-users", "fq-node")
_LISTS = ("listen", *_HTTP, "fq", "default", "limit")
_FLAGS = ("http-qpubs", "require-token", "insecure", "allow-other")
_TLS = ("tls-cert", "tls-key", "tls-client-ca")
_TEXTS = ("store", "mount", "service", "tcp-user", "token-file", *_TLS, *_FQ, "audit", "trace")
KEYS = (*_TEXTS, *_LISTS, *_FLAGS)


def read_file(path: str) -> dict[str, Any]:
    """The options of a configuration file, by the names of Options. Raises BadConfig."""
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise BadConfig(f"--config {path}: {error.strerror} (expected a readable TOML file)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"--config {path}: {error} (expected TOML, KEY = VALUE a line)") from None
    return {key.replace("-", "_"): _value(path, key, value) for key, value in values.items()}


def _value(path: str, key: str, value: object) -> object:
    if key in _LISTS:
        words = [value] if isinstance(value, str) else value
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return tuple(words)
        raise BadConfig(f'--config {path}: invalid {key} = {_print(value)} (expected "TEXT" or ["TEXT", "TEXT"])')
    if key in _FLAGS:
        if isinstance(value, bool):
            return value
        raise BadConfig(f"--config {path}: invalid {key} = {_print(value)} (expected true or false)")
    if key in _TEXTS:
        if key == "trace" and isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, str):
            return value
        raise BadConfig(f'--config {path}: invalid {key} = {_print(value)} (expected "TEXT")')
    raise BadConfig(f"--config {path}: unknown key {key!r} (expected one of {' '.join(KEYS)})")


def _print(value: object) -> str:
    """A value of a TOML file on one line."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def join(file: Mapping[str, Any], command_line: Mapping[str, Any]) -> Options:
    """The options of the command line, then those of the file, then the defaults."""
    given = {key: value for key, value in command_line.items() if value not in (None, ())}
    return Options(**{**file, **given})


def service_address(name: str) -> str:
    """The address of `-s NAME`, as plan9port has it: a socket in the name space directory, or NAME as an address."""
    return name if "!" in name else f"unix!{name_space()}/{name}"


def name_space() -> str:
    """The directory where this user's services are found: $NAMESPACE, or one of the display's."""
    if path := os.environ.get("NAMESPACE"):
        return path
    display = os.environ.get("DISPLAY") or ":0"
    if ":" in display:
        display = display.removesuffix(".0")
    return f"/tmp/ns.{_login()}.{display.replace('/', '_')}"


def _login() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
