"""The fd keeper: a small process that holds the rings' descriptors, so that they survive a killed server.

keeper_link.py, its client, runs it as a program; it imports nothing of mqfs and never reads a ring. It ends on `quit`,
when its socket's file was removed (with the store), or when it holds nothing and has no connection.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys

NAME = "keeper"  # of the socket, in the store's folder
LOOK_S = 2.0  # between two checks that the store still exists
SEND_S = 1.0  # for a server to take an answer
_SERVERS = 4  # connections at once; one more replaces the oldest
_PACKET_BYTES = 256
_CREDENTIALS = struct.Struct("3i")


class FdKeeper:
    """The descriptors of rings, and the connections of servers."""

    def __init__(self, listener: socket.socket, folder: int, most: int) -> None:
        self.listener, self.folder, self.most = listener, folder, most
        self.made = self.socket_file()
        self.held: dict[bytes, int] = {}
        self.servers: list[socket.socket] = []
        self.quitting = False

    def socket_file(self) -> tuple[int, int] | None:
        try:
            found = os.stat(NAME, dir_fd=self.folder, follow_symlinks=False)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def run(self) -> None:
        while not self.quitting:
            ready = self.wait()
            for sock in ready:
                if sock is self.listener:
                    self.accept()
                elif sock in self.servers:
                    self.serve(sock)
            if not ready and self.is_unused():
                break
        if self.made is not None and self.socket_file() == self.made:
            os.unlink(NAME, dir_fd=self.folder)

    def wait(self) -> list[socket.socket]:
        """Return the readable sockets, by poll: descriptors may exceed the limit of select."""
        by_fd = {sock.fileno(): sock for sock in (self.listener, *self.servers)}
        poll = select.poll()
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        return [by_fd[fd] for fd, _ in poll.poll(LOOK_S * 1_000)]

    def is_unused(self) -> bool:
        gone = self.made is None or self.socket_file() != self.made
        return gone or not (self.servers or self.held)

    def accept(self) -> None:
        """Accept a connection of this user; others are closed."""
        sock, _ = self.listener.accept()
        uid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        if uid != os.geteuid():
            sock.close()
            return
        if len(self.servers) == _SERVERS:
            self.leave(self.servers[0])
        sock.settimeout(SEND_S)
        self.servers.append(sock)

    def leave(self, server: socket.socket) -> None:
        self.servers.remove(server)
        server.close()

    def serve(self, server: socket.socket) -> None:
        """Answer one request."""
        try:
            data, fds, _, _ = socket.recv_fds(server, _PACKET_BYTES, 4)
            if not data:
                self.leave(server)
                return
            verb, _, name = data.partition(b" ")
            answer = self.carry_out(server, verb, name, fds)
            for fd in fds:
                os.close(fd)
            server.send(answer)
        except OSError:
            self.leave(server)

    def carry_out(self, server: socket.socket, verb: bytes, name: bytes, fds: list[int]) -> bytes:
        """Answer a request. A descriptor that is kept is removed from `fds`."""
        if verb == b"keep" and name and len(fds) == 1:
            if name not in self.held and len(self.held) >= self.most:
                return b"no: %d descriptors held (the most)" % self.most
            self.forget(name)
            self.held[name] = fds.pop()
        elif verb == b"drop":
            self.forget(name)
        elif verb == b"list":
            for held, fd in self.held.items():
                socket.send_fds(server, [held], [fd])
        elif verb == b"quit":
            self.quitting = True
        else:
            return b"no: unknown request (expected keep NAME with a descriptor, drop NAME, list or quit)"
        return b"ok"

    def forget(self, name: bytes) -> None:
        if name in self.held:
            os.close(self.held.pop(name))


def main() -> None:
    """Run a keeper. Arguments: the descriptors of the listening socket and of the store's folder, and the most rings
    held."""
    listener, folder, most = map(int, sys.argv[1:4])
    FdKeeper(socket.socket(fileno=listener), folder, most).run()


if __name__ == "__main__":
    main()
