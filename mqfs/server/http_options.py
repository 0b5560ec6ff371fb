"""The options of HTTP: what they may say, and at which addresses it is served. Opens nothing."""

from __future__ import annotations

from mqfs.errors import BadAddress, BadConfig, BadName
from mqfs.http import wire
from mqfs.http.proxies import parse_network
from mqfs.net.address import parse_address
from mqfs.server.options import Options
from mqfs.syntax.names import check_name


def check(options: Options) -> None:
    """Raises BadConfig."""
    try:
        option = "--http"
        for text in options.http:
            parse_address(text)
        option = "--http-proxy"
        for text in options.http_proxy:
            parse_network(text)
        option = "--http-ntfy"
        for text in options.http_ntfy:
            group, address = split_ntfy(text)
            for name in group.split("/"):
                check_name(name)
            parse_address(address)
    except BadAddress as error:
        raise BadConfig(f"{option} {error.detail}") from None
    except BadName as error:
        raise BadConfig(f"{option} {text!r}: {error.detail} (expected GROUP=ADDRESS)") from None
    if options.http_qpubs and not options.http:
        raise BadConfig("--http-qpubs: nothing to serve it at (expected --http ADDRESS)")
    if addresses(options) and wire.MISSING:
        raise BadConfig(f"--http: {wire.MISSING} (install it: pip install httptools)")


def split_ntfy(text: str) -> tuple[str, str]:
    """Group and address of `--http-ntfy`. Raises BadAddress."""
    group, sign, address = text.partition("=")
    if not sign:
        raise BadAddress(f"invalid address {text!r}: no group (expected GROUP=ADDRESS)")
    return group, address


def addresses(options: Options) -> list[tuple[str, str]]:
    """Each address of HTTP, with the group that is served there as ntfy does; empty: the tree is."""
    ntfy = (split_ntfy(text) for text in options.http_ntfy)
    return [*((text, "") for text in options.http), *((address, group) for group, address in ntfy)]
