"""The front ends of a server process that begin with HTTP: HTTP itself and fq, made from its options and listeners.

What a new front end needs: docs/contributing/hacking.md.
"""

from __future__ import annotations

import hashlib
import logging
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadAddress, BadConfig, BadName
from mqfs.fq.server import FqServer
from mqfs.fq.users import read_users
from mqfs.http.dialects import durable_streams, ntfy, qpubs
from mqfs.http.gate import Proxies, parse_proxy
from mqfs.http.routes import TREE, Table
from mqfs.http.server import HttpServer
from mqfs.net.sockets import Address, TlsAddress, UnixAddress, is_loopback, parse_address
from mqfs.server.options import Options, service_address
from mqfs.server.service import FQ, HTTP, NINEP
from mqfs.serving.accept import Listener
from mqfs.syntax.names import check_name

log = logging.getLogger("mqfs")
DIALECTS: dict[str, Callable[[str], Table]] = {"ntfy": ntfy.table, "Durable Streams": durable_streams.table}
LOOPBACK = b"\x7f"  # first byte of the node of a broker without an address of its own


def make_servers(
    options: Options, tree: Tree, listeners: Mapping[Listener, Served], **shared: Any
) -> list[tuple[str, HttpServer | FqServer]]:
    """Return the servers with listeners, by name. `shared`: arguments of both, as of HttpServer. Raises BadConfig."""
    found: list[tuple[str, HttpServer | FqServer]] = []
    shared = {**shared, "tcp_user": options.tcp_user}
    if of_http := {listener: served for listener, served in listeners.items() if served.protocol not in (NINEP, FQ)}:
        found.append(("HTTP", _http(options, tree, of_http, shared)))
    if of_fq := [listener for listener, served in listeners.items() if served.protocol == FQ]:
        found.append(("fq", _fq(options, tree, of_fq, shared, _page(of_http))))
    return found


def _http(options: Options, tree: Tree, listeners: Mapping[Listener, Served], shared: dict[str, Any]) -> HttpServer:
    web = HttpServer(tree, **shared, proxies=Proxies(options.http_proxy))
    table = qpubs.beside(TREE) if options.http_qpubs else TREE
    for listener, (protocol, group) in listeners.items():
        web.add(listener, DIALECTS[protocol](group) if group else table)
        what, where = f"{protocol} of group {group!r}" if group else protocol, listener.address
        url = _url(listener.address, "" if group else ".web/")
        log.info("%s at %s%s", what, where, f" ({url})" if url else "")
    return web


def _page(listeners: Mapping[Listener, Served]) -> tuple[str, int] | None:
    """Return scheme and port of the page for browsers, or None."""
    for listener, served in listeners.items():
        if served == Served(HTTP) and not isinstance(listener.address, UnixAddress):
            return "https" if isinstance(listener.address, TlsAddress) else "http", listener.address.port
    return None


def _url(address: Address, path: str) -> str:
    """Return the URL for a browser of this machine, or "" for a unix socket."""
    if isinstance(address, UnixAddress):
        return ""
    host = "localhost" if address.host in ("0.0.0.0", "::") else address.host
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if isinstance(address, TlsAddress) else 'http'}://{host}:{address.port}/{path}"


def _fq(
    options: Options, tree: Tree, listeners: list[Listener], shared: dict[str, Any], page: tuple[str, int] | None
) -> FqServer:
    users = None if options.fq_users is None else read_users(options.fq_users)
    node = _node(options, listeners, tree.store.uuid)
    server = FqServer(tree, **shared, group=options.fq_group, node=node, users=users, page=page)
    for listener in listeners:
        server.add(listener)
        log.info("fq of group %r at %s, node %s", options.fq_group, listener.address, socket.inet_ntoa(node))
    return server


def _node(options: Options, listeners: Iterable[Listener], store: str) -> bytes:
    """Return our address in the hops of messages: the option's, else a listener's if it is a network address, else one
    made from the store, so that brokers on one host differ."""
    if options.fq_node is not None:
        return socket.inet_aton(options.fq_node)
    for listener in listeners:
        host = "" if isinstance(listener.address, UnixAddress) else listener.address.host
        if is_ipv4(host) and host != "0.0.0.0" and not is_loopback(host):
            return socket.inet_aton(host)
    return LOOPBACK + hashlib.sha256(store.encode()).digest()[:3]


