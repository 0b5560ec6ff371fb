"""The group of a bridge: calls that are repeated after a lost connection, and files that the library has no call for.

All calls raise Interrupted if the bridge stops meanwhile.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any, TypeVar, cast

from mqfs.client.client import Client
from mqfs.client.message import Receipt
from mqfs.client.publisher import Outgoing
from mqfs.client.subscription import CursorSubscription
from mqfs.client.transport.ninep import NinepTransport
from mqfs.client.types import File, read_whole, write_lines
from mqfs.client.waiting import Backoff
from mqfs.errors import (
    Again,
    BadName,
    Denied,
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
from mqfs.model import QTDIR
from mqfs.ninep.client import connection as ninep
from mqfs.ninep.client.machine import check
from mqfs.syntax.lines import split
from mqfs.syntax.patterns import Words

T = TypeVar("T")

CONNECT_S = 10.0
PARKED_S = 1.0  # between two calls of `may_wait` while a write waits for room
LATER = (Again, DiskFull, OverLimit, OverQuota, StreamFull)  # errors of a group without room for a message now


class GroupLink:
    """A group, over one 9P connection, which is made again if it is lost. Thread-safe."""

    def __init__(
        self, address: str, path: str, *, user: str, token: str, stopping: threading.Event, create: bool = False
    ) -> None:
        self.path, self.stopping = path.strip("/"), stopping
        self._link = NinepTransport(address, user=user, token=token, timeout=CONNECT_S, reconnect=True)
        self._client = Client(self._link, True)
        self.group = self.repeat(lambda: self._client.group(self.path, create=create))
        self.discards = False  # whether the group had `full drop-new` at the last check
        with suppress(*LATER):
            self.may_discard()  # checked first, so that the first write need not be repeated

    def repeat(self, call: Callable[[], T]) -> T:
        """Return the result of a call, which is repeated while the server is disconnected or stopping."""
        try:
            return Backoff(True, self.stopping).retry(call, Disconnected, Interrupted)
        except (Disconnected, Interrupted):
            if self.stopping.is_set():
                raise Interrupted("the bridge stops") from None
            raise

    def stats(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads("\n".join(self.lines(".stats"))))

    def settings(self) -> dict[str, str]:
        """Return the lines of ctl by their first word; the values are the rest of each line."""
        return {row[0]: row[2] for row in (line.partition(" ") for line in self.lines("ctl"))}

    def words(self) -> Words:
        """Return the separator and wildcards of the group's patterns."""
        return Words(*split(self.settings()["words"]))

    def lines(self, file: str) -> list[str]:
        """Return the lines of a file that has an end."""
        text = self.repeat(lambda: read_whole(self._link, f"{self.path}/{file}")).decode()
        return text.removesuffix("\n").split("\n")  # not `splitlines`: a name may have other line separators

    def open(self, file: str, mode: str) -> File:
        return self._link.open(f"{self.path}/{file}", mode)

    def command(self, file: str, line: str) -> None:
        """Write a command to a file."""
        write_lines(self._link, f"{self.path}/{file}", line)

    def may_discard(self) -> bool:
        """Whether the group may have discarded messages since the last check: it has `full drop-new`, or had it then.
        For one thread only."""
        before = self.discards
        with suppress(Denied):  # a user who may only write cannot know
            self.discards = self.settings()["full"] == "drop-new"
        return before or self.discards

    def put_all(self, messages: Sequence[Outgoing], may_wait: Callable[[], bool]) -> list[MqfsError | None]:
        """Publish messages with options, all under way at once, and make their streams. Returns the error of each, or
        None.

        `may_wait` is called after each PARKED_S in which some wait for room; if it returns False they are cancelled,
        with the error Again. Raises TooLong, and then sends none; Disconnected; the error of opening `.put`; and as
        `may_wait`.
        """
        answered = self.discards
        errors = self._put_each(messages, may_wait, answered)
        missing = [at for at, error in enumerate(errors) if isinstance(error, NotFound)]
        made = {stream: self._make(stream) for stream in {messages[at].stream for at in missing}}
        for at in missing:
            errors[at] = made[messages[at].stream]
        again = [at for at in missing if errors[at] is None]
        for at, error in self._put_these(messages, again, may_wait, answered):
            errors[at] = Again(f"{error} (it was removed meanwhile)") if isinstance(error, NotFound) else error
        written = [at for at, error in enumerate(errors) if error is None]
        for at, error in self._put_discarded(messages, written, may_wait, answered):
            errors[at] = error
        return errors

    def _put_discarded(
        self, messages: Sequence[Outgoing], written: list[int], may_wait: Callable[[], bool], answered: bool
    ) -> list[tuple[int, MqfsError | None]]:
        """Publish messages again that the group may have discarded; it ignores the others, whose ids it knows."""
        try:
            if not written or not self.may_discard() or answered:
                return []
        except LATER as error:
            return [(at, error) for at in written]
        return self._put_these(messages, written, may_wait, True)

    def _put_these(
        self, messages: Sequence[Outgoing], these: list[int], may_wait: Callable[[], bool], answered: bool
    ) -> list[tuple[int, MqfsError | None]]:
        """Publish some of the messages. Returns the index and the error of each."""
        if not these:
            return []
        errors = self._put_each([messages[at] for at in these], may_wait, answered)
        return [*zip(these, errors, strict=True)]

    def _make(self, stream: str) -> MqfsError | None:
        """Make a stream. Returns None if it exists then, else the error."""
        path = f"{self.path}/{stream}"
        try:
            self._link.create(path)
        except Exists:
            try:
                is_group = bool(self._link.connection().stat(path).qid.type & QTDIR)
            except NotFound:  # it was removed meanwhile
                is_group = False
            return BadName(f"stream {stream!r}: a group has that name") if is_group else None
        except MqfsError as error:
            return error
        return None

    def _put_each(
        self, messages: Sequence[Outgoing], may_wait: Callable[[], bool], answered: bool
    ) -> list[MqfsError | None]:
        """Publish messages. Returns the error of each. `answered`: one after the other with a receipt, as only this
        shows that a message was discarded."""
        try:
            opened = self.open(".put", "r+" if answered else "w")
        except LATER as error:
            return [error] * len(messages)
        with closing(cast(ninep.File, opened)) as file:
            return _ask_all(file, messages, may_wait) if answered else _write_all(file, messages, may_wait)

    def connection(self) -> object:
        """Return the present connection: a new object if it was lost before. Raises Disconnected."""
        return self._link.connection()

    def follow(self, first: int) -> CursorSubscription:
        """Follow the messages from a sequence on, with future ones. Reads raise Disconnected."""
        return CursorSubscription(self._link, self.path, "#", start=str(first))

    def close(self) -> None:
        self._client.close()


