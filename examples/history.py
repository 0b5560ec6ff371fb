#!/usr/bin/env python3
"""Read retained messages again: count those of each stream, and print the last; then follow new ones.

    examples/history.py ADDRESS GROUP [PATTERN] [--follow]     e.g. examples/history.py 'unix!./mqfs.sock' log '*.error'

Shows `history` in a group with `replay all`, and how to continue with new messages without a gap.
"""

import sys
from collections import Counter

import mqfs


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--follow"]
    if len(arguments) < 2:
        sys.exit("usage: examples/history.py ADDRESS GROUP [PATTERN] [--follow]")
    address, name, *patterns = arguments
    pattern = patterns[0] if patterns else "#"
    with mqfs.connect(address) as client:
        group = client.group(name)
        counts = Counter(message.stream for message in group.history(pattern=pattern))
        for stream, count in sorted(counts.items()):
            print(f"{stream}: {count}")
        for message in group.history(-3, pattern=pattern):
            print(f"{message.sequence} {message.stream} {message.body.decode().rstrip()}")
        if "--follow" in sys.argv:
            for message in group.subscribe(pattern, existing=True):
                print(message.body.decode().rstrip(), flush=True)


if __name__ == "__main__":
    try:
        main()
    except mqfs.MqfsError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
    except KeyboardInterrupt:  # ends --follow
        sys.exit(130)
