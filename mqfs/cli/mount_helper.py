"""`mount.mqfs`: the program that mount(8) runs for `-t mqfs`, and so for lines of fstab.

    mount.mqfs SOURCE DIR [-sfnvr] [-o OPTION,...]

SOURCE is a store to serve, or the addresses of a server, as of `mqfs mount`. A child serves. This process ends when the
tree is mounted, or the mount is refused. Until then the child's standard error is a pipe to it:

    parent   fork ── reads the pipe to its end ──────────────────► exit 0, or the lines of the pipe and 1 or 32
    child      └── mounts ── READY: NUL, the pipe is closed ── serves ── unmounted: ends
"""

from __future__ import annotations

import getopt
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import attrs

from mq_tools.cli_types import open_standard_files
from mqfs import limits
from mqfs.cli.common import become
from mqfs.errors import BadAddress, BadCommand, BadConfig, BadStore, MqfsError
from mqfs.net.sockets import UnixAddress, parse_address, parse_addresses
from mqfs.server.options import KINDS, Options, join, read_file
from mqfs.syntax.duration import parse_duration

USAGE, INTERRUPTED, FAILED = 1, 8, 32  # of mount(8)
READY = b"\0"  # ends the pipe of a child that has mounted
# Options of mount(8) and systemd, and options that hold anyway.
IGNORED = {
    "rw", "defaults", "auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "owner", "group", "exec",
    "noexec", "suid", "nosuid", "dev", "nodev", "async", "atime", "noatime", "relatime",
    "norelatime", "diratime", "nodiratime",
}  # fmt: skip
OF_A_SERVER = {"user", "token-file", "patience", "allow-other"}  # `mqfs mount`
NOT_HERE = {"store", "mount", "service", "trace"}
FILES = {"config", *(f.name.replace("_", "-") for f in attrs.fields(Options) if f.metadata.get("metavar") == "FILE")}


@attrs.frozen
class Request:
    """The request of mount(8). `options`: of `mqfs serve` or `mqfs mount`, by their keys in a file."""

    source: str
    directory: str
    options: dict[str, Any]
    user: str = ""  # as whom to serve
    fake: bool = False

    @property
    def is_of_server(self) -> bool:
        return is_address(self.source)


def is_address(source: str) -> bool:
    """Whether a source names a server; else it is a store."""
    try:
        return bool(parse_addresses(source))
    except BadAddress:
        return False


def parse(arguments: list[str]) -> Request:
    """Parse the command line. Raises BadConfig."""
    try:
        flags, words = getopt.gnu_getopt(arguments, "sfnvrwo:t:")
    except getopt.GetoptError as error:
        raise BadConfig(f"{error.msg} (expected SOURCE DIR [-sfnvr] [-o OPTION,...])") from None
    if len(words) != 2:
        raise BadConfig(f"{len(words)} arguments (expected SOURCE DIR)")
    source, given = words[0], dict(flags)
    texts = [text for flag, value in flags if flag == "-o" for text in re.split(r"(?<!\\),", value) if text]
    known = OF_A_SERVER if is_address(source) else KINDS.keys() - NOT_HERE | {"config", "uid"}
    options: dict[str, Any] = {}
    for text in texts + ["ro"] * ("-r" in given):
        key, sign, value = text.replace("\\,", ",").partition("=")
        key = key.replace("_", "-") if key not in IGNORED else key
        if (key in IGNORED and not sign) or text.lower().startswith("x-"):
            continue
        if key == "ro":
            raise BadConfig("ro: unsupported (expected rw, and modes of files)")
        if key in known:
            _add(options, key, value if sign else None)
        elif "-s" not in given:
            raise BadConfig(f"{text!r}: unknown option (expected some of {' '.join(sorted(known))})")
    if "patience" in options:
        options["patience"] = _seconds("patience", options["patience"])
    user = options.pop("uid", "")
    if not is_address(source):
        source = os.path.realpath(source)  # the child works in /
    return Request(source, os.path.realpath(words[1]), options, user, "-f" in given)


def _seconds(key: str, value: str) -> float:
    """Return the seconds of a duration. Raises BadConfig."""
    try:
        return parse_duration(value) / 1e9
    except BadCommand as error:
        raise BadConfig(f"{key}={value}: {error.detail}") from None


