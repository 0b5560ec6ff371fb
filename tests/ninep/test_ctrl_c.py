"""Ctrl-C in the blocking client, at each point where it may be raised: no thread hangs, and nothing is lost."""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import linecache
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mqfs import errors
from mqfs.client.transport import ninep
from mqfs.engine.tree.tree import Tree
from mqfs.model import Qid
from mqfs.ninep.client import connection as blocking
from mqfs.ninep.client.machine import Channel, ClientMachine
from mqfs.ninep.codec.messages import Rflush, Rread, Rwrite, Tflush, Tread, Twrite
from mqfs.ninep.codec.wire import Dialect, Framer, decode, encode
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.ninep import Running, open_handles
from tests.support.server import Server


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt in the main thread; not in the end of what an earlier test left, where it is
    ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("call", ["read", "write"])
def test_ctrl_c_among_replies_leaves_no_thread_waiting(server: Running, tree: Tree, ctrl_c: None, call: str) -> None:
    """The main thread receives the replies of the others, and is interrupted before it handed out all."""
    with ThreadPoolExecutor(2) as threads, server.connect() as one, server.connect() as two:
        one.mkdir("full")
        with one.open("full/ctl", "w") as ctl:
            ctl.write(b"replay all\ndepth 1\nfull block\n")
        full, first, second = one.create("full/s", "r+"), one.create("s", "r+"), one.open("s")
        full.write(b"1")
        full.receive()

        def follow() -> bytes:
            eventually(lambda: one._receiving, "the main thread to receive")
            [slot] = one.send([Tread(0, first.channel.fid, 0, 100)])
            one.watch(slot, lambda: signal.raise_signal(signal.SIGINT))
            return second.receive()

        def write() -> None:
            eventually(lambda: tree.waits.used == 3, "three reads to wait")
            with two.open("s", "w") as writer:
                writer.write(b"x")

        followed, written = threads.submit(follow), threads.submit(write)
        with pytest.raises(KeyboardInterrupt):
            full.receive() if call == "read" else full.write(b"2")
        written.result(HANG_S)
        with pytest.raises(errors.Disconnected, match="receiving was interrupted"):
            followed.result(HANG_S)


_AFTER = ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")  # instructions: there handlers of signals run


def interrupt_at(number: int, call: Callable[[], object], module: Any) -> tuple[BaseException | None, str]:
    """Call, with KeyboardInterrupt at that point of a module, counted from 1, where Ctrl-C may raise it: the error, and
    where that was; "": there are fewer points."""
    points: dict[object, set[int]] = {}
    count, where = 0, ""

    def on_opcode(frame: Any, event: str, _: object) -> Any:
        nonlocal count, where
        if (code := frame.f_code) not in points:
            pairs = itertools.pairwise(dis.get_instructions(code))
            points[code] = {following.offset for one, following in pairs if one.opname in _AFTER}
        if event == "opcode" and frame.f_lasti in points[code]:
            count += 1
            if count == number:
                sys.settrace(None)
                where = f"{code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return on_opcode

    def on_call(frame: Any, *_: object) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return on_opcode

    before = sys.gettrace()
    gc.disable()  # the end of what an earlier test left is no place in this call
    sys.settrace(on_call)
    try:
        call()
    except BaseException as error:
        return error, where
    finally:
        sys.settrace(before)
        gc.enable()
    return None, where


@pytest.mark.parametrize("call", ["stat", "write", "ask"])
def test_ctrl_c_at_any_point_leaves_a_client_that_works_or_is_lost(server: Running, call: str) -> None:
    with server.connect() as one:
        one.create("s").close()
    for number in range(1, 1_000):
        with server.connect() as one:
            file, put = one.open("s", "w"), one.open(".put", "r+")
            calls: dict[str, Callable[[], object]] = {
                "stat": lambda: one.stat("s"),
                "write": lambda: file.write(b"x"),  # noqa: B023
                "ask": lambda: put.ask(b'{"stream":"s"} x'),  # noqa: B023
            }
            error, where = interrupt_at(number, calls[call], blocking)
            if not where:
                break
            assert type(error) is KeyboardInterrupt, where

            def use_again(where: str = where) -> bool:
                with contextlib.suppress(errors.Disconnected):
                    for again in calls.values():  # noqa: B023
                        again()
                return True

            with ThreadPoolExecutor(1) as threads:
                done = threads.submit(use_again)
                try:
                    assert done.result(HANG_S), where
                except TimeoutError:
                    one.close()
                    pytest.fail(f"hangs after Ctrl-C in {where}")
    assert number > 20


