"""The group that a bridge is a client of: calls that outlast a lost connection, and files the library has no call for.

Raises Interrupted where the bridge stops meanwhile.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any, TypeVar, cast

from mqfs.client.backoff import Backoff
from mqfs.client.client import Client
from mqfs.client.outgoing import Outgoing
from mqfs.client.subscription import CursorSubscription
from mqfs.client.transport.ninep import NinepTransport
from mqfs.client.types import File, read_whole
from mqfs.errors import (
    Again,
    Disconnected,
    DiskFull,
    Exists,
    Interrupted,
    MqfsError,
    NotFound,
    OverLimit,
    OverQuota,
    StreamFull,
)
from mqfs.ninep.client import connection as ninep
from mqfs.ninep.client.machine import check
from mqfs.syntax.patterns import Words
from mqfs.syntax.quoting import split

T = TypeVar("T")

CONNECT_S = 10.0
PARKED_S = 1.0  # that a write waits for room, until it is asked whether it may
LATER = (Again, DiskFull, OverLimit, OverQuota, StreamFull)  # the group has no room for a message now


class GroupLink:
    """A group, over one connection of 9P, which is made again where it is lost. Thread-safe."""

    def __init__(
        self, address: str, path: str, *, user: str, token: str, stopping: threading.Event, create: bool = False
    ) -> None:
        self.path, self.stopping = path.strip("/"), stopping
        self._link = NinepTransport(address, user=user, token=token, timeout=CONNECT_S, reconnect=True)
        self._client = Client(self._link, True)
        self.group = self.repeat(lambda: self._client.group(self.path, create=create))

    def repeat(self, call: Callable[[], T]) -> T:
        """The result of a call, which is repeated while the server is away, or stops."""
        try:
            return Backoff(True, self.stopping).retry(call, Disconnected, Interrupted)
        except (Disconnected, Interrupted):
            if self.stopping.is_set():
                raise Interrupted("the bridge stops") from None
            raise

    def stats(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads("\n".join(self.lines(".stats"))))

    def settings(self) -> dict[str, str]:
        """The lines of ctl by their first word, of settings the values."""
        return {row[0]: row[2] for row in (line.partition(" ") for line in self.lines("ctl"))}

    def words(self) -> Words:
        """The words of the group's patterns."""
        return Words(*split(self.settings()["words"]))

    def lines(self, file: str) -> list[str]:
        """The lines of a file that has an end."""
        return self.repeat(lambda: read_whole(self._link, f"{self.path}/{file}")).decode().splitlines()

    def open(self, file: str, mode: str) -> File:
        return self._link.open(f"{self.path}/{file}", mode)

    def command(self, file: str, line: str) -> None:
        """Write a command to a file."""
        with closing(self.open(file, "w")) as opened:
            opened.write(line.encode() + b"\n")

    def put_all(self, messages: Sequence[Outgoing], may_wait: Callable[[], bool]) -> list[MqfsError | None]:
        """Publish messages that have options, all under way at once: the error of each, or None. Makes their streams.
        `may_wait` is asked after each PARKED_S that some wait for room; where not, they are taken back: Again. Raises
        TooLong, and then sends none; Disconnected; and what `may_wait` raises."""
        errors = self._write_all(messages, may_wait)
        missing = [at for at, error in enumerate(errors) if isinstance(error, NotFound)]
        made = {stream: self._make(stream) for stream in {messages[at].stream for at in missing}}
        for at in missing:
            errors[at] = made[messages[at].stream]
        if again := [at for at in missing if errors[at] is None]:
            for at, error in zip(again, self.put_all([messages[at] for at in again], may_wait), strict=True):
                errors[at] = error
        return errors

    def _make(self, stream: str) -> MqfsError | None:
        """Why the stream is not there."""
        try:
            self._link.create(f"{self.path}/{stream}")
        except Exists:
            pass
        except MqfsError as error:
            return error
        return None

    def _write_all(self, messages: Sequence[Outgoing], may_wait: Callable[[], bool]) -> list[MqfsError | None]:
        try:
            opened = self.open(".put", "w")
        except MqfsError as error:
            return [error] * len(messages)
        with closing(cast(ninep.File, opened)) as file:
            client = file.client
            slots = client.send([file.channel.request(message.put()) for message in messages])
            with suppress(Disconnected):
                while not _are_answered(client, slots) and may_wait():
                    pass
                for slot in reversed(slots):  # so that none passes one before it
                    client.flush(slot)
            return [_error_of(client, slot) for slot in slots]

    def mkdir(self, path: str) -> None:
        self._link.mkdir(f"{self.path}/{path}")

    def connection(self) -> object:
        """The present one: another than before where the server was away. Raises Disconnected."""
        return self._link.connection()

    def follow(self, first: int) -> CursorSubscription:
        """The messages from a sequence on, including future ones. Its reads raise Disconnected."""
        return CursorSubscription(self._link, self.path, "#", start=str(first))

    def close(self) -> None:
        self._client.close()


def _are_answered(client: ninep.Client, slots: Sequence[ninep.Slot]) -> bool:
    """Waits for PARKED_S."""
    deadline = time.monotonic() + PARKED_S
    try:
        for slot in slots:
            client.wait(slot, deadline)
    except TimeoutError:
        return False
    return True


def _error_of(client: ninep.Client, slot: ninep.Slot) -> MqfsError | None:
    """The error of a write; Again where it was flushed."""
    try:
        reply = client.wait(slot)
        if reply is None:
            return Again("no room at once")
        check(reply)
    except MqfsError as error:
        return error
    return None