# ---------------------------------------------------------------- the options of HTTP and fq, checked; opens nothing


_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@*]+")  # as browsers write it: it is compared as a text
_HOST = re.compile(r"[^\s/?#@*]+")


class Served(NamedTuple):
    """A service at an address. `group`: the one that a dialect serves; "": the service is no dialect."""

    protocol: str
    group: str = ""


def check(options: Options) -> None:
    """Check the options of HTTP and fq. Raises BadConfig."""
    _check_fq(options)
    option = "--http"
    try:
        for text in options.http:
            parse_address(text)
        option = "--http-proxy"
        for text in options.http_proxy:
            parse_proxy(text)
        option = "--http-ntfy"
        _check_groups(options.http_ntfy)
        option = "--http-durable"
        _check_groups(options.http_durable)
    except BadAddress as error:
        raise BadConfig(f"{option}: {error.detail}") from None
    except BadName as error:
        raise BadConfig(f"{option}: {error.detail} (expected GROUP=ADDRESS)") from None
    for text in options.http_origin:
        if not _ORIGIN.fullmatch(text):
            expected = "SCHEME://HOST or SCHEME://HOST:PORT in lower case, without a path, or null"
            raise BadConfig(f"--http-origin {text!r}: no browser sends it (expected {expected})")
    for text in options.http_host:
        if not _HOST.fullmatch(text):
            raise BadConfig(f"--http-host {text!r}: not the name of a host (expected one such as mq.example)")


def _check_groups(texts: Iterable[str]) -> None:
    """Check texts of GROUP=ADDRESS. Raises BadAddress, BadName."""
    for text in texts:
        group, address = split_group(text)
        for name in group.split("/"):
            check_name(name)
        parse_address(address)


def _check_fq(options: Options) -> None:
    try:
        for text in options.fq:
            parse_address(text)
        for name in options.fq_group.split("/"):
            check_name(name)
    except BadAddress as error:
        raise BadConfig(f"--fq: {error.detail}") from None
    except BadName as error:
        raise BadConfig(f"--fq-group {options.fq_group!r}: {error.detail}") from None
    if options.fq_node is not None and not is_ipv4(options.fq_node):
        raise BadConfig(f"--fq-node {options.fq_node!r}: not an IPv4 address (expected one such as 192.0.2.1)")
    if options.fq_users is not None and options.token_file is None:
        raise BadConfig("--fq-users: no passwords (expected --token-file FILE)")


def is_ipv4(text: str) -> bool:
    """Whether a text is an IPv4 address in its canonical form."""
    try:
        return socket.inet_ntop(socket.AF_INET, socket.inet_pton(socket.AF_INET, text)) == text
    except (OSError, ValueError):  # a text that C cannot represent
        return False


def split_group(text: str) -> tuple[str, str]:
    """Return group and address of a dialect's option. Raises BadAddress."""
    group, sign, address = text.partition("=")
    if not sign:
        raise BadAddress(f"invalid address {text!r}: no group (expected GROUP=ADDRESS)")
    return group, address


def addresses(options: Options) -> list[tuple[str, Served]]:
    """Return each address, with the service there."""
    dials = [*options.listen, *([service_address(options.service)] if options.service is not None else [])]
    found = [(text, Served(NINEP)) for text in dials] + [(text, Served(HTTP)) for text in options.http]
    for protocol, texts in (("ntfy", options.http_ntfy), ("Durable Streams", options.http_durable)):
        for text in texts:
            group, address = split_group(text)
            found.append((address, Served(protocol, group)))
    return found + [(text, Served(FQ)) for text in options.fq]


def is_on_standard_files(options: Options) -> bool:
    """Whether no address and no mount is given: then 9P is spoken on standard input and output."""
    return options.mount is None and not addresses(options)
