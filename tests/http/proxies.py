"""nginx and haproxy in front of a server, as child processes."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.http.web import Web
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port

GUIDE = ROOT / "docs" / "howto" / "behind-a-proxy.md"
NGINX = """
daemon off;
master_process off;
error_log stderr;
pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
  access_log off;
  keepalive_timeout 1s;
  client_header_timeout 1s;
  client_body_timeout 1s;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  {block}
}}
"""
HAPROXY = """
global
  maxconn 256
defaults
  mode http
  timeout connect 300s
  timeout client 300s
  timeout server 300s
  timeout http-request 1s
  option abortonclose
  option forwardfor
frontend web
  bind 127.0.0.1:{port}
  http-request set-header X-Forwarded-Proto http
  default_backend mqfs
backend mqfs
  server one {server}
"""


class Through(Web):
    """A server as it is reached through a proxy; `direct`: without."""

    def __init__(self, direct: Web, port: int) -> None:
        self.direct, self.server, self.unix, self._port = direct, direct.server, direct.unix, port

    @property
    def port(self) -> int:
        return self._port


def nginx_block() -> str:
    """The nginx block of the guide."""
    found = re.search(r'```nginx title="mqfs.conf"\n(.*?)```', GUIDE.read_text(), re.DOTALL)
    assert found
    return found[1]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


@contextmanager
def nginx(
    web: Web, folder: Path, certificate: Path, *, ca: Path | None = None, version: str = "1.1", unix: bool = False
) -> Iterator[Through]:
    """With the block of the guide. It listens without TLS, too. `ca`: it speaks TLS to the server; `unix`: it connects
    to the server's unix socket."""
    port = free_port()
    server = f"unix:{web.unix}" if unix else f"127.0.0.1:{web.port if ca is None else web.tls_port}"
    block = replaced(
        nginx_block(),
        ("unix:/run/mqfs/http", server),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port}; listen 127.0.0.1:{free_port()} ssl;"),
        ("/etc/ssl/mq.example.pem", str(certificate)),
        ("proxy_http_version 1.1;", f"proxy_http_version {version};"),
    )
    if ca is not None:
        trust = f"proxy_ssl_verify on; proxy_ssl_name localhost; proxy_ssl_trusted_certificate {ca};"
        block = replaced(block, ("proxy_pass http://mqfs;", f"proxy_pass https://mqfs; {trust}"))
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, block=block))
    with _running(["nginx", "-e", "stderr", "-p", str(folder), "-c", str(config)], port, folder / "nginx.log"):
        yield Through(web, port)


@contextmanager
def haproxy(
    web: Web, folder: Path, certificate: Path, *, ca: Path | None = None, unix: bool = False
) -> Iterator[Through]:
    port = free_port()
    server = f"unix@{web.unix}" if unix else f"127.0.0.1:{web.port}"
    if ca is not None:
        server = f"127.0.0.1:{web.tls_port} ssl verify required verifyhost localhost ca-file {ca}"
    config = folder / "haproxy.cfg"
    config.write_text(HAPROXY.format(port=port, server=server))
    with _running(["haproxy", "-db", "-f", str(config)], port, folder / "haproxy.log"):
        yield Through(web, port)


@contextmanager
def _running(command: list[str], port: int, log: Path) -> Iterator[None]:
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        eventually(lambda: _listens(process, port, log), f"{command[0]} at port {port}")
        yield
    finally:
        process.kill()
        process.wait(HANG_S)


def _listens(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


PROXIES = {"nginx": nginx, "haproxy": haproxy}
