#!/usr/bin/env python3
"""Publishing and subscribing with wildcards.

    examples/pubsub.py ADDRESS GROUP       e.g. examples/pubsub.py 'unix!./mqfs.sock' house

Three listeners: one for all messages from the kitchen, one for all temperatures that are too high, one for the first
alarm only. Shows `mqfs.connect`, callbacks with a filter, `once`, and a subscription as an iterator.
"""

import queue
import sys
from collections.abc import Callable

import mqfs
from mqfs.client import Message

said: queue.SimpleQueue[str] = queue.SimpleQueue()  # listeners are called on threads of their own


def too_high(message: Message) -> bool:
    return float(message.body) > 25


def tell(who: str) -> Callable[[Message], None]:
    return lambda message: said.put(f"{who}: {message.stream} {message.body.decode()}")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: examples/pubsub.py ADDRESS GROUP")
    address, name = sys.argv[1:]
    with mqfs.connect(address) as client:
        house = client.group(name, create=True)
        everything = house.subscribe("#")
        house.on("kitchen.#", tell("kitchen"))
        house.on("*.temperature", tell("too high"), filters=too_high)
        house.once("#.alarm", tell("alarm"))

        house.publish_many(
            [
                ("kitchen.temperature", "21.5"),
                ("attic.temperature", "31"),
                ("kitchen.oven.alarm", "smoke"),
                ("kitchen.oven.alarm", "fire"),
            ]
        )
        for message in everything:  # every message, in the order in which they were written
            print("everything:", message.stream, message.body.decode())
            if message.body == b"fire":
                break
        for line in sorted(said.get() for _ in range(5)):
            print(line)
        print(f"{house.unsubscribe()} listeners were left")


if __name__ == "__main__":
    try:
        main()
    except mqfs.MqfsError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
