"""Consumers: made, looked at, claimed from; and `take` from streams under `deliver one`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

from mqfs import limits
from mqfs.engine.files.claiming import PeekHandle
from mqfs.engine.files.consumer import ConsumerHandle
from mqfs.engine.language.message_formats import shape
from mqfs.errors import BadCommand, BadRequest, Busy, Exists, MqfsError, OverLimit, Stale
from mqfs.http import answers
from mqfs.http.answers import LINES, NO_STORE, SANDBOX, Answer, Format, problem
from mqfs.http.call import WHOLE, Call, TimedOut
from mqfs.http.claims import OpenClaim
from mqfs.http.groups import is_there, mode, write
from mqfs.model import Step, Wait
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.quoting import command_lines, quote_word

CONSUMER_MODE = 0o664
_WORDS = ("transient", "private", "memory")  # flags of `consumer` in ctl
_VALUES = ("backlog", "full", "order")
_STEP_BYTES = 65_536  # that are charged at once: a call for each small message is a tenth of what that costs
_NEXT_S = 0.1  # a claim looks no longer for one more message


async def make(call: Call) -> Answer:
    """A consumer: with options by a line of `ctl`, which is its owner's; else as any file."""
    folder, name = call.target.node, call.target.name
    if any((options := _options(call)).values()):
        await _set_options(call, options)
    else:
        try:
            await call.front.await_step(call.tree.create(call.user, folder, name, mode(call, folder, CONSUMER_MODE)))
        except Exists:
            return Answer(200)
    return Answer(201)


async def change(call: Call) -> Answer:
    """The consumer is there. Of its options those that are given are changed, by a line of `ctl`; none, where it has
    them."""
    answer, before = await is_there(call), dict[str, str | bool]()
    if not call.target.name.startswith("."):  # that of a stream has no options
        own = call.target.node.state
        before = {"over": own.over, "transient": own.transient, "private": own.private, "memory": own.memory}
        before |= {"backlog": str(own.backlog), "full": own.full, "order": "key" if own.rules.ordered else "sequence"}
    after = before | _options(call)
    if after != before:
        await _set_options(call, after)
    return answer


def _options(call: Call) -> dict[str, str | bool]:
    """The options of `consumer` in `ctl` that a request gives."""
    given = {key: value for key in ("over", *_WORDS, *_VALUES) if (value := call.option(key)) is not None}
    if lacking := next((key for key in _VALUES if given.get(key) == ""), None):
        raise BadCommand(f"consumer: {lacking} without a value")
    return {key: call.flag(key) if key in _WORDS else value for key, value in given.items()}


async def _set_options(call: Call, options: Mapping[str, str | bool]) -> None:
    words = ["consumer", quote_word(call.target.name)]
    for key, value in options.items():
        if value:
            words += [key] if value is True else [quote_word(str(value))] if key == "over" else [key, quote_word(value)]
    await write(call, call.tree.walk(call.user, call.group, "ctl"), command_lines(" ".join(words)))


async def peek(call: Call) -> Answer:
    """The backlog, oldest first, without claiming it. With `after`: of later sequences only."""
    form = answers.choose(call.option("format") or "json", "*/*")
    if form.cursor not in ("raw", "line", "nul", "json"):
        raise BadRequest("format: unknown (expected json, raw, line or nul)")
    count = call.number("count", limits.HTTP_LISTED) or limits.HTTP_LISTED
    handle = cast(PeekHandle, call.tree.open(call.user, call.target.node, os.O_RDONLY))
    try:
        handle.position = call.number("after", 1 << 62) or 0
        handle.position += handle.position > 0
        pieces: list[bytes] = []
        size = 0
        while len(pieces) < count and size < limits.HTTP_PAGE_BYTES:
            before = handle.shown
            await call.front.await_step(handle.read(WHOLE))
            if handle.shown is before or handle.shown is None:
                break
            record, delivery = handle.shown
            pieces.append(shape(form.cursor, record, call.group.numbers[record.stream].name, delivery))
            size += len(pieces[-1])
            call.front.hold(size)
            await call.front.pause()
    finally:
        handle.close()
    return Answer(200, b"".join(pieces), form.kind, [*NO_STORE, SANDBOX])


# ---------------------------------------------------------------- claiming


