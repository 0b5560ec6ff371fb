"""The HTTP front end of a server process, made of its options and listeners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from mqfs.engine.tree.tree import Tree
from mqfs.http.browser import BrowserRules
from mqfs.http.dialects import ntfy, qpubs
from mqfs.http.proxies import Proxies
from mqfs.http.routes import TREE
from mqfs.http.server import HttpServer
from mqfs.net.certificates import ServerTls
from mqfs.net.tokens import Tokens
from mqfs.ninep.server.listener import Listener
from mqfs.server.options import Options
from mqfs.turns import Turns

log = logging.getLogger("mqfs")


def make_server(
    options: Options,
    tree: Tree,
    listeners: Mapping[Listener, str],
    *,
    tokens: Tokens | None,
    tls: ServerTls | None,
    turns: Turns,
    troubles: Callable[[], list[str]],
) -> HttpServer:
    """`listeners`: with the group that each serves as ntfy does; empty: the tree."""
    web = HttpServer(
        tree,
        tcp_user=options.tcp_user,
        tokens=tokens,
        tls=tls,
        turns=turns,
        rules=BrowserRules(options.http_origin, options.http_host),
        proxies=Proxies(options.http_proxy),
        troubles=troubles,
    )
    table = qpubs.beside(TREE) if options.http_qpubs else TREE
    for listener, group in listeners.items():
        web.add(listener, ntfy.table(group) if group else table)
        log.info("%s at %s", f"ntfy of group {group!r}" if group else "HTTP", listener.address)
    return web
