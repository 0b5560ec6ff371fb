"""What is to be measured: the options of `mqfs bench`, checked before anything is started.

Owns what goes with what, and its one line where it does not.
"""

from __future__ import annotations

import os
from typing import Any

import attrs

from mqfs import limits
from mqfs.bench.payload import LEAST_BYTES
from mqfs.engine.language.settings import parse_settings
from mqfs.errors import BadAddress, BadCommand, BadConfig
from mqfs.net.address import parse_address

WAITS = ("committed", "published")
TRANSPORTS = ("auto", "ring", "9p", "file", "embedded")


@attrs.frozen
class Plan:
    """As on the command line; None is "not said"."""

    at: str | None = None
    mount: str | None = None
    store: str | None = None
    transport: str | None = None
    producers: int = 1
    consumers: int = 1
    workers: int = 0  # a work queue with so many takers; then there are no consumers
    size: int = 64
    batch: int = 1
    messages: int | None = None
    seconds: float | None = None
    sync: str = "always"
    wait: str = "committed"
    ctl: tuple[str, ...] = ()
    rate: float | None = None
    round_trips: int = 1_000
    json: str | None = None
    plot: str | None = None

    @property
    def takers(self) -> int:
        return self.workers or self.consumers

    def told(self) -> dict[str, Any]:
        """For the JSON object."""
        return {key: value for key, value in attrs.asdict(self).items() if key not in ("json", "plot")}


def make(said: dict[str, Any]) -> Plan:
    """A plan of what the command line said (None: not said). Raises BadConfig."""
    given = {key: value for key, value in said.items() if value is not None}
    if given.get("workers") and "consumers" in given:
        raise BadConfig(
            "--workers and --consumers: workers share the messages, consumers each get all; give one of both"
        )
    if "messages" in given and "seconds" in given:
        raise BadConfig("--messages and --seconds: give one of both")
    if given.get("workers"):
        given["consumers"] = 0
    plan = Plan(**{"seconds": 5.0 if "messages" not in given else None, **given})
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
        ("messages", 1, limits.BENCH_MESSAGES),
        ("round_trips", 0, limits.BENCH_MESSAGES),
    ):
        value = getattr(plan, name)
        if value is not None and not least <= value <= most:
            raise BadConfig(f"--{name.replace('_', '-')} {value}; {least:,} to {most:,} is right")
    if plan.seconds is not None and not 0 < plan.seconds <= limits.BENCH_SECONDS:
        raise BadConfig(f"--seconds {plan.seconds:g}; more than 0, at most {limits.BENCH_SECONDS:,} is right")
    if plan.rate is not None and not 0 < plan.rate < float("inf"):
        raise BadConfig(f"--rate {plan.rate:g}; a number of messages a second, more than 0, is right")


def _place(plan: Plan) -> None:
    if plan.transport not in (None, *TRANSPORTS):
        raise BadConfig(f"--transport {plan.transport!r}; one of {', '.join(TRANSPORTS)} is right")
    if len([place for place in (plan.at, plan.mount, plan.store) if place is not None]) > 1:
        raise BadConfig(
            "--at, --mount and --store: a server that runs, its mount, or a server of the bench's own; give one"
        )
    if plan.at is not None:
        if plan.transport in ("file", "embedded"):
            raise BadConfig(f"--at goes with --transport auto, ring or 9p; for {plan.transport} leave it out")
        try:
            parse_address(plan.at)
        except BadAddress as error:
            raise BadConfig(f"--at {error.detail}") from None
    if plan.mount is not None:
        if plan.transport not in (None, "file"):
            raise BadConfig(f"--mount goes with --transport file; for {plan.transport} give --at")
        if not os.path.exists(os.path.join(plan.mount, "ctl")):
            raise BadConfig(f"--mount {plan.mount}: no tree is mounted there (it has no file ctl)")
    if plan.store is not None and not os.access(plan.store, os.W_OK | os.X_OK):
        raise BadConfig(f"--store {plan.store}: not a directory that can be written to")


def _batch(plan: Plan) -> None:
    if plan.wait not in WAITS:
        raise BadConfig(f"--wait {plan.wait!r}; {' or '.join(WAITS)} is right")
    if plan.wait == "published" and (plan.transport == "file" or plan.mount):
        raise BadConfig("--wait: a write to a file waits as the group's sync says; leave it out, or take the ring")
    if plan.batch > 1 and (plan.transport == "file" or plan.mount):
        raise BadConfig("--batch: a write to a file is one message; leave it out, or take another transport")


def _settings(plan: Plan) -> None:
    for option, line in (("--sync", f"sync {plan.sync}"), *(("--ctl", line) for line in plan.ctl)):
        try:
            parse_settings([line])
        except BadCommand as error:
            raise BadConfig(f"{option}: {error.detail.removeprefix(f'{line!r}: ')}") from None


def _files(plan: Plan) -> None:
    for option, path in (("--json", plan.json), ("--plot", plan.plot)):
        if path is None or (path == "-" and option == "--json"):
            continue
        folder = os.path.dirname(path) or "."
        if not path or os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
            raise BadConfig(f"{option} {path or repr(path)}: no file can be written there")
    if plan.plot is not None:
        if not plan.plot.lower().endswith(".png"):
            raise BadConfig(f"--plot {plan.plot}: a picture is PNG; a name that ends in .png is right")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise BadConfig("--plot needs matplotlib (in a clone: script/setup spark)") from None
