"""The front end for fq: the kind of a connection, the keys that pair two connections, and shutdown.

An HTTP server accepts the connections, as HTTP is served on the same port.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Set
from functools import partial
from typing import Any

import attrs
import trio

from mqfs import limits
from mqfs.engine.tree.tree import Tree
from mqfs.errors import MqfsError, Standby, ungrouped
from mqfs.fq import codec
from mqfs.fq.codec import COMMANDS, DATA, HOP_BYTES, HTTP, MAGIC_BYTES, NAME_BYTES, OLD_PEER, PEER, Malformed
from mqfs.fq.connection import Client
from mqfs.fq.exchanges import Exchanges
from mqfs.fq.queues import Queue, Refused, parse_options
from mqfs.fq.users import Users
from mqfs.fq.web import Web
from mqfs.http.answers import Unauthorized
from mqfs.http.server import HttpServer
from mqfs.model import Grant
from mqfs.net.peer import Peer
from mqfs.net.tokens import Tokens
from mqfs.serving.accept import Listener
from mqfs.serving.await_step import answered, await_step
from mqfs.serving.stream import Gone, SocketStream

log = logging.getLogger("mqfs.fq")


class FqServer:
    """The server of all fq clients. `users`: from `--fq-users`; `node`: our address in hops. `page`: see Web."""

    def __init__(
        self,
        tree: Tree,
        *,
        group: str,
        node: bytes,
        users: dict[str, str] | None = None,
        page: tuple[str, int] | None = None,
        tokens: Tokens | None = None,
        **shared: Any,
    ) -> None:
        """Make the server. `group`: the path of the group of all exchanges. `shared`: see `HttpServer`."""
        self.web = HttpServer(tree, tokens=tokens, speak=self._speak, name="fq", **shared)
        self.exchanges, self.node = Exchanges(tree, group), node
        self._users = Users(self.web.gate, users, checks=tokens is not None)
        self._table = Web(self.exchanges, self._users, node, page).table()
        self._scopes: set[trio.CancelScope] = set()
        self._clients: dict[bytes, Client] = {}  # by key, clients without a data connection
        self._grants: dict[Client, Grant] = {}
        if tokens is not None:
            tokens.on_ended.append(self._end_tokens)

    def add(self, listener: Listener) -> None:
        self.web.add(listener, self._table)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, or until cancelled."""
        with contextlib.suppress(Standby):  # a standby has no exchanges, and refuses clients
            await self.exchanges.start()
        await self.web.run(task_status=task_status)

    async def stop(self) -> None:
        """End all connections. Messages that were sent, but not acked, are redelivered after the next start."""
        for scope in list(self._scopes):
            scope.cancel()
        await self.web.stop()

    def _end_tokens(self, ended: Set[Grant]) -> None:
        """End the clients of tokens that were revoked or expired."""
        for client, grant in list(self._grants.items()):
            if grant in ended:
                log.info("%s: connection ended: token %s revoked, changed or expired", client.peer.where, grant.id)
                client.scope.cancel()
                client.data_scope.cancel()

    # ------------------------------------------------------------ connections

    async def _speak(self, channel: SocketStream, peer: Peer) -> bool:
        """Serve a connection of fq. False: it speaks HTTP, and its bytes are left unread."""
        scope = trio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                return await self._serve(channel, peer)
        except* Gone:  # perhaps together with the cancellation of a stopping server
            pass
        except* (Malformed, trio.TooSlowError) as errors:
            why = ungrouped(errors)
            log.info("%s: connection ended: %s", peer.where, why if why.args else "no sign of the client")
        except* Exception:
            log.exception("%s: connection ended", peer.where)
        finally:
            self._scopes.discard(scope)
        return True

    async def _serve(self, channel: SocketStream, peer: Peer) -> bool:
        deadline = trio.current_time() + limits.FQ_AUTH_S
        data = await _receive(channel, b"", MAGIC_BYTES, deadline)
        kind, rest = data[:MAGIC_BYTES], data[MAGIC_BYTES:]
        if kind in HTTP:
            channel.unread = data
            return False
        if kind == COMMANDS:
            await self._serve_commands(channel, peer, rest, deadline)
        elif kind in (DATA, PEER, OLD_PEER):
            await self._serve_data(channel, kind, rest, deadline)
        elif data:
            raise Malformed(f"unknown protocol {kind.hex()}")
        return True

    async def _serve_data(self, channel: SocketStream, kind: bytes, data: bytes, deadline: float) -> None:
        """Pair a data connection with its command connection by the key at its beginning, and serve it."""
        node = HOP_BYTES if kind == PEER else 0
        data = await _receive(channel, data, node + 2, deadline)
        end = node + 2 + int.from_bytes(data[node : node + 2])
        if not node + 2 < end <= node + 2 + NAME_BYTES:
            raise Malformed("no key")
        data = await _receive(channel, data, end, deadline)
        client = self._take(data[node + 2 : end])
        with client.data_scope:
            await client.serve_data(channel, data[end:], relayed=kind != DATA)

    def _take(self, key: bytes) -> Client:
        """Return the client of a key, and invalidate the key. Raises Malformed."""
        found = None
        for known, client in self._clients.items():
            if hmac.compare_digest(known, key):
                found = known, client
        if found is None:
            raise Malformed("unknown key, or one that was used")
        del self._clients[found[0]]
        return found[1]

    # ------------------------------------------------------------ commands

    async def _serve_commands(self, channel: SocketStream, peer: Peer, data: bytes, deadline: float) -> None:
        parser = codec.CommandParser()
        while (auth := next(parser.receive(data), None)) is None:
            if not (data := await channel.receive(deadline)):
                return
        assert isinstance(auth, codec.Auth)
        try:
            client = await self._authenticate(channel, peer, auth)
        except (Refused, MqfsError) as error:
            await self._refuse(channel, peer, error)
            return
        key = secrets.token_urlsafe(NAME_BYTES)[:NAME_BYTES].encode()
        self._clients[key] = client
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._forget, key)
                await channel.send(codec.authenticated(key), limits.HTTP_SEND_S)
                await client.serve_commands(channel, parser)
                nursery.cancel_scope.cancel()
        finally:
            await self._end(client, key)

    async def _forget(self, key: bytes) -> None:
        """Invalidate a key that no data connection has used within FQ_AUTH_S."""
        await trio.sleep(limits.FQ_AUTH_S)
        self._clients.pop(key, None)

    async def _refuse(self, channel: SocketStream, peer: Peer, error: Exception) -> None:
        log.info("%s: client refused: %s", peer.where, error)
        if isinstance(error, Unauthorized) and (seconds := self.web.gate.delay(peer)):
            await trio.sleep(seconds)
        await channel.send(codec.refused(str(error)), limits.HTTP_SEND_S)
        await channel.linger()

    async def _authenticate(self, channel: SocketStream, peer: Peer, auth: codec.Auth) -> Client:
        """Authenticate a client, and add it to its queue. Raises Refused, MqfsError."""
        ask = partial(self._users.user, peer, auth.user, auth.password)
        user = await await_step(answered(ask))
        options, name = parse_options(auth.kind), auth.queue
        if not name:
            name = secrets.token_hex(16).encode()
            options = attrs.evolve(options, private=True, permanent=False)
        fair_queue, port = self.web.fairness.of(peer.account), _port(channel.socket)

        def make(queue: Queue) -> Client:
            return Client(self.exchanges, peer, user, auth.user, queue, fair_queue, self.node, port)

        client = await self.exchanges.join(user, name, options, make)
        if user.grant is not None:
            self._grants[client] = user.grant
            try:  # check again: `_end_tokens` missed a token that was revoked while the client waited to join
                if (await await_step(answered(ask))).grant != user.grant:
                    raise Refused("token: changed (expected to authenticate again)")
            except (Refused, MqfsError):
                await self._end(client, b"")
                raise
        return client

    async def _end(self, client: Client, key: bytes) -> None:
        """End a client after its command connection: it receives no more messages, and leaves its queue."""
        self._clients.pop(key, None)
        self._grants.pop(client, None)
        client.scope.cancel()
        with trio.CancelScope(shield=True):
            await client.end_delivery()
            client.queue.members.remove(client)
            await self.exchanges.leave(client.queue)


async def _receive(channel: SocketStream, data: bytes, size: int, deadline: float) -> bytes:
    """Receive until there are `size` bytes with `data`, or the connection ends. Returns all bytes. Raises
    trio.TooSlowError."""
    while len(data) < size and (more := await channel.receive(deadline)):
        data += more
    return data


def _port(sock: socket.socket) -> int:
    name = sock.getpeername()
    return int(name[1]) if isinstance(name, tuple) else 0
