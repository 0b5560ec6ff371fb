"""What must come of the examples of mqfs(1), mqfs(4), mqfs-store(5) and mount.mqfs(8)."""

from __future__ import annotations

import filecmp
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mqfs.ninep.client.connection import connect
from tests.docs.pages import Block
from tests.docs.scene import Scene
from tests.docs.treated import prepared, treated
from tests.support import ROOT
from tests.support.eventually import eventually
from tests.support.linux_guest import BOOT_S, KERNEL, missing
from tests.support.mount_space import MountSpace
from tests.support.ports import free_port
from tests.support.server import mounted

GUEST = ROOT / "tests" / "interop"

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
    at.typing.terminal.expect_exact("mqfs: ready")
    with connect(f"unix!{at.folder}/tmp/mq.sock"):
        at.typing.terminal.expect(r"Tversion .*version 9P2000.*\r\n.*Rversion")
    at.typing.interrupt()
    assert at.typing.code == 0


@treated("mqfs.1", "mount -t 9p")
def on_another_linux_machine(at: Scene, block: Block) -> None:
    """The other machine is a guest of qemu; its side of the tunnel is port_564/tunnel.c, our side is qemu's."""
    if lack := missing():
        at.lack = f"Linux v9fs: {lack}"
        return
    at.typing.begin(at.block("mqfs serve -D").text)
    path = at.folder / "tmp" / "mq.sock"
    at.typing.terminal.expect_exact("mqfs: ready")
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


@treated("mqfs.1", "mqfs token new")
def a_token_for_a_program(at: Scene, block: Block) -> None:
    (secret,) = at.type(block.text)
    assert re.fullmatch(r"mq_[0-9a-f]{8}_[A-Za-z0-9_-]{43}", secret)
    (row,) = at.type("mqfs token ls --token-file tokens")
    assert re.fullmatch(rf"{secret.split('_')[1]}\s+daemon\s+write\s+/shop\s+20\S+Z", row)


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


