"""The options of HTTP and fq: what they may say, and at which addresses these are served. Opens nothing."""

from __future__ import annotations

import re
import socket
from typing import NamedTuple

from mqfs.errors import BadAddress, BadConfig, BadName
from mqfs.http import wire
from mqfs.http.proxies import parse_proxy
from mqfs.net.address import parse_address
from mqfs.server.options import Options
from mqfs.syntax.names import check_name


class Served(NamedTuple):
    """A service at an address. `group`: the one that ntfy is of, or the exchanges of fq."""

    protocol: str
    group: str = ""


HTTP = Served("HTTP")
_HOST_PORT = re.compile(r"([^!:/]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
OPTIONS = {"HTTP": "--http", "ntfy": "--http-ntfy", "fq": "--fq"}  # by protocol


def check(options: Options) -> None:
    """Raises BadConfig."""
    _check_fq(options)
    try:
        option = "--http"
        for text in options.http:
            parse_address(dial_of(text))
        option = "--http-proxy"
        for text in options.http_proxy:
            parse_proxy(text)
        option = "--http-ntfy"
        for text in options.http_ntfy:
            group, address = split_ntfy(text)
            for name in group.split("/"):
                check_name(name)
            parse_address(dial_of(address))
    except BadAddress as error:
        raise BadConfig(f"{option} {error.detail}") from None
    except BadName as error:
        raise BadConfig(f"{option} {text!r}: {error.detail} (expected GROUP=ADDRESS)") from None
    if options.http_qpubs and not options.http:
        raise BadConfig("--http-qpubs: nothing to serve it at (expected --http ADDRESS)")
    if wire.MISSING and (served := addresses(options)):
        raise BadConfig(f"{OPTIONS[served[0][1].protocol]}: {wire.MISSING} (install it: pip install httptools)")


def _check_fq(options: Options) -> None:
    try:
        for text in options.fq:
            parse_address(dial_of(text))
        for name in options.fq_group.split("/"):
            check_name(name)
    except BadAddress as error:
        raise BadConfig(f"--fq {error.detail}") from None
    except BadName as error:
        raise BadConfig(f"--fq-group {options.fq_group!r}: {error.detail}") from None
    if options.fq_node is not None and not is_ipv4(options.fq_node):
        raise BadConfig(f"--fq-node {options.fq_node!r}: no IPv4 address (expected one such as 192.0.2.1)")
    if options.fq_users is not None and options.token_file is None:
        raise BadConfig("--fq-users: no passwords (expected --token-file FILE)")


def is_ipv4(text: str) -> bool:
    """Whether it is an address as it is printed."""
    try:
        return socket.inet_ntop(socket.AF_INET, socket.inet_pton(socket.AF_INET, text)) == text
    except OSError:
        return False


def split_ntfy(text: str) -> tuple[str, str]:
    """Group and address of `--http-ntfy`. Raises BadAddress."""
    group, sign, address = text.partition("=")
    if not sign:
        raise BadAddress(f"invalid address {text!r}: no group (expected GROUP=ADDRESS)")
    return group, address


def addresses(options: Options) -> list[tuple[str, Served]]:
    """Each address of HTTP and fq, with what is served there."""
    found = [(text, HTTP) for text in options.http]
    for text in options.http_ntfy:
        group, address = split_ntfy(text)
        found.append((address, Served("ntfy", group)))
    found += [(text, Served("fq", options.fq_group)) for text in options.fq]
    return [(dial_of(text), served) for text, served in found]


def dial_of(text: str) -> str:
    """An address as the other listeners have it: HOST:PORT is TCP, as clients of HTTP write it."""
    match = _HOST_PORT.fullmatch(text)
    return f"tcp!{match[1].strip('[]')}!{match[2]}" if match else text
