"""The tree of a server, by 9P: one connection for any number of threads.

Owns the socket and who reads from it: of the threads that wait for replies one receives, and hands the others theirs;
a thread alone never switches to another. What is said is machine.py's. A waiting read holds up nobody.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from mqfs import limits
from mqfs.client.types import READ_BYTES, Direct, File
from mqfs.errors import BadAddress, BadFrame, Disconnected, Interrupted, MqfsError, TooLong
from mqfs.ninep.client import connection, machine
from mqfs.ninep.client.machine import Channel, Procedure
from mqfs.ninep.codec.messages import Fcall, Twrite

T = TypeVar("T")

RECEIVE_BYTES = 262_144
WINDOW_BYTES = 1 << 20  # writes under way at once: bounds what is copied, and what waits in the server
WINDOW = 256


class _Slot:
    """A request that is unanswered."""

    __slots__ = ("about", "done", "flushing", "reply", "tag", "wake")

    def __init__(self, tag: int, about: _Slot | None = None) -> None:
        self.tag, self.about = tag, about  # `about`: of a flush, the request it gives up
        self.reply: Fcall | None = None
        self.done = False  # with a reply; or flushed, or lost, without
        self.flushing = False
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def settle(self, reply: Fcall | None) -> None:
        self.reply, self.done = reply, True
        self.wake.put(None)


class Connection:
    """One attached connection."""

    def __init__(self, address: str, user: str, aname: str, timeout: float | None, token: str = "") -> None:
        self.where = address
        self._client = connection.connect(
            address, user=user, aname=aname, msize=limits.MSIZE_MOST, timeout=timeout, token=token
        )
        self._socket, self.caller = self._client.socket, self._client.caller
        self.lost = ""  # why
        self.dropped: list[int] = []  # fids of files that were forgotten, to be let go with the next call
        self._pid = os.getpid()
        self._lock = threading.Lock()  # for the machine and all below
        self._sending = threading.Lock()  # requests leave in the order of their tags; taken before the other
        self._slots: dict[int, _Slot] = {}
        self._followers: dict[_Slot, None] = {}  # whose threads wait while another receives
        self._receiving = False

    # ------------------------------------------------------------ ends

    def _require(self) -> None:
        if os.getpid() != self._pid:
            raise Disconnected("this connection belongs to the parent process; connect again in the child")
        if self.lost:
            raise Disconnected(f"{self.where}: {self.lost}")

    def _lose(self, why: str) -> None:
        """Everyone who waits is told. The lock is held."""
        self.lost = self.lost or why
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.settle(None)
        for slot in self._followers:
            slot.wake.put(None)

    def close(self, why: str = "the client was closed") -> None:
        with self._lock:
            self._lose(why)
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)  # wakes the thread that receives
        self._socket.close()

    @property
    def gone(self) -> bool:
        """Whether the other end was closed, though nobody may have noticed yet."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(self.lost) or bool(poll.poll(0))

    # ------------------------------------------------------------ requests out, replies in

    def send(self, requests: Sequence[Fcall], give_up: _Slot | None = None) -> list[_Slot]:
        """Send requests, or the Tflush of a request that is given up (none where that was answered, or is flushed,
        already); its own slot tells when that is done."""
        with self._sending:
            with self._lock:
                self._require()
                slots = [_Slot(self.caller.call(request)) for request in requests]
                if give_up is not None and not (give_up.done or give_up.flushing):
                    give_up.flushing = True
                    slots.append(_Slot(self.caller.flush(give_up.tag), give_up))
                self._slots.update((slot.tag, slot) for slot in slots)
                data = self.caller.take()
            try:
                self._socket.sendall(data)
            except BaseException as error:
                with self._lock:
                    self._lose(f"sending failed ({error})" if isinstance(error, OSError) else "a request was cut short")
                if isinstance(error, OSError):
                    raise Disconnected(f"{self.where}: {self.lost}") from None
                raise
        return slots

    def wait(self, slot: _Slot, deadline: float | None = None) -> Fcall | None:
        """The reply; None where the request was flushed. Raises TimeoutError, Disconnected."""
        with self._lock:
            try:
                while not slot.done:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError
                    if self._receiving:
                        self._follow(slot, left)
                    else:
                        self._lead(left)
            finally:
                if not self._receiving and self._followers:
                    next(iter(self._followers)).wake.put(None)  # somebody has to receive
            if slot.reply is None and self.lost:
                raise Disconnected(f"{self.where}: {self.lost}")
            return slot.reply

    def _follow(self, slot: _Slot, left: float | None) -> None:
        self._followers[slot] = None
        self._lock.release()
        try:
            with contextlib.suppress(queue.Empty):
                slot.wake.get(timeout=left)
        finally:
            self._lock.acquire()
            del self._followers[slot]

    def _lead(self, left: float | None) -> None:
        if self.lost:
            raise Disconnected(f"{self.where}: {self.lost}")
        self._receiving = True
        self._lock.release()
        try:
            data = self._receive(left)
        finally:
            self._lock.acquire()
            self._receiving = False
        if data == b"":
            self._lose("the server closed the connection")
        elif data is not None:
            self._distribute(data)

    def _receive(self, left: float | None) -> bytes | None:
        """What came; b"" at the end, None where nothing came in time."""
        try:
            if left is not None:
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(left * 1_000 + 1):
                    return None
            return self._socket.recv(max(RECEIVE_BYTES, self.caller.missing))
        except (OSError, ValueError):
            return b""

    def _distribute(self, data: bytes) -> None:
        try:
            replies = self.caller.receive(data)
        except BadFrame as error:
            self._lose(str(error))
            return
        for tag, reply in replies:
            slot = self._slots.pop(tag)
            old = slot.about
            if old is not None and not old.done:
                self._slots.pop(old.tag, None)
                old.settle(None)
            slot.settle(reply)

    # ------------------------------------------------------------ calls

    def do(self, procedure: Procedure[T]) -> T:
        """Drive a procedure of the client machine to its end."""
        while self.dropped:
            with contextlib.suppress(MqfsError):
                self._drive(self.caller.clunk(self.dropped.pop()))
        return self._drive(procedure)

    def _drive(self, procedure: Procedure[T]) -> T:
        try:
            with self._lock:
                request = next(procedure)
            while True:
                try:
                    reply = machine.expect(request, self._finish(self.send([request])[0]))
                except Disconnected:
                    raise
                except MqfsError as error:
                    with self._lock:
                        request = procedure.throw(error)
                else:
                    with self._lock:
                        request = procedure.send(reply)
        except StopIteration as done:
            value: T = done.value
            return value

    def _finish(self, slot: _Slot) -> Fcall:
        """The reply to a request nobody flushes; where waiting is cut short (Ctrl-C) it is given up."""
        try:
            reply = self.wait(slot)
        except Disconnected:
            raise
        except BaseException:
            self.send([], slot)
            self.wait(slot)
            raise
        assert reply is not None
        return reply


