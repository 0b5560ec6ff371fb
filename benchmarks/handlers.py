"""Costs of many handlers of `on`: publishing with one and with all of them, and the memory of each.

    python benchmarks/handlers.py [HANDLERS [MESSAGES]]

Each message is for one handler. The times are those of publishing, and until the last call of a handler.
"""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc

import mqfs
from mqfs import Message


def run(handlers: int, messages: int) -> tuple[float, float, float]:
    """Return seconds to publish, seconds to the last call of a handler, and bytes per handler."""
    with mqfs.open(None) as client:
        group = client.group("g", create=True, ctl=["replay all"])
        group.create(*(f"user.{number % 100}.x" for number in range(100)))
        left, done = [messages], threading.Event()

        def handle(message: Message) -> None:
            left[0] -= 1
            if not left[0]:
                done.set()

        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        group.on("user.*.x", handle)
        for number in range(handlers - 1):
            group.on(f"account.{number}.#", lambda message: None, dedup=False)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        begun = time.perf_counter()
        group.publish_many((f"user.{number % 100}.x", b"x" * 100) for number in range(messages))
        published = time.perf_counter() - begun
        if not done.wait(60):
            raise SystemExit(f"{left[0]} messages are missing")
        return published, time.perf_counter() - begun, (after - before) / handlers


def main(handlers: int = 10_000, messages: int = 10_000) -> None:
    print(f"{messages:,} messages     published   handled   bytes a handler")
    for count in (1, handlers, 1, handlers):
        published, handled, size = run(count, messages)
        print(f"{count:>8,} handlers {published:>9.2f} s {handled:>7.2f} s {size:>10,.0f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