def _write_all(file: ninep.File, messages: Sequence[Outgoing], may_wait: Callable[[], bool]) -> list[MqfsError | None]:
    client = file.client
    slots = client.send([file.channel.request(message.put()) for message in messages])
    with suppress(Disconnected):
        while not _are_answered(client, slots) and may_wait():
            pass
        for slot in reversed(slots):  # the last first, so that no message overtakes an earlier one
            client.flush(slot)
    return [_error_of(client, slot) for slot in slots]


def _ask_all(file: ninep.File, messages: Sequence[Outgoing], may_wait: Callable[[], bool]) -> list[MqfsError | None]:
    """Publish messages one after the other. After the first without room the rest get its error, unsent."""
    errors: list[MqfsError | None] = []
    for message in messages:
        errors.append(_ask(file, message, may_wait))
        if isinstance(errors[-1], LATER):
            break
    return errors + errors[-1:] * (len(messages) - len(errors))


def _ask(file: ninep.File, message: Outgoing, may_wait: Callable[[], bool]) -> MqfsError | None:
    while True:
        try:
            return discarded(message, Receipt.parse(file.ask(message.put(kept=True), PARKED_S)))
        except TimeoutError:
            if not may_wait():
                return Again("no room at once")
        except MqfsError as error:
            return error


def discarded(message: Outgoing, receipt: Receipt) -> StreamFull | None:
    """Return the error for an accepted message that `full drop-new` discarded; None: it is in the group."""
    return None if receipt.sequence else StreamFull(f"stream {message.stream!r}: full, the message was discarded")


def _are_answered(client: ninep.Client, slots: Sequence[ninep.Slot]) -> bool:
    """Whether all writes are answered within PARKED_S."""
    deadline = time.monotonic() + PARKED_S
    try:
        for slot in slots:
            client.wait(slot, deadline)
    except TimeoutError:
        return False
    return True


def _error_of(client: ninep.Client, slot: ninep.Slot) -> MqfsError | None:
    """Return the error of a write, or None; Again if it was flushed."""
    try:
        reply = client.wait(slot)
        if reply is None:
            return Again("no room at once")
        check(reply)
    except MqfsError as error:
        return error
    return None
