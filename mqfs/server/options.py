"""The options of `mqfs serve`, from the command line and from a TOML file.

Each option is declared once, here; the command line, the file and the checks of both read the declaration. This module
opens nothing but the file, and checks nothing that depends on the machine: app.py does.
"""

from __future__ import annotations

import os
import pwd
import stat
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from mqfs import limits
from mqfs.errors import BadConfig


def _text(metavar: str, help: str, default: str | None = None, **more: Any) -> Any:
    return attrs.field(default=default, metadata={"kind": "text", "metavar": metavar, "help": help, **more})


def _list(metavar: str, help: str, **more: Any) -> Any:
    return attrs.field(default=(), metadata={"kind": "list", "metavar": metavar, "help": f"{help} Repeatable.", **more})


def _flag(help: str, default: bool | None = False, **more: Any) -> Any:
    return attrs.field(default=default, metadata={"kind": "flag", "help": help, **more})


_HTTP = "http http_ntfy http_durable"
_TCP = "tcp! tls! http_proxy"  # clients of a proxy at a unix socket act as those of TCP


@attrs.frozen
class Options:
    """Each option once: its name (with - for _), its kind, its default, and its text in --help. `live`: SIGHUP puts a
    change in force. `needs`: options and kinds of addresses; without any of these it has no effect."""

    store: str | None = _text("DIR", "Directory of the store; else messages are in memory only.")
    mount: str | None = _text("DIR", "Mount the tree at this empty directory.", short="-m")
    listen: tuple[str, ...] = _list("ADDRESS", "Serve 9P at unix!PATH, tcp!HOST!PORT or tls!HOST!PORT.")
    http: tuple[str, ...] = _list("ADDRESS", "Serve HTTP at an address of these forms, or HOST:PORT.")
    http_origin: tuple[str, ...] = _list(
        "ORIGIN", "Allow pages of this origin, as https://HOST.", live=True, needs=f"{_HTTP} fq"
    )
    http_host: tuple[str, ...] = _list("NAME", "Name of this host beside localhost.", live=True, needs=f"{_HTTP} fq")
    http_proxy: tuple[str, ...] = _list("CIDR|user:NAME", "Trust X-Forwarded-* from this network or user.", needs=_HTTP)
    http_ntfy: tuple[str, ...] = _list("GROUP=ADDRESS", "Serve a group as ntfy does.")
    http_durable: tuple[str, ...] = _list("GROUP=ADDRESS", "Serve a group as Durable Streams.")
    http_qpubs: bool = _flag("Serve the interface of qpubs at /.qpubs/GROUP/.", needs="http")
    fq: tuple[str, ...] = _list("ADDRESS", "Serve fq at an address of these forms.")
    fq_group: str = _text("GROUP", "Group of the exchanges of fq.", "fq", needs="fq")
    fq_users: str | None = _text("FILE", "File of users of fq, USER SYSTEM-USER a line; for tokens.", needs="fq")
    fq_node: str | None = _text(
        "IPV4", "IPv4 address of this broker among its fq peers; else a listener's.", needs="fq"
    )
    service: str | None = _text("NAME", "Serve 9P at a unix socket of this name in $NAMESPACE.", short="-s")
    default: tuple[str, ...] = _list("'CTL LINE'", "Initial setting of new groups.")
    limit: tuple[str, ...] = _list("'USER KEY=N...'", "Quota of a user (*: of the others).")
    tcp_user: str = _text("NAME", "User that TCP clients act as.", "nobody", needs=_TCP)
    token_file: str | None = _text("FILE", "File of tokens; see mqfs token.", needs=f"{_TCP} fq_users")
    require_token: bool = _flag("Refuse TCP clients without a token.", needs="token_file")
    tls_cert: str | None = _text("FILE", "Certificate for tls!HOST!PORT, with its chain, in PEM.", needs="tls!")
    tls_key: str | None = _text("FILE", "Key of the certificate; else in the same file.", needs="tls_cert")
    tls_client_ca: str | None = _text(
        "FILE", "Authorities of client certificates, which name the user.", needs="tls_cert"
    )
    audit: str = _text("LEVEL", "Audit log: off, changes, or all (publishes too).", "off")
    log_level: str = _text("LEVEL", "Least level of the log: debug, info, warning or error.", "info", live=True)
    log_format: str = _text("FORMAT", "Form of a line of the log: text or json.", "text", live=True)
    replica: str | None = _text(
        "URL", "Replicated log: nats://HOST,.../NAME, s3://BUCKET/NAME, file:///DIR.", needs="store"
    )
    standby: bool = _flag("Follow the primary of --replica, and take over.", needs="replica")
    failover: str = _text("DURATION", "Silence of the primary after which a standby takes over.", "5s", needs="replica")
    confirm: str = _text("N", "Standbys that have to confirm what is replicated: 0 or 1.", "0", needs="replica")
    replica_keep: str = _text("DURATION", "Time that mqfs restore can go back.", "1h", needs="replica")
    insecure: bool = _flag("Allow TCP, and TLS without known clients, beyond loopback.")
    allow_other: bool | None = _flag("Let other users access the mount. As root: yes.", None, needs="mount")
    trace: str = _text(
        "[CLASS,...]",
        "Print each message of 9p, fuse, http (all three without CLASS), or call of engine, store, ring.",
        "off",
        short="-D",
        alone="on",
    )


