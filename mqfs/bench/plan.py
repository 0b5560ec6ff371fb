"""The options of `mqfs bench`, checked before anything is started: bounds, combinations, errors."""

from __future__ import annotations

import os
from typing import Any

import attrs

from mqfs import limits
from mqfs.bench.payload import LEAST_BYTES
from mqfs.client.publisher import Durability
from mqfs.engine.language.settings import parse_settings
from mqfs.errors import BadAddress, BadCommand, BadConfig
from mqfs.net.sockets import parse_addresses

WAITS = ("committed", "published")
TRANSPORTS = ("auto", "ring", "9p", "file", "embedded")


@attrs.frozen
class Plan:
    """The options of the command line; None: not given."""

    at: str | None
    mount: str | None
    store: str | None
    transport: str | None
    producers: int
    consumers: int
    workers: int  # competing consumers of a work queue, instead of `consumers`
    size: int
    batch: int
    prefetch: int
    messages: int | None
    seconds: float | None
    sync: str
    wait: Durability
    ctl: tuple[str, ...]
    rate: float | None
    round_trips: int
    json: str | None
    plot: str | None

    @property
    def receivers(self) -> int:
        return self.workers or self.consumers

    def as_dict(self) -> dict[str, Any]:
        """Return the options for the JSON output."""
        return {key: value for key, value in attrs.asdict(self).items() if key not in ("json", "plot")}


def make(options: dict[str, Any]) -> Plan:
    """Return the plan of the command line's options (None: not given). Raises BadConfig."""
    workers, consumers, messages, seconds = (options[name] for name in ("workers", "consumers", "messages", "seconds"))
    if workers and consumers is not None:
        raise BadConfig(
            "--workers and --consumers: workers share the messages, consumers receive all (expected one of both)"
        )
    if messages is not None and seconds is not None:
        raise BadConfig("--messages and --seconds: both given (expected one)")
    if consumers is None:
        consumers = 0 if workers else 1
    if messages is None and seconds is None:
        seconds = 5.0
    plan = Plan(**{**options, "consumers": consumers, "seconds": seconds})
    for check in (_numbers, _place, _batch, _settings, _files):
        check(plan)
    return plan if plan.transport else attrs.evolve(plan, transport="file" if plan.mount else "auto")


def _numbers(plan: Plan) -> None:
    for name, least, most in (
        ("producers", 1, limits.BENCH_PRODUCERS),
        ("consumers", 0, limits.BENCH_CONSUMERS),
        ("workers", 0, limits.BENCH_WORKERS),
        ("size", LEAST_BYTES, limits.MESSAGE_BYTES),
        ("batch", 1, limits.BENCH_BATCH),
        ("prefetch", 1, limits.PREFETCH),
        ("messages", 1, limits.BENCH_MESSAGES),
        ("round_trips", 0, limits.BENCH_MESSAGES),
    ):
        value = getattr(plan, name)
        if value is not None and not least <= value <= most:
            raise BadConfig(f"--{name.replace('_', '-')} {value}: out of range (expected {least:,} to {most:,})")
    if plan.seconds is not None and not 0 < plan.seconds <= limits.BENCH_SECONDS:
        raise BadConfig(f"--seconds {plan.seconds:g}: out of range (expected above 0, up to {limits.BENCH_SECONDS:,})")
    if plan.rate is not None and not 0 < plan.rate < float("inf"):
        raise BadConfig(f"--rate {plan.rate:g}: out of range (expected messages a second, more than 0)")


def _place(plan: Plan) -> None:
    if plan.transport not in (None, *TRANSPORTS):
        raise BadConfig(f"--transport {plan.transport!r}: unknown (expected {', '.join(TRANSPORTS)})")
    if len([place for place in (plan.at, plan.mount, plan.store) if place is not None]) > 1:
        raise BadConfig("--at, --mount and --store: more than one given (expected one, or none for a temporary store)")
    if plan.at is not None:
        if plan.transport in ("file", "embedded"):
            raise BadConfig(f"--at: not with --transport {plan.transport} (expected auto, ring or 9p)")
        try:
            parse_addresses(plan.at)
        except BadAddress as error:
            raise BadConfig(f"--at: {error.detail}") from None
    if plan.mount is not None:
        if plan.transport not in (None, "file"):
            raise BadConfig(f"--mount: not with --transport {plan.transport} (expected file)")
        if not os.path.exists(os.path.join(plan.mount, "ctl")):
            raise BadConfig(f"--mount {plan.mount!r}: no tree mounted there (expected a file ctl in it)")
    if plan.store is not None and not os.access(plan.store, os.W_OK | os.X_OK):
        raise BadConfig(f"--store {plan.store!r}: cannot write there (expected a writable directory)")


def _batch(plan: Plan) -> None:
    if plan.wait not in WAITS:
        raise BadConfig(f"--wait {plan.wait!r}: unknown (expected {' or '.join(WAITS)})")
    if plan.wait == "published" and (plan.transport == "file" or plan.mount):
        raise BadConfig("--wait published: not with files, whose writes wait as `sync` says (expected the ring)")
    if plan.batch > 1 and (plan.transport == "file" or plan.mount):
        raise BadConfig("--batch: not with files, where a write is one message (expected another transport)")
    if plan.prefetch > 1 and (plan.transport == "file" or plan.mount or not plan.workers):
        raise BadConfig("--prefetch: for --workers of the library (expected --workers, and not files)")


def _settings(plan: Plan) -> None:
    for option, line in (("--sync", f"sync {plan.sync}"), *(("--ctl", line) for line in plan.ctl)):
        try:
            parse_settings([line])
        except BadCommand as error:
            raise BadConfig(f"{option}: {error.detail.removeprefix(f'{option[2:]}: ')}") from None


def _files(plan: Plan) -> None:
    for option, path in (("--json", plan.json), ("--plot", plan.plot)):
        if path is None or (path == "-" and option == "--json"):
            continue
        folder = os.path.dirname(path) or "."
        if not path or os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
            raise BadConfig(f"{option} {path!r}: cannot write there (expected a file in a writable directory)")
    if plan.plot is not None:
        if not plan.plot.lower().endswith(".png"):
            raise BadConfig(f"--plot {plan.plot!r}: not a PNG file (expected a name ending in .png)")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise BadConfig("--plot: matplotlib is missing (install it: pip install matplotlib)") from None


def describe(plan: Plan) -> str:
    """Return a description of the run in one line."""
    receivers = f"{plan.workers} sharing them" if plan.workers else f"{plan.consumers} receiving all"
    batch = f" in batches of {plan.batch}" if plan.batch > 1 else ""
    ahead = f", {plan.prefetch} claimed at once" if plan.prefetch > 1 else ""
    rate = f", {plan.rate:,g} a second" if plan.rate else ""
    who = f"{plan.producers} publishing{batch}{rate}, {receivers}{ahead}"
    wait = ", waiting for shared memory only" if plan.wait == "published" else ""
    return f"{plan.size:,} bytes, {who}; {plan.transport}, sync {plan.sync}{wait}"
