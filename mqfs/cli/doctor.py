"""`mqfs doctor`: whether this machine has what a server needs, a line for each check, with the remedy."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import click

from mqfs import errors, ring
from mqfs.cli.common import become_owner
from mqfs.net.tokens import read_entries
from mqfs.records import batch
from mqfs.ring.server import fd_keeper
from mqfs.ring.server.keeper_link import KeeperLink
from mqfs.server.options import read_file

OK, WARN, BAD = "ok", "warn", "bad"
DESCRIPTORS = 65_536  # one for each connection, open segment and ring
ROOM_BYTES, LITTLE_BYTES = 1 << 30, 64 << 20
SYNCS, SYNC_BYTES, SLOW_S = 64, 4096, 0.05
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "afs")
VOLATILE = ("tmpfs", "ramfs")
_TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronized


class Finding(NamedTuple):
    """The result of a check. `remedy`: what to do; empty: nothing."""

    level: str
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5}{self.subject}: {self.text}{f' (expected {self.remedy})' if self.remedy else ''}"


@click.command()
@click.argument("store", required=False)
@click.option("--token-file", metavar="FILE", help="File of tokens to check, as of serve.")
@click.option("--replica", metavar="URL", help="URL of a replicated log, as of serve; a stream of NATS is made.")
@click.option("--config", metavar="FILE", help="TOML file of serve: it, and what it names of the above, are checked.")
def doctor(store: str | None, token_file: str | None, replica: str | None, config: str | None) -> int:
    """Check what a server needs of this machine, and of the disk of a STORE, which need not exist yet.

    Root looks as the owner of STORE, or of the directory that it is to be made in; without STORE, of the file of
    tokens. Exits with 1 where something is bad.
    """
    settings: dict[str, object] = {}
    if config is not None:
        with contextlib.suppress(errors.BadConfig):  # checked below, as the server's user
            settings = read_file(config)
    store, token_file = store or _text(settings.get("store")), token_file or _text(settings.get("token_file"))
    replica = replica or _text(settings.get("replica"))
    findings = list(_user(store or token_file, replica))
    if config is not None:
        findings.append(_configuration(config))
    for look in (_python, _native, _fuse, _descriptors, _clock):
        findings += look()
    if store is not None:
        findings += _disk(store)
        findings += _keeper(store)
    if token_file is not None:
        findings += _tokens(token_file)
    if replica is not None:
        findings += _replica(replica)
    for finding in findings:
        print(finding)
    return int(any(finding.level == BAD for finding in findings))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _user(path: str | None, replica: str | None) -> Iterator[Finding]:
    """Become the server's user: root's access says nothing about that user's."""
    for name in ("mqfs.fuse.mount", *(["mqfs.replica.log", "mqfs.replica.objects"] if replica else [])):
        with contextlib.suppress(ImportError, errors.MountError):
            importlib.import_module(name)  # here, as that user may not be able to read the installation
    if path is not None and (user := become_owner(path)):
        yield Finding(OK, "user", f"{user}, as of {path}")


def _configuration(path: str) -> Finding:
    try:
        read_file(path)
    except errors.BadConfig as error:
        return Finding(BAD, "configuration", str(error))
    return Finding(OK, "configuration", path)