LIVE = {field.name for field in attrs.fields(Options) if field.metadata.get("live")}
KINDS = {field.name.replace("_", "-"): field.metadata["kind"] for field in attrs.fields(Options)}  # by key


def command_line() -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Return the arguments of `click.option` for each option. Options that are not given are None or ()."""
    made: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    for field in attrs.fields(Options):
        key, meta = field.name.replace("_", "-"), field.metadata
        default = f" [default: {field.default}]" if isinstance(field.default, str) else ""
        more: dict[str, Any] = {"help": meta["help"] + default}
        if meta["kind"] == "flag":
            made.append(((f"--{key}/--no-{key}",), {**more, "default": None}))
            continue
        more |= {"metavar": meta["metavar"], "multiple": meta["kind"] == "list"}
        if "alone" in meta:  # the value of the option when given without one
            more |= {"is_flag": False, "flag_value": meta["alone"]}
        made.append(((*([meta["short"]] if "short" in meta else []), f"--{key}"), more))
    return made


def read_file(path: str, *, again: bool = False) -> dict[str, Any]:
    """Return the options of a configuration file, by the names of Options. `again`: it was a regular file, so do not
    wait for a named pipe in its place. Raises BadConfig."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | again * os.O_NONBLOCK)) as file:
            if again and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadConfig(f"--config {path}: not a regular file (expected a readable TOML file)")
            data = file.read(limits.CONFIG_BYTES + 1)
        if len(data) > limits.CONFIG_BYTES:
            raise BadConfig(f"--config {path}: too long (expected at most {limits.CONFIG_BYTES} bytes)")
        values = tomllib.loads(data.decode())
    except OSError as error:
        raise BadConfig(f"--config {path}: {error.strerror} (expected a readable TOML file)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"--config {path}: {error} (expected TOML, KEY = VALUE a line)") from None
    except (ValueError, RecursionError):  # from int(), and from the recursive parser
        raise BadConfig(f"--config {path}: number too long, or values too deep (expected KEY = VALUE a line)") from None
    return {key.replace("-", "_"): _value(path, key, value) for key, value in values.items()}


def _value(path: str, key: str, value: object) -> object:
    kind = KINDS.get(key)
    if kind is None:
        raise BadConfig(f"--config {path}: unknown key {key!r} (expected one of {' '.join(KINDS)})")
    if has_nul(value):
        raise BadConfig(f"--config {path}: invalid {key} = {_print(value)} (expected text without NUL)")
    if kind == "list":
        words = [value] if isinstance(value, str) else value
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return tuple(words)
    elif key == "trace" and isinstance(value, bool):
        return "on" if value else "off"
    elif isinstance(value, bool if kind == "flag" else str):
        return value
    expected = {"list": '"TEXT" or ["TEXT", "TEXT"]', "flag": "true or false", "text": '"TEXT"'}[kind]
    raise BadConfig(f"--config {path}: invalid {key} = {_print(value)} (expected {expected})")


def has_nul(value: object) -> bool:
    """Whether a value of an option is or contains a text with a NUL: no name, path or address may have one."""
    texts = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(text, str) and "\0" in text for text in texts)


def _print(value: object) -> str:
    """Return a value of a TOML file on one line."""
    try:
        text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or as many nested tables
        text = "..."
    return text if len(text) <= 60 else text[:60] + "..."


def join(file: Mapping[str, Any], command_line: Mapping[str, Any]) -> Options:
    """Join the options: of the command line, then of the file, then the defaults."""
    given = {key: value for key, value in command_line.items() if value not in (None, ())}
    return Options(**{**file, **given})


def require_partners(options: Options, others: Iterable[str]) -> None:
    """Check that each option has something that it `needs`: without an effect it would only seem to be in force. A
    default counts as not given. `--failover` does not need `--standby`, so that two servers can have the same options.

    Args:
        options: The options.
        others: The kinds of the addresses, and options in whose place sockets were passed.

    Raises:
        BadConfig: An option has no effect.
    """
    here = {name for name in attrs.fields_dict(Options) if getattr(options, name)}.union(others)
    for field in attrs.fields(Options):
        needs = field.metadata.get("needs", "").split()
        if needs and getattr(options, field.name) != field.default and here.isdisjoint(needs):
            expected = " or ".join(map(print_partner, needs))
            raise BadConfig(f"{print_partner(field.name)}: no effect alone (expected also {expected})")


def print_partner(name: str) -> str:
    """Return an option or a kind of addresses as it is on a command line."""
    return f"{name}HOST!PORT" if name.endswith("!") else f"--{name.replace('_', '-')}"


def service_address(name: str) -> str:
    """Return the address of `-s NAME`, as in plan9port: a socket in the name space directory, or NAME if an address."""
    return name if "!" in name else f"unix!{name_space()}/{name}"


def name_space() -> str:
    """Return the directory of this user's services: $NAMESPACE, or one named after the display."""
    if path := os.environ.get("NAMESPACE"):
        return path
    display = os.environ.get("DISPLAY") or ":0"
    if ":" in display:
        display = display.removesuffix(".0")
    return f"/tmp/ns.{_login()}.{display.replace('/', '_')}"


def _login() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
