"""One run of the bench: the group, the processes, the end, and what it comes to.

Owns the order of these and the figures; how they are shown is display.py's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from mqfs import limits
from mqfs.bench import local_server, payload
from mqfs.bench.actors import Load
from mqfs.bench.children import Crew
from mqfs.bench.drivers import CONSUMER, PING, PONG, STREAM, Place, open_driver
from mqfs.bench.histogram import PERCENTILES, Histogram
from mqfs.bench.plan import Plan

ROUND_TRIPS_S = 5.0  # no longer than that
_SECOND_NS = 10**9


@attrs.define
class Found:
    """What was measured."""

    plan: Plan
    published: int = 0
    received: int = 0
    publishing_s: float = 0.0  # from the first publish to the end of the last
    receiving_s: float = 0.0  # from the first publish to the last that came
    lost: int = 0
    twice: int = 0
    disordered: int = 0
    damaged: int = 0
    unacknowledged: int = 0  # of what workers took, by the tree's own count
    interrupted: bool = False
    took: dict[str, Histogram] = attrs.Factory(dict)  # publish, delivery, round trip

    @property
    def sound(self) -> bool:
        return not (self.lost or self.twice or self.disordered or self.damaged or self.unacknowledged)

    def told(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "options": self.plan.told(),
            "interrupted": self.interrupted,
            "published": {**_rates(self.published, self.publishing_s, self.plan.size)},
            "received": {**_rates(self.received, self.receiving_s, self.plan.size)},
            "checked": {
                "lost": self.lost,
                "twice": self.twice,
                "out_of_order": self.disordered,
                "damaged": self.damaged,
                "unacknowledged": self.unacknowledged,
            },
            "latency_us": {name: latencies(took) for name, took in self.took.items()},
            "histogram_us": {name: [[ns / 1000, n] for ns, n in took.bars()] for name, took in self.took.items()},
        }


def _rates(count: int, seconds: float, size: int) -> dict[str, float]:
    rate = count / seconds if seconds else 0.0
    return {"messages": count, "seconds": seconds, "rate": rate, "mb_per_s": rate * size / 1e6}


def latencies(took: Histogram) -> dict[str, float]:
    """Microseconds."""
    found = {f"p{percent:g}": took.percentile(percent) / 1000 for percent in PERCENTILES}
    return {"count": len(took), **found, "max": took.most / 1000}


Progress = Callable[[int, int], None]  # published, received


def measure(plan: Plan, progress: Progress) -> Found:
    """Carry it out. Raises what went wrong; Ctrl-C ends it with what was measured by then."""
    with local_server.folder(plan) as folder, local_server.place(plan, folder) as place:
        found = _load(plan, place, folder, progress)
        if plan.round_trips and not found.interrupted:
            _round_trips(plan, place, folder, found)
        return found


def _load(plan: Plan, place: Place, folder: str, progress: Progress) -> Found:
    kept = "replay off" if plan.workers else "replay all"
    consumer = [f"consumer {CONSUMER} {STREAM}"] if plan.workers else []
    with local_server.group(place, [kept, f"sync {plan.sync}", *consumer, *plan.ctl], [STREAM]) as group:
        load = Load(group, plan.producers, plan.size, plan.batch, plan.messages, plan.seconds, plan.rate)
        load = attrs.evolve(load, marks=not plan.workers)
        taker = "worker" if plan.workers else "consumer"
        roles = [(taker, i) for i in range(plan.takers)] + [("producer", i) for i in range(plan.producers)]
        with Crew(place, load, folder, roles) as crew:
            return Run(plan, place, load, crew, progress).carry_out()


class Run:
    """Producers against those who take, until all has come."""

    def __init__(self, plan: Plan, place: Place, load: Load, crew: Crew, progress: Progress) -> None:
        self.plan, self.place, self.load, self.crew, self.progress = plan, place, load, crew, progress
        self.taker = "worker" if plan.workers else "consumer"
        self.cut = self.interrupted = False

    def carry_out(self) -> Found:
        crew = self.crew
        crew.begin()
        try:
            self._wait_for("producer")
            self._mark_ends()
            self._drain()
        except KeyboardInterrupt:
            self.interrupted = True
            self._end_early()
        if crew.left(self.taker) or crew.left("producer"):
            self.cut = True
            crew.cut()
        return self._found()

    def _wait_for(self, role: str) -> None:
        while self.crew.left(role) and not self._inside_over(role):
            self.crew.look()
            self._show()

    def _inside_over(self, role: str) -> bool:
        """In one process with all, the producers have not ended on their own."""
        return role == "producer" and self.place.transport == "embedded"

    def _show(self) -> None:
        self.progress(self.crew.count("producer"), self.crew.count(self.taker))

    def _mark_ends(self) -> None:
        """Workers end at a mark each, behind all there is."""
        if self.place.transport == "embedded" or not self.plan.workers:
            return
        way = open_driver(self.place)
        try:
            publish, _ = way.publisher(self.load.group, STREAM)
            for _ in range(self.plan.workers):
                publish(payload.make(0, 0, 0, payload.tail(self.plan.size), payload.END))
        finally:
            way.close()

    def _drain(self, seconds: float = float("inf")) -> None:
        """Until all has come; or nothing does any more."""
        deadline = time.monotonic() + seconds
        moved_at, last = time.monotonic(), (-1, -1)
        while self.crew.left(self.taker) and time.monotonic() < deadline:
            self.crew.look()
            self._show()
            now = self.crew.count("producer"), self.crew.count(self.taker)
            if now != last:
                moved_at, last = time.monotonic(), now
            elif time.monotonic() - moved_at > limits.BENCH_STALL_S and not self.crew.left("producer"):
                return  # what is missing is lost

    def _end_early(self) -> None:
        """Publish no more; what was published may still come for a while."""
        self.crew.tell("stop")
        deadline = time.monotonic() + limits.BENCH_DRAIN_S
        while self.crew.left("producer") and time.monotonic() < deadline:
            self.crew.look()
        if not self.crew.left("producer"):
            self._mark_ends()
            self._drain(limits.BENCH_DRAIN_S)

    # ------------------------------------------------------------ figures

    def _found(self) -> Found:
        producers, takers = self.crew.told("producer"), self.crew.told(self.taker)
        begun_ns = min(told["begun_ns"] for told in producers)
        found = Found(self.plan, interrupted=self.interrupted)
        found.published = sum(told["count"] for told in producers)
        found.received = sum(told["count"] for told in takers)
        found.publishing_s = (max(told["ended_ns"] for told in producers) - begun_ns) / _SECOND_NS
        ended_ns = max((told["ended_ns"] for told in takers if told["count"]), default=begun_ns)
        found.receiving_s = (ended_ns - begun_ns) / _SECOND_NS
        found.took = {"publish": _joined(producers)}
        if takers:
            found.took["delivery"] = _joined(takers)
            self._check(found, [told["count"] for told in producers], takers)
        return found

    def _acknowledged(self, takers: list[dict[str, Any]]) -> int:
        if self.place.transport == "embedded":
            return sum(told.get("acknowledged", 0) for told in takers)
        way = open_driver(self.place)
        try:
            return way.acknowledged(self.load.group)
        finally:
            way.close()

    def _check(self, found: Found, sent: list[int], takers: list[dict[str, Any]]) -> None:
        for told in takers:
            found.twice += told["sight"]["twice"]
            found.disordered += told["sight"]["disordered"]
            found.damaged += told["sight"]["damaged"]
        if self.plan.workers:
            parts = [[Path(path).read_bytes() for path in told["seen"]] for told in takers]
            found.lost, twice = payload.shared_out(parts, sent)
            found.twice += twice
            if not self.cut:
                found.unacknowledged = found.received + self.plan.workers - self._acknowledged(takers)  # end marks too
        else:
            found.lost = sum(lost(told, sent) for told in takers)
        if self.interrupted and self.cut:
            found.lost = 0  # what has not come by then is no loss


def lost(told: dict[str, Any], sent: list[int]) -> int:
    """Of what was sent by each, how much never came to one consumer."""
    behind = sum(max(0, count - came) for count, came in zip(sent, told["next"], strict=True))
    return int(behind + sum(told["missing"]))


def _joined(told: list[dict[str, Any]]) -> Histogram:
    all_ = Histogram()
    for one in told:
        all_.merge(Histogram.heard(one["took"]))
    return all_


def _round_trips(plan: Plan, place: Place, folder: str, found: Found) -> None:
    """With nothing else going on."""
    with local_server.group(place, ["replay all", f"sync {plan.sync}", *plan.ctl], [PING, PONG]) as group:
        load = Load(group, 1, plan.size, round_trips=plan.round_trips, seconds=ROUND_TRIPS_S)
        with Crew(place, load, folder, [("echo", 0), ("pinger", 0)]) as crew:
            crew.begin()
            with contextlib.suppress(KeyboardInterrupt):
                while crew.left("pinger"):
                    crew.look()
                found.took["round trip"] = _joined(crew.told("pinger"))
                return
            found.interrupted = True
            crew.cut()
            found.took["round trip"] = _joined(crew.told("pinger"))
