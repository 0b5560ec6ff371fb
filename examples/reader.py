#!/usr/bin/env python3
"""A reader in Python that stores its position, so that it neither repeats nor misses a message.

    examples/reader.py GROUP STATEFILE [STREAM]...       e.g. examples/reader.py ./mq/room /tmp/room.at

Shows `.cursor` used as a plain file: commands are written to it, messages are read from it. STATEFILE has the sequence
of the last message that was handled; the next run continues after that message. Needs only the standard library.
"""

import json
import os
import sys
from collections.abc import Iterator


def open_cursor(group: str, streams: list[str], after: int) -> int:
    """Open a cursor that returns one line of JSON per read: the messages after a sequence, up to the present end."""
    fd = os.open(os.path.join(group, ".cursor"), os.O_RDWR)
    if streams:
        quoted = ["'" + name.replace("'", "''") + "'" for name in streams]
        os.write(fd, f"select {' '.join(quoted)}\n".encode())
    os.write(fd, f"seek {after + 1}\n".encode())
    os.write(fd, b"format json\nuntil end\n")  # leave `until end` out to wait for what is written later
    return fd


def lines(fd: int) -> Iterator[bytes]:
    """Yield whole lines up to the end of the file. A long line may need several reads."""
    rest = b""
    while data := os.read(fd, 1 << 20):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def load(state: str) -> int:
    """Return the sequence of the last message that was handled; 0 at first."""
    try:
        with open(state) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


def save(state: str, sequence: int) -> None:
    """Replace the file by a rename, so that a crash leaves the old or the new number."""
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
