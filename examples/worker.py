#!/usr/bin/env python3
"""A worker in Python: it acknowledges each message that it claims, or reports its failure.

    examples/worker.py ADDRESS GROUP [HANDLES]      e.g. examples/worker.py 'unix!./mqfs.sock' sums 4

Each message is a sum, "2+3"; the answer is published to the stream `answers`. A message that is no sum is delivered
twice more, and then becomes a message of the stream `dead`. A worker ends after a second without a message. Any number
of workers may run, on any machine: each message is delivered to one of them. Shows `consume`, `with claim`, and one
handle for each thread.
"""

import sys
import threading

import mqfs
from mqfs import Group


def reckon(text: str) -> int:
    return sum(int(number) for number in text.split("+"))


def work(group: Group) -> None:
    with group.consume("reckoner", over="sums") as claims:
        while True:
            try:
                claim = claims.get(timeout=1)
            except TimeoutError:
                return
            try:
                with claim:  # a clean exit acknowledges; an exception counts as a failed delivery
                    answer = reckon(claim.body.decode())
                    # With an id the answer is published once, even if this worker is killed before it acknowledges.
                    group.publish("answers", f"{claim.body.decode()}={answer}", id=f"answer to {claim.sequence}")
            except ValueError as error:
                print(f"{claim.body.decode()}, attempt {claim.deliveries}: {error}", file=sys.stderr)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: examples/worker.py ADDRESS GROUP [HANDLES]")
    address, name, *handles = sys.argv[1:]
    with mqfs.connect(address) as client:
        settings = mqfs.Settings(replay="all", retries=3, backoff=("10ms", "1s"))
        group = client.group(name, create=True, settings=settings)
        threads = [threading.Thread(target=work, args=(group,)) for _ in range(int(handles[0]) if handles else 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    try:
        main()
    except mqfs.MqfsError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
