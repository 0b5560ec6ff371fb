"""A Linux in qemu, for its 9P client."""

from __future__ import annotations

import shutil

from tests.support import ROOT
from tests.support.eventually import patient

KERNEL = ROOT / ".cache" / "v9fs" / "kernel"
BOOT_S = patient(900)  # for a hang only: an emulated machine boots in seconds, on a busy one in minutes


def missing() -> str:
    """Return the missing requirement of the test; "" if there is none."""
    for program in ("qemu-system-x86_64", "busybox", "cpio"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not list(KERNEL.glob("boot/vmlinuz-*")):
        return "no kernel: run script/v9fs-kernel"
    return ""