def _add(options: dict[str, Any], key: str, value: str | None) -> None:
    """Add an option: several values for a list, no value for a flag. Raises BadConfig."""
    kind, name = KINDS.get(key, "text"), key.replace("-", "_")
    if (kind == "flag") != (value is None):
        expected = key if kind == "flag" else f"{key}=VALUE"
        raise BadConfig(f"{key}: {'a' if value else 'no'} value (expected {expected})")
    if value is not None and not _path_of(key, value).startswith("/"):
        raise BadConfig(f"{key}={value}: a relative path (expected one from / on)")
    if kind == "list":
        options[name] = (*options.get(name, ()), value)
    else:
        options[name] = True if kind == "flag" else value


def _path_of(key: str, value: str) -> str:
    """Return the path in the value of an option; "/" if it has none."""
    if key in FILES:
        return value
    try:
        address = parse_address(value.rpartition("=")[2]) if KINDS.get(key) == "list" else None
    except BadAddress:
        return "/"
    return address.path if isinstance(address, UnixAddress) else "/"


# ---------------------------------------------------------------- the child


def serve(request: Request, notify: Callable[[str], None]) -> int:
    """Serve until unmounted from outside or a signal comes. Return the exit code. Raises MqfsError, OSError."""
    if request.user:
        become(request.user)
    return serve_server(request, notify) if request.is_of_server else serve_store(request, notify)


def serve_store(request: Request, notify: Callable[[str], None]) -> int:
    """Serve a store. Wait a moment for one that is in use: an unmount returns before its server has ended."""
    from mqfs.server.app import run  # here, as a wrong option needs none of it

    values = dict(request.options)
    file = read_file(values.pop("config")) if "config" in values else {}
    own = {"store": request.source, "mount": request.directory}
    options = join({"log_level": "warning", **file}, {**values, **own})
    is_new = not os.path.exists(request.source)

    def note(state: str) -> None:
        if is_new and state == "READY=1":
            print(f"{request.source}: a new store was made", file=sys.stderr, flush=True)  # the name may be mistyped
        notify(state)

    until = time.monotonic() + limits.SHUTDOWN_S
    while True:
        try:
            return run(options, notify=note, ends_with_mount=True)
        except BadStore as error:
            if "in use by process" not in error.detail or time.monotonic() > until:
                raise
            time.sleep(0.1)


def serve_server(request: Request, notify: Callable[[str], None]) -> int:
    """Serve the tree of a remote server."""
    import trio  # here, as above

    from mqfs.cli import mount
    from mqfs.cli.bridge import secret
    from mqfs.server import logs

    logs.set_up("warning")
    given = request.options
    options = mount.Options(
        address=request.source,
        directory=request.directory,
        patience_s=given.get("patience", 60.0),
        allow_other=given.get("allow_other"),
        user=given.get("user", ""),
        token=secret(given.get("token_file")),
        trace=False,
    )
    return trio.run(mount.run, options, notify)


def detach(state: str) -> None:
    """Report READY=1 to the parent, and leave the terminal."""
    if state == "READY=1":
        from mqfs.server import logs

        logs.move_to_syslog()
        os.write(2, READY)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.close(null)


def be_child(request: Request, pipe: int) -> NoReturn:
    """Serve, and end with the exit code of mount(8)."""
    os.setsid()
    os.chdir("/")
    os.dup2(pipe, 2)
    os.close(pipe)
    try:
        code = FAILED if serve(request, detach) else 0
    except BadConfig as error:
        print(error, file=sys.stderr)
        code = USAGE
    except MqfsError as error:
        print(error, file=sys.stderr)
        code = FAILED
    except OSError as error:
        print(f"{request.source}: {error.strerror or error}", file=sys.stderr)
        code = FAILED
    sys.stderr.flush()
    os._exit(code)


# ---------------------------------------------------------------- the parent


def mount(request: Request) -> int:
    """Mount, and return the exit code of mount(8) when that is done. Prints failures. Ctrl-C ends the child."""
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        os.close(ours)
        be_child(request, theirs)
    os.close(theirs)
    try:
        with open(ours, "rb") as pipe:
            said = pipe.read()
    except KeyboardInterrupt:  # the child has left the terminal, and gets no SIGINT
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        return INTERRUPTED
    for line in said.rstrip(READY).decode(errors="replace").splitlines():
        print(f"mount.mqfs: {line.removeprefix('mqfs: ')}", file=sys.stderr)
    if said.endswith(READY):
        return 0
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code in (USAGE, FAILED) else FAILED


def main() -> NoReturn:
    """Run `mount.mqfs`: one line for every failure, no traceback."""
    open_standard_files()
    try:
        request = parse(sys.argv[1:])
        sys.exit(0 if request.fake else mount(request))
    except BadConfig as error:
        print(f"mount.mqfs: {error}", file=sys.stderr)
        sys.exit(USAGE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
