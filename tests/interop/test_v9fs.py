"""Linux' own 9P client, in qemu, in all three dialects, what is large with two msizes; v9fs/guest.sh has the steps."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mqfs.net import identity
from tests.support.linux_guest import BOOT_S, KERNEL, missing
from tests.support.ninep import make_tree, open_handles, running

HERE = Path(__file__).parent / "v9fs"
DIALECTS = ("9p2000.L", "9p2000.u", "9p2000")


def boot(folder: Path, port: int) -> str:
    """Run the guest to its end; what it printed."""
    initrd = folder / "initrd.gz"
    subprocess.run([HERE / "mkinitrd.sh", KERNEL, initrd, str(port)], check=True)
    (kernel,) = KERNEL.glob("boot/vmlinuz-*")
    command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "256", "-nodefaults", "-no-reboot", "-nographic"]
    command += ["-serial", "stdio", "-kernel", str(kernel), "-initrd", str(initrd)]
    command += ["-append", "console=ttyS0 quiet panic=-1 no_timer_check", "-netdev", "user,id=n0"]
    command += ["-device", "virtio-net-pci,netdev=n0,romfile="]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=BOOT_S, check=False)
    return done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")


@pytest.mark.timeout(BOOT_S + 60)
def test_v9fs(tmp_path: Path) -> None:
    lack = missing()
    if lack:
        pytest.skip(f"Linux v9fs: {lack}")
    tree = make_tree()
    with running(tree, tmp_path, tcp=True, tcp_user=identity.user_name(os.getuid())) as server:
        with server.connect(msize=1 << 20) as client:
            client.mkdir("host")
            with client.open("host/ctl", "w") as ctl:
                ctl.write(b"replay all\n")
            for name, body in (("big", b"x" * 299_996 + b"end\n"), ("exact", b"y" * 131_072), ("small", b"small\n")):
                with client.create(f"host/{name}") as stream:
                    stream.write(body)
            client.mkdir("many")
            for number in range(560):  # more than one reply of the largest msize holds
                client.create(f"many/{number:0240}").close()
        printed = boot(tmp_path, server.port)
        told = [line.strip() for line in printed.splitlines() if "GUEST-" in line]
        want = [f"GUEST-OK {dialect} {msize}" for dialect in DIALECTS for msize in ("default", "131096")]
        assert told[1:] == [*want, "GUEST-RC 0"], printed
        assert server.call(lambda: open_handles(tree)) == 0
        assert server.call(lambda: tree.waits.used) == 0
