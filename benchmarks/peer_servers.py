"""The servers of `peers.py`, also mqfs: each in a folder and on a socket of its own, stopped by its process id.

NATS can only listen on TCP: on loopback, at a free port.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from queue_peers import HERE, mqfs_command, running

NODE = HERE.parent / ".cache" / "node"  # script/setup bench installs benchmarks/node/package.json here
INSTALLS = "script/setup bench installs it"
RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # Debian's command in PATH changes the user


def answers(path: str | int) -> Callable[[], bool]:
    """Return a function: whether a server accepts at a socket (a number: port of loopback)."""

    def look() -> bool:
        family = socket.AF_INET if isinstance(path, int) else socket.AF_UNIX
        with socket.socket(family) as end, contextlib.suppress(OSError):
            end.connect(("127.0.0.1", path) if isinstance(path, int) else path)
            return True
        return False

    return look


def processor_s() -> float:
    """Return the processor seconds so far of all descendants of this process."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], used[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(used[pid] for pid in ours - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def mqfs(base: Path, synced: bool) -> Iterator[str]:
    """Run mqfs, and yield its 9P socket; the mount is in the same folder."""
    from mqfs.fuse.mount import mounted, unmount

    mount, at = str(base / "mq"), str(base / "9p")
    os.mkdir(mount)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: mounted(mount) and unmount(mount, lazily=True))
        command = mqfs_command("--store", str(base / "store"), "--mount", mount, "--listen", f"unix!{at}")
        stack.enter_context(running(command, lambda: os.path.exists(f"{mount}/ctl") and answers(at)()))
        yield at


@contextlib.contextmanager
def redis(base: Path, synced: bool) -> Iterator[str]:
    at = str(base / "redis")
    os.mkdir(f"{at}.d")
    command = ["redis-server", "--port", "0", "--unixsocket", at, "--dir", f"{at}.d", "--save", "", "--daemonize", "no"]
    command += ["--appendonly", "yes", "--auto-aof-rewrite-percentage", "0"]
    command += ["--appendfsync", "always" if synced else "no"]
    command += ["--client-output-buffer-limit", "pubsub 0 0 0"]  # else a slow subscriber is disconnected
    with running(command, answers(at)):
        yield at


@contextlib.contextmanager
def beanstalkd(base: Path, synced: bool) -> Iterator[str]:
    at = str(base / "bean")
    os.mkdir(f"{at}.d")
    with running(["beanstalkd", "-l", f"unix:{at}", "-b", f"{at}.d", "-f0" if synced else "-F"], answers(at)):
        yield at


@contextlib.contextmanager
def nats(base: Path, synced: bool) -> Iterator[str]:
    port = free_port()
    config = base / "nats.conf"
    config.write_text(
        f"listen: 127.0.0.1:{port}\nmax_pending: 1GB\n"  # else a slow subscriber is disconnected
        f"jetstream {{ store_dir: {base}/nats, max_file_store: 20GB }}\n"
    )
    with running(["nats-server", "-c", str(config)], answers(port)):
        yield f"nats://127.0.0.1:{port}"


@contextlib.contextmanager
def mosquitto(base: Path, synced: bool) -> Iterator[str]:
    at, config = str(base / "mqtt"), base / "mosquitto.conf"
    lines = [f"listener 0 {at}", "allow_anonymous true", "user root", "max_queued_messages 0", "max_queued_bytes 0"]
    config.write_text("\n".join([*lines, "max_inflight_messages 0", "log_type none", ""]))
    with running([shutil.which("mosquitto") or "/usr/sbin/mosquitto", "-c", str(config)], answers(at)):
        yield at


@contextlib.contextmanager
def rabbitmq(base: Path, synced: bool) -> Iterator[str]:
    """Run a node with its own port mapper, on loopback. Its classic queues sync messages before they confirm them."""
    home, port, mapper, between = base / "rabbit", free_port(), free_port(), free_port()
    home.mkdir()
    (home / "plugins").write_text("[].\n")
    environment = {
        **os.environ,
        **{f"RABBITMQ_{name}_BASE": str(home) for name in ("MNESIA", "LOG")},
        "HOME": str(home),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
        "RABBITMQ_NODENAME": f"mqfsbench{port}@localhost",
        "RABBITMQ_CONFIG_FILE": str(home / "none"),
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "ERL_EPMD_PORT": str(mapper),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_DIST_PORT": str(between),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    with (
        running(["epmd", "-port", str(mapper), "-address", "127.0.0.1"], answers(mapper)),
        running([RABBITMQ], answers(port), environment, 300),
    ):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def nothing(base: Path, synced: bool) -> Iterator[str]:
    """Yield a folder, for peers without a server."""
    path = base / "files"
    path.mkdir(exist_ok=True)
    yield str(path)


SERVERS = {
    "mqfs": mqfs,
    "redis": redis,
    "beanstalkd": beanstalkd,
    "nats": nats,
    "mosquitto": mosquitto,
    "rabbitmq": rabbitmq,
    "zmq": nothing,
    "node": nothing,
    "fsq": nothing,
    "bare": nothing,
}
_PROGRAMS = {"redis": "redis-server", "beanstalkd": "beanstalkd", "nats": "nats-server", "mosquitto": "mosquitto"}
_PROGRAMS["rabbitmq"] = RABBITMQ
_MODULES = {
    "rabbitmq": "pika",
    "redis": "redis",
    "beanstalkd": "greenstalk",
    "nats": "nats",
    "mosquitto": "paho.mqtt",
    "zmq": "zmq",
}
_PACKAGES = {"node": "shared-memory-disruptor", "fsq": "qlobber-fsq"}


def lacks(server: str) -> str:
    """Return the missing part of a server, and how to install it; "" if none is missing."""
    program, module, package = (table.get(server) for table in (_PROGRAMS, _MODULES, _PACKAGES))
    if program and shutil.which(program) is None and not os.path.exists(f"/usr/sbin/{program}"):
        return f"no {program}; {INSTALLS}"
    if module and not _found(module):
        return f"no Python package {module}; {INSTALLS}"
    if package and shutil.which("node") is None:
        return f"no node; {INSTALLS}"
    if package and not (NODE / "node_modules" / package).is_dir():
        return f"no npm package {package}; {INSTALLS}"
    return ""


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def serving(base: Path, names: set[str], synced: bool) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Start the servers that are installed. Yield where each is, and why the others are missing."""
    base.mkdir()
    where: dict[str, str] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            failed[name] = lacks(name)
            if not failed[name]:
                try:
                    where[name] = stack.enter_context(SERVERS[name](base, synced))
                except (AssertionError, OSError) as error:
                    failed[name] = f"did not start: {error}"
        yield where, {name: why for name, why in failed.items() if why}


def versions() -> dict[str, str]:
    """Return the versions of all installed servers and packages."""
    found = {}
    for name, command in (
        ("redis-server", ["redis-server", "--version"]),
        ("beanstalkd", ["beanstalkd", "-v"]),
        ("nats-server", ["nats-server", "--version"]),
        ("mosquitto", ["mosquitto", "-h"]),
        ("node", ["node", "--version"]),
    ):
        with contextlib.suppress(OSError):
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            found[name] = (said.stdout or said.stderr).splitlines()[0].split(" sha=")[0]
    from importlib import metadata

    for package in ("redis", "hiredis", "greenstalk", "nats-py", "paho-mqtt", "pyzmq", "pika", "kombu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    import json

    for package in _PACKAGES.values():
        with contextlib.suppress(OSError):
            found[package] = json.loads((NODE / "node_modules" / package / "package.json").read_text())["version"]
    return found