class NinepFile:
    """An open file of a server."""

    def __init__(self, connection: Connection, channel: Channel) -> None:
        self.connection, self.channel = connection, channel
        self._slot: _Slot | None = None  # the read that waits
        self._interrupted = False
        self._closed = False

    def read(self, count: int = READ_BYTES, timeout: float | None = None) -> bytes:
        channel = self.channel
        if channel.kept is not None:
            return channel.take_kept(count)
        deadline = None if timeout is None else time.monotonic() + timeout
        procedure = channel.read(count)
        request = next(procedure)
        slot = self._slot = self.connection.send([request])[0]
        try:
            if self._interrupted:
                self.connection.send([], slot)
            reply = self.connection.wait(slot, deadline)
        except Disconnected:
            raise
        except TimeoutError:
            reply = self._give_up(slot)
            if reply is None:
                raise
        except BaseException:
            late = self._give_up(slot)
            if late is not None:
                channel.keep(late)  # the next read returns it
            raise
        finally:
            self._slot = None
        if reply is None:
            self._interrupted = False
            raise Interrupted
        try:
            procedure.send(machine.expect(request, reply))
        except StopIteration as done:
            return cast(bytes, done.value)
        raise AssertionError("a read of plain 9P2000 is one request")

    def _give_up(self, slot: _Slot) -> Fcall | None:
        self.connection.send([], slot)
        return self.connection.wait(slot)

    def interrupt(self) -> None:
        self._interrupted = True
        slot = self._slot
        if slot is not None:
            with contextlib.suppress(Disconnected):
                self.connection.send([], slot)

    def request(self, data: bytes) -> Twrite:
        """The write, to be sent with others."""
        if len(data) > self.channel.most:
            raise TooLong(f"{len(data)} bytes; over 9P at most {self.channel.most}")
        return Twrite(0, self.channel.fid, 0, data)

    def write(self, data: bytes) -> None:
        self.connection.do(self.channel.write(data))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Disconnected):
                self.connection.do(self.connection.caller.clunk(self.channel.fid))

    def __del__(self) -> None:
        if not self._closed:
            self.connection.dropped.append(self.channel.fid)


