"""The tree of a server elsewhere without a mount: what a connection holds, and what it may ask at once."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio
import trio.testing

from mqfs import limits
from mqfs.errors import BadRequest, DiskFailed, OverLimit
from mqfs.fuse import protocol
from mqfs.fuse.device import Device, ParkedRequests, Request
from mqfs.model import User
from mqfs.ninep.client import connection
from mqfs.ninep.codec.messages import Fcall, Tclunk
from mqfs.remote.link import Link
from mqfs.remote.session import INTERRUPT_S, WRITTEN_BYTES, Session
from mqfs.remote.tree import RemoteNode, RemoteTree
from mqfs.serving.await_step import await_step
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server, short_folder

ROOT = User(os.geteuid(), os.getegid())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_folder() as folder, Server.at(folder) as it:
        yield it


def serve(server: Server, program: Callable[[RemoteTree, Link], Awaitable[None]], user: str = "") -> None:
    """Run a program with the tree of a connection."""

    async def run() -> None:
        session = Session(server.address, patience_s=60.0, user=user)
        link = await session.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run, link)
            try:
                await program(await RemoteTree.of(session), link)
            finally:
                session.close()
            nursery.cancel_scope.cancel()

    trio.run(run)


def make(server: Server, group: str, *ctl: str) -> None:
    with connection.connect(server.address) as client:
        client.mkdir(group)
        with client.open(f"{group}/ctl", "w") as file:
            file.write("".join(f"{line}\n" for line in ctl).encode())
        client.create(f"{group}/s").close()


def fids_in_use(link: Link) -> int:
    """Beside the root's of the mount. None may be free twice."""
    free = link.machine._free_fids
    assert len(set(free)) == len(free)
    return link.machine._next_fid - 1 - len(link.machine._free_fids)


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")
def test_an_open_for_writing_that_may_not_read_ctl_keeps_no_fid(server: Server) -> None:
    make(server, "closed")
    with connection.connect(server.address) as client:
        client.chmod("closed/ctl", 0o600)
        client.chmod("closed/s", 0o666)
        client.chmod("closed", 0o777)

    async def program(tree: RemoteTree, link: Link) -> None:
        group, _ = await await_step(tree.lookup(ROOT, tree.root, "closed"))
        stream, _ = await await_step(tree.lookup(ROOT, group, "s"))
        for _ in range(50):
            file = await await_step(tree.open(ROOT, stream, os.O_WRONLY))
            assert file.channel is None
            file.close()
        await await_step(tree.lookup(ROOT, group, "s"))  # its answer: the last clunk's was before
        assert fids_in_use(link) == 0

    serve(server, program, user="nobody")


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")
def test_calls_of_a_user_at_once_attach_it_once(server: Server) -> None:
    async def program(tree: RemoteTree, link: Link) -> None:
        users = [User(uid, uid) for uid in range(20_000, 20_020)]
        steps = [tree.lookup(user, tree.root, "ctl") for user in users for _ in range(3)]
        for step in steps:
            await await_step(step)
        await await_step(tree.statfs())
        assert len(link.roots) == len(users)
        assert fids_in_use(link) == len(users)

    serve(server, program)


def test_a_file_that_is_closed_while_its_claim_goes_back_is_closed_once(server: Server) -> None:
    make(server, "queue", "deliver one", "ack next")

    async def program(tree: RemoteTree, link: Link) -> None:
        group, _ = await await_step(tree.lookup(ROOT, tree.root, "queue"))
        stream, _ = await await_step(tree.lookup(ROOT, group, "s"))
        kept = await await_step(tree.open(ROOT, stream, os.O_RDWR))
        await await_step(kept.write(b"1"))
        await await_step(tree.statfs())
        before = fids_in_use(link)
        file = await await_step(tree.open(ROOT, stream, os.O_RDWR))
        assert await await_step(file.read(64)) == b"1"
        file._give_back()  # as at the end of the process, which the kernel closes it for
        file.close()
        assert await await_step(kept.read(64)) == b"1"
        await await_step(tree.statfs())
        assert fids_in_use(link) == before

    serve(server, program)


def full(link: Link, left: int) -> None:
    """Leave `left` tags of the connection."""
    while len(link.machine._free_tags) + limits.TAGS - link.machine._next_tag > left:
        link.machine._tag()


