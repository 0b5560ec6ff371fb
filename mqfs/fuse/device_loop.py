"""The FUSE device loop: requests are read from the device itself, and the hot and the parked ones are answered there.

One task drains the device while the mount lives. It answers reads, writes and interrupts here, and polls, locks, syncs,
lookups and listings in handlers.py, all without a coroutine per request. Requests that make, change, open or remove
files have a task each, in handlers.py. The other requests never wait. They pass to libfuse (and so to pyfuse3) through
a socket pair: the agreement on the protocol, amended, and links, which are refused. The meaning of a file is its
handle's.

Why not pyfuse3 alone: it ignores interrupts, so a parked reader could not even be killed, and the next message would be
delivered to the dead reader. It performs a limited number of requests at once: as many waiting requests of one user
would stop the mount. It needs three times as long.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from functools import partial

import trio

from mqfs import errors, limits
from mqfs.fuse import handlers, protocol
from mqfs.fuse.backend import Backend, File, Files, Nodes
from mqfs.fuse.device import Device, ParkedRequests, Request
from mqfs.fuse.handlers import Handlers, Operations
from mqfs.store.api import Handle

log = logging.getLogger("mqfs.fuse")

BATCH = 64  # requests answered before other tasks run
POLL_NS = 40_000  # for which the loop polls the device before it waits: a caller on another CPU may send a request
POLL_PAYS_NS = 100_000  # it polls only after a wait shorter than this, which is mostly waking; so never when idle
PASSED = frozenset((protocol.READLINK, protocol.SYMLINK, protocol.LINK, protocol.INIT))
WANTED = (
    protocol.POSIX_LOCKS
    | protocol.FLOCK_LOCKS
    | protocol.ATOMIC_O_TRUNC
    | protocol.BIG_WRITES
    | protocol.ASYNC_DIO
    | protocol.PARALLEL_DIROPS
    | protocol.MAX_PAGES
    | protocol.HANDLE_KILLPRIV
)  # not READDIRPLUS: it would enter every file of a directory in the table of nodes
MAX_WRITE, PAGES = 1 << 20, 256
BACKGROUND = 0xFFFF  # many, as asynchronous reads that wait must not block a RELEASE


class DeviceLoop:
    """The loop of one mount's device."""

    def __init__(self, tree: Backend, nodes: Nodes, files: Files, device: int, libfuse: socket.socket) -> None:
        self.nodes, self.files, self.libfuse = nodes, files, libfuse
        self.receive, self.rest = tree.receive, tree.rest
        self.device = Device(device)
        self.parked = ParkedRequests(self.device, tree.waits)
        self._operations = Operations(tree, nodes, files, self.device, self.parked)
        self._init = 0  # the INIT request, whose reply is amended
        self._handlers = {
            **Handlers(tree, nodes, files, self.device, self.parked).by_opcode,
            protocol.INTERRUPT: self._interrupt,
        }

    # ------------------------------------------------------------ requests and replies

    async def requests(self) -> None:
        """Answer or forward requests until the mount ends."""
        async with trio.open_nursery() as nursery:
            await self._drain(nursery)
            nursery.cancel_scope.cancel()

    async def _drain(self, nursery: trio.Nursery) -> None:
        device, buffer, hot = self.device.fd, self.device.buffer, protocol.HOT.unpack_from
        readv, vector, wait_readable = self.device.readv, [buffer], trio.lowlevel.wait_readable
        clock, asks_until, polls, receive, rest = time.monotonic_ns, 0, False, self.receive, self.rest
        handlers, operations = self._handlers, self._operations.by_opcode
        while True:
            for _ in range(BATCH):
                try:
                    size = readv(device, vector)
                except BlockingIOError:
                    if receive():
                        asks_until = 0
                        continue
                    now = clock()
                    if not asks_until:
                        asks_until = now + (POLL_NS if polls else 1)
                    if now < asks_until and rest(device):  # the caller just answered may send another at once
                        continue
                    await wait_readable(device)
                    asks_until, polls = 0, clock() - now < POLL_PAYS_NS
                    continue
                except OSError as error:
                    if error.errno in (errno.ENODEV, errno.ECONNABORTED):  # unmounted, perhaps by force
                        return
                    if error.errno == errno.ENOENT:  # the caller was killed before its request was read
                        continue
                    raise
                asks_until = 0
                opcode, unique, fh, offset, count, caller, flags = hot(buffer)
                try:
                    if opcode == protocol.WRITE:
                        self._write(unique, fh, offset, count, flags)
                    elif opcode == protocol.READ:
                        self._read(unique, fh, offset, count, caller, flags)
                    elif opcode in handlers:
                        handlers[opcode](unique)
                    elif opcode in operations:
                        nursery.start_soon(self._operations.perform, opcode, Request(bytes(self.device.view[:size])))
                        asks_until = 1  # the request's task is next
                    elif opcode in PASSED:
                        await self._forward(opcode, unique, size)
                        asks_until = 1  # pyfuse3's task is next
                    else:
                        self.device.refuse(unique, errno.ENOSYS)  # the kernel does not ask for it again
                except errors.MqfsError as error:
                    self.device.refuse(unique, error.errno)
                except Exception:
                    self.device.bug(unique, f"request {opcode}")
            await trio.lowlevel.checkpoint()

    async def replies(self) -> None:
        """Pass pyfuse3's replies to the device, until its end is closed."""
        buffer = bytearray(64 << 10)
        view = memoryview(buffer)
        while True:
            try:
                size = self.libfuse.recv_into(buffer)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.libfuse)
                continue
            if not size:
                return
            if protocol.REPLY.unpack_from(buffer)[1:] == (0, self._init):
                self._amend_init(buffer)
            self.device.send(view[:size])

    async def _forward(self, opcode: int, unique: int, size: int) -> None:
        buffer, at = self.device.buffer, protocol.IN_HEADER + 12
        if opcode == protocol.INIT:  # libfuse would splice from the socket, which it takes for the device
            self._init = unique
            protocol.U32.pack_into(buffer, at, protocol.U32.unpack_from(buffer, at)[0] & ~protocol.SPLICES)
        while True:
            try:
                self.libfuse.send(self.device.view[:size])
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.libfuse)
            else:
                return

    # ------------------------------------------------------------ data

    def _read(self, unique: int, fh: int, offset: int, count: int, caller: int, flags: int) -> None:
        file = self.files.open.get(fh)
        if file is None or not caller & protocol.READ_LOCKOWNER or self.parked.early:
            if self.parked.closing:
                self.device.answer(unique, b"")
                return
            file = self.files.find(fh)
            if self.parked.is_interrupted(unique):
                return
            if not caller & protocol.READ_LOCKOWNER:
                self._require_pages(file)
        handle = file.handle
        if handle.takes:
            self._set_reader(file)
        if count > limits.MESSAGE_BYTES and handle.parkable:
            # The kernel splits a read that is too large, and asks for the rest only after a full reply.
            count = limits.MESSAGE_BYTES
        step = handle.read(count, offset)
        if step.__class__ is bytes:
            try:
                self.device.writev(
                    self.device.fd, (protocol.REPLY.pack(protocol.OUT_HEADER + len(step), 0, unique), step)
                )
            except OSError as error:
                self.device.lost(error)
                handle.push_back(step)
        elif flags & os.O_NONBLOCK and not step.settled and step.cancel(errors.Again()):
            self.device.refuse(unique, errno.EAGAIN)
        else:
            self.parked.park(unique, step, partial(self._answer_read, unique, handle))

    def _answer_read(self, unique: int, handle: Handle, data: bytes) -> None:
        if not self.device.answer(unique, data):
            handle.push_back(data)

    def _require_pages(self, file: File) -> None:
        """Refuse a read of the kernel that fills pages, for sendfile or splice, unless allowed. Programs then read."""
        if not self.nodes.may_be_mapped(protocol.U64.unpack_from(self.device.buffer, 16)[0]):
            raise errors.BadRequest(f"cannot map {file.node.name!r} (expected read)")

    def _set_reader(self, file: File) -> None:
        """Set the process that reads of a handle that claims. The kernel gives only its thread."""
        thread = protocol.U32.unpack_from(self.device.buffer, protocol.THREAD)[0]
        if thread != file.thread:
            file.thread = thread
            file.process = handlers.membership(thread)[0] if thread else 0  # 0: in another pid namespace
        file.handle.reader_pid = file.process

    def _write(self, unique: int, fh: int, offset: int, count: int, flags: int) -> None:
        file = self.files.open.get(fh)
        if file is None or self.parked.early:
            if self.parked.closing:
                self.device.refuse(unique, errno.EIO)
                return
            file = self.files.find(fh)
            if self.parked.is_interrupted(unique):
                return
        if count > limits.MESSAGE_BYTES:  # perhaps the first piece of a write that the kernel splits
            file.handle.refuse_long(count)
        step = file.handle.write(bytes(self.device.view[protocol.WRITE_DATA : protocol.WRITE_DATA + count]), offset)
        if step.__class__ is int:
            self.device.send(protocol.WRITTEN.pack(24, 0, unique, step, 0))
        elif flags & os.O_NONBLOCK and not step.is_prompt and not step.settled and step.cancel(errors.Again()):
            self.device.refuse(unique, errno.EAGAIN)
        else:
            self.parked.park(unique, step, partial(self._answer_write, unique))

    def _answer_write(self, unique: int, size: int) -> None:
        self.device.send(protocol.WRITTEN.pack(24, 0, unique, size, 0))

    # ------------------------------------------------------------ interrupts

    def _interrupt(self, _: int) -> None:
        """Interrupt a request. There is no reply."""
        unique = protocol.U64.unpack_from(self.device.buffer, protocol.IN_HEADER)[0]
        self.parked.interrupt(unique)

    def close(self) -> None:
        """Answer all parked requests. From now on answer every read with end-of-file."""
        self.parked.close()

    def _amend_init(self, reply: bytearray) -> None:
        """Replace libfuse's options by ours. The kernel ignores those it does not support."""
        major, minor, ahead, *_ = protocol.INIT_OUT.unpack_from(reply, protocol.OUT_HEADER)
        fields = (major, minor, ahead, WANTED, BACKGROUND, BACKGROUND, MAX_WRITE, 1, PAGES, 0, 0)
        protocol.INIT_OUT.pack_into(reply, protocol.OUT_HEADER, *fields)
