"""The durations of tests, and the groups that one worker runs. To update durations.json from a run:

script/test --durations=0 | python -m tests.support.durations
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict

from tests.support import ROOT

DURATIONS = ROOT / "tests" / "support" / "durations.json"
MOST_S, LISTED_S = 20, 5  # a test, or a group, that takes longer is listed
# Folders whose tests share a long-lived process: a Java, a cluster. In other folders each file is a group of its own,
ONE_GROUP = {"spark", "spark_cluster", "house"}
# and so is a file in OWN_GROUP, which starts its own Java. Tests of a file in APART share nothing: each is a group.
OWN_GROUP = {"tests/spark/test_kills.py"}
APART = {"tests/server/test_standstills.py", "tests/server/test_starvation.py"}
LINE = re.compile(r"(\d+\.\d+)s (?:setup|call|teardown) +(tests/.+)")


def group_of(nodeid: str) -> str:
    """Return the group of a test, which one worker runs: a folder, a file, or the test itself."""
    file = nodeid.partition("::")[0]
    folder = file.split("/")[1] if file.startswith("tests/") and file not in OWN_GROUP else ""
    return folder if folder in ONE_GROUP else nodeid if file in APART else file


def listed(taken: dict[str, float], least: float) -> dict[str, int]:
    rows = sorted(taken.items(), key=lambda row: -row[1])
    return {name: round(seconds) for name, seconds in rows if seconds >= least}


def main() -> None:
    tests, groups = defaultdict[str, float](float), defaultdict[str, float](float)
    for line in sys.stdin:
        if match := LINE.match(line):
            tests[match[2].strip()] += float(match[1])
            groups[group_of(match[2])] += float(match[1])
    found = {"groups": listed(groups, LISTED_S), "tests": listed(tests, MOST_S)}
    DURATIONS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