@treated("mqfs.4", "mkdir mq/accounts")
def only_after_the_message_that_was_read(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mqfs.4", """echo '{"stream":"mail","id":"nightly\"""")
def each_night(at: Scene, block: Block) -> None:
    at.type(block.text)
    (schedule,) = json.loads((at.mount / "post" / ".stats").read_text())["schedules"].items()
    assert schedule[0] == "nightly"
    assert schedule[1]["next"] % 86400 == 3 * 3600


@treated("mqfs.4", "mkdir mq/jobs")
def work_for_one_of_many(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mqfs.4", "mkdir mq/post")
def a_worker_in_plain_shell(at: Scene, block: Block) -> None:
    """It sends what it can; what fails comes again."""
    send = at.folder / "send"
    send.write_text('#!/bin/sh\n[ "$1" != bob ] || [ -e tried ] || { touch tried; exit 1; }\necho "$1" >>sent\n')
    send.chmod(0o755)
    before, loop = block.lines[:4], block.lines[4:]
    for line in before:
        assert at.type(line.typed) == []
    at.typing.begin("\n".join(line.typed for line in loop))
    for name in ("ann", "bob", "cem"):
        (at.mount / "post" / "mail").write_text(name)
    sent = at.folder / "sent"
    eventually(lambda: sent.exists() and len(sent.read_text().split()) == 3, "all are sent")
    assert sorted(sent.read_text().split()) == ["ann", "bob", "cem"]
    row = '"acknowledged": 3,\n   "failed": 1'
    eventually(lambda: row in (at.mount / "post" / ".stats").read_text(), "all are acknowledged")
    at.typing.interrupt()


@treated("mqfs.4", 'echo \'{"stream":"mail","headers"')
def what_else_there_is_to_know(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mqfs.4", "echo 'dead no such address'")
def give_up_on_it_and_try_again(at: Scene, block: Block) -> None:
    at.type_as_shown(block)
    at.type("exec 3>&-")


@treated("mqfs.4", 'echo \'{"stream":"mail","delay"')
def later_and_before_the_others(at: Scene, block: Block) -> None:
    """A second later."""
    post = at.mount / "post"
    short = block.text.replace("30s", "1s")
    assert short != block.text
    assert at.type(short) == []
    assert '"held": 1' in (post / ".stats").read_text()
    assert (post / ".consumers" / "mailer").read_text() == "eve\n"
    eventually(lambda: '"held": 0' in (post / ".stats").read_text(), "it is due")
    assert at.type("read -r first <>mq/post/.consumers/mailer; echo $first") == ["joe"]


@treated("mqfs.4", "mkdir mq/house")
def the_newest_state_of_each_room(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mqfs.4", "mkdir mq/shop\n")
def two_messages_in_one_write(at: Scene, block: Block) -> None:
    at.type_as_shown(block)
    assert (at.mount / "shop" / ".kept" / "mail").read_text() == "annbob"


@treated("mqfs.4", "mkdir mq/shop/.txn/today")
def both_or_none_and_once(at: Scene, block: Block) -> None:
    at.type_as_shown(block)
    assert (at.mount / "shop" / ".kept" / "mail").read_text() == "annbobdear ann\n"
    assert [path.name for path in (at.mount / "shop" / ".txn").iterdir()] == ["ctl"]


@treated("mqfs.4", "mkdir mq/home")
def all_that_has_to_do_with_warmth(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mqfs.4", "tail -n 2 mq/log/.kept")
def a_log_as_an_ordinary_file(at: Scene, block: Block) -> None:
    said = at.type(block.text)
    assert (said[0].startswith("make: ***"), said[1]) == (True, "after")


@treated("mqfs.4", "echo 'replay everything'")
def why_a_write_was_refused(at: Scene, block: Block) -> None:
    write, read = block.lines
    assert at.type(write.typed, 1) == ["bash: echo: write error: Invalid argument"]
    said = json.loads(at.type(read.typed)[-1])
    assert "replay 'everything': unknown value (expected off, last, key or all)" in said["text"]


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
    for file in (GUEST / "port_564" / "guest.sh", GUEST / "v9fs" / "mkinitrd.sh"):
        shutil.copy2(file, build)
    initrd = build / "initrd.gz"
    subprocess.run([build / "mkinitrd.sh", KERNEL, initrd, "564"], check=True)
    subprocess.run(["cc", "-O", "-static", "-o", build / "tunnel", GUEST / "port_564" / "tunnel.c"], check=True)
    (build / "example").write_text(f"{example}\n")
    archive = ["cpio", "-o", "-H", "newc", "--quiet"]
    more = subprocess.run(archive, cwd=build, input=b"tunnel\nexample\n", stdout=subprocess.PIPE, check=True)
    initrd.write_bytes(initrd.read_bytes() + gzip.compress(more.stdout))
    (kernel,) = KERNEL.glob("boot/vmlinuz-*")
    command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "256", "-nodefaults", "-no-reboot", "-nographic"]
    command += ["-serial", "stdio", "-kernel", str(kernel), "-initrd", str(initrd)]
    command += ["-append", "console=ttyS0 quiet panic=-1 no_timer_check"]
    command += ["-device", "virtio-net-pci,netdev=n0,romfile="]
    # Connected when the guest dials: the server ends connections that do not attach, and the guest may boot slowly.
    relay = f"{sys.executable} {GUEST / 'port_564' / 'relay.py'} {sock}"
    command += ["-netdev", f"user,id=n0,guestfwd=tcp:10.0.2.100:564-cmd:{relay}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=BOOT_S, check=False)
    return done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")


# ---------------------------------------------------------------- mount.mqfs(8)


@prepared("mount.mqfs.8")
def a_machine_with_mount_mqfs(at: Scene) -> None:
    """Its mounts are its own."""
    for name in ("etc", "srv/mq", "srv/far", "var/lib"):
        (at.folder / name).mkdir(parents=True)


@treated("mount.mqfs.8", "/var/lib/mqfs")
def lines_of_fstab(at: Scene, block: Block) -> None:
    """The second is of a machine that is not there, and of a token that is not, either."""
    if os.geteuid() != 0:
        at.lack = "mount(8): needs root"
        return
    fstab, mount = at.folder / "etc" / "fstab", at.folder / "srv" / "mq"
    fstab.write_text(f"{block.text}\n")
    with MountSpace(at.folder) as space:
        first, second = (line.split()[1] for line in fstab.read_text().splitlines())
        assert space.run("mount", "-T", fstab, first) == (
            0,
            f"mount.mqfs: {at.folder}/var/lib/mqfs: a new store was made\n",
        )
        assert "replay all\n" in (space.path(mount) / "ctl").read_text()
        code, text = space.run("mount", "-T", fstab, second)
        assert (code, "mqfs.token: No such file" in text) == (1, True), text
        for line in at.block("mount -t mqfs").lines[::-1]:  # unmounted, and mounted again
            assert space.run(*shlex.split(line.typed)) == (0, "")
        assert "replay all\n" in (space.path(mount) / "ctl").read_text()


@treated("mount.mqfs.8", "mount -t mqfs")
def the_same_by_hand(at: Scene, block: Block) -> None:
    """Typed with the one above, as it needs the same name space."""
