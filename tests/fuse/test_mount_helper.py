"""mount(8), umount(8), findmnt(8) and a file like fstab, with the mount.mqfs of this project."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mqfs.cli.mount_helper import Request, parse
from mqfs.errors import BadConfig
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.mount_space import MountSpace
from tests.support.server import Server, short_folder

needs_root = pytest.mark.root


@pytest.fixture(scope="module")
def space() -> Iterator[tuple[MountSpace, Path]]:
    with short_folder() as folder:
        for name in ("mq", "far"):
            (folder / name).mkdir()
        with MountSpace(folder) as found:
            yield found, folder


@needs_root
def test_a_line_of_fstab(space: tuple[MountSpace, Path]) -> None:
    """`mount -a` mounts it once, findmnt shows it, umount ends its server, and at once it can be mounted again."""
    at, folder = space
    store, mount = folder / "store", folder / "mq"
    fstab = folder / "fstab"
    options = r"default=replay\040all,default=depth\0405,nofail,_netdev,x-systemd.automount,noexec"
    fstab.write_text(f"{store} {mount} mqfs {options} 0 0\n")
    for turn in range(2):
        for again in range(2):  # the second time there is nothing to do
            said = "" if turn or again else f"mount.mqfs: {store}: a new store was made\n"
            assert at.run("mount", "-a", "-T", fstab) == (0, said)
        assert at.run("findmnt", "-n", "-o", "SOURCE,FSTYPE", mount) == (0, f"{store} fuse.mqfs\n")
        group = at.path(mount) / "a"
        if turn == 0:
            group.mkdir()
            (group / "s").write_text("hello\n")
        assert (group / ".kept" / "s").read_text() == "hello\n"
        assert {"replay all", "depth 5"} <= set((group / "ctl").read_text().splitlines())
        assert len(at.servers()) == 1
        assert at.run("umount", mount) == (0, "")
    eventually(lambda: not at.servers(), "the server ends")


@needs_root
def test_a_store_that_is_in_use(space: tuple[MountSpace, Path]) -> None:
    """One line, and 32."""
    at, folder = space
    (folder / "own").mkdir()
    with Server("--store", "store", "--listen", "unix!socket", cwd=folder / "own") as server:
        code, text = at.run("mount", "-t", "mqfs", folder / "own" / "store", folder / "mq")
        assert (code, text) == (32, f"mount.mqfs: {folder}/own/store: in use by process {server.pid}\n")


@needs_root
def test_a_server_elsewhere(space: tuple[MountSpace, Path]) -> None:
    """It stays when its mount is taken away; the type that findmnt shows is one of mount(8), too."""
    at, folder = space
    with Server.at(folder) as server:
        address, mount = f"unix!{folder}/socket", folder / "far"
        assert at.run("mount", "-t", "fuse.mqfs", "-o", "patience=9s,rw", address, mount) == (0, "")
        (at.path(mount) / "g").mkdir()
        assert at.run("umount", mount) == (0, "")
        eventually(lambda: not at.servers(), "the process of the mount ends")
        assert server.process.poll() is None


@needs_root
@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_mount_with_a_file_closed(space: tuple[MountSpace, Path], redirection: str, is_elsewhere: bool) -> None:
    """None of its own files gets that number: what is written there would be in it."""
    at, folder = space
    with ExitStack() as stack:
        source = f"{folder}/closed"
        if is_elsewhere:
            (folder / "open").mkdir(exist_ok=True)
            stack.enter_context(Server.at(folder / "open"))
            source = f"unix!{folder}/open/socket"
        command = f'exec "$@" {redirection}'
        assert at.run("sh", "-c", command, "sh", "mount.mqfs", source, folder / "mq")[0] == 0
        stream = at.path(folder / "mq") / f"s{int(is_elsewhere)}"
        stream.write_text("hello\n")
        (pid,) = at.servers()
        assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)] == 3 * [os.devnull]
        assert at.run("umount", folder / "mq") == (0, "")
        eventually(lambda: not at.servers(), "the server ends")


@needs_root
def test_ctrl_c_before_it_is_mounted(tmp_path: Path) -> None:
    """The server does not answer. The child, which the terminal does not reach, ends, too."""
    command = [sys.executable, "-c", "from mqfs.cli.mount_helper import main; main()"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(HANG_S)
        address = f"tcp!127.0.0.1!{listener.getsockname()[1]}"
        with subprocess.Popen([*command, address, tmp_path], cwd=ROOT, stderr=subprocess.PIPE) as process:
            try:
                of_child, _ = listener.accept()
                with of_child:
                    of_child.settimeout(HANG_S)
                    process.send_signal(signal.SIGINT)
                    assert (process.wait(HANG_S), process.communicate()[1]) == (8, b"")
                    while of_child.recv(4096):
                        pass
            finally:
                process.kill()
    assert not os.path.ismount(tmp_path)


@needs_root
def test_it_serves_elsewhere_too_and_ends_with_its_mount(space: tuple[MountSpace, Path]) -> None:
    at, folder = space
    options = f"listen=unix!{folder}/s,uid=nobody"
    (folder / "of-nobody").mkdir()
    os.chown(folder / "of-nobody", 65534, 65534)
    assert at.run("mount", "-t", "mqfs", "-o", f"listen=unix!{folder}/s", folder / "two", folder / "mq")[0] == 0
    (pid,) = at.servers()
    assert (folder / "s").is_socket()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not at.servers(), "it is gone")
    assert at.run("mount", "-t", "mqfs", "-o", options, folder / "of-nobody" / "store", folder / "mq")[0] == 32
    assert at.run("mount", "-t", "mqfs", folder / "two", folder / "mq") == (0, "")
    assert at.run("umount", folder / "mq") == (0, "")


@needs_root
@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ("stroe=x", 1, "'stroe=x': unknown option (expected some of "),
        ("ro", 1, "ro: unsupported (expected rw"),
        ("listen", 1, "listen: no value (expected listen=VALUE)"),
        ("default=replay never", 1, "--default: "),
        ("config=/nowhere", 1, "--config /nowhere: No such file"),
        ("uid=who", 1, "uid=who: unknown user"),
        ("listen=unix!s", 1, "listen=unix!s: a relative path (expected one from / on)"),
        ("listen=unix:s", 1, "listen=unix:s: a relative path (expected one from / on)"),
        ("token-file=t", 1, "token-file=t: a relative path (expected one from / on)"),
    ],
)
def test_wrong_options(space: tuple[MountSpace, Path], options: str, code: int, text: str) -> None:
    at, folder = space
    found = at.run("mount", "-t", "mqfs", "-o", options, folder / "store", folder / "mq")
    assert found[0] == code, found
    assert found[1].startswith(f"mount.mqfs: {text}"), found
    assert found[1].count("\n") == 1


@needs_root
def test_a_directory_that_is_not_there(space: tuple[MountSpace, Path]) -> None:
    at, folder = space
    code, text = at.run("mount", "-t", "mqfs", folder / "store", folder / "nowhere")
    assert code == 32
    assert "nowhere" in text


LATE = ["unix!/s", "/m", "-o", "patience=soon"]


@needs_root
def test_a_wrong_option_of_a_server_elsewhere(space: tuple[MountSpace, Path]) -> None:
    at, folder = space
    code, text = at.run("mount", "-t", "mqfs", "-o", "patience=soon", f"unix!{folder}/none", folder / "far")
    assert (code, text.count("\n")) == (1, 1), text
    assert text.startswith("mount.mqfs: patience=soon: invalid duration 'soon'")


def test_reading_the_command_line() -> None:
    options = r"rw,default=bind v a\,b,default=ttl 5s,listen=unix!/s,allow_other,uid=7"
    words = ["/st", "/m", "-n", "-v", "-o", options, "-f"]
    values = {"default": ("bind v a,b", "ttl 5s"), "listen": ("unix!/s",), "allow_other": True}
    assert parse(words) == Request("/st", "/m", values, "7", fake=True)
    assert parse(["tls!h!1,tls!i!1", "/m", "-o", "token-file=/t"]).options == {"token_file": "/t"}
    assert parse(["/st", "/m", "-s", "-o", "fancy"]).options == {}
    assert parse(["st", "m"]) == Request(f"{os.getcwd()}/st", f"{os.getcwd()}/m", {})
    assert parse(["tls!h!1", "/m", "-o", "patience=1500ms"]).options == {"patience": 1.5}
    for wrong in (["/st"], ["/st", "/m", "-q"], ["/st", "/m", "-r"], ["tcp!h!1", "/m", "-o", "listen=unix!s"], LATE):
        with pytest.raises(BadConfig, match=r"expected"):
            parse(wrong)
