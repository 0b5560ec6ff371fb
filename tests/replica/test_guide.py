"""docs/howto/replicas.md, typed: three machines in network namespaces with NATS and haproxy; and a bucket of moto."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

import mqfs as library
from tests.docs.scene import ABSOLUTE, commands
from tests.replica.servers import NATS_SERVER
from tests.support import ROOT
from tests.support.eventually import eventually
from tests.support.machines import Machine, Network
from tests.support.mount_space import own_mounts
from tests.support.server import short_folder, unmount
from tests.support.shell import Shell, shell

pytestmark = [pytest.mark.process, pytest.mark.slow]
PAGE = (ROOT / "docs/howto/replicas.md").read_text()
BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
BLOCKS = [(title, text) for _, title, text in BLOCK.findall(PAGE)]
HOLD = 'mount --bind "$0" /etc/hosts && exec sleep infinity'  # in a mount namespace that all machines share


def block(title: str, begins: str = "") -> str:
    """The page's only example of that title that begins so."""
    (found,) = [text for of, text in BLOCKS if of == title and text.startswith(begins)]
    return found


class Host:
    """A machine of the page: a folder for its absolute paths, and shells."""

    def __init__(
        self, name: str, machine: Machine, network: Network, folder: Path, holder: int, stack: ExitStack
    ) -> None:
        self.name, self.machine, self.network, self.folder = name, machine, network, folder
        self._holder, self._stack = holder, stack
        for below in ("var/lib", "mnt"):
            (folder / below).mkdir(parents=True)
        (commands(folder / ".bin") / "nats-server").symlink_to(NATS_SERVER)

    def text(self, text: str) -> str:
        return ABSOLUTE.sub(f"{self.folder}/", text)

    def shell(self) -> Shell:
        enter = (
            "nsenter",
            f"--mount=/proc/{self._holder}/ns/mnt",
            "sh",
            "-c",
            'cd "$0" && exec "$@"',
            str(self.folder),
        )
        inside = self.machine.inside(*enter)
        path = f"{self.folder}/.bin:/usr/bin:/bin:/usr/sbin"
        return self._stack.enter_context(shell(self.folder, path, inside=inside))

    def seen(self, path: str) -> Path:
        """A file as the machines see it: their mounts are in a namespace of their own."""
        return Path(f"/proc/{self._holder}/root{self.folder}/{path}")

    def run(self, text: str, until: str) -> Shell:
        """Type a block into a new shell, and wait for what it says."""
        typing = self.shell()
        typing.begin(self.text(text).strip())
        typing.terminal.expect(until)
        return typing

    def type(self, text: str) -> list[str]:
        """Type a block that ends by itself, into a new shell."""
        typing = self.shell()
        said = [line for row in self.text(text).strip().splitlines() for line in typing.type(row)]
        assert typing.code == 0, said
        return said