def test_ctrl_c_at_any_point_leaves_a_transport_that_connects_again(server: Running) -> None:
    for number in range(1, 100):
        transport = ninep.NinepTransport(server.address)
        error, where = interrupt_at(number, lambda: transport.names(""), ninep)  # noqa: B023
        if not where:
            break
        assert type(error) is KeyboardInterrupt, where
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(transport.connection, HANG_S / 2)
            assert found.result(HANG_S).list(), where
        transport.close()
    transport.close()
    assert number > 2


@pytest.mark.parametrize("call", ["stat", "write"])
def test_ctrl_c_at_any_point_of_a_thread_that_follows_leaves_others_that_receive(server: Running, call: str) -> None:
    """The thread that received goes first, so that the one that is left has to."""
    with server.connect() as admin, ThreadPoolExecutor(2) as threads:
        admin.create("s").close()
        to_first, to_second = admin.create("first", "w"), admin.create("second", "w")
        for number in range(1, 1_000):
            with server.connect() as one:
                file, first, second = one.open("s", "w"), one.open("first"), one.open("second")
                led = threads.submit(first.receive)
                eventually(lambda: one._receiving, "the other thread to receive")
                calls: dict[str, Callable[[], object]] = {
                    "stat": lambda: one.stat("s"),
                    "write": lambda: file.write(b"x"),  # noqa: B023
                }
                error, where = interrupt_at(number, calls[call], blocking)
                if where:
                    assert type(error) is KeyboardInterrupt, where
                followed = threads.submit(second.receive)
                eventually(lambda: one.lost or second._slot in one._followers, where)  # noqa: B023
                to_first.write(b"1")
                ends_with(led, one, b"1", where)
                to_second.write(b"2")
                ends_with(followed, one, b"2", where)
                assert one.lost or not one._followers, where
            if not where:
                break
        assert number > 20


def ends_with(read: Future[bytes], client: blocking.Client, message: bytes, where: str) -> None:
    """The read of another thread has that message, or the connection is lost."""
    try:
        assert read.result(HANG_S) == message, where
    except errors.Disconnected:
        assert client.lost, where
    except TimeoutError:
        client.close()
        pytest.fail(f"another thread hangs after Ctrl-C in {where}")


def test_ctrl_c_while_another_thread_has_the_lock_leaves_it_to_that_thread(
    server: Running, request: pytest.FixtureRequest
) -> None:
    """The thread that followed is woken, waits for the lock, and is interrupted there."""
    main, interrupted = threading.main_thread().ident, threading.Event()
    assert main is not None

    def raise_interrupt(_: int, frame: Any) -> None:
        is_there = "acquire" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if is_there and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, raise_interrupt)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with ThreadPoolExecutor(2) as threads, server.connect() as one, server.connect() as two:
        first, second = one.create("first", "r+"), one.create("second", "r+")
        led = threads.submit(first.receive)
        eventually(lambda: one._receiving, "the other thread to receive")

        def interrupt_inside() -> bool:
            eventually(lambda: one._followers, "the main thread to wait")
            with one._lock:
                for slot in one._followers:
                    assert slot.wake is not None
                    slot.wake.put(None)
                eventually(lambda: signal.pthread_kill(main, signal.SIGINT) or interrupted.is_set(), "Ctrl-C there")
                return one._lock.acquire(timeout=patient(0.3))

        let_in = threads.submit(interrupt_inside)
        with pytest.raises(KeyboardInterrupt):
            second.receive()
        assert let_in.result(HANG_S) is False
        assert not one._followers
        with two.open("first", "w") as writer:
            writer.write(b"x")
        assert led.result(HANG_S) == b"x"


@pytest.mark.parametrize("call", ["read", "read in time", "read in parts"])
@pytest.mark.parametrize("dialect", [Dialect.PLAIN, Dialect.UNIX], ids=lambda dialect: dialect.version)
def test_ctrl_c_at_any_point_of_a_read_loses_no_message(server: Running, dialect: Dialect, call: str) -> None:
    with server.connect() as admin:
        writer = admin.create("s", "w")
        for number in range(1, 1_000):
            with server.connect(dialect=dialect) as one:
                file = one.open("s")
                if call == "read in parts":
                    file.begin_read()
                calls: dict[str, Callable[[], object]] = {
                    "read": file.receive,
                    "read in time": lambda: file.receive(timeout=HANG_S),  # noqa: B023
                    "read in parts": lambda: file.receive(2),  # noqa: B023
                }
                writer.write(b"first")
                writer.write(b"second")
                error, where = interrupt_at(number, calls[call], blocking)
                if not where:
                    break
                assert type(error) is KeyboardInterrupt, where
                came = b""
                with contextlib.suppress(errors.Disconnected, TimeoutError):
                    while len(came) < len(b"firstsecond"):
                        came += file.receive(timeout=patient(2.0))
                assert one.lost or came == b"firstsecond", where
        assert number > 20
        writer.close()


