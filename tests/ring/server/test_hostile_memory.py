"""An attached client stores numbers into a ring: the server keeps running, keeps what files took, and starts again.

Any word of the head, of the seats and of the heads of records, with random and boundary values, at every phase: idle,
under load, before an orderly end, before a kill. Seeded; the server is in this process, its disk in memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mqfs
from mqfs import errors, limits, ring
from mqfs.ninep.client.connection import connect
from mqfs.ring.server.intake import RingIntake
from mqfs.ring.server.keeper_link import KeeperLink
from tests.ring.server.crowd import Member, check, check_followers, log_of
from tests.ring.server.rig import ME, Client, Rig
from tests.ring.server.story import small
from tests.store.script import PATH
from tests.support.anyone import NOBODY, plain_environment, python_for_anyone
from tests.support.campaign import seed, size, whole
from tests.support.chosen_numbers import crowded_numbers
from tests.support.eventually import HANG_S, eventually, patient
from tests.support.lying_disk import LyingDisk
from tests.support.server import Server

pytestmark = [
    pytest.mark.skipif(bool(ring.MISSING), reason=ring.MISSING),
    pytest.mark.usefixtures("quiet"),
]

SEATS_AT, SEAT_BYTES = 768, 128
HEAD_END = SEATS_AT + SEAT_BYTES * 3  # of what is in use: the other seats are free
KNOWN = {
    "retired": 56,
    "final": 64,
    "lock": 128,
    "state0": 152,
    "state1": 176,
    "tail": 256,
    "reserved": 264,
    "seat0": 776,
}
WORST_S = 2.0  # of the processor, that one call of the server may take
REFUSED = (
    errors.Stale, errors.Again, errors.BadRing, errors.Disconnected, errors.Busy, errors.Unsupported, errors.DiskFull,
)  # fmt: skip


class Hostile:
    """The memory of a ring, and stores into it."""

    def __init__(self, client: Client, dice: random.Random) -> None:
        self.ring, self.dice = client.ring, dice
        self.memory = mmap.mmap(client.ring.fileno(), ring.HEAD_BYTES + client.ring.size)

    def value(self, old: int) -> int:
        """A boundary value, a neighbour of the present one, or any."""
        of = self.ring.size
        edges = [0, 1, 7, 8, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 8, 2**63, 2**64 - 8, 2**64 - 1]
        near = [old + step for step in (-of - 8, -of, -8, -1, 1, 8, of - 8, of, of + 8)]
        around = [of - 8, of - 1, of, of + 1, of + 8, of // 2, of // 2 + 8]
        return self.dice.choice([*edges, *near, *around, self.dice.getrandbits(64)]) % 2**64

    def place(self) -> int:
        """The place of a word: often one that much depends on, else any of the head, or of a record's head."""
        what = self.dice.random()
        if what < 0.5:
            return self.dice.choice(sorted(KNOWN.values()))
        if what < 0.85:
            return self.dice.randrange(0, HEAD_END, 8)
        behind = self.ring.tail - self.dice.randrange(0, 4_096, 8)
        return ring.HEAD_BYTES + (behind & (self.ring.size - 1) & ~7)

    def store(self) -> None:
        at = self.place()
        old = int.from_bytes(self.memory[at : at + 8], "little")
        self.memory[at : at + 8] = self.value(old).to_bytes(8, "little")

    def close(self) -> None:
        self.memory.close()