class NinepTransport:
    """See `Link`. A connection that was lost is made anew by the next call that opens something, if that is wanted."""

    can_be_lost = True

    def __init__(
        self,
        address: str,
        *,
        user: str = "",
        aname: str = "",
        timeout: float | None = None,
        reconnect: bool = True,
        token: str = "",
    ) -> None:
        self.where = address
        self._options: Any = (user, aname, timeout, token)
        self._reconnect, self._closed = reconnect, False
        self._dialling = threading.Lock()
        self._now = Connection(address, *self._options)

    def connection(self) -> Connection:
        """One that is not known to be lost. Raises Disconnected."""
        with self._dialling:
            if self._closed:
                raise Disconnected("the client was closed")
            if self._now.lost and self._reconnect:
                self._now.close()
                try:
                    self._now = Connection(self.where, *self._options)
                except BadAddress as error:
                    raise Disconnected(error.detail) from None
                except (OSError, MqfsError) as error:
                    raise Disconnected(f"{self.where}: {error}") from None
            return self._now

    def open(self, path: str, mode: str) -> File:
        now = self.connection()
        return NinepFile(now, now.do(now.caller.open(path, connection.flags_of(mode))))

    def create(self, path: str) -> None:
        now = self.connection()
        NinepFile(now, now.do(now.caller.create(path, os.O_WRONLY))).close()

    def mkdir(self, path: str) -> None:
        now = self.connection()
        now.do(now.caller.mkdir(path))

    def remove(self, path: str) -> None:
        now = self.connection()
        now.do(now.caller.remove(path))

    def names(self, path: str) -> list[str]:
        now = self.connection()
        return now.do(now.caller.names(path))

    def direct(self, path: str) -> Direct | None:
        return None

    def write_all(self, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        results: list[MqfsError | None] = []
        at = 0
        while at < len(writes):
            end, size = at, 0
            while end < len(writes) and end - at < WINDOW and (end == at or size + len(writes[end][1]) <= WINDOW_BYTES):
                size += len(writes[end][1])
                end += 1
            results += self._write_some(writes[at:end])
            at = end
        return results

    def _write_some(self, writes: Sequence[tuple[File, bytes]]) -> list[MqfsError | None]:
        connection: Connection | None = None
        requests: list[Twrite | MqfsError] = []
        for file, data in writes:
            assert isinstance(file, NinepFile)
            connection = file.connection
            try:
                requests.append(file.request(data))
            except TooLong as error:
                requests.append(error)
        assert connection is not None
        slots = iter(connection.send([request for request in requests if isinstance(request, Twrite)]))
        return [self._became(connection, next(slots)) if isinstance(r, Twrite) else r for r in requests]

    def _became(self, connection: Connection, slot: _Slot) -> MqfsError | None:
        try:
            reply = connection.wait(slot)
            assert reply is not None
            machine.check(reply)
        except MqfsError as error:
            return error
        return None

    def close(self) -> None:
        with self._dialling:
            self._closed = True
            self._now.close()
