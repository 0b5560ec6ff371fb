"""A blocking 9P client, for any number of threads: its connection and its open files.

The protocol is in machine.py; here are the socket and the choice of the thread that receives. Of the threads that wait
for replies one receives, and passes the others theirs. So a blocked read delays no other call:

    thread A   wait(read) ---- receives ----- reply of B: wakes B ---- receives ---- its own reply
    thread B         wait(write) -- sleeps -------------- returns

A thread alone never switches to another. Requests are sent in the order of `send`.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from mqfs import limits
from mqfs.errors import BadFrame, Disconnected, Interrupted, MqfsError, OverLimit
from mqfs.model import Stat
from mqfs.net.sockets import Address, TlsAddress, UnixAddress, explain_failure, parse_addresses
from mqfs.ninep.client.dial import Silence, TlsSocket, dial, first_of, is_ready, reason_of, send_all
from mqfs.ninep.client.machine import Channel, ClientMachine, Procedure, clunk_once, expect, flags_of, stat_of_root
from mqfs.ninep.codec.messages import Fcall
from mqfs.ninep.codec.wire import Dialect

T = TypeVar("T")
RECEIVE_BYTES = SEND_BYTES = 65_536  # of one call: long requests over a slow link then show in `progress`
IDLE_S = 5.0  # for which the receiving thread of async programs stays without a request
ATTACH_S = 2.0 * limits.CLIENT_SILENT_S  # to attach at one of several addresses: meanwhile another may begin to serve
FLUSH_S = 10.0  # without any byte: a server that has not answered a Tflush by then has stopped
INTERRUPT_S = 2.0  # that Ctrl-C waits for the answer to a Tflush
ANSWER_BYTES = 65_536  # of the answer to `File.ask`: of `.put`, and of a cursor with names of views
WINDOW = 64  # procedures that run at once: enough to keep a server busy

_forks = 0  # forks before this process; reading it costs a tenth of os.getpid()


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def connect(
    address: Address | str,
    *,
    user: str = "",
    aname: str = "",
    dialect: Dialect = Dialect.PLAIN,
    msize: int = limits.MSIZE_DEFAULT,
    timeout: float | None = None,
    token: str = "",
) -> Client:
    """Connect and attach to the tree at an address, or at the first of several, separated by commas, that serves it.
    `timeout`: of connecting, in seconds. `token`: the secret that identifies a client over TCP or TLS. Raises
    BadAddress, BadConfig, TimeoutError, the server's errors, and Disconnected if no server answers."""
    addresses = parse_addresses(address) if isinstance(address, str) else [address]
    attach = partial(_attach, user=user, aname=aname, dialect=dialect, msize=msize, token=token)
    if len(addresses) == 1:
        return attach(addresses[0], timeout=timeout)
    each_s = min(math.inf if timeout is None else timeout, ATTACH_S)
    return first_of(addresses, partial(attach, timeout=each_s, is_alone=False), timeout)


def _attach(
    where: Address, *, user: str, aname: str, dialect: Dialect, msize: int, timeout: float | None, token: str,
    is_alone: bool = True,
) -> Client:  # fmt: skip
    try:
        sock = dial(where, timeout, is_alone=is_alone)
    except OSError as error:
        raise Disconnected(explain_failure(where, error)) from None
    client = Client(sock, ClientMachine(dialect, msize), str(where))
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        private = isinstance(where, TlsAddress) or os.environ.get("MQFS_PLAIN_TOKEN") == "yes"
        token = "" if isinstance(where, UnixAddress) else token
        client.do(client.caller.connect(user, aname, token, private=private), deadline)
    except BaseException as error:
        client.close()
        if isinstance(error, Disconnected) and deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{where}: no answer in {timeout:g} s") from None
        raise
    sock.settimeout(None)
    client.silence.asks = not is_alone
    return client


class Slot:
    """A request that was sent, and its outcome."""

    reply: Fcall | None = None
    done = False  # answered, flushed or lost; the last two without a reply
    number = 0  # of the reply: a connection counts its replies in order of arrival
    end = 0  # of the last request of a `send`: where it ends among all bytes sent
    flushing = False
    wake: queue.SimpleQueue[None] | None = None  # wakes a thread that follows
    on_done: Callable[[], None] | None = None  # callback of an async program, see `Client.watch`

    def __init__(self, tag: int, request: Any, about: Slot | None = None) -> None:
        self.tag, self.request, self.about = tag, request, about  # request None: the flush of `about`

    def finish(self, reply: Fcall | None) -> None:
        self.reply, self.done = reply, True
        if self.wake is not None:
            self.wake.put(None)
        if self.on_done is not None:
            self.on_done()


