"""Starvation: one user takes whatever can be had of the server, another's round trips go on.

How long these take depends on what else the machine does. What the server lets them wait for, in time of its thread
(measured.py), hardly does: that is held to the turns that users have, and the clock only to a hang.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest

from mqfs import limits
from tests.server.users import KINDS
from tests.server.watched import GREEDY, POLITE, Measured, measuring, user
from tests.support import campaign
from tests.support.eventually import patient

RUNS = 3
RUN_S = campaign.size(50, 20) / 10
WAIT_S = limits.SLICE_S  # turns are a fourth of it; a busy machine makes more of them
P99_S, LONGEST_S = patient(2.0), patient(10.0)  # on a machine that does other things too


@pytest.fixture
def measured() -> Iterator[Measured]:
    with measuring() as server:
        yield server


@pytest.mark.root
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_go_on_beside_a_greedy_user(
    measured: Measured, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = measured.address
    with user(address, POLITE, "polite") as ours:
        ours.trips(RUN_S)  # what is done once is done
        measured.settle()
        alone = [ours.trips(RUN_S) for _ in range(RUNS)]
        usual, _ = measured.settle()
        with user(address, GREEDY, "greedy", kind) as theirs:
            assert theirs.line() == b"at work\n"
            measured.settle()
            beside = [ours.trips(RUN_S) for _ in range(RUNS)]
            waits, _ = measured.settle()
            assert theirs.process.poll() is None, "the greedy one goes on, too"
        after = ours.trips(RUN_S)
    before, during = (statistics.median(p99 for p99, _ in runs) for runs in (alone, beside))
    longest = max(most for _, most in [*beside, after])
    usually, waited = (statistics.quantiles(each, n=100)[98] for each in (usual, waits))
    with capsys.disabled():
        times = f"p99 {before * 1e3:.2f} ms alone, {during * 1e3:.2f} ms beside, {during / before:.1f} x"
        work = f"{usually * 1e3:.2f} and {waited * 1e3:.2f} ms behind other work, at most {max(waits) * 1e3:.0f} ms"
        print(f"\n{kind}: {times}, the longest {longest * 1e3:.0f} ms; {work}")
    assert waited <= WAIT_S
    assert max(during, after[0]) < P99_S
    assert longest < LONGEST_S