def _python() -> Iterator[Finding]:
    yield Finding(OK, "python", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def _native() -> Iterator[Finding]:
    """Check the parts in C. Without them all works, but several times as slowly and without shared memory."""
    for subject, reason in (("records in C", batch.MISSING), ("rings in C", ring.MISSING)):
        if reason:
            yield Finding(WARN, subject, reason, "gcc, libc6-dev and python3-dev, then mqfs installed again")
        else:
            yield Finding(OK, subject, "built")


def _fuse() -> Iterator[Finding]:
    """Check FUSE, which only --mount needs."""
    if importlib.util.find_spec("pyfuse3") is None:
        yield Finding(WARN, "pyfuse3", "not installed", "libfuse3-dev, then pip install pyfuse3, to mount")
        return
    from mqfs.fuse import mount  # here, as it needs pyfuse3

    try:
        mount.check_device()
        yield Finding(OK, "fuse", mount.DEVICE)
    except errors.MountError as error:
        yield Finding(WARN, "fuse", str(error))
    for name, seconds in mount.request_timeouts().items():
        if seconds:
            yield Finding(BAD, name, mount.ABORTED.format(seconds), f"sysctl -w {name}=0")
        else:
            yield Finding(OK, name, "0")
    if os.geteuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        yield Finding(WARN, "fusermount3", "not found", "apt install fuse3, for mounts of an ordinary user")
    try:
        mount.others_allowed(True)
        yield Finding(OK, "mounts for others", "allowed")
    except errors.MountError as error:
        yield Finding(WARN, "mounts for others", str(error))


def _descriptors() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS:
        yield Finding(OK, "descriptors", "unlimited" if hard == resource.RLIM_INFINITY else str(hard))
    else:
        yield Finding(WARN, "descriptors", f"{hard}", f"ulimit -Hn {DESCRIPTORS} or LimitNOFILE={DESCRIPTORS}")


def _clock() -> Iterator[Finding]:
    """Check the clock, which `at`, `ttl` and the times of messages depend on."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # struct timex has 208 bytes
    if state == _TIME_ERROR:
        yield Finding(WARN, "clock", "not synchronized", "a service such as chrony or systemd-timesyncd")
    elif state >= 0:
        yield Finding(OK, "clock", "synchronized")


def _disk(store: str) -> Iterator[Finding]:
    folder = os.path.realpath(store)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):  # also a link to itself
        yield Finding(BAD, "disk", f"{folder}: not a directory", "a directory, or a path that does not exist")
        return
    kind, missing = _filesystem(folder), "" if os.path.lexists(store) else f"{store}: does not exist yet; "
    if kind in NETWORK:
        yield Finding(BAD, "disk", f"{missing}{folder} is on {kind}: locks and syncs of others", "a local disk")
    elif kind in VOLATILE:
        yield Finding(WARN, "disk", f"{missing}{folder} is on {kind}: lost when the machine ends", "a local disk")
    else:
        yield Finding(OK, "disk", f"{missing}{folder} is on {kind}")
    free = shutil.disk_usage(folder).free
    level = OK if free >= ROOM_BYTES else WARN if free >= LITTLE_BYTES else BAD
    yield Finding(level, "room", f"{free >> 20} MiB free", "" if level == OK else f"{ROOM_BYTES >> 20} MiB or more")
    try:
        times = _sync_times(folder)
    except OSError as error:
        yield Finding(BAD, "sync", f"{folder}: {error.strerror}", "a folder that this user may write to")
        return
    median, slow = statistics.median(times), times[-1]
    text = f"{median * 1e3:.2f} ms median, {slow * 1e3:.2f} ms the slowest of {SYNCS} of {SYNC_BYTES} bytes"
    yield (
        Finding(WARN, "sync", text, "a faster disk, or 'sync 1s' in ctl")
        if median > SLOW_S
        else Finding(OK, "sync", text)
    )


def _keeper(store: str) -> Iterator[Finding]:
    """Check the process that keeps a store's rings when its server is killed; without rings there is none."""
    if os.path.lexists(f"{store}/{fd_keeper.NAME}"):
        try:
            held = KeeperLink.held(store)
        except errors.BadStore as error:
            yield Finding(BAD, "fd keeper", str(error))
            return
        for descriptor in held.values():
            os.close(descriptor)
        text = f"{len(held)} ring{'s' if len(held) > 1 else ''} held" if held else "no rings held"
        yield Finding(OK, "fd keeper", text)


def _filesystem(path: str) -> str:
    """Return the type of the file system that holds a path."""
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for row in file:
            words = row.split()
            if words[2] == device:
                return words[words.index("-") + 1]
    return "an unknown file system"


def _sync_times(folder: str) -> list[float]:
    """Return how long each fdatasync of a small append took, in seconds, ascending."""
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(SYNCS):
            os.write(file.fileno(), bytes(SYNC_BYTES))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return sorted(times)


def _tokens(path: str) -> Iterator[Finding]:
    try:
        count = len(read_entries(path))
    except errors.BadConfig as error:
        yield Finding(BAD, "tokens", str(error))
    else:
        yield Finding(OK, "tokens", f"{count} in {path}")


def _replica(url: str) -> Iterator[Finding]:
    """Check whether an engine answers and can fence; report its promises. Make no files: this user would own them."""
    from mqfs.replica.log import open_log  # here, as it needs the package of its engine

    if (is_file := url.startswith("file://")) and importlib.util.find_spec("obstore") is not None:
        folder = os.path.realpath(url.removeprefix("file://"))
        at = next((one for one in (f"{folder}/log", folder) if os.path.lexists(one)), os.path.dirname(folder))
        if not os.path.isdir(at) or not os.access(at, os.W_OK | os.X_OK):
            yield Finding(BAD, "replica", f"{url}: {at}: not writable", "a directory that this user may write to")
            return
        if at != f"{folder}/log":
            yield Finding(OK, "replica", f"{url}: no log yet, a server makes it")
            return
    try:
        log = open_log(url, create=not is_file)
    except (errors.BadConfig, errors.BadReplica) as error:
        yield Finding(BAD, "replica", str(error).removeprefix("--replica "))
        return
    for promise in log.promises():
        yield Finding(OK, "replica", f"{log.name}: {promise}")
    log.close()