class Collector:
    """Reads messages from a handle, each claimed by its read."""

    def __init__(self, call: Call, handle: ConsumerHandle, most: int, room: Callable[[], bool] = lambda: True) -> None:
        """`room`: takes a place for one more message, and says whether there is one."""
        self._call, self._handle, self._most, self._room = call, handle, most, room
        self.size = self._charged = 0  # bytes

    async def collect(self, seconds: float, add: Callable[[bytes, int, int], None]) -> None:
        """`add` the present messages: bytes, sequence, delivery. Wait for the first only."""
        count = 0
        while count < self._most and self.size < limits.HTTP_CLAIM_BYTES and self._room():
            try:
                step, most = self._handle.read(WHOLE), _NEXT_S if count else seconds
                if isinstance(step, Wait) and not (step.settled or (most and not count)) and step.cancel(TimedOut()):
                    return
                # One that does not wait and was not cancelled is looking for what is there, and ends by itself. That
                # may take longer than those that were claimed are held.
                data = await self._call.front.await_step(step, most or None, looks=not count)
            except TimedOut:
                return
            except MqfsError:
                if count:
                    return  # with what it has so far; the next request fails
                raise
            shown = self._handle.shown
            if shown is None or shown[0].sequence not in self._handle.claims:
                return  # the end: the consumer was removed, or the server stops
            add(data, shown[0].sequence, shown[1])
            self.size += len(data)
            count += 1
            if self.size > self._charged:
                self._charged = self.size + _STEP_BYTES
                try:  # before one more is read: it may be the longest there is
                    self._call.front.hold(self._charged + limits.MESSAGE_BYTES)
                except OverLimit:
                    return  # with what it has so far
            await self._call.front.pause()


def _lease(call: Call) -> float:
    word = call.option("lease")
    seconds = limits.HTTP_LEASE_S if word is None else parse_duration(word) / 1e9
    if not 1 <= seconds <= limits.HTTP_LEASE_MOST_S:
        raise BadRequest(f"lease {word!r} (expected 1s to 12h)")
    return seconds


async def claim(call: Call) -> Answer:
    """Claim up to `max` messages; each line of the answer has a token to settle it by."""
    claims, lease = call.front.claims, _lease(call)
    most = claims.room(call.owner, call.number("max", limits.HTTP_CLAIMED) or 1)
    wait = call.seconds("wait") or 0.0
    handle = _open(call, call.target.node, "json")
    mine = claims.begin(handle, call.target.node, call.user, call.owner)
    lines: list[bytes] = []

    def add(line: bytes, sequence: int, delivery: int) -> None:
        token = claims.add(mine, sequence, delivery)
        lines.append(b'{"token":"%b",' % token.encode() + line[1:])

    try:
        await Collector(call, handle, most, partial(claims.take_place, mine)).collect(wait, add)
    except BaseException:
        claims.release(mine)
        raise
    if not lines:
        claims.release(mine)
        return Answer(204, headers=list(NO_STORE))
    claims.give_place(mine)
    claims.lease(mine, mine.deliveries, lease)
    return Answer(200, b"".join(lines), LINES, [*NO_STORE, SANDBOX], partial(_unless_sent, call, mine))


def _unless_sent(call: Call, mine: OpenClaim, sent: bool) -> None:
    """Give back what did not reach the client."""
    if not sent:
        call.front.claims.release(mine)


def _open(call: Call, node: Any, form: str) -> ConsumerHandle:
    handle = cast(ConsumerHandle, call.tree.open(call.user, node, os.O_RDWR))
    try:
        handle.whole_below = limits.CTL_BYTES
        handle.write(b"format %b\n" % form.encode())
    except BaseException:
        handle.close()
        raise
    return handle


# ---------------------------------------------------------------- settling


async def settle(call: Call) -> Answer:
    """`ack`, `nack`, `release`, `dead`, `touch` of tokens, one a line: those of one claim request all or none."""
    verb, claims = call.target.verb, call.front.claims
    suffix = _suffix(call, verb)
    lease = _lease(call) if verb == "touch" else 0.0
    call.tree.access(call.user, call.target.node, os.R_OK | os.W_OK)
    chosen: dict[OpenClaim, dict[str, int]] = {}
    left: set[str] = set()  # tokens that are not settled
    void: set[str] = set()  # numbers of claim requests that have one, and settle none of their messages
    given = list(dict.fromkeys(_tokens(call.body)))
    for token in given:
        try:
            mine, sequence = claims.find(token, call.user.uid, call.target.node)
        except Stale:
            left.add(token)
            void.add(token.partition(".")[0])
        else:
            chosen.setdefault(mine, {})[token] = sequence
    for mine, tokens in chosen.items():
        if str(mine.number) in void:
            left.update(tokens)
            continue
        sequences = list(tokens.values())
        try:
            step = _command(mine.handle, verb, sequences, suffix)
        except Stale:
            claims.drop_void(mine)
            left.update(tokens)
            continue
        except MqfsError:  # some of them may be done
            claims.drop_void(mine)
            raise
        if verb == "touch":
            claims.lease(mine, sequences, lease)
        else:
            claims.settled(mine, sequences)
        await call.front.await_step(step)
    return _not_settled(call, [token for token in given if token in left]) if left else Answer(204)