class Client:
    """An attached connection, from `connect`. Thread-safe, but only one thread at a time may read an open file."""

    def __init__(self, sock: socket.socket | TlsSocket, machine: ClientMachine, where: str = "") -> None:
        """`where`: the address, for error texts."""
        self.socket, self.caller, self.where = sock, machine, where
        self._send_bytes = sock.sendall if isinstance(sock, TlsSocket) else partial(send_all, sock)
        self.silence = Silence()
        self.lost = ""  # the reason, once lost
        self._dropped: list[Channel] = []  # of collected files, to be clunked with the next call
        self._forks = _forks
        self._lock = threading.Lock()  # guards the machine and the fields below
        self._sending = threading.Lock()  # keeps requests in order; acquired before `_lock`
        self._slots: dict[int, Slot] = {}  # by tag
        self._replies = self._sent = 0  # counts; `_sent`: whole pieces of SEND_BYTES
        self._followers: dict[Slot, queue.SimpleQueue[None]] = {}  # wake threads that wait while another one receives
        self._receiving = False
        self._received: deque[bytes | None] = deque()  # not processed yet
        self._watched: dict[Slot, None] = {}  # by async programs
        self._watching = threading.Condition(self._lock)
        self._has_receiver = False  # whether the thread that receives for async programs runs

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    # ------------------------------------------------------------ the end of a connection

    def close(self, why: str = "the client was closed") -> None:
        """End the connection. Calls that wait in other threads raise Disconnected with that reason."""
        if self._forks == _forks:  # in a child, closing its copy of the socket must not end the parent's connection
            with self._lock:
                self._lose(why)
        self.socket.close()

    @property
    def gone(self) -> bool:
        """Whether the peer has closed the connection, even if this client has not read its end yet."""
        return bool(self.lost) or (self._forks == _forks and is_ready(self.socket, select.POLLRDHUP, 0))

    def _disconnected(self) -> Disconnected:
        if self._forks != _forks:  # checked before any lock: in a child, a thread of the parent may hold it for ever
            return Disconnected("connection of the parent process (expected a new one in the child)", final=True)
        return Disconnected(f"{self.where}: {self.lost}")

    def _lose(self, why: str) -> None:
        """Finish all requests without a reply. The caller holds the lock."""
        self.lost = self.lost or why
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.finish(None)
        for wake in self._followers.values():
            wake.put(None)
        self._watched.clear()
        self._watching.notify()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives; the server sees the end

    # ------------------------------------------------------------ requests out, replies in

    def send(self, requests: Sequence[Fcall]) -> list[Slot]:
        """Send requests without waiting for their replies: all, or none. Raises Disconnected, OverLimit."""
        if self._dropped:
            self._clunk_dropped()
        return self._send(requests)

    def flush(self, slot: Slot) -> None:
        """Cancel a request, unless it is already answered or cancelled; `wait` returns the outcome."""
        self._send((), slot)

    def _send(self, requests: Sequence[Fcall], aborted: Slot | None = None) -> list[Slot]:
        if self._forks != _forks:
            raise self._disconnected()
        with self._sending:
            try:
                with self._lock:
                    if self.lost:
                        raise self._disconnected()
                    slots = list(map(Slot, self.caller.call_all(requests), requests))
                    if aborted is not None and not (aborted.done or aborted.flushing):
                        slots.append(Slot(self.caller.flush(aborted.tag), None, aborted))
                        aborted.flushing = True
                    for slot in slots:
                        self._slots[slot.tag] = slot
                    data = self.caller.take()
                    self.silence.sent += len(data)
                    if slots:
                        slot.end = self.silence.sent
                for at in range(0, len(data), SEND_BYTES):
                    self._send_bytes(data[at : at + SEND_BYTES])
                    self._sent += at + SEND_BYTES <= len(data)  # whole pieces only, not the questions of `give_up`
            except MqfsError:
                raise
            except BaseException as error:
                with self._lock:
                    self._lose(reason_of(error) if isinstance(error, OSError) else "sending was interrupted")
                if isinstance(error, OSError):
                    raise self._disconnected() from None
                raise
        return slots

    def wait(self, slot: Slot, deadline: float | None = None) -> Fcall | None:
        """Return the reply to a request, which may be an error, or None if the request was flushed. `deadline`: of
        time.monotonic(). Raises TimeoutError, Disconnected."""
        if self._forks != _forks:  # in a child, replies to earlier requests are the parent's
            raise self._disconnected()
        with self._lock:
            try:
                while not slot.done:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError("no answer in time")
                    if self._receiving:
                        self._follow(slot, left)
                    else:
                        self._lead(left)
            finally:
                if self._followers:
                    self._hand_over()
            if slot.reply is None and self.lost:
                raise self._disconnected()
            return slot.reply

    def _hand_over(self) -> None:
        """Have a waiting thread receive, if there is one. The caller holds the lock."""
        if not self._receiving and self._followers:
            next(iter(self._followers.values())).put(None)

    def _follow(self, slot: Slot, left: float | None) -> None:
        wake = slot.wake = self._followers[slot] = slot.wake or queue.SimpleQueue()
        try:
            with contextlib.suppress(queue.Empty):
                self._unlocked(wake.get, True, left)
        finally:
            del self._followers[slot]

    def _lead(self, left: float | None) -> None:
        if self.lost:
            raise self._disconnected()
        why, self._receiving = "", True
        try:
            if not self._received:
                self._unlocked(self._receive, left)
        except (OSError, ValueError) as error:  # ValueError: the socket was closed meanwhile
            why = reason_of(error)
        finally:
            self._receiving = False  # first, for Ctrl-C: the next thread that receives begins with `_received`
            self._take_received(why)

    def _unlocked(self, wait: Callable[..., None], *arguments: Any) -> None:
        """Call without the lock. The lock is held afterwards, even if Ctrl-C comes while another thread has it."""
        held = list[bool]()
        interrupted: BaseException | None = None
        try:
            self._lock.release()
            wait(*arguments)
        finally:
            while not held:
                try:  # in one call in C: wherever Ctrl-C is raised, `held` says whether the lock is held
                    held.extend(map(self._lock.acquire, (True,)))
                except BaseException as error:
                    interrupted = error
            if interrupted is not None:
                raise interrupted

    def _take_received(self, why: str) -> None:
        """Process one piece of received data. `why`: why the connection is lost, or "". The caller holds the lock."""
        try:
            data: Any = self._received.popleft() if self._received else None
            if data == b"" or why:
                self._lose(why or "the server closed the connection")
            elif data is not None and not self.lost:  # when sending failed meanwhile, all requests are finished
                for tag, reply in self.caller.receive(data):
                    slot = self._slots.pop(tag)
                    old = slot.about
                    if old is not None and not old.done:
                        self._slots.pop(old.tag, None)
                        self._watched.pop(old, None)
                        old.finish(None)
                    self._watched.pop(slot, None)
                    self._replies = slot.number = self._replies + 1
                    if slot.end > self.silence.taken:
                        self.silence.taken = slot.end
                    slot.finish(reply)
        except BadFrame as error:
            self._lose("it answers in HTTP (expected a 9P server)" if data[:5] == b"HTTP/" else str(error))
        except BaseException:  # Ctrl-C: the replies of other threads are in that data
            self._lose("receiving was interrupted")
            raise

    def _receive(self, left: float | None) -> None:
        """Append received bytes to `_received`: b"" at the end, nothing after a time-out. Raises OSError."""
        try:
            if left is None or is_ready(self.socket, select.POLLIN, left):
                # In one call in C: if Ctrl-C were raised after `recv`, the replies to other threads would be lost.
                self._received.extend(map(self.socket.recv, (max(RECEIVE_BYTES, self.caller.missing),)))
                return
        except BlockingIOError:
            pass
        if self.silence.look(self.socket, progress(self), self._sending.locked()):
            with contextlib.suppress(MqfsError):  # the connection is lost, or has no tag left for the question
                self._send([stat_of_root(self.caller)])
                self.silence.asked = True

    # ------------------------------------------------------------ requests that no thread waits for

    def watch(self, slot: Slot, call: Callable[[], None]) -> None:
        """Call `call` once a request is answered, flushed or lost. One thread receives for all these requests."""
        if self._forks != _forks:
            raise self._disconnected()
        with self._lock:
            if not (slot.done or self.lost):
                slot.on_done = call
                self._watched[slot] = None
                if not self._has_receiver:
                    threading.Thread(target=self._receive_for_watched, name="mqfs-receiver", daemon=True).start()
                    self._has_receiver = True  # it waits for the lock; if it cannot be started, the next call retries
                self._watching.notify()
                return
        call()

    def _receive_for_watched(self) -> None:
        """Receive, or follow the receiving thread, while requests are watched. End after IDLE_S without one."""
        own = Slot(-1, None)  # to follow by: another thread may follow a watched request itself, to take it back
        with self._lock:
            while not self.lost:
                if not self._watched:
                    self._hand_over()
                    if not self._watching.wait(IDLE_S) and not self._watched:
                        break
                elif self._receiving:
                    self._follow(own, None)
                else:
                    self._lead(None)
            self._has_receiver = False
            self._hand_over()

    # ------------------------------------------------------------ calls

    def answer(self, slot: Slot, deadline: float | None = None) -> Fcall:
        """Return the reply to a request that was not flushed. Raises the error in it, TimeoutError, Disconnected."""
        reply: Any = self.wait(slot, deadline)
        return expect(slot.request, reply)

    def give_up(self, slot: Slot, most_s: float = math.inf) -> Fcall | None:
        """Cancel a request. Return its reply if there is one all the same: a write that waits for the disk or the
        replica is always answered, however late. Drops the connection and raises Disconnected if the cancel is not
        answered in `most_s` seconds, or no byte moves for FLUSH_S though the server is asked for its root."""
        until = time.monotonic() + most_s
        self.flush(slot)
        moved, moved_at = progress(self), time.monotonic()
        while True:
            try:
                return self.wait(slot, min(until, time.monotonic() + FLUSH_S / 2))
            except TimeoutError:
                now, before, moved = time.monotonic(), moved, progress(self)
                moved_at = moved_at if moved == before else now
                with self._lock:
                    if now >= min(until, moved_at + FLUSH_S):
                        self._lose(f"no answer to a cancelled request in {min(most_s, FLUSH_S):g} s")
                        raise self._disconnected() from None
                with contextlib.suppress(OverLimit):
                    self._send([stat_of_root(self.caller)])

    def _cancel(self, slot: Slot | None) -> Fcall | None:
        """Cancel a request after Ctrl-C as `give_up` does, within INTERRUPT_S; None: it has no reply. Without a request
        drop the connection: Ctrl-C came between two requests, and the state of the fids is unknown."""
        with contextlib.suppress(Disconnected):
            if slot is not None:
                return self.give_up(slot, INTERRUPT_S)
            with self._lock:
                self._lose("a call was interrupted")
        return None

    def do(self, procedure: Procedure[T], deadline: float | None = None) -> T:
        """Return the result of a procedure. After TimeoutError the connection is unusable."""
        self._clunk_dropped()
        try:
            return self._drive(procedure, deadline)
        except MqfsError as error:
            raise error.with_traceback(None) from None  # the frames of the protocol would hide the caller's line

    def _clunk_dropped(self) -> None:
        if self._forks != _forks:
            raise self._disconnected()
        while self._dropped:
            with contextlib.suppress(MqfsError, IndexError):  # another thread may have popped the last
                self._drive(clunk_once(self.caller, self._dropped.pop()))

    def _drive(self, procedure: Procedure[T], deadline: float | None = None, slot: Slot | None = None) -> T:
        """Run a procedure. `slot`: its first request, if already sent."""
        step: Callable[[Any], Fcall] = procedure.send
        answer: Fcall | MqfsError | None = None
        try:
            while True:
                if slot is None:
                    with self._lock:  # the procedure allocates tags and fids of the machine
                        request = step(answer)
                    [slot] = self._send([request])
                try:
                    step, answer = procedure.send, self.answer(slot, deadline)
                except (Disconnected, TimeoutError):
                    raise
                except MqfsError as error:
                    step, answer = procedure.throw, error
                slot = None
        except StopIteration as done:
            value: T = done.value
            return value
        except (MqfsError, TimeoutError):
            raise
        except BaseException:  # Ctrl-C
            self._cancel(slot)
            raise

    def begin(self, procedures: Sequence[Procedure[T]]) -> tuple[list[Slot], Callable[[], list[T]]]:
        """Send the first request of each procedure, all at once. Return their slots, and a function that the caller
        must call: it completes the procedures and returns the results, or raises the first error."""
        self._clunk_dropped()
        with self._lock:
            requests = [next(procedure) for procedure in procedures]
        slots = self._send(requests)

        def finish() -> list[T]:
            results, failed = list[T](), list[MqfsError]()
            for procedure, slot in zip(procedures, slots, strict=True):
                try:
                    results.append(self._drive(procedure, slot=slot))
                except Disconnected:
                    raise
                except MqfsError as error:
                    failed.append(error.with_traceback(None))
            if failed:
                raise failed[0]
            return results

        return slots, finish

    def together(self, procedures: Iterable[Procedure[T]]) -> list[T | MqfsError]:
        """Return the result or the error of each procedure. Up to WINDOW of them run at once, in any order."""
        self._clunk_dropped()
        results: dict[int, T | MqfsError] = {}
        waiting: deque[tuple[int, Procedure[T], Slot]] = deque()

        def advance(number: int, procedure: Procedure[T], step: Callable[[Any], Fcall], answer: Any) -> None:
            try:
                with self._lock:
                    request = step(answer)
            except StopIteration as done:
                results[number] = done.value
            except MqfsError as error:
                results[number] = error
            else:
                waiting.append((number, procedure, self._send([request])[0]))

        left = enumerate(procedures)
        while True:
            for number, procedure in islice(left, WINDOW - len(waiting)):
                advance(number, procedure, procedure.send, None)
            if not waiting:
                return [results[number] for number in sorted(results)]
            number, procedure, slot = waiting.popleft()
            try:
                reply = self.answer(slot)
            except Disconnected:
                raise
            except MqfsError as error:
                advance(number, procedure, procedure.throw, error)
            else:
                advance(number, procedure, procedure.send, reply)

    def drop(self, channel: Channel) -> None:
        """Have the next call clunk a collected file. Not done here: this may run in the middle of a call."""
        self._dropped.append(channel)

    # ------------------------------------------------------------ files

    def open(self, path: str, mode: str = "r", *, nonblocking: bool = False) -> File:
        return File(self, self.do(self.caller.open(path, flags_of(mode), nonblocking=nonblocking)), mode)

    def create(self, path: str, mode: str = "w", permissions: int = 0o666) -> File:
        return File(self, self.do(self.caller.create(path, flags_of(mode), permissions)), mode)

    def mkdir(self, path: str, permissions: int = 0o777) -> None:
        self.do(self.caller.mkdir(path, permissions))

    def remove(self, path: str) -> None:
        self.do(self.caller.remove(path))

    def rename(self, path: str, name: str) -> None:
        """Rename a file within its group."""
        self.do(self.caller.rename(path, name))

    def chmod(self, path: str, permissions: int) -> None:
        self.do(self.caller.chmod(path, permissions))

    def stat(self, path: str) -> Stat:
        return self.do(self.caller.stat(path))

    def list(self, path: str = "") -> list[str]:
        return self.do(self.caller.names(path))


