"""What every face must do, whatever carries it: a new one proves itself with one line.

`check_face(open_client)` is given a function that makes a client of the face in an empty group; it checks the tree as
mqfs(4) describes it, by names, reads and writes alone. Nothing here knows a face by name.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from mqfs.errors import MqfsError
from tests.support.eventually import HANG_S

A_MOMENT_S = 0.05  # how long a read that must wait is watched doing so
MESSAGE_BYTES = 1_044_480
FOLDERS = {".consumers", ".kept", ".txn"}
META = {"ctl", "order", ".cursor", ".put", ".batch", ".stats", ".who", ".errors"} | FOLDERS


class File(Protocol):
    """An open file. Refusals are exceptions with an `errno`."""

    def receive(self, count: int, timeout: float) -> bytes:
        """One read; TimeoutError where it would still wait, and then it has consumed nothing."""
        ...

    def write(self, data: bytes) -> Any: ...

    def close(self) -> None: ...


class Client(Protocol):
    """Paths are names in the group that the client was given, joined by slashes."""

    largest: int  # the largest message that this face carries

    def mkdir(self, path: str) -> None: ...

    def create(self, path: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def rename(self, path: str, name: str) -> None: ...

    def names(self, path: str) -> list[str]: ...

    def open(self, path: str, mode: str) -> File:
        """`mode`: "r", "w" or "r+"."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


def check_face(open_client: Callable[[], Client]) -> None:
    """Raises AssertionError where the face does not do what the contract says."""
    for check in CHECKS:
        client = open_client()
        try:
            check(client)
        finally:
            client.close()


def put(client: Client, path: str, *bodies: bytes) -> None:
    file = client.open(path, "w")
    for body in bodies:
        file.write(body)
    file.close()


def drain(file: File, count: int = 4096) -> list[bytes]:
    """All that can be read without waiting."""
    got: list[bytes] = []
    while True:
        try:
            data = file.receive(count, A_MOMENT_S)
        except TimeoutError:
            return got
        if not data:
            return got
        got.append(data)


def refused(number: int, call: Callable[[], Any]) -> None:
    with pytest.raises((OSError, MqfsError)) as info:
        call()
    got = getattr(info.value, "errno", None)
    assert got == number, f"{info.value!r}, not {errno.errorcode[number]}"


def check_streams(client: Client) -> None:
    client.create("s")
    early = client.open("s", "r")
    put(client, "ctl", b"replay all\n")
    put(client, "s", b"one", b"two", b"three")
    late = client.open("s", "r")
    assert drain(early) == [b"one", b"two", b"three"]
    assert drain(late) == [b"one", b"two", b"three"]
    put(client, "s", b"four")
    assert late.receive(2, HANG_S) == b"fo", "a buffer that is too small gets the first part"
    assert late.receive(64, HANG_S) == b"ur", "and the next read the rest"
    both = client.open("s", "r+")
    both.write(b"own")
    assert drain(both)[-1] == b"own", "a handle reads its own writes"


def check_replay(client: Client) -> None:
    client.create("s")
    for replay, seen in (("all", [b"1", b"2"]), ("last", [b"2"]), ("off", [])):
        put(client, "ctl", b"clear\n", f"replay {replay}\n".encode())
        put(client, "s", b"1", b"2")
        assert drain(client.open("s", "r")) == seen, replay


def check_transient(client: Client) -> None:
    client.create("s")
    put(client, "ctl", b"replay all\nconsumer t transient\n")
    put(client, "s", b"1")
    for _ in range(2):
        shown = client.open(".consumers/t", "r")
        assert b"1" in shown.receive(4096, HANG_S)
        shown.close()
        assert "t" in client.names(".consumers"), "an open for reading only changes nothing"