class Story:
    """A server and its clients, one of them hostile; the server is ended and started again."""

    def __init__(self, number: int) -> None:
        self.dice, self.number = random.Random(number), number
        self.disk = LyingDisk()
        self.acknowledged: list[bytes] = []
        self.start()

    def start(self) -> None:
        self.rig = self.timed(Rig, "replay all", disk=self.disk)
        self.attach()

    def attach(self) -> None:
        try:
            self.good, bad = self.rig.attach(), self.rig.attach()
        except REFUSED:  # a group whose rings were spoilt has none for a while
            self.rig.rings._cooldown.clear()
            self.rig.tick()
            self.good, bad = self.rig.attach(), self.rig.attach()
        self.hostile = Hostile(bad, self.dice)

    def timed(self, act: Any, *arguments: Any, **more: Any) -> Any:
        began = time.process_time()
        result = act(*arguments, **more)
        assert time.process_time() - began < WORST_S, f"{act} took too long"
        return result

    def publish(self) -> None:
        try:
            if not self.good.ring.retired:  # then it is asked whether it was taken, and no server answers meanwhile
                self.good.ring.publish(16, b"ring" + bytes(self.dice.choice([1, 1_000, 9_000])), b"", 1, 0, 0)
        except REFUSED:
            pass

    def write(self) -> None:
        body = b"file %d" % len(self.acknowledged)
        self.timed(self.rig.write, "s", body)
        self.acknowledged.append(body)

    def hurt(self) -> None:
        for _ in range(self.dice.randint(1, 3)):
            self.hostile.store()

    def act(self) -> None:
        what = self.dice.random()
        if what < 0.3:
            self.publish()
        elif what < 0.5:
            self.write()
        elif what < 0.65:
            self.timed(self.rig.pump)
        elif what < 0.8:
            self.timed(self.rig.tick)
        else:
            self.hurt()
            self.timed(self.rig.run)

    def end(self) -> None:
        """Orderly or not, with stores right before it; and a start."""
        if self.dice.random() < 0.7:
            self.hurt()
        if self.dice.random() < 0.5:
            self.timed(self.rig.stop)
        else:
            self.rig.kill()
        self.hostile.close()
        self.disk = self.disk.after_kill()
        self.start()

    def check(self) -> None:
        self.write()
        self.timed(self.rig.tick)
        bodies = [body for _, _, body in self.rig.log()]
        assert [body for body in bodies if body.startswith(b"file")] == self.acknowledged
        assert self.rig.group.log.end.next < 1 << 32, "the group's sequences are used up"
        assert self.rig.group.log.upkeep.damaged == 0

    def run(self) -> None:
        for _ in range(3):
            for _ in range(self.dice.randint(1, 12)):
                self.act()
            self.end()
            self.check()
        self.hostile.close()
        self.timed(self.rig.stop)


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a ring is given up where reading it fails is the last resort: here nothing may come to that."""

    def fail(intake: RingIntake) -> None:
        raise AssertionError("a number was computed with before it was bounded") from sys.exception()

    monkeypatch.setattr(RingIntake, "_break_off", fail)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_numbers_stored_at_any_moment(keeper: Any, bounded: None) -> None:
    with small():
        for number in range(seed() * 10_000, seed() * 10_000 + size(1_500)):
            try:
                story = Story(number)
                story.run()
            except Exception as error:
                raise AssertionError(f"story {number}: {type(error).__name__}: {error}") from error
            finally:
                keeper("").quit()


@pytest.mark.slow
def test_numbers_stored_all_the_time(keeper: Any, bounded: None) -> None:
    """A thread stores while the server reads: what was looked at once is another value the next time."""
    with small():
        for number in range(seed() * 100, seed() * 100 + size(60)):
            story = Story(number)
            over = threading.Event()

            def hurt(story: Story = story, over: threading.Event = over) -> None:
                while not over.is_set():
                    story.hurt()

            thread = threading.Thread(target=hurt)
            thread.start()
            try:
                for _ in range(30):
                    story.dice.choice([story.publish, story.write, story.write, story.rig.pump, story.rig.tick])()
            finally:
                over.set()
                thread.join()
            story.end()
            story.check()
            story.hostile.close()
            story.rig.stop()
            keeper("").quit()


def test_a_ring_that_cannot_be_read_is_one_groups(keeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails while a ring is read: what is not taken goes to quarantine, and the group continues without it."""
    disk = LyingDisk()
    rig = Rig("replay all", disk=disk)
    client = rig.attach()
    client.ring.publish(16, b"taken")
    rig.pump()
    monkeypatch.setattr(rig.own.ring_log.intake.checks, "is_sound", lambda rows, own: 1 // 0)
    client.ring.publish(16, b"not taken")
    rig.tick()
    assert rig.own is None
    with pytest.raises(errors.Stale):
        client.ring.publish(16, b"too late")
    rig.write("s", b"by file")
    assert [body for _, _, body in rig.log()] == [b"taken", b"by file"]
    kept = b"".join(disk.view(f"{PATH}/quarantine/{name}") for name in disk.listdir(f"{PATH}/quarantine"))
    assert b"not taken" in kept
    rig.stop()


def test_a_state_that_makes_no_sense(keeper: Any) -> None:
    """Publishers are refused; the server gives the group another ring, though it writes nothing to the group itself."""
    rig = Rig("replay all", disk=LyingDisk())
    client = rig.attach()
    client.ring.publish(16, b"before")
    rig.pump()
    memory = mmap.mmap(client.ring.fileno(), ring.HEAD_BYTES)
    for name in ("state0", "state1"):
        memory[KNOWN[name] : KNOWN[name] + 8] = (1 << 40).to_bytes(8, "little")
    memory.close()
    with pytest.raises(errors.BadRing):
        client.ring.publish(16, b"refused")
    rig.tick()
    rig.tick()
    client = rig.attach()
    client.ring.publish(16, b"after")
    rig.pump()
    assert [body for _, _, body in rig.log()] == [b"before", b"after"]
    rig.stop()


def test_numbers_of_streams_that_there_are_not(keeper: Any) -> None:
    """As many as the ring can hold in one batch, chosen so that it takes long to count them: they are not counted."""
    rig = Rig("replay all", disk=LyingDisk())
    client = rig.attach()
    rig.own.follower.stop()
    client.ring.publish_unit([(1, number, b"x") for number in crowded_numbers(57_000)])
    began = time.process_time()
    rig.pump()
    assert time.process_time() - began < patient(WORST_S)
    rig.tick()
    assert rig.own is None
    assert rig.log() == []
    rig.stop()


@pytest.mark.parametrize("word", ["magic", "version", "seat", "nonsense"])
def test_a_ring_that_cannot_be_resumed(keeper: Any, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """A start puts what was not taken into quarantine, all of it and nothing else, and has the ring dropped from the
    keeper: the next one does not meet it. Where its positions make no sense, the whole ring is put there."""
    monkeypatch.setattr(limits, "RING_BYTES", 4 << 20)
    disk = LyingDisk()
    rig = Rig("replay all", disk=disk)
    client = rig.attach()
    body = bytes(limits.RING_BYTES // 64)
    for number in range(60):
        client.ring.publish(16, b"taken %d;" % number + body)
        rig.pump()
    untaken = [b"only in the ring %d;" % number for number in range(30)]  # beyond the end of its memory, and round
    for name in untaken:
        client.ring.publish(16, name + body)
    memory = mmap.mmap(client.ring.fileno(), ring.HEAD_BYTES)
    rig.kill()
    if word == "magic":
        memory[:8] = bytes(8)
    elif word == "version":
        memory[8:12] = (99).to_bytes(4, "little")
    elif word == "nonsense":
        memory[:8] = bytes(8)
        memory[KNOWN["tail"] : KNOWN["tail"] + 8] = (2**64 - 1).to_bytes(8, "little")
    else:
        fcntl.fcntl(client.ring.fileno(), fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0))
    disk = disk.after_kill()
    rig = Rig(disk=disk)
    assert rig.own is None
    assert keeper.rings == {}
    rig.write("s", b"and on")
    assert [body for _, _, body in rig.log()][-1] == b"and on"
    kept = b"".join(disk.view(f"{PATH}/quarantine/{name}") for name in disk.listdir(f"{PATH}/quarantine"))
    assert [name for name in untaken if name not in kept] == []
    assert (b"taken 59;" in kept) == (word == "nonsense")
    memory.close()
    rig.stop()


def foreign_descriptors(folder: Path) -> dict[str, int]:
    """Files that a program of the server's user may have given to the keeper in place of a ring."""
    sizes = {"empty": 0, "short": 100, "only a head": ring.HEAD_BYTES, "a page more": ring.HEAD_BYTES + 4096}
    sizes["larger than the memory"] = 1 << 46
    found = {}
    for name, length in sizes.items():
        found[name] = os.memfd_create("foreign")
        os.ftruncate(found[name], length)
    found["write only"] = os.open(folder / "file", os.O_WRONLY | os.O_CREAT)
    os.ftruncate(found["write only"], ring.HEAD_BYTES + 4096)
    found["folder"] = os.open(folder, os.O_RDONLY)
    found["null"] = os.open("/dev/null", os.O_RDONLY)
    found["pipe"], other = os.pipe()
    os.close(other)
    return found


def test_what_the_keeper_holds_need_not_be_a_ring(keeper: Any, tmp_path: Path) -> None:
    """Whatever it is: the server starts, the group continues, and the keeper holds it no longer."""
    disk = LyingDisk()
    rig = Rig("replay all", disk=disk)
    group = rig.group.number
    for what, fd in foreign_descriptors(tmp_path).items():
        rig.kill()
        keeper.rings[group, 1] = fd
        disk = disk.after_kill()
        rig = Rig(disk=disk)
        assert keeper.rings == {}, what
        rig.attach().ring.publish(16, what.encode())
        rig.pump()
        assert rig.log()[-1][2] == what.encode()
        rig.own.ring_log.retire("the next is to come")
        while rig.own is not None:
            rig.tick()
        keeper("").quit()
    rig.stop()


# ---------------------------------------------------------------- a real server


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("stores", [{"reserved": 2**63, "tail": 2**64 - 1}, {"state0": 2**64 - 1, "tail": 2**63}])
def test_a_server_goes_on_and_starts_again(tmp_path: Path, stores: dict[str, int]) -> None:
    address = f"unix!{tmp_path / 's'}"
    arguments = ["--store", "store", "--listen", address]
    server = Server(*arguments, cwd=tmp_path)
    try:
        for number in ("SIGKILL", "SIGTERM"):
            with mqfs.connect(address, transport="ring") as client:
                group = client.group("g", create=True, ctl=["replay all"])
                group.publish("s", f"before {number}")
                made = group._publisher._direct._attachment.now.ring  # type: ignore[union-attr]
                memory = mmap.mmap(made.fileno(), ring.HEAD_BYTES)
                for name, value in stores.items():
                    memory[KNOWN[name] : KNOWN[name] + 8] = value.to_bytes(8, "little")
                memory.close()
                if number == "SIGTERM":
                    with mqfs.connect(address, transport="9p") as other:
                        other.group("g").publish("s", "by file")
                        assert server.process.poll() is None, server.text()
            getattr(server, "kill" if number == "SIGKILL" else "stop")()
            server = Server(*arguments, cwd=tmp_path)
        with mqfs.connect(address, transport="9p") as client:
            bodies = [message.body for message in client.group("g").history()]
        assert bodies == [b"before SIGKILL", b"before SIGTERM", b"by file"]
    finally:
        assert server.stop() == 0, server.text()
    assert "Traceback" not in server.text(), server.text()


# Rings are given again and again, and a lock is held for less long: else few would be met in a minute.
SCRIBBLED = (
    "from mqfs import limits; from mqfs.cli.main import main; import sys;"
    " limits.RING_CORRUPT = 1 << 30; limits.RING_HOLD_S = 0.05;"
    " sys.argv[0] = 'mqfs'; main()"
)


class Stranger(Member):
    """As another user, with a Python and a folder that anybody may use."""

    def __init__(self, folder: Path, address: str, path: str, stream: str, name: str, mode: str) -> None:
        python, packages = python_for_anyone()
        self.name, self.mode, self.file, self.errors = name, mode, folder / f"told-{name}", folder / f"errors-{name}"
        self.file.touch()
        self.file.chmod(0o666)
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                [*NOBODY, python, "-m", "tests.ring.server.crowd", address, path, stream, name, mode, str(self.file)],
                cwd="/", env=plain_environment(packages), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.root
def test_scribbles_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of one group's ring are overwritten in a real server while publishers and readers run: it never ends, who
    uses files of that group loses nothing, and rings of other groups and users are as they were."""
    monkeypatch.setenv("CROWD_PAUSE", "0.01")
    dice, wanted, began = random.Random(seed()), 100_000 if whole() else 2_000, time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="mqfs-scribbled-"))
    os.chmod(folder, 0o755)
    address, server = f"unix!{folder}/s", None
    try:
        server = Server("--store", "store", "--listen", address, cwd=folder,
                         program=[sys.executable, "-c", SCRIBBLED, "serve"])  # fmt: skip
        os.chmod(folder / "s", 0o777)
        for door in folder.glob("s?*"):
            os.chmod(door, 0o777)
        with connect(address) as tree:
            for group in ("mine", "other", "theirs"):
                tree.mkdir(group, 0o777)
                tree.open(f"{group}/ctl", "w").write(b"replay all\nsync 10ms\nring all\n")
                for name in ("s", "shared", "t"):
                    tree.create(f"{group}/{name}", permissions=0o666).close()
                    tree.chmod(f"{group}/{name}", 0o666)
        members = [
            Member(folder, address, "mine", "t", "m1", "put"),
            Member(folder, address, "other", "s", "o1", "published"),
            Member(folder, address, "other", "s", "o2", "committed"),
            Member(folder, address, "other", "", "o3", "follow"),
            Stranger(folder, address, "theirs", "s", "a1", "committed"),
            Stranger(folder, address, "theirs", "", "a2", "follow"),
        ]
        try:
            for member in members:
                member.ready()
            rings = scribble(address, server, dice, wanted)
            for member in members:
                if member.mode != "follow":
                    member.end()
            logs = {group: log_of(address, group) for group in ("mine", "other", "theirs")}
            for member in members[3::2]:
                eventually(lambda of=member: of.newest() >= max(logs["other" if of.name == "o3" else "theirs"]))  # type: ignore[misc]
                member.end()
        finally:
            for member in members:
                member.close()
        mine = {n: row for n, row in logs["mine"].items() if row[0] == "t" and row[1].startswith("m1 ")}
        told = check(mine, members[:1]) + check(logs["other"], members[1:4]) + check(logs["theirs"], members[4:])
        seen = check_followers(logs["other"], members[1:4]) + check_followers(logs["theirs"], members[4:])
        assert server.stop() == 0, server.text()
        assert "Traceback" not in server.text(), server.text()
        print(
            f"{wanted} scribbles into {rings} rings, {told} messages of others confirmed, {seen} seen,"
            f" {time.monotonic() - began:.0f} s"
        )
        assert rings > wanted // 2_000
        assert told
        assert seen
    finally:
        if server is not None and server.process.poll() is None:
            server.kill()
        KeeperLink(str(folder / "store")).quit()
        shutil.rmtree(folder)


def scribble(address: str, server: Server, dice: random.Random, wanted: int) -> int:
    """Bursts of stores into ring after ring of `mine`. How many rings there were."""
    done = rings = 0
    with connect(address) as tree:
        tree.socket.settimeout(HANG_S)
        while done < wanted:
            with mqfs.connect(address, transport="ring", reconnect=False) as client:
                group = client.group("mine")
                try:
                    group.publish("s", b"first", wait="published")
                    ours = group._publisher._direct._attachment.now.ring  # type: ignore[union-attr]
                except (*REFUSED, AttributeError):
                    continue  # one that was spoilt is still being ended
                rings += 1
                hostile = Hostile(SimpleNamespace(ring=ours), dice)  # type: ignore[arg-type]
                try:
                    while not ours.retired and done < wanted:
                        for _ in range(dice.choice([1, 30, 1_000])):
                            hostile.store()
                            done += 1
                        ours.publish(16, b"on" + bytes(dice.choice([1, 1_000])), b"", 1, 0, 0.1)
                        if dice.random() < 0.2:
                            tree.stat("mine")
                except REFUSED:
                    pass
                finally:
                    hostile.close()
            began = time.monotonic()
            tree.stat("other")
            assert time.monotonic() - began < patient(15 * WORST_S), "the server was held up"
            assert server.process.poll() is None, server.text()
    return rings


def _filled(kind: str, record: bytes, sequence: int, count: int) -> bytes:
    """So many records, or what may look like some."""
    size = len(record)

    def numbered(number: int) -> bytes:
        head = bytearray(record)
        struct.pack_into("<Q", head, 8, number)
        length = struct.unpack_from("<I", head)[0]
        struct.pack_into("<I", head, 4, ring.crc32c(bytes(head[8:length]), ring.crc32c(bytes(head[:4]))))
        return bytes(head)

    match kind:
        case "noise":
            return random.Random(seed()).randbytes(size * count)
        case "heads":
            return record[:32] * (size * count // 32)
        case "old":
            return record * count
        case "new":
            return bytes(size) + b"".join(numbered(sequence + n) for n in range(1, count))
        case _:
            return b"".join(numbered(sequence + n) if n % 2 else bytes(size) for n in range(count))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["noise", "heads", "old", "new", "each other one"])
def test_a_whole_ring_of_it_holds_up_the_server_for_a_moment(kind: str) -> None:
    """16 MiB, written behind the server's back: it was up to a minute."""
    rig = Rig("replay all", "sync off")
    client = rig.attach()
    number = client.number("s")
    for _ in range(100):
        client.ring.publish(number, bytes(100))
    memory = mmap.mmap(client.ring.fileno(), ring.HEAD_BYTES + client.ring.size)
    tail, of = client.ring.tail, client.ring.size
    record = bytes(memory[ring.HEAD_BYTES : ring.HEAD_BYTES + tail // 100])
    rig.pump()
    filled = _filled(kind, record, rig.group.log.end.next, (of - tail) // len(record))
    memory[ring.HEAD_BYTES + tail : ring.HEAD_BYTES + tail + len(filled)] = filled
    for name in ("reserved", "tail"):
        struct.pack_into("<Q", memory, KNOWN[name], of)
    began = time.thread_time()
    rig.pump()
    rig.tick()
    assert time.thread_time() - began < 5.0
    rig.until(lambda: rig.own is None)
    assert len(rig.log()) >= 100
    rig.stop()


def test_an_owner_that_holds_up_the_server_has_no_rings_for_a_while() -> None:
    """In any of its groups; what it writes is in the log all the same."""
    rig = Rig("replay all", "sync off")
    rig.tree.mkdir(ME, rig.tree.root, "h", 0o777)
    for turn in range(limits.RING_CORRUPT):
        client = rig.attach()
        memory = mmap.mmap(client.ring.fileno(), ring.HEAD_BYTES + client.ring.size)
        struct.pack_into("<I", memory, KNOWN["lock"], threading.get_native_id())
        rig.write("s", b"%d" % turn)
        rig.until(lambda: rig.own is None)
        memory.close()
    for group in ("g", "h"):
        with pytest.raises(errors.Unsupported, match="locked too long"):
            rig.rings.attach(ME, group)
    assert [body for _, _, body in rig.log()] == [b"%d" % turn for turn in range(limits.RING_CORRUPT)]
    rig.stop()