class File(io.RawIOBase):
    """An open file. Each read returns a message or a part of one; each write is a message."""

    def __init__(self, client: Client, channel: Channel, mode: str) -> None:
        super().__init__()
        self.client, self.channel, self._flags = client, channel, flags_of(mode)
        self._slot: Slot | None = None  # the pending read
        self._begun: Slot | None = None  # the read begun by `when_ready` or `begin_read`
        self._interrupted = self._is_closing = False
        self._beginning = threading.Lock()  # held by `close`, and to begin a read that no thread waits for

    is_lost = property(lambda self: bool(self.client.lost))

    def readable(self) -> bool:
        return self._flags != os.O_WRONLY

    def writable(self) -> bool:
        return self._flags != os.O_RDONLY

    def receive(self, count: int = limits.MESSAGE_BYTES, timeout: float | None = None) -> bytes:
        """Return the bytes of one read, at most `count`, or b"" at the end, within `timeout` seconds. After
        TimeoutError or Interrupted nothing was read: this or the next read returns a message that came all the same."""
        channel = self.channel
        if channel.kept is not None:
            return channel.take_kept(count)
        deadline = None if timeout is None else time.monotonic() + timeout
        slot: Slot | None = None
        offset = channel.offset
        try:
            slot, self._begun = self._begun or self._send(channel.read_request(count)), None
            reply: Any = expect(slot.request, self._reply(slot, deadline))
            while channel.took(len(reply.data), slot.request.count):
                request, slot = slot.request, None
                slot = self._send(request)
                reply = expect(request, self._reply(slot, deadline))
            data: bytes = reply.data
            if len(data) > count:  # `begin_read` asked for more
                channel.kept, data = data[count:], data[:count]
            return data
        except (MqfsError, TimeoutError):
            raise
        except BaseException:  # Ctrl-C
            channel.keep(self.client._cancel(slot), offset)
            raise
        finally:
            self._slot = None

    def _send(self, request: Fcall) -> Slot:
        [slot] = self.client.send([request])
        self._slot = slot
        if self._interrupted:
            self.client.flush(slot)
        return slot

    def when_ready(self, call: Callable[[], None]) -> None:
        """Begin a read, if none is begun, and call `call` once `receive` does not wait, perhaps from another thread. If
        the file is closed, call at once: its fid may be another file's. Raises Disconnected."""
        self.begin_read()
        slot = self._begun
        if slot is None or self._is_closing:
            call()
        else:
            self.client.watch(slot, call)

    def begin_read(self) -> None:
        """Begin the read of the next `receive`, unless it is begun, or kept data will do. Raises Disconnected."""
        with self._beginning:
            if not self._is_closing and self.channel.kept is None:
                self._begun = self._begun or self._send(self.channel.read_request(limits.MESSAGE_BYTES))

    def look_up(self, path: str) -> Callable[[], bool | None]:
        """Begin a read, and after it ask whether a file exists. Return a function to be called after `receive`: it
        returns the answer, or None if the read was answered after the question. Raises Disconnected."""
        self.begin_read()
        read = self._begun
        [asked], finish = self.client.begin([self.client.caller.exists(path)])

        def answer() -> bool | None:
            [found] = finish()
            return found if read is None or 0 < read.number < asked.number else None

        return answer

    def _reply(self, slot: Slot, deadline: float | None) -> Fcall:
        try:
            reply = self.client.wait(slot, deadline)
        except TimeoutError:
            if (late := self.client.give_up(slot)) is None:
                raise
            return late
        if reply is None:
            self._interrupted = False
            raise Interrupted
        return reply

    def interrupt(self) -> None:
        """End the read that waits in another thread, or else the next one, with Interrupted."""
        self._interrupted = True
        slot = self._slot
        if slot is not None:
            with contextlib.suppress(Disconnected):
                self.client.flush(slot)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self.receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _require_open(self) -> None:
        """Raise Disconnected if the file is closed: its fid may be another file's."""
        if self._is_closing:
            raise Disconnected("the file was closed")

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Write one message. Raises TooLong."""
        self._require_open()
        [slot] = self.client.send([self.channel.request(bytes(data))])
        try:
            reply: Any = self.client.answer(slot)
        except MqfsError as error:
            raise error.with_traceback(None) from None
        except BaseException:  # Ctrl-C
            self.client._cancel(slot)
            raise
        return int(reply.count)

    def send(self, data: bytes) -> Callable[[], Fcall]:
        """Begin to write one message. Return a function that waits for the answer. Raises TooLong."""
        self._require_open()
        return partial(self.client.answer, self.client.send([self.channel.request(data)])[0])

    def ask(self, data: bytes, timeout: float | None = None) -> bytes:
        """Write once, waiting for at most `timeout` seconds, and return the short answer that the next read gets, in
        one round trip. After TimeoutError nothing is written."""
        self._require_open()
        client, asked = self.client, self.channel.read_request(ANSWER_BYTES)
        deadline = None if timeout is None else time.monotonic() + timeout
        self.channel.kept = None  # the answer to a call that Ctrl-C ended
        written, read = client.send([self.channel.request(data), asked])
        try:
            expect(written.request, self._reply(written, deadline))
            reply: Any = client.answer(read)
        except (MqfsError, TimeoutError):
            client.give_up(read)
            raise
        except BaseException:  # Ctrl-C
            client._cancel(written)
            client._cancel(read)
            raise
        self.channel.took(len(reply.data), asked.count)
        return reply.data or self.receive(ANSWER_BYTES)  # if the write waited but the read did not, read again

    def close(self) -> None:
        with self._beginning:
            self._is_closing = True
        try:
            with contextlib.suppress(Disconnected):
                self.client.do(clunk_once(self.client.caller, self.channel))
        finally:
            self.__del__()

    def __del__(self) -> None:
        if not self.channel.is_clunked:
            self.client.drop(self.channel)
        super().close()


def progress(client: Client) -> tuple[int, int, int]:
    """Return a value that changes whenever the connection moves bytes: any received, or SEND_BYTES sent."""
    return client._replies, client.caller.missing, client._sent