def _command(handle: ConsumerHandle, verb: str, sequences: list[int], suffix: str) -> Step[int]:
    """Settle messages of a handle, all or none. Raises Stale, and does nothing then."""
    sequences = sorted(sequences, key=handle.claims.__contains__)  # the first line fails where one is not claimed
    lines = [command_lines(f"{verb} {sequence}{suffix}") for sequence in sequences]
    fit = max(limits.CTL_BYTES // max(map(len, lines)), 1)
    step: Step[int] = 0
    for at in range(0, len(lines), fit):
        step = handle.write(b"".join(lines[at : at + fit]))
    return step


def _suffix(call: Call, verb: str) -> str:
    """The arguments after a sequence."""
    if verb == "nack" and (after := call.option("after")) is not None:
        parse_duration(after)
        return f" {after}"
    if verb == "dead" and (reason := call.option("reason")):
        return f" {quote_word(reason)}"
    return ""


def _tokens(body: bytes) -> list[str]:
    words = body.split()
    if not words or len(words) > limits.HTTP_CLAIMED:
        raise BadRequest(f"{len(words)} tokens (expected 1 to {limits.HTTP_CLAIMED}, one a line)")
    return [word.decode("ascii", "replace") for word in words]


def _not_settled(call: Call, tokens: list[str]) -> Answer:
    """All that were not settled, one a line in plain text: a claim request of theirs has one that is void."""
    plain = "json" not in call.request.headers.get("accept", "*/*")
    kind, body = problem(Stale(f"not settled: {len(tokens)} claims, void or of a request with a void one"), plain)
    return Answer(410, "".join(f"{token}\n" for token in tokens).encode() if plain else body, kind)


async def seek(call: Call) -> Answer:
    """Move the consumer: its claims are void."""
    try:
        word = call.body.decode().strip()
    except UnicodeDecodeError:
        raise BadRequest("seek: not UTF-8 (expected a word of seek)") from None
    await write(call, call.target.node, command_lines(f"seek {quote_word(word)}"))
    return Answer(204)


# ---------------------------------------------------------------- taking


async def take(call: Call) -> Answer:
    """Take from a stream under `deliver one` and `ack read`: what reached the client is done."""
    stream = call.target.node
    settings = stream.group.settings
    if settings.deliver != "one" or settings.ack != "read":
        raise Busy("stream is not a work queue (expected 'deliver one' and 'ack read', or a consumer)")
    form = answers.choose(call.option("format"), call.request.headers.get("accept", "*/*"))
    if form.cursor == "record" or form.beat is not None:
        raise BadRequest("format: unknown (expected raw, line, nul or json)")
    most = call.number("max", limits.HTTP_CLAIMED) or 1
    folder = call.own(".consumers")
    handle = _open(call, call.tree.walk(call.user, folder, f".{stream.name}"), form.cursor)
    return await _take(call, handle, form, most)


async def _take(call: Call, handle: ConsumerHandle, form: Format, most: int) -> Answer:
    bodies: list[bytes] = []
    sequences: list[int] = []

    def add(data: bytes, sequence: int, delivery: int) -> None:
        bodies.append(data)
        sequences.append(sequence)

    def done(sent: bool) -> None:
        verb = "ack" if sent else "release"
        for sequence in sequences if not handle.closed else ():
            with suppress(MqfsError):  # each by itself: the lease of one may be over; it comes again
                handle.write(f"{verb} {sequence}\n".encode())
        handle.close()

    try:
        await Collector(call, handle, most).collect(call.seconds("wait") or 0.0, add)
    except BaseException:
        done(False)
        raise
    if not bodies:
        handle.close()
        return Answer(204, headers=list(NO_STORE))
    return Answer(200, b"".join(bodies), form.kind, [*NO_STORE, SANDBOX], done)
