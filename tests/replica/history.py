"""What must be true of the stores in the end, and of what their clients heard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mqfs.model import Kind
from mqfs.store.check import check
from mqfs.store.store import DiskStore
from tests.replica.workload import Call, Delivery, Load


class Found(NamedTuple):
    group: int
    sequence: int
    body: bytes


def read_store(path: Path) -> list[Found]:
    """All messages of a store that no server has."""
    store, found = DiskStore(str(path)), list[Found]()
    try:
        for number in store.groups():
            bucket, at = store.open(number), 0
            while (record := bucket.reader.scan(at)) is not None:
                if record.kind == Kind.MESSAGE:
                    found.append(Found(number, record.sequence, bytes(record.body)))
                at = record.sequence + 1
    finally:
        store.close()
    return found


def segments(path: Path) -> dict[str, bytes]:
    """The bytes of its segments, without the zeros that are allocated ahead."""
    try:
        return {str(file.relative_to(path)): file.read_bytes().rstrip(b"\0") for file in path.glob("buckets/*/*/*.log")}
    except FileNotFoundError:  # they come and go
        return {}


def problems(load: Load, stores: Sequence[Path]) -> list[str]:
    """All that is wrong, a line each; none where the servers kept their word."""
    all_found = [read_store(path) for path in stores]
    found = [one for one in all_found[0] if not one.body.startswith(b"job.")]
    lines = [*load.faults]
    for path, other in zip(stores[1:], all_found[1:], strict=True):
        if (ours := kept(other)) != kept(all_found[0]):
            lines.append(f"{path} has {len(ours)} messages, {stores[0]} {len(kept(all_found[0]))}, or others")
    for path in stores:
        report: list[str] = []
        if check(str(path), report=report.append):
            lines += [f"check: {line}" for line in report]
    lines += [*writes(load.calls, found), *order(load.calls, found), *units(load, found), *jobs(load)]
    lines += invented(load, found)
    at = {one.sequence: one.body for one in found if one.body.startswith(b"single.")}
    lines += [f"seen, and not there: {number} {body!r}" for number, body in load.seen.items() if at.get(number) != body]
    return lines


def kept(found: Iterable[Found]) -> set[Found]:
    """Without jobs: what is acknowledged goes from the primary first."""
    return {one for one in found if not one.body.startswith(b"job.")}


def writes(calls: Iterable[Call], found: Iterable[Found]) -> list[str]:
    count = Counter(one.body for one in found)
    allowed = {"ok": (1, 1), "unknown": (0, 1), "failed": (0, 0)}
    lines = []
    for call in calls:
        least, most = allowed[call.outcome]
        if not least <= count[call.body] <= most:
            lines.append(f"{call.outcome} of {call.run}, and {count[call.body]} times there: {call.body!r}")
    return lines


def invented(load: Load, found: Iterable[Found]) -> list[str]:
    sent = {call.body for call in load.calls} | {body for _, bodies in load.units.values() for body in bodies}
    return [f"never sent: {one.body!r}" for one in found if one.body not in sent]


def order(calls: Iterable[Call], found: Iterable[Found]) -> list[str]:
    """A call that ended before another began has the lower sequence: two servers never acknowledge at the same time."""
    by_body = {call.body: call for call in calls if call.outcome == "ok"}
    in_log = [by_body[one.body] for one in sorted(found, key=lambda one: one.sequence) if one.body in by_body]
    lines, first_end = list[str](), float("inf")
    for call in reversed(in_log):
        if first_end < call.began:
            lines.append(f"acknowledged by {call.run} after one that is later in the log: {call.body!r}")
        first_end = min(first_end, call.ended)
    return lines


def units(load: Load, found: Iterable[Found]) -> list[str]:
    """Each transaction is there whole and once, together; or not at all where it was not committed."""
    at: dict[bytes, list[int]] = {}
    for one in found:
        if one.body.startswith(b"unit."):
            at.setdefault(one.body, []).append(one.sequence)
    lines = []
    for name, (outcome, bodies) in load.units.items():
        there = [at.get(body, []) for body in bodies]
        if not any(there) and outcome != "ok":
            continue
        if any(len(one) != 1 for one in there):
            lines.append(f"transaction {name!r}, {outcome}: messages are there {[len(one) for one in there]} times")
        elif [one[0] for one in there] != list(range(there[0][0], there[0][0] + len(bodies))):
            lines.append(f"transaction {name!r}: not together: {there}")
    return lines


def jobs(load: Load) -> list[str]:
    """Each job is acknowledged, one that anybody saw too; none is delivered later by the server that has that ack, or
    one after it."""
    ranks = {run: rank for rank, run in enumerate(runs_in_order(load.calls))}
    known = {call.body for call in load.puts if call.outcome != "failed"}
    acked: dict[bytes, Call] = {}
    for call in load.acks:
        if call.outcome == "ok":
            acked.setdefault(call.body, call)
    done = {call.body for call in load.acks if call.outcome != "failed"}
    put = {call.body for call in load.puts if call.outcome == "ok"}
    there = put.union(delivery.body for delivery in load.deliveries)
    lines = [f"never acknowledged: {body!r}" for body in sorted(there - done)]
    for delivery in load.deliveries:
        if delivery.body not in known:
            lines.append(f"delivered, and never put: {delivery.body!r}")
        ack = acked.get(delivery.body)
        if ack is not None and delivery.asked > ack.ended and is_later(delivery, ack, ranks):
            lines.append(f"delivered by {delivery.run} after its ack by {ack.run}: {delivery.body!r}")
    return [*lines, *counts(load), *returned(load, ranks), *delays(load), *priorities(load)]


def is_later(delivery: Delivery, call: Call, ranks: dict[str, int]) -> bool:
    return ranks.get(delivery.run, -1) >= ranks.get(call.run, len(ranks))


def counts(load: Load) -> Iterator[str]:
    """A job that one server delivers again was delivered once more, but where it was released."""
    released = {(one.call.body, one.call.run, one.count) for one in load.returns if one.delay_s is None}
    newest: dict[tuple[bytes, str], int] = {}
    for delivery in sorted(load.deliveries, key=lambda one: one.came):
        key = delivery.body, delivery.run
        before = newest.get(key, 0)
        if delivery.count < before + (key + (before,) not in released):
            yield f"delivery {delivery.count} of {delivery.body!r} by {delivery.run} after {before}"
        newest[key] = delivery.count


def returned(load: Load, ranks: dict[str, int]) -> Iterator[str]:
    """A failure or release that was answered is known to whoever delivers the job next, and so is its delay."""
    given: dict[bytes, list[Delivery]] = {}
    for delivery in load.deliveries:
        given.setdefault(delivery.body, []).append(delivery)
    for call, count, delay_s in load.returns:
        if call.outcome != "ok":
            continue
        later = (one for one in given[call.body] if one.asked > call.ended and is_later(one, call, ranks))
        for one in later:
            if one.count < count + (delay_s is not None):
                yield f"delivery {one.count} of {one.body!r} by {one.run}, and {count} was given back to {call.run}"
            if one.came < call.began + (delay_s or 0):
                yield f"delivered by {one.run} {call.began + (delay_s or 0) - one.came:.3f} s too early: {one.body!r}"


def delays(load: Load) -> Iterator[str]:
    """None is delivered before it is due."""
    put = {call.body: call for call in load.puts}
    for one in load.deliveries:
        if one.body in put and one.came < (due := put[one.body].began + load.orders[one.body].delay_s):
            yield f"delivered by {one.run} {due - one.came:.3f} s before it is due: {one.body!r}"


def priorities(load: Load) -> Iterator[str]:
    """None is delivered while one of higher priority was there and free: which the same server delivered later, for
    the first time, to who asked later."""
    put = {call.body: call.ended for call in load.puts if call.outcome == "ok" and not load.orders[call.body].delay_s}
    runs: dict[str, list[Delivery]] = {}
    first: dict[bytes, Delivery] = {}
    for one in sorted(load.deliveries, key=lambda one: one.came):
        if one.body in load.orders:
            runs.setdefault(one.run, []).append(one)
            first.setdefault(one.body, one)
    for run, given in runs.items():
        waiting = sorted(
            ((one.asked, put[body], load.orders[body].priority, body) for body, one in first.items()
             if one.count == 1 and one.run == run and body in put), reverse=True,
        )  # fmt: skip
        for one in given:
            mine = load.orders[one.body].priority
            for asked, there, priority, body in waiting:
                if asked <= one.came:
                    break
                if priority > mine and there < one.asked:
                    yield f"{run} delivered {one.body!r} of priority {mine} before {body!r} of {priority}"


def runs_in_order(calls: Iterable[Call]) -> list[str]:
    """The runs that acknowledged something, by their first answer."""
    first: dict[str, float] = {}
    for call in calls:
        if call.outcome == "ok":
            first[call.run] = min(call.ended, first.get(call.run, call.ended))
    return sorted(first, key=first.__getitem__)


def takeovers(calls: Iterable[Call]) -> int:
    return max(0, len(runs_in_order(calls)) - 1)