def test_without_tags_all_fails_and_nothing_stays(server: Server) -> None:
    make(server, "full", "replay all")

    async def program(tree: RemoteTree, link: Link) -> None:
        group, _ = await await_step(tree.lookup(ROOT, tree.root, "full"))
        stream, _ = await await_step(tree.lookup(ROOT, group, "s"))
        reader = await await_step(tree.open(ROOT, stream, os.O_RDONLY))
        writer = await await_step(tree.open(ROOT, stream, os.O_WRONLY))
        await await_step(tree.statfs())  # its answer: all others were before
        full(link, 2)
        lookup = tree.lookup(ROOT, group, "s")  # of three requests
        with pytest.raises(OverLimit):
            await await_step(lookup)
        assert (tree.session.working, link.unanswered) == (0, 0)
        assert reader.ahead is not None
        reader.ahead.window = 3
        with pytest.raises(OverLimit):
            reader.read(64)
        assert (len(reader.ahead.asked), len(reader.ahead.waiting)) == (0, 0)
        reader.ahead.window = 1
        waiting = reader.read(64)
        await await_step(writer.write(b"1"))
        assert await await_step(waiting) == b"1"

    serve(server, program)


def test_calls_over_the_share_of_a_user_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a connection: no signal came, so not with EINTR."""
    monkeypatch.setattr(limits, "FUSE_TASKS", 4)

    def request(unique: int) -> Request:
        return Request(protocol.HEADER.pack(protocol.IN_HEADER, protocol.STATFS, unique, 1, 1001, 1001, 1) + bytes(4))

    with short_folder() as folder, Server.at(folder) as server:

        async def program(tree: RemoteTree, link: Link) -> None:
            parked = ParkedRequests(Device(-1), tree.waits)
            server.stop(signal.SIGKILL)
            with trio.fail_after(HANG_S):
                while tree.session.link is not None:
                    await trio.sleep(0.01)
            async with trio.open_nursery() as nursery:
                for unique in (2, 4):
                    nursery.start_soon(parked.wait, request(unique), tree.statfs())
                await trio.testing.wait_all_tasks_blocked()
                working = tree.session.working
                with trio.fail_after(INTERRUPT_S / 2), pytest.raises(OverLimit):
                    await parked.wait(request(6), tree.statfs())
                assert (tree.session.working, len(tree.session.pending), parked.tasks.used) == (working, 2, 2)
                server.start()

        serve(server, program)


@pytest.mark.parametrize("kind", ["reader", "claimer", "writer"])
def test_what_would_wait_over_the_share_of_a_user_says_so(
    kind: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the request, so it is taken back; no signal came, so not with EINTR."""
    make(server, kind, "replay all", *{"claimer": ["deliver one"], "writer": ["depth 1", "full block"]}.get(kind, []))
    monkeypatch.setattr(limits, "PARKED", 4)

    async def program(tree: RemoteTree, link: Link) -> None:
        group, _ = await await_step(tree.lookup(ROOT, tree.root, kind))
        stream, _ = await await_step(tree.lookup(ROOT, group, "s"))
        flags = {"reader": os.O_RDONLY, "claimer": os.O_RDWR, "writer": os.O_WRONLY}[kind]
        files = [await await_step(tree.open(ROOT, stream, flags)) for _ in range(3)]
        if kind == "writer":
            await await_step(files[0].write(b"1"))
        ours, theirs = trio.socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            parked = ParkedRequests(Device(ours.fileno()), tree.waits)
            protocol.U32.pack_into(parked.device.buffer, protocol.USER, 1001)
            for unique, file in enumerate(files, 2):
                parked.park(unique, file.write(b"2") if kind == "writer" else file.read(64), lambda _: None)
            with trio.fail_after(HANG_S):
                _, number, unique = protocol.REPLY.unpack(await theirs.recv(64))
            assert (-number, unique) == (errno.ENFILE, 4)
            assert (len(parked.by_unique), tree.waits.used) == (2, 2)

    serve(server, program)


