"""`mqfs bridge fq`: messages of an exchange of a broker of fq, as a peer of it, into the group of that exchange here.

So that a message is there once, it is published under an id made of its own id, its sender and the broker where it
began, and confirmed to the broker after it is committed. A broker that is mqfs redelivers what was not confirmed; the
group remembers the ids for its `dedup`. fqd has no confirmations, and loses the messages in transit.
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
AGAIN_S = 0.1  # between two looks for room
STEADY_S = 30.0  # a connection that lasts as long, or that brings a message, is of use
STATS_S, STATS_BYTES = 4.0, 16 << 20  # of a whole look at the counters; a key waits for its connection for 10 seconds
AT_ONCE = 256  # messages on their way to the group
REFUSED = BadCommand, BadName, Denied, TooLong  # of one message: no stream can take it


@attrs.frozen(kw_only=True)
class Options:
    """Options of the command. `tls`: of the broker. `node`: our server's address, in hops; `group`: its exchanges."""

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
        """That of the broker; of each bridge another, as it is private."""
        return self.queue or f"bridge-{socket.inet_ntoa(self.node)}-{self.exchange}"

    @property
    def kind(self) -> str:
        """The type and the parameters of the queue."""
        return f"disk:private,{'permanent' if self.permanent else 'transient'},backlog=0"

    def check(self) -> None:
        """Raises BadConfig for what no broker can be asked: each would end the connection without a word."""
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
    ended: SimpleQueue[BaseException | None] = SimpleQueue()  # None: by a signal
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.put(None))
    # A thread, as a handler that raises would end what it interrupts: in a `__del__` nothing. It ends with the process,
    # where it is: a bridge may be killed at any moment.
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
    """Carry the messages of one exchange."""

    def __init__(self, options: Options, here: GroupLink) -> None:
        self._options, self._here = options, here
        self._is_full = False
        self._is_logged = False  # that it connected
        self._useful_at = math.inf  # of time.monotonic(): a connection lost later is logged, one lost before is not

    def run(self) -> NoReturn:
        """Carry messages, over one connection after the other. Raises MqfsError."""
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
        """Raises OSError, EOFError, Malformed, MqfsError."""
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
                for done in self._carry(data, key.isascii()):  # fqd's are random bytes
                    while old and done >= waiting:
                        self._unbind(commands, answers, old.pop())

    def _bind(self, commands: socket.socket, answers: _Answers) -> int:
        """The route of the program. Raises BadCommand where it is none; OSError where the broker refuses."""
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
        """Raises OSError where the broker refuses."""
        commands.sendall(codec.unbind(route, self._options.exchange.encode()))
        if answers.wait_for("unbound").route == ILLEGAL:
            raise ConnectionRefusedError("unbind of an earlier program refused (the broker's log has the reason)")

    def _earlier_routes(self, route: int) -> tuple[list[int], int]:
        """The routes of other programs, to which an earlier run has bound the queue, and how many messages wait: these
        are to come before. The broker's counters alone tell; where they cannot be read that is logged."""
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
        """`/stats.json` of the broker. Raises OSError, also after STATS_S; HTTPException, ValueError."""
        options, deadline = self._options, time.monotonic() + STATS_S
        with closing(http.client.HTTPConnection(options.host, options.port)) as connection, ExitStack() as stack:
            sock = connection.sock = self._connect(STATS_S, STATS_S)
            timer = threading.Timer(deadline - time.monotonic(), _shut_down, (sock,))  # a timeout is of each piece only
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
        """Yields how many messages have come, at first 0. Confirmed is what was published; a message that came before
        is known, and confirmed, too. Not `confirmed`: fqd delivers nothing again, so what has come is published, also
        when it has gone."""
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
        """None: it was here before, or has too many hops. The last hop is its client's, whose host may be ours."""
        hops = [message.hops[at : at + HOP_BYTES] for at in range(0, len(message.hops), HOP_BYTES)]
        if self._options.node in (hops[:-1] or hops) or len(hops) >= FQ_HOPS:
            return None
        headers = {
            "fq-sender": escape(message.sender),
            "fq-hops": ",".join(map(socket.inet_ntoa, [self._options.node, *hops])),
            "fq-id": message.id.hex(),
        }
        origin = hops[-2] if len(hops) > 1 else b""  # the broker where it began; after it is its client
        id = blake2b(message.id + origin + message.sender, digest_size=16).hexdigest()
        return Outgoing(escape(message.route), message.payload, headers=headers, id=f"fq-{id}")

    def _publish(self, messages: list[Outgoing | None], may_wait: Callable[[], bool]) -> Iterator[int]:
        """Until each is committed, or left out. Before it waits for one it yields how many are before that."""
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
        """Publish the first ones at once, and take from `rest` what is committed: it is not published again, as its id
        may be forgotten before those that are left have room. Whether none was refused. Raises Disconnected,
        Interrupted, and what `may_wait` raises."""
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
        """Why no stream can take the message; None: it is published. Raises any other refusal, and what `may_wait`
        raises."""
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
        """Log once that there is no room, until all messages of one read have room at once again."""
        if isinstance(refusal, LATER) and not self._is_full:
            self._is_full = True
            log.warning("group %s: %s; waiting for room", self._here.path, refusal)


def _is_there(data: socket.socket) -> bool:
    """True. Raises EOFError where the connection has ended: what the broker does not have confirmed comes again, and
    some of that may be committed, which the group remembers for a while only."""
    poll = select.poll()
    poll.register(data, select.POLLRDHUP)
    if poll.poll(0):
        raise EOFError
    return True


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        sock.shutdown(socket.SHUT_RDWR)


def _confirmation(count: int) -> bytes:
    """All of the first `count` messages of this connection are safe. To fqd it is a message to no exchange."""
    return codec.relayed(Message(codec.CONFIRM, b"", bytes(codec.ID_BYTES), count.to_bytes(8), b"mqfs"))


class _Answers:
    """The answers of a broker to commands."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._parser = sock, AnswerParser()
        self._found: list[codec.Answer] = []

    def wait_for(self, kind: str) -> codec.Answer:
        """Raises OSError, also where the broker refuses; EOFError, Malformed."""
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
