"""The manual's EXAMPLES, typed into a real shell beside a real server, do what the page says of them.

The examples are read from the pages; here stands, for the beginning of each, what must come of it. An example, or a
page, that nothing stands for fails, and so does what stands for an example that is no more.
"""

from __future__ import annotations

import filecmp
import gzip
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqfs.ninep.blocking import connect
from tests.docs.pages import PAGES, Block, examples
from tests.docs.scene import Scene, scene
from tests.interop.test_v9fs import BOOT_S, KERNEL, missing
from tests.server.process import mounted, until
from tests.tools.mount import mq_cat, opened

HERE = Path(__file__).parent
KEY = "\x1c"  # Ctrl-\

Treatment = Callable[[Scene, Block], None]
PREPARED: dict[str, Callable[[Scene], None]] = {}
TREATED: dict[str, dict[str, Treatment]] = {}


def prepared(name: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """What is there before the first example of that page is typed."""

    def keep(function: Callable[[Scene], None]) -> Callable[[Scene], None]:
        PREPARED[name] = function
        return function

    return keep


def treated(name: str, begins: str) -> Callable[[Treatment], Treatment]:
    """How the example of that page that begins so is typed, and what must come of it."""

    def keep(function: Treatment) -> Treatment:
        assert TREATED.setdefault(name, {}).setdefault(begins, function) is function
        return function

    return keep


def treatment(name: str, block: Block) -> Treatment:
    known = TREATED.get(name, {})
    found = [begins for begins in known if block.text.startswith(begins)]
    assert len(found) == 1, f"{name}: nothing, or not one thing, says what must come of this example: {block.text}"
    return known[found[0]]


@pytest.mark.timeout(BOOT_S + 60)
@pytest.mark.parametrize("source", PAGES, ids=lambda page: page.name)
def test_page(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"  # short: it stands in the paths of sockets
    folder.mkdir()
    with scene(folder, source) as at:
        treatments = [treatment(source.name, block) for block in at.blocks]
        assert set(treatments) == set(TREATED[source.name].values()), "an example is gone"
        PREPARED.get(source.name, Scene.serve)(at)
        for block, what in zip(at.blocks, treatments, strict=True):
            what(at, at.block(block.text))


def test_no_page_is_gone() -> None:
    assert set(TREATED) == {source.name for source in PAGES}


def test_reading_mdoc() -> None:
    source = ".Sh NAME\n.Dl no\n.Sh EXAMPLES\nText:\n.Dl $ a 'b\\ec'\n.Bd -literal -offset indent\nx\n\\&.y\n.Ed\n"
    source += ".Bd -literal\n$ one\nshown\n$ two\n.Ed\n.Sh SEE ALSO\n.Dl no\n"
    assert [[tuple(line) for line in block.lines] for block in examples(source)] == [
        [("a 'b\\c'", [])],
        [("x", []), (".y", [])],
        [("one", ["shown"]), ("two", [])],
    ]
    for wrong in ('.Dl a "b"', ".Bd -literal\nx", ".Bd -literal\n.Pp\n.Ed", ".Dl \\(aq", ".Bd -filled\nx\n.Ed"):
        with pytest.raises(AssertionError):
            examples(f".Sh EXAMPLES\n{wrong}\n")


def test_an_example_that_nothing_stands_for() -> None:
    (block,) = examples(".Sh EXAMPLES\n.Dl $ mq-cat --new mq/room\n")
    with pytest.raises(AssertionError, match="says what must come of this example: mq-cat --new mq/room"):
        treatment("mq-cat.1", block)


# ---------------------------------------------------------------- mqfs(1)


@prepared("mqfs.1")
def nothing(at: Scene) -> None:
    """Its examples are servers."""


@treated("mqfs.1", "mkdir mq")
def a_tree_that_keeps_everything(at: Scene, block: Block) -> None:
    make, serve = block.lines
    at.type(make.typed)
    with typed_server(at, serve.typed, at.mount):
        assert (at.mount / "ctl").read_text().splitlines()[1] == "replay all"
        (at.mount / "group").mkdir()
        assert "replay all" in (at.mount / "group" / "ctl").read_text().splitlines()
    assert (at.folder / "store" / "mqfs").exists()


@treated("mqfs.1", 'store = "')
def from_a_file(at: Scene, block: Block) -> None:
    """The file is written; the next example uses it."""
    for name in ("etc", "run", "srv/mq", "tmp", "var/lib"):
        (at.folder / name).mkdir(parents=True)
    text = block.text.replace("5640", str(free_port()))
    assert text != block.text
    (at.folder / "etc" / "mqfs.toml").write_text(text)


@treated("mqfs.1", "mqfs serve --config")
def and_then(at: Scene, block: Block) -> None:
    text = (at.folder / "etc" / "mqfs.toml").read_text()
    with typed_server(at, block.text, at.folder / "srv" / "mq"):
        for dial in re.findall(r'"(\w+![^"]*)"', text):
            with connect(dial) as client:
                assert b"replay all" in client.open("ctl").receive()
        for number, name in enumerate(("a", "b", "c")):
            group = at.folder / "srv" / "mq" / name
            group.mkdir()
            for word in range(10):
                (group / "s").write_text(f"message {number}-{word}\n")
    assert (at.folder / "var/lib/mqfs/mqfs").exists()


@treated("mqfs.1", "mqfs serve -D")
def a_trace(at: Scene, block: Block) -> None:
    at.typing.begin(block.text)
    until((at.folder / "tmp" / "mq.sock").exists, "the socket")
    with connect(f"unix!{at.folder}/tmp/mq.sock"):
        at.typing.terminal.expect(r"Tversion .*version 9P2000.*\r\n.*Rversion")
    at.typing.interrupt()
    assert at.typing.code == 0


@treated("mqfs.1", "mount -t 9p")
def on_another_linux_machine(at: Scene, block: Block) -> None:
    """The other machine is a guest of qemu; its side of the tunnel is v9fs/tunnel.c, our side is qemu's."""
    if lack := missing():
        pytest.skip(f"Linux v9fs: {lack}")
    at.typing.begin(at.block("mqfs serve -D").text)
    path = at.folder / "tmp" / "mq.sock"
    until(path.exists, "the socket")
    with connect(f"unix!{path}") as client:
        client.mkdir("host")
        with client.open("host/ctl", "w") as ctl:
            ctl.write(b"replay all\n")
        with client.create("host/s") as stream:
            stream.write(b"from the host\n")
        example = block.text.replace(f"{at.folder}/", "/")  # there it is the guest's own
        printed = guest(at.folder, example, path)
        assert "GUEST-RC 0" in printed, printed
        with client.open("host/s") as stream:
            assert [stream.receive(), stream.receive()] == [b"from the host\n", b"from the guest\n"]
    at.typing.terminal.expect(r"Tversion .*version 9P2000\.L")
    at.typing.interrupt()
    assert at.typing.code == 0


@treated("mqfs.1", "mqfs check --fix")
def a_store_after_a_disk_failed(at: Scene, block: Block) -> None:
    store = at.folder / "var" / "lib" / "mqfs"
    damage(store, b"message 1-4")
    said = at.type(block.text)
    assert "do not pass their check" in said[0]
    assert "1 problem, repaired" in said[-1]
    assert list((store / "quarantine").iterdir())
    with typed_server(at, at.block("mqfs serve --config").text, at.folder / "srv" / "mq"):
        kept = at.folder / "srv" / "mq" / "b" / "s"
        with kept.open("rb", buffering=0) as stream:
            assert [stream.read(100) for _ in range(5)][-1] == b"message 1-5\n"


# ---------------------------------------------------------------- mqfs(4)


@treated("mqfs.4", "mkdir mq/news")
def everybody_who_listens(at: Scene, block: Block) -> None:
    *before, say = block.lines
    for count in range(2):  # everybody: two
        for line in before[2 * count :]:
            at.type(line.typed)
    at.waiting(at.mount / "news", 2)
    at.typing.begin(say.typed)
    at.typing.shows("rain at noon", "rain at noon", prompt=True)
    at.typing.type("kill %1 %2; wait")


@treated("mqfs.4", "mkdir mq/log")
def the_last_thousand_lines_of_each_program(at: Scene, block: Block) -> None:
    *before, make = block.lines
    (at.folder / "Makefile").write_text("all:\n\t@seq 1 1500\n\t@echo it failed >&2; exit 3\n")
    for line in before:
        at.type(line.typed)
    (at.mount / "log" / "other").write_text("of another program\n")
    at.type(make.typed)
    kept = at.type("mq-cat -e mq/log make")
    assert len(kept) == 1000
    assert kept[-3] == "1500"
    assert kept[-2] == "it failed"
    assert at.type("mq-cat -e mq/log other") == ["of another program"]


@treated("mqfs.4", "head -n 1 mq/news/city")
def one_message_then_go_on(at: Scene, block: Block) -> None:
    at.typing.begin(block.text)
    at.waiting(at.mount / "news")
    (at.mount / "news" / "city").write_text("snow\n")
    at.typing.shows("snow", prompt=True)
    assert at.typing.code == 0


@treated("mqfs.4", "exec 3<>mq/log/.cursor")
def the_last_three_messages_and_what_comes_after(at: Scene, block: Block) -> None:
    *before, cat = block.lines
    for line in before:
        assert at.type(line.typed) == []
    at.typing.begin(cat.typed)
    objects = [json.loads(at.typing.terminal.readline()) for _ in range(3)]
    (at.mount / "log" / "make").write_text("after\n")
    objects.append(json.loads(at.typing.terminal.readline()))
    assert [it["stream"] for it in objects[:2]] == ["make"] * 2
    assert objects[1]["body"] == "it failed\n"
    assert objects[3]["body"] == "after\n"
    at.typing.interrupt()
    at.type("exec 3>&-")


@treated("mqfs.4", "echo 'replay everything'")
def why_a_write_was_refused(at: Scene, block: Block) -> None:
    write, read = block.lines
    assert at.type(write.typed, 1) == ["bash: echo: write error: Invalid argument"]
    said = json.loads(at.type(read.typed)[-1])
    assert "replay 'everything': write off or last or all" in said["text"]


# ---------------------------------------------------------------- mqfs-store(5)


@prepared("mqfs-store.5")
def a_store_that_nobody_has_open(at: Scene) -> None:
    at.serve()
    for name, size in (("small", 10), ("large", 300_000)):
        (at.group(name, "replay all", "sync off") / "s").write_bytes(b"x" * size + b"\n")
    at.stop()
    (at.folder / "backup").mkdir()


@treated("mqfs-store.5", "mqfs check ./store")
def look_for_damage_and_repair_it(at: Scene, block: Block) -> None:
    look, repair = block.lines
    assert at.type(look.typed) == ["./store: sound"]
    at.type(repair.typed)
    shutil.copytree(at.folder / "store", at.folder / "kept")
    damage(at.folder / "store", b"x" * 10)
    assert "do not pass their check" in at.type(look.typed, 1)[0]
    assert "1 problem, repaired" in at.type(repair.typed)[-1]
    assert at.type(look.typed) == ["note: quarantine/: 1 kept aside", "./store: sound"]
    shutil.rmtree(at.folder / "store")
    (at.folder / "kept").rename(at.folder / "store")


@treated("mqfs-store.5", "cp -a ./store /backup/store")
def copy_a_store(at: Scene, block: Block) -> None:
    at.type(block.text)
    same = filecmp.dircmp(at.folder / "store", at.folder / "backup" / "store")
    assert (same.left_only, same.right_only, same.diff_files) == ([], [], [])
    shutil.rmtree(at.folder / "store")
    (at.folder / "backup" / "store").rename(at.folder / "store")
    at.serve()
    assert at.type("head -c 11 mq/small/s") == ["x" * 10]
    at.stop()


@treated("mqfs-store.5", "du -s")
def which_group_has_the_largest_log(at: Scene, block: Block) -> None:
    (said,) = at.type(block.text)
    kilobytes, path = said.split("\t")
    assert int(kilobytes) >= 300
    assert any(b"x" * 300_000 in log.read_bytes() for log in (at.folder / path).glob("*.log"))


@treated("mqfs-store.5", "newest=")
def the_state_at_the_head_of_the_newest_segment(at: Scene, block: Block) -> None:
    said: list[str] = []
    for line in block.lines:
        said = at.type(line.typed)
    assert said[0].startswith('{"group":1,"parent":1,"name":"/",')


# ---------------------------------------------------------------- mq-cat(1)


@prepared("mq-cat.1")
def a_room(at: Scene) -> None:
    at.serve()
    room = at.group("room", "replay all")
    at.group("cron", "data line")
    for number in range(12):
        (room / ("bob" if number % 3 else "alice")).write_text(f"line {number}\n")


@treated("mq-cat.1", "mq-cat --from first")
def follow_everything(at: Scene, block: Block) -> None:
    at.typing.begin(block.text)
    at.typing.shows(*(f"line {number}" for number in range(12)))
    (at.mount / "room" / "carol").write_text("hello\n")
    at.typing.shows("hello")
    at.typing.interrupt()
    assert at.typing.code == 130


@treated("mq-cat.1", "mq-cat -e -t --from -10")
def the_last_ten_with_their_times(at: Scene, block: Block) -> None:
    said = at.type(block.text)
    rows = [re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00 (\w+) line (\d+)", row) for row in said]
    wanted = [("bob" if number % 3 else "alice", str(number)) for number in range(2, 12)]
    assert [row.groups() for row in rows if row] == wanted


@treated("mq-cat.1", "mq-cat -e --from -15m")
def what_was_logged_lately(at: Scene, block: Block) -> None:
    assert at.type(block.text) == []
    (at.mount / "cron" / "ctl").write_text("replay all\n")
    (at.mount / "cron" / "backup").write_text("began\nended\n")
    assert at.type(block.text) == ["began", "ended"]


@treated("mq-cat.1", "mq-cat -n 1 --idle 1m")
def at_most_a_minute(at: Scene, block: Block) -> None:
    at.typing.begin(block.text)
    until(opened(at.mount / "room", ".cursor"), "the reader")
    alice = at.mount / "room" / "alice"
    # It may not have gone to the end yet; then the next one is its one message.
    until(lambda: alice.write_text("here\n") > 0 and at.typing.prompted(0.2), "the one message")
    assert (at.typing.said, at.typing.code) == (["here"], 0)
    assert at.type(block.text.replace("1m", "0.1")) == ["nobody there"]


@treated("mq-cat.1", "mq-cat -e --from first --json")
def count_what_each_stream_has(at: Scene, block: Block) -> None:
    streams = json.loads((at.mount / "room" / ".stats").read_text())["streams"]
    wanted = [[str(streams[name]["messages"]), name] for name in ("alice", "bob", "carol")]
    assert [row.split() for row in at.type(block.text)] == wanted


# ---------------------------------------------------------------- pin(1)


@prepared("pin.1")
def a_make_file(at: Scene) -> None:
    at.serve()
    (at.folder / "Makefile").write_text("all: one two\none two:\n\t@echo made $@\n")
    at.defer(lambda: hang_up(at))


@treated("pin.1", "pin work")
def a_shell_that_stays(at: Scene, block: Block) -> None:
    terminal = at.typing.terminal
    at.typing.begin(block.text)
    until(at.typing.raw, "attached")
    terminal.sendline("echo answer-$((40 + 2))")
    terminal.expect_exact("answer-42\r\n")
    terminal.send(KEY)
    at.typing.prompt()
    assert at.typing.code == 0
    at.typing.begin(block.text)
    terminal.expect_exact("answer-42\r\n")
    terminal.send(KEY)
    at.typing.prompt()
    assert at.typing.code == 0


@treated("pin.1", "pin -c build make -j4")
def a_long_build(at: Scene, block: Block) -> None:
    create, look = block.lines
    assert at.type(create.typed) == []
    assert sorted(at.type(look.typed)) == ["made one", "made two"]


@treated("pin.1", "pin -w work ls -l")
def type_into_it_from_elsewhere(at: Scene, block: Block) -> None:
    for line, shows in zip(block.lines, (r"-rw.* Makefile\r\n", r"\d\d:\d\d:\d\d .*\d{4}\r\n"), strict=True):
        assert at.type(line.typed) == []
        until(lambda: re.search(shows, history(at)) is not None, line.typed)  # noqa: B023


@treated("pin.1", "printf '\\003' | pin -w work")
def interrupt_what_runs_in_it(at: Scene, block: Block) -> None:
    at.type("pin -w work 'echo begun-$((1)); sleep 1000; echo not this'")
    until(lambda: "begun-1\r\n" in history(at), "it runs")
    until(lambda: runs("sleep 1000", at.folder), "it sleeps")
    assert at.type(block.text) == []
    until(lambda: not runs("sleep 1000", at.folder), "the interrupt")
    at.type("pin -w work 'echo ended-$((1))'")
    until(lambda: "ended-1\r\n" in history(at), "the session goes on")
    assert "\nnot this" not in history(at)


@treated("pin.1", "mq-cat -e --from first mq/work out")
def everything_it_has_shown(at: Scene, block: Block) -> None:
    said = at.type(block.text)
    assert "answer-42" in said
    assert "ended-1" in said


# ---------------------------------------------------------------- what they share


@contextmanager
def typed_server(at: Scene, line: str, mount: Path) -> Iterator[None]:
    """A `mqfs serve` that is typed; ready, and ended by Ctrl-C."""
    at.typing.begin(line)
    at.mounts(mount)
    at.typing.terminal.expect_exact("mqfs: ready")
    yield
    at.typing.interrupt()
    assert at.typing.code == 0
    assert not mounted(mount)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def damage(store: Path, where: bytes) -> None:
    """Flip a bit in the middle of what is stored."""
    for log in store.glob("buckets/*/*/*.log"):
        data = bytearray(log.read_bytes())
        if where in data:
            data[data.index(where)] ^= 1
            log.write_bytes(data)
            return
    raise AssertionError(f"{where!r} is not in the store")


def guest(folder: Path, example: str, sock: Path) -> str:
    """Boot Linux, with the socket behind 10.0.2.100, type the example, look at what it has brought; what it printed."""
    build = folder / "guest"
    build.mkdir()
    for file in (HERE / "v9fs" / "guest.sh", HERE.parent / "interop" / "v9fs" / "mkinitrd.sh"):
        shutil.copy2(file, build)
    initrd = build / "initrd.gz"
    subprocess.run([build / "mkinitrd.sh", KERNEL, initrd, "564"], check=True)
    subprocess.run(["cc", "-O", "-static", "-o", build / "tunnel", HERE / "v9fs" / "tunnel.c"], check=True)
    (build / "example").write_text(f"{example}\n")
    archive = ["cpio", "-o", "-H", "newc", "--quiet"]
    more = subprocess.run(archive, cwd=build, input=b"tunnel\nexample\n", stdout=subprocess.PIPE, check=True)
    initrd.write_bytes(initrd.read_bytes() + gzip.compress(more.stdout))
    (kernel,) = KERNEL.glob("boot/vmlinuz-*")
    command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "256", "-nodefaults", "-no-reboot", "-nographic"]
    command += ["-serial", "stdio", "-kernel", str(kernel), "-initrd", str(initrd)]
    command += ["-append", "console=ttyS0 quiet panic=-1", "-device", "virtio-net-pci,netdev=n0,romfile="]
    command += ["-chardev", f"socket,id=tunnel,path={sock}"]
    command += ["-netdev", "user,id=n0,guestfwd=tcp:10.0.2.100:564-chardev:tunnel"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=BOOT_S, check=False)
    return done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")


def history(at: Scene) -> str:
    """All that the session `work` has shown."""
    return str(mq_cat("-e", "--from", "first", at.mount / "work", "out").stdout.decode())


def hang_up(at: Scene) -> None:
    """End all sessions."""
    for session in at.mount.glob("*/out"):
        shutil.rmtree(session.parent)
    until(lambda: not runs("/bin/bash -i", at.folder), "the session's end")


def runs(command: str, folder: Path) -> bool:
    """Is there a process with these words, in that folder?"""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if b" ".join(words) == command.encode() and (process / "cwd").readlink() == folder:
                return True
        except OSError:
            continue
    return False
