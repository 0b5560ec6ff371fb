"""`mqfs bridge fq`: carry messages of an exchange from an fq broker into the group of that exchange, as a peer.

To have each message once, the bridge publishes it with an id made from the message's id, its sender and the broker of
its origin. It confirms the message to the broker after it is committed. An mqfs broker redelivers unconfirmed messages;
the group remembers the ids for its `dedup`. fqd has no confirmations: messages in transit are lost with a connection.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from hashlib import blake2b
from itertools import islice
from queue import SimpleQueue
from typing import Any, NoReturn

import attrs

from mqfs.bridge.link import LATER, GroupLink
from mqfs.client import Outgoing
from mqfs.client.waiting import Backoff
from mqfs.errors import BadCommand, BadConfig, BadName, Denied, Disconnected, Interrupted, MqfsError, TooLong
from mqfs.fq import codec
from mqfs.fq.codec import HOP_BYTES, ILLEGAL, AnswerParser, Malformed, Message, MessageParser
from mqfs.limits import FQ_HOPS, PROGRAM_BYTES
from mqfs.net.sockets import detect_dead_host
from mqfs.net.tls import client_context
from mqfs.syntax.names import escape

log = logging.getLogger("mqfs.bridge")
RECEIVE_BYTES = 1 << 18
CONNECT_S, ANSWER_S = 10.0, 30.0
AGAIN_S = 0.1  # longest pause between two attempts to publish a message without room
STEADY_S = 30.0  # a connection that lasts for this long, or that brings a message, counts as useful
STATS_S, STATS_BYTES = 4.0, 16 << 20  # bounds of reading the counters; a key waits for its connection for 10 seconds
AT_ONCE = 256  # messages under way to the group
REFUSED = BadCommand, BadName, Denied, TooLong  # errors of a message that no stream can take


@attrs.frozen(kw_only=True)
class Options:
    """Options of the command. `tls`: of the broker. `node`: our server's address in hops; `group`: the group that has
    the exchanges as its groups."""

    host: str
    port: int
    tls: bool = False
    exchange: str
    program: str
    address: str
    node: bytes
    group: str = "fq"
    queue: str = ""
    permanent: bool = True
    name: str = "mqfs"
    password: str = ""
    user: str = ""
    token: str = ""

    @property
    def queue_name(self) -> str:
        """The name of the queue at the broker. Each bridge has its own, as the queue is private."""
        return self.queue or f"bridge-{socket.inet_ntoa(self.node)}-{self.exchange}"

    @property
    def kind(self) -> str:
        """The type and the parameters of the queue, as fq writes them."""
        return f"disk:private,{'permanent' if self.permanent else 'transient'},backlog=0"

    def check(self) -> None:
        """Check options that a broker would answer only by ending the connection. Raises BadConfig."""
        texts = {
            "EXCHANGE": (self.exchange, 1, codec.NAME_BYTES),
            "PROGRAM": (self.program, 1, PROGRAM_BYTES),
            "--queue": (self.queue_name, 1, codec.QUEUE_BYTES - len(self.kind) - 1),
            "--name": (self.name, 0, codec.NAME_BYTES),
            "--password-file": (self.password, 0, codec.PASSWORD_BYTES),
        }
        for what, (text, least, most) in texts.items():
            try:
                size = len(text.encode())
            except UnicodeEncodeError:
                raise BadConfig(f"{what}: not UTF-8 (expected that)") from None
            if not least <= size <= most:
                raise BadConfig(f"{what}: {size} bytes (expected {least} to {most})")


def run(options: Options) -> int:
    """Carry messages until SIGTERM or SIGINT. Raises BadConfig, MqfsError, OSError."""
    options.check()
    ended: SimpleQueue[BaseException | None] = SimpleQueue()  # None: a signal
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.put(None))
    # In a thread: a signal handler that raises could be lost, as in a `__del__`. The thread ends with the process, as a
    # bridge may be killed at any moment.
    threading.Thread(target=_carry_until_error, args=(options, ended), daemon=True).start()
    if (error := ended.get()) is not None:
        raise error
    return 0


def _carry_until_error(options: Options, ended: SimpleQueue[BaseException | None]) -> None:
    stopped = threading.Event()  # never set: the process ends
    path = f"{options.group}/{escape(options.exchange.encode())}"
    try:
        link = GroupLink(options.address, path, user=options.user, token=options.token, stopping=stopped, create=True)
        with closing(link) as here:
            Bridge(options, here).run()
    except BaseException as error:
        ended.put(error)


class Bridge:
    """The transfer of the messages of one exchange."""

    def __init__(self, options: Options, here: GroupLink) -> None:
        self._options, self._here = options, here
        self._is_full = False
        self._is_logged = False  # whether the connection was logged
        self._useful_at = math.inf  # monotonic time from which a lost connection, and the next one, is logged

    def run(self) -> NoReturn:
        """Carry messages; connect again after each lost connection. Raises MqfsError."""
        where = f"{self._options.host}!{self._options.port}"
        pauses = Backoff(True, threading.Event())
        while True:
            try:
                self._useful_at = math.inf
                self._carry_until_lost()
            except (OSError, EOFError, Malformed) as error:
                if time.monotonic() >= self._useful_at:
                    pauses, self._is_logged = Backoff(True, threading.Event()), False
                pauses.wait(Disconnected(f"{where}: {str(error) or 'the connection ended'}"))

    def _carry_until_lost(self) -> None:
        """Connect and carry messages until the connection is lost. Raises OSError, EOFError, Malformed, MqfsError."""
        options = self._options
        names = options.name.encode(), options.queue_name.encode(), options.kind.encode(), options.password.encode()
        with self._connect() as commands:
            commands.sendall(codec.auth(*names))
            answers = _Answers(commands)
            key = answers.wait_for("key").text
            route = self._bind(commands, answers)
            old, waiting = self._earlier_routes(route)
            with self._connect() as data:
                data.sendall(codec.data(key, options.node) + _confirmation(0))
                if not self._is_logged:
                    log.info("%s!%d: exchange %s", options.host, options.port, options.exchange)
                self._is_logged, self._useful_at = True, time.monotonic() + STEADY_S
                for done in self._carry(data, key.isascii()):  # keys of fqd are random bytes
                    while old and done >= waiting:
                        self._unbind(commands, answers, old.pop())

    def _bind(self, commands: socket.socket, answers: _Answers) -> int:
        """Bind the program and return its route. Raises BadCommand for an invalid program; OSError if the broker
        refuses."""
        options = self._options
        flags = codec.FLAG_PEER | (codec.FLAG_PERMANENT if options.permanent else codec.FLAG_TRANSIENT)
        commands.sendall(codec.bind(flags, options.exchange.encode(), options.program.encode()))
        if (route := answers.wait_for("bound").route) != ILLEGAL:
            return route
        from mqfs.fq.exchanges import translate  # here, as it loads much of the server

        try:
            translate(options.program.encode())
        except BadCommand as error:
            raise BadCommand(f"program {options.program!r}: refused by the broker: {error}") from None
        raise ConnectionRefusedError("bind refused (expected a user who may bind; the broker's log has the reason)")

    def _unbind(self, commands: socket.socket, answers: _Answers, route: int) -> None:
        """Remove a route of the queue. Raises OSError if the broker refuses."""
        commands.sendall(codec.unbind(route, self._options.exchange.encode()))
        if answers.wait_for("unbound").route == ILLEGAL:
            raise ConnectionRefusedError("unbind of an earlier program refused (the broker's log has the reason)")

    def _earlier_routes(self, route: int) -> tuple[list[int], int]:
        """Return the routes of other programs that an earlier run bound to the queue, and the number of messages that
        wait. The routes are unbound after these messages came. If the broker's counters cannot be read, that is logged
        and there are none."""
        options = self._options
        try:
            counters = self._counters()
            rows = counters["exchanges"][options.exchange]["routes"].values()
            mine = [int(row["route_id"]) for row in rows if row["queue"] == options.queue_name]
            return [each for each in mine if each != route], int(counters["queues"][options.queue_name]["backlog"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            if not self._is_logged:
                log.warning("queue %s: counters not read, earlier programs stay bound: %r", options.queue_name, error)
            return [], 0

    def _counters(self) -> Any:
        """Read `/stats.json` of the broker. Raises OSError, also after STATS_S; HTTPException, ValueError."""
        options, deadline = self._options, time.monotonic() + STATS_S
        with closing(http.client.HTTPConnection(options.host, options.port)) as connection, ExitStack() as stack:
            sock = connection.sock = self._connect(STATS_S, STATS_S)
            timer = threading.Timer(deadline - time.monotonic(), _shut_down, (sock,))  # a timeout is for each read
            stack.callback(timer.cancel)
            timer.start()
            token = {"Authorization": f"Bearer {options.password}"} if options.password else {}
            connection.request("GET", "/stats.json", headers=token)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise ValueError(f"status: {answer.status} (expected 200)")
            text = answer.read(STATS_BYTES)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not whole after {STATS_S:g} s")
        return json.loads(text)

    def _connect(self, connect_s: float = CONNECT_S, answer_s: float = ANSWER_S) -> socket.socket:
        options = self._options
        sock = socket.create_connection((options.host, options.port), connect_s)
        detect_dead_host(sock)
        sock.settimeout(answer_s)
        return client_context("fq").wrap_socket(sock, server_hostname=options.host) if options.tls else sock

    def _carry(self, data: socket.socket, confirmed: bool) -> Iterator[int]:
        """Publish received messages, and yield their number so far, at first 0. Raises EOFError at the end.

        Published messages are confirmed, also repeats, which the group knows. Not `confirmed`: the broker is fqd, which
        never redelivers, so received messages are published even after the connection ended.
        """
        data.settimeout(None)
        parser, done = MessageParser(relayed=True), 0
        yield done
        while received := data.recv(RECEIVE_BYTES):
            messages = parser.receive(received)
            skipped, parser.too_large = parser.too_large, 0
            if skipped:
                log.warning("messages left out: %d, too large for this server", skipped)
            may_wait = partial(_is_there, data) if confirmed else lambda: True
            for first in self._publish([*map(self._outgoing, messages)], may_wait):
                if confirmed and first:
                    data.sendall(_confirmation(done + first))
            done += len(messages) + skipped
            if messages or skipped:
                data.sendall(_confirmation(done))
                self._useful_at = 0.0
                yield done
        raise EOFError

    def _outgoing(self, message: Message) -> Outgoing | None:
        """Return a message to publish. None: it passed through this server before, or has too many hops. The last hop
        does not count, as it is its client's, which may be on our host."""
        hops = [message.hops[at : at + HOP_BYTES] for at in range(0, len(message.hops), HOP_BYTES)]
        if self._options.node in (hops[:-1] or hops) or len(hops) >= FQ_HOPS:
            return None
        headers = {
            "fq-sender": escape(message.sender),
            "fq-hops": ",".join(map(socket.inet_ntoa, [self._options.node, *hops])),
            "fq-id": message.id.hex(),
        }
        origin = hops[-2] if len(hops) > 1 else b""  # the broker that got it from its client, the last hop
        id = blake2b(message.id + origin + message.sender, digest_size=16).hexdigest()
        return Outgoing(escape(message.route), message.payload, headers=headers, id=f"fq-{id}")

    def _publish(self, messages: list[Outgoing | None], may_wait: Callable[[], bool]) -> Iterator[int]:
        """Publish messages until each is committed or left out. Before a wait it yields the number of messages that are
        done, so that they can be confirmed."""
        rest = {at: message for at, message in enumerate(messages) if message is not None}
        while rest:
            yield next(iter(rest))  # an error of the group may end the bridge
            if not self._here.repeat(partial(self._put_some, rest, may_wait)):
                break
        self._is_full = self._is_full and bool(rest)
        for at, message in rest.items():
            yield at
            pauses = Backoff(True, threading.Event(), longest_s=AGAIN_S)
            put = partial(self._here.repeat, partial(self._put, message, may_wait))
            if (error := pauses.retry(put, *LATER)) is not None:
                log.warning("message %s left out: %s", (message.headers or {})["fq-id"], error)

    def _put_some(self, rest: dict[int, Outgoing], may_wait: Callable[[], bool]) -> bool:
        """Publish the first AT_ONCE messages of `rest` at once, and remove the committed ones from it. These must not
        be published again later, when their ids may be forgotten. Whether none was refused. Raises Disconnected,
        Interrupted, and as `may_wait`."""
        may_wait()
        some = [*islice(rest.items(), AT_ONCE)]
        try:
            errors = self._here.put_all([message for _, message in some], lambda: False)
        except TooLong:
            return False
        for (at, _), error in zip(some, errors, strict=True):
            if error is None:
                del rest[at]
        refusals = [*filter(None, errors)]
        for error in refusals:
            if isinstance(error, (Disconnected, Interrupted)):
                raise error
        if refusals:
            self._note(refusals[0])
        return not refusals

    def _put(self, message: Outgoing, may_wait: Callable[[], bool]) -> MqfsError | None:
        """Publish a message. Returns the error if no stream can ever take it; None: it is published. Raises any other
        refusal, and as `may_wait`."""
        may_wait()
        try:
            (error,) = self._here.put_all([message], may_wait)
        except TooLong as too_long:
            return too_long
        if error is None or isinstance(error, REFUSED):
            return error
        self._note(error)
        raise error

    def _note(self, refusal: MqfsError) -> None:
        """Log that there is no room: once, and again only after all messages of one read had room at once."""
        if isinstance(refusal, LATER) and not self._is_full:
            self._is_full = True
            log.warning("group %s: %s; waiting for room", self._here.path, refusal)


