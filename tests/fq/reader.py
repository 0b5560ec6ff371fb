"""A client of fq that writes each message down, by one write a message, until it is killed; it connects again.

python -m tests.fq.reader ADDRESS QUEUE TYPE FILE

ADDRESS: of a unix socket, or HOST:PORT; then it asks for heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time

from mqfs.fq import codec
from mqfs.fq.codec import MessageParser
from tests.fq.client import Client, Refused
from tests.support.eventually import eventually

BEAT_MS = 300
PEEK_BYTES = 4_096  # many messages


def connected(address: str | tuple[str, int], queue: str, kind: str) -> Client | None:
    """None while the queue has too many clients: those of readers that were killed, and not noticed yet."""
    try:
        return Client(address, queue, kind)
    except Refused:
        return None


def write_down(client: Client, file: int) -> None:
    """Record messages before they are taken from the kernel: so all that this process has taken is recorded."""
    parser = MessageParser(relayed=True)
    data = client.data.recv(PEEK_BYTES, socket.MSG_PEEK)
    if not data:
        raise EOFError
    for message in parser.receive(data):
        os.write(file, b"%b %b\n" % (message.payload, message.id.hex().encode()))
    client.data.recv(len(data) - parser.held, socket.MSG_WAITALL)


def beat(commands: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            commands.sendall(codec.BEAT)
            time.sleep(BEAT_MS / 4e3)


def main() -> None:
    where, queue, kind, path = sys.argv[1:]
    host, _, port = where.rpartition(":")
    address = (host, int(port)) if host else where
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    while True:
        client = eventually(lambda: connected(address, queue, kind))
        if host:
            client.commands.sendall(codec.beat_request(BEAT_MS))
            threading.Thread(target=beat, args=(client.commands,), daemon=True).start()
        with contextlib.suppress(EOFError, OSError):  # on a busy machine beats may come too late
            while True:
                write_down(client, file)
        client.close()


if __name__ == "__main__":
    main()
