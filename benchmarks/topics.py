"""A name against 10,000 patterns: the trie beside a scan of all patterns, in one run, pinned to one CPU; and a program.

python benchmarks/topics.py  100,000 names of 2 to 6 words, and patterns of every kind, as at a site with many senders
"""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from collections.abc import Callable

from mqfs.engine.language.programs import parse
from mqfs.syntax.patterns import Patterns, compile_pattern, is_pattern

NAMES, PATTERNS = 100_000, 10_000
SCANNED = 200  # names for the scan, which needs milliseconds for each
ROUNDS = 5
PROGRAM = 'prefix:"site1" (payload_prefix("M") && route_contains("err"))'

SITES = [f"site{number}" for number in range(40)]
KINDS = ["http", "mail", "db", "cache", "disk", "net", "auth", "billing"]
HOSTS = [f"host{number}" for number in range(250)]
LEVELS = ["debug", "info", "warning", "error", "access"]


def name(random_: random.Random) -> str:
    words = [random_.choice(SITES), random_.choice(KINDS), random_.choice(HOSTS), random_.choice(LEVELS)]
    more = [f"user{random_.randrange(100_000)}", f"part{random_.randrange(20)}"]
    return ".".join([*words, *more][: random_.choice((2, 3, 4, 4, 4, 5, 5, 6))])


def pattern(random_: random.Random, names: list[str]) -> str:
    """Return a random pattern: half are names, a quarter has `*`, a quarter has `#`, a few begin with `#`."""
    words = random_.choice(names).split(".")
    kind = random_.random()
    if kind < 0.5:
        return ".".join(words)
    if kind < 0.75:
        for at in random_.sample(range(1, len(words)), random_.choice((1, 1, 2)) if len(words) > 2 else 1):
            words[at] = "*"
        return ".".join(words)
    if kind < 0.95:
        return ".".join([*words[: random_.randint(2, len(words))], "#"])
    if kind < 0.99:
        return ".".join([words[0], "#", words[-1]])
    return ".".join(["#", *words[-2:]])


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fill(patterns: list[str]) -> Patterns[int]:
    trie: Patterns[int] = Patterns()
    for key, each in enumerate(patterns):
        trie.add(each, key)
    return trie


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def scan(name: str, tests: list[tuple[int, Callable[[str], bool]]]) -> set[int]:
    return {key for key, test in tests if test(name)}


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    random_ = random.Random(1)
    names = list({name(random_) for _ in range(NAMES * 3)})
    names = random_.sample(sorted(names), NAMES)
    patterns = [pattern(random_, names) for _ in range(PATTERNS)]
    print(f"{len(names):,} names, {len(patterns):,} patterns, {sum(map(is_pattern, patterns)):,} with a wildcard")

    gc.collect()
    before = memory()
    start = time.perf_counter()
    trie = fill(patterns)
    built = time.perf_counter() - start
    print(
        f"trie: built in {built * 1e3:.0f} ms ({built / PATTERNS * 1e6:.1f} us each), {(memory() - before) >> 10:,} KiB"
    )

    best = min(timed(lambda: [trie.match(each) for each in names]) for _ in range(ROUNDS))
    hits = sum(len(trie.match(each)) for each in names)
    ours = NAMES / best
    print(f"trie: {ours:,.0f} names a second, {hits / NAMES:.2f} patterns match a name")

    tests = [(key, compile_pattern(each)) for key, each in enumerate(patterns)]
    some = names[:SCANNED]
    assert [scan(each, tests) for each in some] == [trie.match(each) for each in some]
    theirs = SCANNED / min(timed(lambda: [scan(each, tests) for each in some]) for _ in range(ROUNDS))
    print(f"scan: {theirs:,.0f} names a second; the trie is {ours / theirs:,.0f} times as fast")

    program = parse(PROGRAM)
    chosen = min(timed(lambda: [program.selects(each, b"More", 1) for each in names]) for _ in range(ROUNDS)) / NAMES
    parsed = min(timed(lambda: [parse(PROGRAM) for _ in range(100)]) for _ in range(ROUNDS)) / 100
    print(f"program: parsed in {parsed * 1e6:.0f} us, {1 / chosen:,.0f} messages a second")

    few = fill(patterns[: PATTERNS // 10])
    less = NAMES / min(timed(lambda: [few.match(each) for each in names]) for _ in range(ROUNDS))
    print(f"trie of {PATTERNS // 10:,} patterns: {less:,.0f} names a second")


if __name__ == "__main__":
    main()