def test_a_lost_connection_answers_all_though_one_fails(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def program(tree: RemoteTree, link: Link) -> None:
        answers: list[Fcall | None] = []

        def fail(reply: Fcall | None) -> None:
            raise AssertionError("an answer that fails")

        link.send([(Tclunk(0, 900), fail), (Tclunk(0, 901), answers.append)])
        link.lose("the test ends it")
        assert answers == [None]
        assert "answer not handled" in caplog.text

    serve(server, program)


def test_lines_without_room_are_written_not_at_all(server: Server) -> None:
    make(server, "lines", "replay all", "data line")

    async def program(tree: RemoteTree, link: Link) -> None:
        group, _ = await await_step(tree.lookup(ROOT, tree.root, "lines"))
        stream, _ = await await_step(tree.lookup(ROOT, group, "s"))
        file = await await_step(tree.open(ROOT, stream, os.O_WRONLY))
        await await_step(file.write(b"a"))
        tree.session.hold(WRITTEN_BYTES - 20)
        with pytest.raises(OverLimit):
            file.write(b"b\nc\nd\nfghijklmnopqrstuvw")
        tree.session.hold(20 - WRITTEN_BYTES)
        assert await await_step(file.write(b"b\nc\nd\nf")) == 7
        tree.session.hold(WRITTEN_BYTES)  # nothing of it is held any more
        tree.session.hold(-WRITTEN_BYTES)
        file.close()

    serve(server, program)
    with connection.connect(server.address) as client, client.open("lines/.kept/s") as kept:
        assert kept.receive() == b"ab\nc\nd\nf"


# ---------------------------------------------------------------- writes whose answer was lost


def text_of(server: Server, path: str) -> bytes:
    with connection.connect(server.address) as client, client.open(path) as file:
        return file.receive()


async def write_unanswered(tree: RemoteTree, server: Server, folder: RemoteNode, file: str, shows: str) -> int:
    """Write to a `.put`, and lose the connection once the file `shows` the message: the server lives on."""
    put, _ = await await_step(tree.lookup(ROOT, folder, ".put"))
    opened = await await_step(tree.open(ROOT, put, os.O_WRONLY))
    step = opened.write(b'{"stream":"s"} body')
    eventually(lambda: shows.encode() in text_of(server, file), "the message")  # of this thread: no answer is taken
    assert tree.session.link is not None
    tree.session.link.lose("the test ends it")
    try:
        return await await_step(step)
    finally:
        opened.close()


@pytest.mark.parametrize("dedup", ["1ms", "2m"])
def test_a_put_without_an_answer_is_there_once(server: Server, dedup: str) -> None:
    make(server, group := f"dedup-{dedup}", "replay all", f"dedup {dedup}", "bind v 'a\rdedup 1h\rb'")  # one pattern

    async def program(tree: RemoteTree, link: Link) -> None:
        folder, _ = await await_step(tree.lookup(ROOT, tree.root, group))
        write = write_unanswered(tree, server, folder, f"{group}/.kept/s", "body")
        if dedup == "2m":
            assert await write == len(b'{"stream":"s"} body')
        else:
            with pytest.raises(DiskFailed, match="outcome of the write unknown"):
                await write

    serve(server, program)
    assert text_of(server, f"{group}/.kept/s") == b"body"


def test_a_put_in_a_part_without_an_answer_is_committed_once(server: Server) -> None:
    make(server, "parts", "replay all")

    async def program(tree: RemoteTree, link: Link) -> None:
        group, _ = await await_step(tree.lookup(ROOT, tree.root, "parts"))
        transactions, _ = await await_step(tree.lookup(ROOT, group, ".txn"))
        part = await await_step(tree.mkdir(ROOT, transactions, "p", 0o700))
        with pytest.raises(DiskFailed, match="outcome of the write unknown"):
            await write_unanswered(tree, server, part, "parts/.txn/ctl", f"part p {ROOT.uid} 1 ")
        ctl, _ = await await_step(tree.lookup(ROOT, transactions, "ctl"))
        commands = await await_step(tree.open(ROOT, ctl, os.O_WRONLY))
        await await_step(commands.write(b"commit test.1 p\n"))
        commands.close()

    serve(server, program)
    assert text_of(server, "parts/.kept/s") == b"body"


def test_a_schedule_without_a_name_is_refused(server: Server) -> None:
    """The mount gives it none: each such write would be another schedule."""
    make(server, "schedules")

    async def program(tree: RemoteTree, link: Link) -> None:
        group, _ = await await_step(tree.lookup(ROOT, tree.root, "schedules"))
        put, _ = await await_step(tree.lookup(ROOT, group, ".put"))
        file = await await_step(tree.open(ROOT, put, os.O_RDWR))
        for key in (b'"every":"1h"', b'"cron":"0 8 * * *"'):
            with pytest.raises(BadRequest):
                await await_step(file.write(b'{"stream":"s",%s} job' % key))
            assert b'no key "id"' in await await_step(file.read(4_096))
        file.close()

    serve(server, program)