def check_keys(client: Client) -> None:
    client.create("s")
    put(client, "ctl", b"replay key\n")
    early = client.open("s", "r")
    text = b'{"stream":"s","key":"%s"} %s'
    put(client, ".put", *(text % message for message in ((b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"c", b"4"))))
    put(client, "s", b"5", b"6")
    put(client, ".put", text % (b"c", b""))
    assert drain(early) == [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert drain(client.open("s", "r")) == [b"2", b"3", b"6"]
    assert drain(client.open("order", "r")) == [b"s\0"] * 3
    cursor = client.open(".cursor", "r+")
    assert drain(cursor) == [b"2", b"3", b"6"]
    put(client, ".put", text % (b"b", b"7"))
    assert drain(cursor) == [b"7"]
    assert b"".join(drain(client.open(".kept/s", "r"))) == b"367"
    client.create(".consumers/w")
    worker = client.open(".consumers/w", "r+")
    assert drain(worker) == [b"3", b"6", b"7"]
    assert b"replay key\n" in client.open("ctl", "r").receive(4096, HANG_S)
    assert json.loads(client.open(".stats", "r").receive(65536, HANG_S))["keys"] == 3


def check_order(client: Client) -> None:
    put(client, "ctl", b"replay all\n")
    for name in ("a", "b b", "c"):
        client.create(name)
    for name in ("a", "c", "b b", "a"):
        put(client, name, name.encode())
    assert drain(client.open("order", "r")) == [b"a\0", b"c\0", b"b b\0", b"a\0"]
    refused(errno.EACCES, lambda: client.open("order", "w"))


def check_ctl(client: Client) -> None:
    client.mkdir("copy")
    put(client, "ctl", b"replay last\ndepth 10\nttl 90s\nfull block\nsync 1s\n")
    text = client.open("ctl", "r").receive(4096, HANG_S)
    assert {b"replay last", b"depth 10", b"ttl 90s", b"full block", b"sync 1s"} <= set(text.splitlines())
    put(client, "copy/ctl", text)
    assert client.open("copy/ctl", "r").receive(4096, HANG_S) == text
    handle = client.open("ctl", "r+")
    refused(errno.EINVAL, lambda: handle.write(b"depth 1\nreplay often\n"))
    assert b"line 2: replay 'often': unknown value" in handle.receive(4096, HANG_S), (
        "the reason comes with the next read of the handle"
    )
    assert client.open("ctl", "r").receive(4096, HANG_S) == text, "nothing of the write was done"
    assert b"replay 'often'" in client.open(".errors", "r").receive(65536, HANG_S)


def check_cursor(client: Client) -> None:
    put(client, "ctl", b"replay all\n")
    for name in ("a", "b"):
        client.create(name)
    for i in range(6):
        put(client, "ab"[i % 2], b"%d" % i)
    cursor = client.open(".cursor", "r+")
    cursor.write(b"seek -3\nuntil end\n")
    assert drain(cursor) == [b"3", b"4", b"5"]
    cursor.write(b"select b\nseek first\n")
    assert drain(cursor) == [b"1", b"3", b"5"]
    cursor.write(b"select\nseek 2\nuntil 2\nformat json\n")
    (row,) = (json.loads(line) for line in drain(cursor))
    assert (row["sequence"], row["stream"], row["body"]) == (2, "b", "1")
    cursor.write(b"seek first\nformat each\n")
    assert [cursor.receive(64, HANG_S) for _ in range(4)] == [b"0", b"", b"1", b""]
    cursor.write(b"info\n")
    assert cursor.receive(4096, HANG_S).startswith(b"sequence 2\nstream b\n")
    refused(errno.EINVAL, lambda: cursor.write(b"seek yonder\n"))
    assert b"seek 'yonder'" in cursor.receive(4096, HANG_S)
    for mode in ("r", "w"):
        refused(errno.EACCES, lambda mode=mode: client.open(".cursor", mode))


def check_waiting(client: Client) -> None:
    client.create("s")
    reader, writer = client.open("s", "r"), client.open("s", "w")
    for i in range(3):
        try:
            reader.receive(64, A_MOMENT_S)
        except TimeoutError:
            pass
        else:
            raise AssertionError("it did not wait")
        writer.write(b"%d" % i)
        assert reader.receive(64, HANG_S) == b"%d" % i, "a read that gave up has consumed nothing"
    client.remove("s")
    assert reader.receive(64, HANG_S) == b"", "end-of-file when the stream is removed"
    refused(errno.ENOENT, lambda: writer.write(b"x"))


def check_bounds(client: Client) -> None:
    put(client, "ctl", b"replay all\ndepth 2\n")
    client.create("s")
    reader = client.open("s", "r")
    put(client, "s", b"1", b"2", b"3")
    refused(errno.EPIPE, lambda: reader.receive(64, HANG_S))
    assert drain(reader) == [b"2", b"3"], "reported once, then on"
    put(client, "ctl", b"full reject\n")
    refused(errno.ENOSPC, lambda: put(client, "s", b"4"))
    put(client, "ctl", b"full drop-new\n")
    put(client, "s", b"5")
    assert drain(client.open("s", "r")) == [b"2", b"3"]
    put(client, "ctl", b"depth 0\n")
    put(client, "s", b"x" * client.largest)
    refused(errno.EMSGSIZE, lambda: put(client, "s", b"x" * (client.largest + 1)))
    assert sum(map(len, drain(client.open("s", "r"), MESSAGE_BYTES))) == client.largest + 2


def check_names(client: Client) -> None:
    client.mkdir("d")
    client.create("d/s")
    assert set(client.names("d")) - {".", ".."} == META | {"s"}
    refused(errno.EEXIST, lambda: client.create("d/s"))
    refused(errno.EEXIST, lambda: client.mkdir("d"))
    refused(errno.EINVAL, lambda: client.create("d/.hidden"))
    refused(errno.ENOENT, lambda: client.open("d/t", "r"))
    refused(errno.ENOENT, lambda: client.remove("d/t"))
    client.create("d/other")
    refused(errno.EEXIST, lambda: client.rename("d/s", "other"))
    client.rename("d/s", "t")
    put(client, "d/t", b"x")
    refused(errno.ENOTEMPTY, lambda: client.rmdir("d"))
    put(client, "d/ctl", b"protect on\n")
    refused(errno.EPERM, lambda: client.remove("d/t"))
    put(client, "d/ctl", b"protect off\n")
    for name in client.names("d"):
        if name in FOLDERS:
            client.rmdir(f"d/{name}")  # the group's own, and so its files: nothing happens
        elif name not in (".", ".."):
            client.remove(f"d/{name}")
    client.rmdir("d")
    refused(errno.ENOENT, lambda: client.names("d"))


def entries(client: Client, path: str) -> set[str]:
    return set(client.names(path)) - {".", ".."}


def check_consumers(client: Client) -> None:
    put(client, "ctl", b"replay all\n")
    client.create("s")
    client.create(".consumers/w")
    assert entries(client, ".consumers") == {"w"}
    refused(errno.EEXIST, lambda: client.create(".consumers/w"))
    refused(errno.EPERM, lambda: client.mkdir(".consumers/d"))
    refused(errno.EPERM, lambda: client.rename(".consumers/w", "v"))
    put(client, "s", b"1", b"2", b"3", b"4")
    one, two = client.open(".consumers/w", "r+"), client.open(".consumers/w", "r+")
    assert [one.receive(64, HANG_S), two.receive(64, HANG_S)] == [b"1", b"2"]
    one.write(b"ack\n")
    two.write(b"release\n")
    assert one.receive(1, HANG_S) == b"2", "what was given back is the head"
    refused(errno.ESTALE, lambda: two.write(b"ack\n"))
    assert b"not claimed" in two.receive(4096, HANG_S), "the reason comes with the next read of the handle"
    refused(errno.EBUSY, lambda: client.remove(".consumers/w"))
    shown = client.open(".consumers/w", "r")
    assert [shown.receive(64, HANG_S) for _ in range(3)] == [b"3", b"4", b""], "who may not take is shown what waits"
    one.write(b"info\n")
    told = one.receive(4096, HANG_S)
    assert told.startswith(b"sequence 2\nstream s\ntime ")
    assert b"\ndeliveries 1\n" in told
    assert told.endswith(b"\n\n"), "then headers, where the face writes under ids"
    one.close()
    assert two.receive(64, HANG_S) == b"2", "the last close gives back"
    two.write(b"info\nack\n")
    assert b"\ndeliveries 2\n" in two.receive(4096, HANG_S)
    assert [two.receive(64, HANG_S), two.receive(64, HANG_S)] == [b"3", b"4"]
    two.write(b"ack 3\nack 4\n")
    try:
        two.receive(64, A_MOMENT_S)
    except TimeoutError:
        pass
    else:
        raise AssertionError("it did not wait")
    put(client, "s", b"5")
    assert two.receive(64, HANG_S) == b"5", "a read that gave up has claimed nothing"
    two.write(b"ack\n")
    client.remove(".consumers/w")
    assert two.receive(64, HANG_S) == b""
    refused(errno.ESTALE, lambda: two.write(b"seek first\n"))
    assert entries(client, ".consumers") == set()


def check_consumers_of_ctl(client: Client) -> None:
    client.create("s")
    put(client, "ctl", b"replay all\nconsumer mine s private\nconsumer gone s transient\n")
    assert entries(client, ".consumers") == {"mine", "gone"}
    text = client.open("ctl", "r").receive(4096, HANG_S)
    assert b"consumer mine s private\n" in text
    held = client.open(".consumers/mine", "r+")
    refused(errno.EBUSY, lambda: client.open(".consumers/mine", "r+"))
    held.close()
    client.open(".consumers/mine", "r+").close()
    client.open(".consumers/gone", "r+").close()
    assert entries(client, ".consumers") == {"mine"}
    put(client, "ctl", b"remove mine\n")
    assert entries(client, ".consumers") == set()


def check_formats(client: Client) -> None:
    put(client, "ctl", b"replay all\n")
    client.create("s")
    client.create(".consumers/w")
    file = client.open(".consumers/w", "r+")

    def given(how: bytes, body: bytes) -> bytes:
        put(client, "s", body)
        file.write(b"format " + how + b"\n")
        data = file.receive(4096, HANG_S)
        file.write(b"ack\n")
        return data

    assert given(b"raw", b"x") == b"x"
    assert given(b"line", b"x") == b"x\n"
    assert given(b"line", b"x\n") == b"x\n"
    assert given(b"nul", b"x") == b"x\0"
    put(client, "s", b"x", b"y")
    file.write(b"format each\n")
    assert [file.receive(64, HANG_S) for _ in range(4)] == [b"x", b"", b"y", b""]
    file.write(b"ack 5 6\n")
    row = json.loads(given(b"json", b"x"))
    assert (row["sequence"], row["stream"], row["deliveries"], row["body"]) == (7, "s", 1, "x")
    assert json.loads(given(b"json", b"\xff"))["body_base64"] == "/w=="
    put(client, "s", b"one", b"two")
    file.write(b"format record\n")
    data = file.receive(4096, HANG_S)
    assert data.index(b"one") < data.index(b"two"), "as many whole records as fit"
    file.write(b"ack\nformat raw\n")
    file.write(b"seek -2\nuntil end\n")
    assert drain(file) == [b"one", b"two"]
    file.write(b"seek @1\nuntil 2\n")
    assert drain(file) == [b"x", b"x"]
    refused(errno.ESTALE, lambda: file.write(b"ack 9\n"))
    assert b"message 9" in file.receive(4096, HANG_S)


def check_deliver_one(client: Client) -> None:
    put(client, "ctl", b"deliver one\n")
    client.create("s")
    put(client, "s", b"1", b"2", b"3")
    shown = client.open("s", "r")
    assert [shown.receive(64, HANG_S) for _ in range(4)] == [b"1", b"2", b"3", b""]
    one, two = client.open("s", "r+"), client.open("s", "r+")
    assert [one.receive(64, HANG_S), two.receive(64, HANG_S)] == [b"1", b"2"]
    refused(errno.EBUSY, lambda: put(client, "ctl", b"deliver all\n"))
    one.close()
    two.close()
    shown = client.open("s", "r")
    assert [shown.receive(64, HANG_S) for _ in range(2)] == [b"3", b""], "what was taken is gone"
    put(client, "ctl", b"ack next\n")
    one = client.open("s", "r+")
    assert one.receive(64, HANG_S) == b"3"
    one.close()
    one = client.open("s", "r+")
    assert one.receive(1, HANG_S) == b"3", "not acknowledged, so given back"
    put(client, "s", b"45")
    assert [one.receive(1, HANG_S), one.receive(1, HANG_S)] == [b"4", b"5"]
    one.close()
    assert (
        json.loads(client.open(".stats", "r").receive(65536, HANG_S))["streams"]["s"]["consumer"]["acknowledged"] == 3
    )


def check_put(client: Client) -> None:
    put(client, "ctl", b"replay all\n")
    client.create("s")
    file = client.open(".put", "r+")
    file.write(b'{"stream":"s","headers":{"colour":"blue"}} hello\n')
    assert file.receive(64, HANG_S) == b"1\n"
    file.write(b'{"stream":"s","id":"a"} once')
    file.write(b'{"stream":"s","id":"a"} once')
    assert file.receive(64, HANG_S) == b"2\n", "the first's sequence"
    refused(errno.EINVAL, lambda: file.write(b'{"stream":"s","colour":"blue"} x'))
    assert b"colour" in file.receive(4096, HANG_S)
    refused(errno.ENOENT, lambda: put(client, ".put", b'{"stream":"t"} x'))
    refused(errno.EINVAL, lambda: put(client, ".put", b'{"stream":"s"}'))
    assert drain(client.open("s", "r")) == [b"hello\n", b"once"]
    cursor = client.open(".cursor", "r+")
    cursor.write(b"seek first\nuntil 1\nformat json\n")
    assert json.loads(cursor.receive(4096, HANG_S))["headers"]["colour"] == "blue"


def check_refused(client: Client) -> None:
    """A write that is refused makes nothing, and leaves no message."""
    client.create("s")
    put(client, "ctl", b"replay all\ndepth 10B\nfull reject\n")
    wrong = (b'"ttl":"soon"', b'"priority":11', b'"delay":"soon"', b'"delay":"1s","at":1', b'"every":"1h"', b'"no":1')
    before = entries(client, "")
    for stream in (b"s", b"new"):
        for key in wrong:
            refused(
                errno.EINVAL,
                lambda key=key, stream=stream: put(client, ".put", b'{"stream":"%s",%s} x' % (stream, key)),
            )  # type: ignore[misc]
        refused(
            errno.EMSGSIZE if stream == b"s" else errno.ENOENT,
            lambda stream=stream: put(client, ".put", b'{"stream":"%s"} ' % stream + b"x" * 40),  # type: ignore[misc]
        )
    refused(errno.ENOENT, lambda: put(client, ".batch", framed(b"s", b"x") + framed(b"new", b"x")))
    assert entries(client, "") == before
    assert drain(client.open("s", "r")) == []


def check_kept(client: Client) -> None:
    put(client, "ctl", b"replay all\n")
    client.create("s")
    put(client, "s", b"one\n", b"two\n")
    assert entries(client, ".kept") == {"s"}
    file = client.open(".kept/s", "r")
    put(client, "s", b"three\n")
    assert b"".join(drain(file, 3)) == b"one\ntwo\n", "as it was at the open"
    assert b"".join(drain(client.open(".kept/s", "r"))) == b"one\ntwo\nthree\n"
    refused(errno.EACCES, lambda: client.open(".kept/s", "r+"))
    refused(errno.EPERM, lambda: client.create(".kept/t"))
    refused(errno.EPERM, lambda: client.mkdir(".kept/d"))
    refused(errno.EPERM, lambda: client.rename(".kept/s", "t"))
    client.remove(".kept/s")
    assert entries(client, ".kept") == {"s"}, "nothing happened"
    client.remove("s")
    assert entries(client, ".kept") == set()


def check_views(client: Client) -> None:
    put(client, "ctl", b"replay all\nbind all #\nbind news news.*\n")
    for name in ("news.uk", "news.fr", "other"):
        client.create(name)
    assert {"all", "news"} < entries(client, "")
    waiting = client.open("news", "r")
    for name in ("news.uk", "other", "news.fr"):
        put(client, name, name.encode())
    assert drain(waiting) == [b"news.uk", b"news.fr"]
    assert drain(client.open("all", "r")) == [b"news.uk", b"other", b"news.fr"]
    refused(errno.EACCES, lambda: client.open("news", "w"))
    put(client, "ctl", b"consumer w news\n")
    worker = client.open(".consumers/w", "r+")
    assert worker.receive(64, HANG_S) == b"news.uk"
    worker.write(b"ack\n")
    assert worker.receive(64, HANG_S) == b"news.fr"
    client.remove("all")
    assert "all" not in entries(client, "")


def framed(stream: bytes, body: bytes) -> bytes:
    """A frame of `.batch` without headers."""
    size = (8 + len(stream) + len(body)).to_bytes(4, "little")
    return size + len(stream).to_bytes(2, "little") + b"\0\0" + stream + body


def check_units(client: Client) -> None:
    put(client, "ctl", b"replay all\n")
    client.create("s")
    client.create("t")
    batch = client.open(".batch", "r+")
    batch.write(framed(b"s", b"1") + framed(b"t", b"2"))
    assert batch.receive(64, HANG_S) == b"1\n"
    refused(errno.EINVAL, lambda: batch.write(framed(b"s", b"x") + b"\0"))
    assert b"frame 2" in batch.receive(4096, HANG_S)
    refused(errno.ENOENT, lambda: batch.write(framed(b"s", b"x") + framed(b"nowhere", b"x")))
    client.mkdir(".txn/p")
    client.mkdir(".txn/q")
    refused(errno.EEXIST, lambda: client.mkdir(".txn/p"))
    refused(errno.ENOENT, lambda: client.create(".txn/p/nowhere"))
    refused(errno.EACCES, lambda: client.open(".txn/p/s", "r"))
    put(client, ".txn/p/s", b"3", b"4")
    put(client, ".txn/q/.batch", framed(b"t", b"5"))
    assert entries(client, ".txn") == {"ctl", "p", "q"}
    assert entries(client, ".txn/p") == {".batch", ".put", "s"}
    assert drain(client.open("s", "r")) == [b"1"]
    refused(errno.ENOENT, lambda: put(client, ".txn/ctl", b"commit job.1 p gone\n"))
    put(client, ".txn/ctl", b"commit job.1 q p\n")
    put(client, ".txn/ctl", b"commit job.1 q p\n")
    assert drain(client.open("s", "r")) == [b"1", b"3", b"4"]
    assert drain(client.open("t", "r")) == [b"2", b"5"]
    assert client.open(".txn/ctl", "r").receive(4096, HANG_S) == b"committed job.1\n"
    client.mkdir(".txn/p")
    client.rmdir(".txn/p")
    assert entries(client, ".txn") == {"ctl"}
    refused(errno.EPERM, lambda: client.create(".txn/file"))


CHECKS = [
    check_units,
    check_consumers,
    check_consumers_of_ctl,
    check_transient,
    check_formats,
    check_deliver_one,
    check_put,
    check_kept,
    check_views,
    check_streams,
    check_replay,
    check_keys,
    check_order,
    check_ctl,
    check_cursor,
    check_waiting,
    check_bounds,
    check_names,
]
