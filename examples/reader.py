#!/usr/bin/env python3
"""A reader in Python that never reads a message twice, nor misses one: it remembers where it was.

    examples/reader.py GROUP STATEFILE [STREAM]...       e.g. examples/reader.py ./mq/room /tmp/room.at

Shows `.cursor` used as a plain file: commands are written to it, messages read from it. The sequence of the last
message handled is kept in STATEFILE; run it again and it continues after that. Needs nothing but the standard library.
"""

import json
import os
import sys
from collections.abc import Iterator


def open_cursor(group: str, streams: list[str], after: int) -> int:
    """A cursor that gives one JSON line a read, from behind that sequence to the present end."""
    fd = os.open(os.path.join(group, ".cursor"), os.O_RDWR)
    if streams:
        quoted = ["'" + name.replace("'", "''") + "'" for name in streams]
        os.write(fd, f"select {' '.join(quoted)}\n".encode())
    os.write(fd, f"seek {after + 1}\n".encode())
    os.write(fd, b"format json\nuntil end\n")  # leave `until end` out to wait for what is written later
    return fd


def lines(fd: int) -> Iterator[bytes]:
    """Whole lines, to the end of file. A long one may come in several reads."""
    rest = b""
    while data := os.read(fd, 1 << 20):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def load(state: str) -> int:
    """The last sequence handled; 0 at first."""
    try:
        with open(state) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


def save(state: str, sequence: int) -> None:
    """Replaced by rename, so that a crash leaves the old or the new number."""
    with open(state + ".new", "w") as file:
        file.write(f"{sequence}\n")
    os.replace(state + ".new", state)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: examples/reader.py GROUP STATEFILE [STREAM]...")
    group, state, *streams = sys.argv[1:]
    cursor = open_cursor(group, streams, load(state))
    for line in lines(cursor):
        message = json.loads(line)
        print(f"{message['sequence']} {message['stream']}: {message.get('body', '(binary)').rstrip()}", flush=True)
        save(state, message["sequence"])


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{sys.argv[0]}: {error.filename or 'GROUP'}: {error.strerror} (is it a group in a mounted tree?)")