def test_ctrl_c_at_any_point_of_a_close_clunks_that_file_and_no_other(server: Running, tree: Tree) -> None:
    with server.connect() as admin:
        admin.create("s").close()
    for number in range(1, 1_000):
        with server.connect() as one:
            file = one.open("s")
            error, where = interrupt_at(number, file.close, blocking)
            if not where:
                break
            assert type(error) is KeyboardInterrupt, where
            with contextlib.suppress(errors.Disconnected):
                other = one.open("s", "w")  # its fid is that of the first, if that was clunked
                error.__traceback__ = None
                del file, error
                gc.collect()
                one.list()
                assert other.write(b"x") == 1, where
                eventually(lambda: one.lost or open_handles(tree) == 1, f"one file to be open after {where}")
    assert number > 20


def test_an_ask_after_ctrl_c_in_another_has_its_own_answer(ctrl_c: None) -> None:
    """The server answers the first read of an ask before its write is done, and the second as it is cancelled."""
    main = threading.main_thread().ident
    assert main is not None
    ours, theirs = socket.socketpair()
    with theirs, ThreadPoolExecutor(1) as threads, blocking.Client(ours, ClientMachine()) as one:
        put = blocking.File(one, Channel(1, Qid(0, 0, 1), 8_192, False), "r+")

        def serve() -> None:
            frames, written, read, held = Framer(8_192), 0, 0, 0
            while data := theirs.recv(8_192):
                for buffer, start, size in frames.frames(data):
                    request = decode(buffer, start, size, False)
                    if isinstance(request, Twrite):
                        written += 1
                        theirs.sendall(encode(Rwrite(request.tag, len(request.data)), False))
                    elif isinstance(request, Tflush):
                        theirs.sendall(encode(Rread(held, b"1"), False) + encode(Rflush(request.tag), False))
                    elif isinstance(request, Tread):
                        read += 1
                        if read == 2:
                            held = request.tag
                            eventually(lambda: one._receiving, "the main thread to have sent it and to wait")
                            signal.pthread_kill(main, signal.SIGINT)
                            continue
                        theirs.sendall(encode(Rread(request.tag, b"" if read % 2 else b"%d" % written), False))

        served = threads.submit(serve)
        with pytest.raises(KeyboardInterrupt):
            put.ask(b"x")
        assert put.ask(b"y") == b"2"
        one.close()
        served.result(HANG_S)


@pytest.mark.process
@pytest.mark.parametrize("call", ["read", "read in time", "write", "ask", "stat", "open"])
def test_ctrl_c_waits_for_no_server_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctrl_c: None, call: str
) -> None:
    """Whatever the call waits for; with another thread that waits, too, and gets an end."""
    monkeypatch.setattr(blocking, "FLUSH_S", HANG_S)
    served = Server.at(tmp_path)
    try:
        one = blocking.connect(served.address)
        file, other, put = one.create("s", "r+"), one.open("s"), one.open(".put", "r+")
        calls: dict[str, Callable[[], object]] = {
            "read": file.receive,
            "read in time": lambda: file.receive(timeout=HANG_S),
            "write": lambda: file.write(b"x"),
            "ask": lambda: put.ask(b'{"stream":"s"} x'),
            "stat": lambda: one.stat("s"),
            "open": lambda: one.open("s"),
        }
        served.process.send_signal(signal.SIGSTOP)
        main = threading.main_thread().ident
        assert main is not None
        with ThreadPoolExecutor(2) as threads:
            waits = threads.submit(other.receive)
            eventually(lambda: one._receiving, "the other thread to wait")

            def interrupt() -> None:
                eventually(lambda: one._followers, "the main thread to wait")
                signal.pthread_kill(main, signal.SIGINT)

            threads.submit(interrupt)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                calls[call]()
            assert time.monotonic() - began < HANG_S / 2
            with pytest.raises(errors.Disconnected, match="no answer to a cancelled request"):
                waits.result(HANG_S)
        one.close()
    finally:
        served.process.send_signal(signal.SIGCONT)
        served.close()