def _is_there(data: socket.socket) -> bool:
    """Return True while the connection lasts; raise EOFError when it has ended. Waiting on would be wrong: the broker
    redelivers unconfirmed messages, and the group remembers the ids of committed ones only for a time."""
    poll = select.poll()
    poll.register(data, select.POLLRDHUP)
    if poll.poll(0):
        raise EOFError
    return True


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)


def _confirmation(count: int) -> bytes:
    """Encode the confirmation of the first `count` messages of this connection. fqd takes it as a message to an unknown
    exchange."""
    return codec.relayed(Message(codec.CONFIRM, b"", bytes(codec.ID_BYTES), count.to_bytes(8), b"mqfs"))


class _Answers:
    """The answers of a broker to commands."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._parser = sock, AnswerParser()
        self._found: list[codec.Answer] = []

    def wait_for(self, kind: str) -> codec.Answer:
        """Return the next answer of a kind, and skip others. Raises OSError, also if the broker refuses; EOFError,
        Malformed."""
        while True:
            while self._found:
                answer = self._found.pop(0)
                if answer.kind == "error":
                    raise ConnectionRefusedError(answer.text.decode(errors="replace"))
                if answer.kind == kind:
                    return answer
            if not (data := self._sock.recv(RECEIVE_BYTES)):
                raise EOFError
            self._found += self._parser.receive(data)
