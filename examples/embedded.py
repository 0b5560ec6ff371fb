#!/usr/bin/env python3
"""A store without a server: the engine runs inside this program.

    examples/embedded.py STORE TEXT...      e.g. examples/embedded.py ./notes.store 'buy milk'

Each TEXT is added to a to-do list, of which each run does one item. The other items stay in STORE, which
`mqfs serve --store STORE` can serve at any other time. Shows `mqfs.open`: the same calls as over 9P.
"""

import sys

import mqfs


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: examples/embedded.py STORE TEXT...")
    store, *texts = sys.argv[1:]
    with mqfs.open(store) as client:
        notes = client.group("notes", create=True, ctl=["replay all"])
        notes.publish_many(("todo", text) for text in texts)
        with notes.consume("me") as claims:
            try:
                with claims.get(timeout=0.2) as claim:
                    print(f"now: {claim.body.decode()}")
            except TimeoutError:
                print("nothing to do")
        print(f"left: {notes.stats().consumers['me'].waiting}")


if __name__ == "__main__":
    try:
        main()
    except mqfs.MqfsError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
