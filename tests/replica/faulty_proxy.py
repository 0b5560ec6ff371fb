"""A proxy before an object store that refuses, delays and loses what passes: by a seed, one request in a few.

500 503 412     the store is not asked
lost            neither is it, and there is no answer
no answer       the store has done it
slow            it has, and its answer takes long

It may be at the end of a slow line, where a request takes as long as its bytes and those of its answer need.
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = ("500", "503", "412", "lost", "no answer", "slow")


class FaultyProxy:
    """At `port`, before `host:port`. `rate`: how many of the requests meet a fault. `bytes_s`: of its line."""

    def __init__(
        self,
        upstream: str,
        seed: int,
        rate: float,
        slow_s: float,
        faults: Sequence[str] = FAULTS,
        bytes_s: float = float("inf"),
    ) -> None:
        self.faults, self.bytes_s = faults, bytes_s
        self.upstream, self.luck, self.rate, self.slow_s = upstream, random.Random(seed), rate, slow_s
        self.count: Counter[str] = Counter()
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            faulty = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def choose(self, method: str) -> str:
        """The fault of one request. A precondition can only fail where there is one."""
        with self._lock:
            fault = self.luck.choice(self.faults) if self.luck.random() < self.rate else ""
            if fault == "412" and method != "PUT":
                fault = "503"
            self.count[fault] += 1
            return fault

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faulty: FaultyProxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.faulty.choose(self.command)
        if fault == "lost":
            self._hang_up()
        elif fault.isdigit():
            self._answer(int(fault), [], b"<Error><Code>Fault</Code></Error>")
        else:
            status, headers, data = self._ask(body)
            time.sleep((len(body) + len(data)) / self.faulty.bytes_s)
            if fault == "no answer":
                self._hang_up()
                return
            if fault == "slow":
                time.sleep(self.faulty.luck.uniform(0, self.faulty.slow_s))
            self._answer(status, headers, data)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

    def _hang_up(self) -> None:
        self.close_connection = True

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(self.faulty.upstream, timeout=60)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        try:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Its requests are many."""