def kill(typing: Shell) -> None:
    """As kill -9 of what runs in a shell."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == typing.terminal.pid != int(process.name):
                os.kill(int(process.name), signal.SIGKILL)
    typing.prompt()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if os.geteuid() or shutil.which("haproxy", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("network namespaces need root, the page needs haproxy")
    with short_folder() as folder, ExitStack() as stack:
        network = Network(3)
        stack.callback(network.close)
        names, file = ("one", "two", "three"), folder / "hosts"
        lines = [f"{machine.address} {name}\n" for name, machine in zip(names, network.machines, strict=True)]
        file.write_text("127.0.0.1 localhost\n" + "".join(lines))
        holder = stack.enter_context(
            subprocess.Popen([*own_mounts("--propagation", "slave"), "sh", "-c", HOLD, str(file)])
        )
        stack.callback(holder.kill)
        eventually(lambda: Path(f"/proc/{holder.pid}/root/etc/hosts").read_text() == file.read_text())
        yield [
            Host(name, machine, network, folder / name, holder.pid, stack)
            for name, machine in zip(names, network.machines, strict=True)
        ]


def test_three_machines(hosts: list[Host]) -> None:
    one, two, three = hosts
    for host in hosts:
        config = host.text(block("nats.conf")).replace("server_name: one", f"server_name: {host.name}")
        (host.folder / "nats.conf").write_text(config)
    engines = [host.run(block("each machine"), "Server is ready") for host in hosts]
    for engine in engines:
        engine.terminal.expect("metadata leader")
    primary = one.run(block("one"), "mqfs: ready")
    assert "replica nats://one,two,three/shop: nats-server 2." in primary.terminal.before
    assert "3 replicas" in primary.terminal.before
    standby = two.run(block("two"), r"whose primary is tcp!one!5640")
    mount = three.seen("mnt/mq")
    three.run(block("three", "mkdir -p"), "mounted at")
    worker = three.shell()
    *setup, work = three.text(block("three", "mkdir /mnt")).strip().splitlines()
    for line in setup:
        assert worker.type(line) == []
    worker.begin(work.replace("sleep 5", "sleep 1"))
    done = three.folder / "done"
    eventually(lambda: done.exists() and len(done.read_text().splitlines()) >= 2)
    kill(primary)
    eventually(lambda: set(done.read_text().splitlines()) == {f"order {number}" for number in range(1, 7)})
    worker.interrupt()
    (three.folder / "haproxy.cfg").write_text(block("haproxy.cfg"))
    proxy, ask = three.text(block("three", "haproxy")).strip().splitlines()
    three.shell().type(proxy)
    eventually(lambda: is_ready(three, ask))
    again = one.run(block("one").strip() + " --standby", r"whose primary is tcp!two!5640")
    (mount / "shop/orders").write_text("order 7\n")
    eventually(lambda: (one.folder / "var/lib/mqfs/promote").exists())
    assert one.type(block("the standby")) == [f"{one.folder}/var/lib/mqfs: primary"]
    again.terminal.expect("mqfs: ready")
    standby.prompt()  # another one is the primary: it has ended
    assert (mount / "shop/.kept/orders").read_text() == "".join(f"order {n}\n" for n in range(1, 8))
    eventually(lambda: is_ready(three, ask))
    assert_power_cut_is_survived(one, two, mount)


def is_ready(host: Host, ask: str) -> bool:
    typing = host.shell()
    said = typing.type(ask.replace("curl ", "curl -s "))
    return any('"status":"ok"' in line.replace(" ", "") for line in said)


def assert_power_cut_is_survived(one: Host, two: Host, mount: Path) -> None:
    """The primary's machine is not reached any more: no connection of it is closed."""
    two.run(block("two"), r"whose primary is tcp!one!5640")
    one.network.isolate(one.machine)
    began = time.monotonic()
    (mount / "shop/orders").write_text("order 8\n")
    assert time.monotonic() - began < 60.0
    assert (mount / "shop/.kept/orders").read_text().endswith("order 7\norder 8\n")


def test_copies_in_a_bucket(s3: str, tmp_path: Path) -> None:
    """And restores to a time, to a message and of a group."""
    with short_folder() as folder, ExitStack() as stack:
        path = f"{commands(folder / '.bin')}:/usr/bin:/bin"
        known = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        (folder / "mq").mkdir()
        stack.callback(unmount, folder / "mq")
        serving = stack.enter_context(shell(folder, path, **known))
        serving.begin(block("copies").strip())
        serving.terminal.expect("mqfs: ready")
        shop = folder / "mq/shop"
        shop.mkdir()
        (shop / "ctl").write_text("replay all\nsync replica\n")
        for number in range(1, 4):
            (shop / "orders").write_text(f"{number}\n")
        noted = datetime.now(UTC).isoformat(timespec="microseconds")
        for number in range(4, 6):
            (shop / "orders").write_text(f"{number}\n")
        serving.interrupt()
        typing = stack.enter_context(shell(folder, path, **known))
        rows = block("restore").replace("@2026-01-31T12:00:00", f"@{noted}").strip().splitlines()
        for row in rows:
            typing.type(row)
            assert typing.code == 0, (row, typing.said)
        assert typing.said == ["before: sound"]
        for name, count in (("yesterday", 3), ("before", 3), ("part", 5)):
            with library.open(folder / name) as client:
                bodies = [message.body for message in client.group("shop").history()]
            assert bodies == [b"%d\n" % number for number in range(1, count + 1)], name


def test_every_example_of_the_page_is_typed() -> None:
    typed = {"nats.conf", "each machine", "one", "two", "three", "haproxy.cfg", "the standby", "copies", "restore"}
    typed.add("after a loss")  # by tests/replica/test_mistakes.py
    assert {title for title, _ in BLOCKS} == typed
    assert PAGE.count("\n```") == 2 * len(BLOCKS), "an example without a title is not typed"
