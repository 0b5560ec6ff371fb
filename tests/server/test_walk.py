"""The walk: every kind of request of every face (walk.py), beside much of each thing, as root and as a user without any
right. None may keep the server's thread for longer than 20 ms in one piece, beside 100,000 of each; here there are
fewer, and the bound is in proportion. A long request is asked again: a change that is made only once is seen once.

Today's breaches are in walk.json, which only shrinks. To write it again, from what is seen now:

    python -m tests.server.test_walk
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic

import pytest

from tests.server.walk import MUCH, build, requests_of
from tests.server.watched import GREEDY, POLITE, Measured, program
from tests.support import campaign
from tests.support.eventually import eventually
from tests.support.server import Server, short_folder

COUNT = 100_000 if campaign.whole() else 10_000
PIECE_S = 0.02  # beside fewer, too: a busy core makes that of what takes a few milliseconds
LISTED_S = max(0.003, 0.01 * COUNT / 100_000)  # what takes as long is listed: it is too long beside 100,000
KNOWN = Path(__file__).with_name("walk.json")
USERS = ("stranger", GREEDY), ("root", 0)
QUIET = 300  # signals in a row that find nothing long: about a second
AGAIN = 4  # times that what was long is asked again: what it takes each time counts


@contextmanager
def serving(count: int) -> Iterator[tuple[Measured, Path]]:
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        build(folder / "store", count)
        ways = ["--store", f"{folder}/store", "--listen", f"unix!{folder}/s", "--http", f"unix!{folder}/web"]
        ways += ["--fq", f"unix!{folder}/fq", "--http-qpubs"]
        for group in MUCH:
            ways += ["--http-ntfy", f"{group}=unix!{folder}/ntfy-{group}"]
        server = stack.enter_context(Server(*ways, cwd=folder, program=program(POLITE)))
        os.chmod(folder, 0o755)
        for way in ("s", "web", *(f"ntfy-{group}" for group in MUCH)):
            os.chmod(folder / way, 0o666)
        measured = Measured(f"unix!{folder}/s", server, folder / "work")
        eventually(lambda: all(measured.longest() < PIECE_S for _ in range(QUIET)), "it has looked at all groups")
        yield measured, folder


def longest_pieces(measured: Measured, folder: Path, group: str, uid: int) -> dict[str, float]:
    """The longest piece of work for each kind of request, in seconds of the thread."""
    found: dict[str, float] = {}
    measured.record()
    for ask in requests_of(group, with_options=campaign.whole() or group == "streams"):
        ask.perform(folder, uid)
        longest = measured.longest()
        for _ in range(AGAIN if longest > PIECE_S else 0):
            ask.perform(folder, uid)
            longest = min(longest, measured.longest())
        found[ask.kind] = longest
    return found


def walk(measured: Measured, folder: Path) -> dict[str, float]:
    return {
        f"{group} {who}: {kind}": longest
        for group in MUCH
        for who, uid in USERS
        if campaign.whole() or uid == 0 or group in ("streams", "messages")  # a stranger is refused before all that
        for kind, longest in longest_pieces(measured, folder, group, uid).items()
    }


def family(kind: str) -> str:
    """Without the option of HTTP."""
    return kind.partition(" ?")[0]


def described(found: dict[str, float], most: int) -> str:
    rows = sorted(found.items(), key=lambda row: -row[1])[:most]
    return "\n".join(f"{seconds * 1e3:8.1f} ms  {kind}" for kind, seconds in rows)


@pytest.mark.root
@pytest.mark.slow
def test_no_request_holds_up_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(COUNT) as (measured, folder):
        found = walk(measured, folder)
    with capsys.disabled():
        print(f"\n{len(found)} requests beside {COUNT} of each, the ten longest:\n{described(found, 10)}")
    known = set(json.loads(KNOWN.read_text()))
    new = {kind: longest for kind, longest in found.items() if longest > PIECE_S and family(kind) not in known}
    assert not new, f"longer than {PIECE_S * 1e3:g} ms in one piece:\n{described(new, 100)}"
    gone = known - {family(kind) for kind in found}
    assert not gone, f"no longer asked: {sorted(gone)} (take them out of {KNOWN.name})"


def main() -> None:
    began = monotonic()
    with serving(COUNT) as (measured, folder):
        print(f"{monotonic() - began:.1f} s")
        found = walk(measured, folder)
    long = {family(kind) for kind, longest in found.items() if longest > LISTED_S}
    KNOWN.write_text(json.dumps(sorted(long), indent=1) + "\n")
    print(f"{monotonic() - began:.1f} s, {len(found)} requests\n{described(found, 150)}")


if __name__ == "__main__":
    main()
