"""`mqfs.serve`: a server inside a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import anyio
import pytest

import mqfs
from mqfs import errors
from mqfs.client import aio
from tests.support.eventually import HANG_S
from tests.support.server import environment

pytestmark = pytest.mark.process


def serving() -> bool:
    return any(thread.name == "mqfs-server" for thread in threading.enumerate())


def test_it_serves_until_its_block_ends(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), os.umask(0o022)
    with mqfs.serve(tmp_path / "store", default=("replay all",)) as server:
        assert server.running
        assert server.addresses == (server.address,)
        with mqfs.connect(server.address) as client:
            group = client.group("g", create=True)
            with group.subscribe() as messages:
                group.publish("s", "x")
                assert messages.get(HANG_S).body == b"x"
        with pytest.raises(errors.BadStore, match="this process"):
            mqfs.open(tmp_path / "store")
    assert not server.running
    assert (signal.getsignal(signal.SIGTERM), os.umask(before[1])) == (before[0], 0o022)
    assert not serving()
    assert not Path(server.address.removeprefix("unix!")).parent.exists()
    with pytest.raises(errors.Disconnected):
        mqfs.connect(server.address, transport="9p").group()
    with mqfs.open(tmp_path / "store") as client:
        assert [message.body for message in client.group("g").history()] == [b"x"]
    server.close()
    with pytest.raises(errors.BadConfig):
        server.start()


def test_addresses_of_every_kind(tmp_path: Path) -> None:
    socket = f"unix!{tmp_path}/s"
    with mqfs.serve(listen=[socket, "tcp!127.0.0.1!0"], http="tcp!127.0.0.1!0") as server:
        assert server.address == socket
        assert not any(address.endswith("!0") for address in server.addresses)
        _, tcp, web = server.addresses
        for address in (socket, tcp):
            with mqfs.connect(address) as client:
                assert client.group().groups() == []
        _, host, port = web.split("!")
        with urllib.request.urlopen(f"http://{host}:{port}/.health", timeout=HANG_S) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("face", ["http", "fq"])
def test_it_listens_where_it_is_told_and_nowhere_else(face: str) -> None:
    with mqfs.serve(**{face: ["tcp!127.0.0.1!0"]}) as server:
        (address,) = server.addresses
        assert address.startswith("tcp!127.0.0.1!")


def test_two_of_them_in_one_program() -> None:
    with mqfs.serve() as one, mqfs.serve() as two, mqfs.connect(one.address) as a, mqfs.connect(two.address) as b:
        a.group("only here", create=True)
        assert (a.group().groups(), b.group().groups()) == (["only here"], [])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"listen": "nowhere"}, errors.BadConfig),
        ({"listen": "unix!/no/such/folder/s"}, errors.BadAddress),
        ({"colour": "red"}, errors.BadConfig),
        ({"default": ("replay sometimes",)}, errors.BadConfig),
        ({"tcp_user": "no such user"}, errors.BadConfig),
    ],
    ids=str,
)
def test_what_cannot_start_raises(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        mqfs.serve(**options).start()  # type: ignore[arg-type]
    assert not serving()


def test_a_store_in_use(tmp_path: Path) -> None:
    with mqfs.open(tmp_path), pytest.raises(errors.BadStore):
        mqfs.serve(tmp_path).start()


def test_async(backend: str) -> None:
    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with mqfs.serve() as server, aio.connect(server.address) as client:
                group = await client.group("g", create=True)
                assert (await group.publish("s", "x")).sequence == 1
        assert not server.running

    anyio.run(main, backend=backend)


def test_importing_the_library_loads_no_server() -> None:
    look = "print('trio' in sys.modules)"
    program = f"import mqfs, sys; mqfs.connect; mqfs.Receipt; {look}; mqfs.serve; {look}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


@pytest.fixture(params=["trio", "asyncio"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
