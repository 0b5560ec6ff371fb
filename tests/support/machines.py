"""Several machines on one: network namespaces on a bridge, and faults of the wires between them.

The wires only connect namespaces: no packet reaches the network of this machine. If a direction between two machines is
cut or slow, its packets pass through a `tun` device of each, and this process drops or delays them. The other direction
and other machines are not affected. Needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

LETTERS = "abcdefgh"
_numbers = itertools.count()  # numbers of the networks of this process
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def command(*words: str) -> None:
    """Run a command. Raises AssertionError with its error output if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


class Machine:
    """A network namespace with an address."""

    def __init__(self, network: int, number: int) -> None:
        self.name, self.address = f"mqfs{os.getpid()}-{network}{LETTERS[number]}", f"10.77.0.{number + 1}"
        command("ip", "netns", "add", self.name)

    def ip(self, *words: str) -> None:
        """Run ip(8) in the namespace."""
        command(*self.inside("ip", *words))

    def inside(self, *words: str) -> list[str]:
        """Return the command that runs another in the namespace."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *words]

    def remove(self) -> None:
        """Remove the namespace, which lasts until the end of its last process."""
        command("ip", "netns", "del", self.name)


class Network:
    """A bridge in the first machine, and a wire to it from each other machine."""

    def __init__(self, count: int) -> None:
        self.machines: list[Machine] = []
        self._detour: Detour | None = None
        try:
            self._join(count)
        except BaseException:
            self.close()
            raise

    def _join(self, count: int) -> None:
        network = next(_numbers)
        for number in range(count):
            self.machines.append(Machine(network, number))
        first, *others = self.machines
        first.ip("link", "add", "bridge", "type", "bridge")
        first.ip("addr", "add", f"{first.address}/24", "dev", "bridge")
        first.ip("link", "set", "bridge", "up")
        for number, other in enumerate(others):
            wire = f"wire{number}"
            first.ip("link", "add", wire, "type", "veth", "peer", "name", "wire", "netns", other.name)
            first.ip("link", "set", wire, "master", "bridge", "up")
            other.ip("addr", "add", f"{other.address}/24", "dev", "wire")
            other.ip("link", "set", "wire", "up")
        for machine in self.machines:
            machine.ip("link", "set", "lo", "up")

    # ------------------------------------------------------------ faults

    def cut(self, sender: Machine, receiver: Machine) -> None:
        """Drop all packets of one direction; the other direction stays as it is."""
        self._redirect(sender, receiver, None)

    def isolate(self, machine: Machine) -> None:
        """Drop all packets between this machine and the others."""
        for other in self.machines:
            if other is not machine:
                self.cut(machine, other)
                self.cut(other, machine)

    def slow(self, delay_s: float) -> None:
        """Delay every packet between two machines by `delay_s` seconds."""
        for sender in self.machines:
            for receiver in self.machines:
                if sender is not receiver:
                    self._redirect(sender, receiver, delay_s)

    def heal(self) -> None:
        """Remove all faults."""
        if self._detour is not None:
            for sender, receiver in self._detour.clear():
                sender.ip("route", "del", f"{receiver.address}/32")

    def _redirect(self, sender: Machine, receiver: Machine, delay_s: float | None) -> None:
        if self._detour is None:
            self._detour = Detour(self.machines)
        self._detour.set(sender, receiver, delay_s)
        sender.ip("route", "replace", f"{receiver.address}/32", "dev", "detour", "src", sender.address)

    def close(self) -> None:
        if self._detour is not None:
            self._detour.close()
        for machine in self.machines:
            machine.remove()
        self.machines = []


class Detour:
    """A tun device in each machine, and the thread that carries packets between them."""

    def __init__(self, machines: list[Machine]) -> None:
        self._tuns = {machine.address: _make_tun(machine) for machine in machines}
        self._delays: dict[tuple[str, str], tuple[float | None, Machine, Machine]] = {}
        self._late: list[tuple[float, int, bytes]] = []  # when it is due, its device, the packet
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="detour", daemon=True)
        self._thread.start()

    def set(self, sender: Machine, receiver: Machine, delay_s: float | None) -> None:
        """Delay the packets of one direction; None: drop them."""
        self._delays[sender.address, receiver.address] = (delay_s, sender, receiver)

    def clear(self) -> list[tuple[Machine, Machine]]:
        """Stop carrying new packets. Return the directions that were carried."""
        ways = [(sender, receiver) for _, sender, receiver in self._delays.values()]
        self._delays.clear()
        return ways

    def _run(self) -> None:
        while not self._closing.is_set():
            wait_s = min(0.1, max(0.0, self._late[0][0] - time.monotonic())) if self._late else 0.1
            for fd in select.select(list(self._tuns.values()), [], [], wait_s)[0]:
                self._take(os.read(fd, 65_536))
            while self._late and self._late[0][0] <= time.monotonic():
                _, to, packet = heapq.heappop(self._late)
                with contextlib.suppress(OSError):
                    os.write(to, packet)

    def _take(self, packet: bytes) -> None:
        if packet[0] >> 4 != 4:
            return  # the kernel searches for IPv6 neighbours
        sender, receiver = (socket.inet_ntoa(packet[at : at + 4]) for at in (12, 16))
        delay_s, *_ = self._delays.get((sender, receiver), (None,))
        if delay_s is not None:
            heapq.heappush(self._late, (time.monotonic() + delay_s, self._tuns[receiver], packet))

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for fd in self._tuns.values():
            os.close(fd)


def _make_tun(machine: Machine) -> int:
    """Make the tun device of a machine. Return its descriptor; the device lasts until that is closed."""
    fd, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC), f"tun{os.getpid()}"
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    command("ip", "link", "set", name, "netns", machine.name, "name", "detour")
    machine.ip("link", "set", "detour", "up")
    loose = "for file in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 >$file; done"  # answers use another device
    command(*machine.inside("sh", "-c", loose))
    return fd


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Make a network for the block. Processes in it must have ended at the end of the block."""
    made = Network(count)
    try:
        yield made
    finally:
        made.close()
