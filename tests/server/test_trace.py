"""`-D`: what is printed of each class, and that it is printed of no other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import mqfs
from mqfs import ring
from tests.support.eventually import HANG_S, eventually
from tests.support.server import NO_FUSE, SERVE, Server, can_mount, short_folder
from tests.support.server import mqfs as run

NINE = r"Twrite "
LINES = {
    "9p": NINE,
    "fuse": r"fuse -> WRITE \d+ node \d+ uid 0 pid \d+ fh \d+ offset 0 count 6\nfuse <- \d+ 8 bytes",
    "http": r"http tcp \d+ POST /g/s 4 bytes -> 201 2 bytes",
    "engine": (
        r"engine open /g/s uid 0 flags 1 -> StreamHandle, \d+ us\n"
        r"(.*\n)*?engine s: write 6 bytes 0 -> (6|waits), \d+ us"
    ),
    "store": r"store pwrite \d+ \d+ bytes \d+ -> \d+, \d+ us",
    "ring": r"ring attach User g -> Attachment, \d+ us",
}


def use(server: Server) -> None:
    """Write over every front end, and attach to shared memory."""
    with mqfs.connect(server.address, transport="9p") as client:
        client.group("g", create=True).publish("s", "9p")
    if server.mount is not None:
        (server.mount / "g" / "s").write_text("mount\n")
    (port,) = re.findall(r"HTTP at tcp!127\.0\.0\.1!(\d+)", server.text())
    with urlopen(Request(f"http://127.0.0.1:{port}/g/s?h-secret=1", b"http", method="POST")) as answer:
        assert answer.status == 201
    if not ring.MISSING:
        with mqfs.connect(server.address, transport="ring") as client:
            client.group("g").publish("s", "ring")


@pytest.mark.parametrize(
    ("words", "traced"),
    [
        (["-D"], ["9p", "fuse", "http"]),
        (["-D", "engine"], ["engine"]),
        (["-D", "store,ring"], ["store", "ring"]),
        (["--trace", "fuse"], ["fuse"]),
        (["-D", "http", "--trace", "off"], []),
    ],
    ids=lambda words: " ".join(words) or "nothing",
)
def test_classes(words: list[str], traced: list[str]) -> None:
    if not can_mount():
        pytest.skip(NO_FUSE)
    http = ["--http", "tcp!127.0.0.1!0", "--tcp-user", "root"]
    with short_folder() as folder, Server.at(folder, *words, *http, mount=True) as server:
        use(server)
        for kind, line in LINES.items():
            if kind in traced and not (kind == "ring" and ring.MISSING):
                eventually(lambda line=line: re.search(line, server.text()), f"{kind} traced")  # type: ignore[misc]
        text = server.text()
    for kind, line in LINES.items():
        assert kind in traced or not re.search(line, text), kind
    assert "h-secret" not in text


@pytest.mark.parametrize("words", [["-D"], ["-D", "engine"], ["-D", "store,ring"]], ids=" ".join)
@pytest.mark.parametrize("to", ["/dev/full", ">(exec true)"])
def test_a_trace_that_cannot_be_printed_is_left_out(words: list[str], to: str) -> None:
    """Its disk is full, or its reader ended: what is traced works on, and nothing of it fails."""
    program = ["bash", "-c", f'exec "$@" 2> {to}', "bash", *SERVE]
    mount = can_mount()
    with short_folder() as folder:
        http = ["--http", f"unix!{folder}/http"]
        with Server.at(folder, *words, *http, mount=mount, program=program) as server:
            with mqfs.connect(server.address, transport="9p") as client:
                client.group("g", create=True, ctl=["replay all"]).publish("s", "9p")
            if mount:
                (server.path / "g" / "s").write_text("mount")
            asked = ["curl", "-sS", "--unix-socket", f"{folder}/http", "-d", "http", "http://h/g/s"]
            subprocess.run(asked, capture_output=True, check=True, timeout=HANG_S)
            if not ring.MISSING:
                with mqfs.connect(server.address, transport="ring") as client:
                    client.group("g").publish("s", "ring")
            with mqfs.connect(server.address, transport="9p") as client:
                found = [bytes(message.body) for message in client.group("g").history()]
            assert found == [b"9p", *([b"mount"] if mount else []), b"http", *([] if ring.MISSING else [b"ring"])]
            assert server.stop() == 0


def test_a_class_there_is_not(tmp_path: Path) -> None:
    done = run("serve", "-D", "fuse,disk", "--listen", "unix!s", cwd=tmp_path)
    assert done.returncode == 2
    assert "-D 'disk' (expected some of 9p,fuse,http,engine,store,ring)" in done.stderr


@pytest.mark.parametrize(
    ("value", "traced"), [("true", True), ("false", False), ('"9p,store"', True), ('"off"', False)]
)
def test_in_the_configuration(tmp_path: Path, value: str, traced: bool) -> None:
    (tmp_path / "c.toml").write_text(f"trace = {value}\n")
    with Server("--config", "c.toml", "--listen", "unix!s", cwd=tmp_path) as server:
        with mqfs.connect(f"unix!{tmp_path}/s", transport="9p") as client:
            client.group("g", create=True).publish("s", "x")
        if traced:
            eventually(lambda: "Twrite" in server.text(), "a trace")
    assert ("Twrite" in server.text()) is traced
