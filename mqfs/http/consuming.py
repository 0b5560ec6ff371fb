"""Consumers over HTTP: make one, read its backlog, claim from it; and `take` from streams under `deliver one`.

Only an open claim outlives its request. It belongs to an open handle, so each claim request keeps its handle here until
its messages are settled or their leases end. This module has the tokens and the client's leases. The consumer may end a
claim earlier: at the end of the group's own lease, or at a seek. Such a claim is void. It is dropped here when its user
has no room for more claims, at a command that names it, and by the alarm, which fires at the end of either lease.
"""

from __future__ import annotations

import hmac
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, cast

import attrs

from mqfs import limits
from mqfs.engine.core.timers import CONSUMERS, Alarm
from mqfs.engine.files.claiming import PeekHandle
from mqfs.engine.files.consumer import ConsumerHandle
from mqfs.engine.language.message_formats import shape
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadCommand, BadRequest, Busy, Denied, Exists, MqfsError, OverLimit, Stale
from mqfs.http import answers
from mqfs.http.answers import LINES, NO_STORE, SANDBOX, Answer, Format, problem
from mqfs.http.groups import is_there, mode, write
from mqfs.http.route import WHOLE, Call, TimedOut
from mqfs.model import Grant, Step, User, Wait
from mqfs.syntax.duration import parse_duration
from mqfs.syntax.lines import command_lines, quote_word

MAC_BYTES = 16


@attrs.define(eq=False)
class OpenClaim:
    """The messages of one claim request, each with its number of deliveries and the end of its lease (engine time)."""

    number: int
    secret: str  # of its tokens
    handle: Any  # of the consumer
    node: Any
    user: User
    account: Hashable
    alarm: Alarm
    has_place: bool = False  # whether the message that it waits for is counted for its account
    deliveries: dict[int, int] = attrs.Factory(dict)
    due_ns: dict[int, int] = attrs.Factory(dict)


class Claims:
    """All open claims of the front end."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._key = os.urandom(32)  # tokens are valid until the server ends
        self._numbers = count(1)
        self._open: dict[int, OpenClaim] = {}
        self._of_user: Counter[Hashable] = Counter()

    def room(self, account: Hashable, wanted: int) -> int:
        """Return how many of the wanted messages a user may still claim. Raises OverLimit where that is 0."""
        if self._of_user[account] + wanted > limits.HTTP_USER_CLAIMS:
            for claim in [claim for claim in self._open.values() if claim.account == account and claim.due_ns]:
                self.drop_void(claim)
        left = limits.HTTP_USER_CLAIMS - self._of_user[account]
        if left <= 0:
            raise OverLimit(f"open claims: {limits.HTTP_USER_CLAIMS} of this user (expected an ack or release first)")
        return min(left, wanted)

    def take_place(self, claim: OpenClaim) -> bool:
        """Count the next message of a claim request before the request waits for it, as other requests of the user may
        wait, too. Returns False where the user has no room for another."""
        if not claim.has_place and self._of_user[claim.account] < limits.HTTP_USER_CLAIMS:
            self._of_user[claim.account] += 1
            claim.has_place = True
        return claim.has_place

    def give_place(self, claim: OpenClaim) -> None:
        """Stop counting a message for a claim request that waits for none any more."""
        self._of_user[claim.account] -= claim.has_place
        claim.has_place = False

    def begin(self, handle: Any, node: Any, user: User, account: Hashable) -> OpenClaim:
        """Return a new claim request, without messages and with a place for the first. `account` is charged for its
        messages; `room` was called for it before."""
        number = next(self._numbers)
        alarm = Alarm(self._tree.timers, node.group, CONSUMERS, "ending leases", partial(self._expire, number))
        secret = hmac.digest(self._key, f"{number}.{user.uid}".encode(), "sha256")[:MAC_BYTES].hex()
        claim = self._open[number] = OpenClaim(number, secret, handle, node, user, account, alarm)
        self.take_place(claim)
        return claim

    def add(self, claim: OpenClaim, sequence: int, delivery: int) -> str:
        """Add a message that the handle has claimed, in the place that was taken for it. Returns its token."""
        claim.deliveries[sequence] = delivery
        claim.has_place = False
        return self._token(claim, sequence)

    def lease(self, claim: OpenClaim, sequences: Iterable[int], seconds: float) -> None:
        """Lease messages to the client for `seconds` from now on."""
        due = self._tree.clock.engine_ns() + int(seconds * 1e9)
        claim.due_ns.update(dict.fromkeys(sequences, due))
        self._set_alarm(claim)

    def _set_alarm(self, claim: OpenClaim) -> None:
        """Set the alarm to the first end of a lease: the client's, or the group's own, which ends without a notice."""
        if claim.due_ns:
            due, own = min(claim.due_ns.values()), claim.node.group.settings.lease
            claim.alarm.at(min(due, self._tree.clock.engine_ns() + own) if own else due)

    def _token(self, claim: OpenClaim, sequence: int) -> str:
        return f"{claim.number}.{sequence}.{claim.deliveries[sequence]}.{claim.secret}"

    def find(self, token: str, uid: int, node: Any) -> tuple[OpenClaim, int]:
        """Return the claim and the sequence of a token. Raises BadRequest for an invalid token, Stale for a void claim,
        Denied for another user's."""
        words = token.split(".")
        if len(words) != 4 or not all(word.isascii() and word.isdigit() and len(word) < 20 for word in words[:3]):
            raise BadRequest(f"invalid token {token[:80]!r} (expected one of a claim)")
        claim, sequence = self._open.get(int(words[0])), int(words[1])
        if claim is None or sequence not in claim.deliveries or claim.node != node:
            raise Stale(f"claim void: {token[:80]}")
        if not hmac.compare_digest(self._token(claim, sequence).encode(), token.encode()):
            raise Stale(f"claim void: {token[:80]}")
        if claim.user.uid != uid:
            raise Denied("token: another user's claim")
        return claim, sequence

    def settled(self, claim: OpenClaim, sequences: Iterable[int]) -> None:
        """Remove messages that are no longer in flight, and close the claim after its last one."""
        for sequence in sequences:
            if claim.deliveries.pop(sequence, None) is not None:
                self._of_user[claim.account] -= 1
            claim.due_ns.pop(sequence, None)
        if not claim.deliveries:
            self.give_place(claim)
            self._open.pop(claim.number, None)
            claim.handle.close()
            if not self._of_user[claim.account]:
                del self._of_user[claim.account]

    def drop_void(self, claim: OpenClaim) -> None:
        """Drop the messages that the handle no longer holds."""
        held = () if claim.node.removed else claim.handle.claims
        self.settled(claim, [sequence for sequence in claim.deliveries if sequence not in held])

    def command(self, claim: OpenClaim, line: str) -> None:
        """Write a command without waiting for its result. Errors are ignored: the claim is void then."""
        with suppress(MqfsError):
            claim.handle.write(f"{line}\n".encode())

    def release(self, claim: OpenClaim) -> None:
        """Requeue messages that did not reach the client, without counting a failed delivery."""
        for sequence in list(claim.deliveries):
            self.command(claim, f"release {sequence}")
        self.settled(claim, list(claim.deliveries))

    def end_grants(self, ended: Set[Grant]) -> None:
        """Release the claims of tokens that were revoked, changed or expired."""
        for claim in [claim for claim in self._open.values() if claim.user.grant in ended]:
            self.settled(claim, list(claim.deliveries))

    def _expire(self, number: int, now_ns: int) -> None:
        """Nack the messages whose lease has expired, each by itself, as others may be settled already. Drop the void
        ones."""
        claim = self._open.get(number)
        if claim is None:
            return
        due = [sequence for sequence, due_ns in claim.due_ns.items() if due_ns <= now_ns]
        for sequence in due:
            self.command(claim, f"nack {sequence}")
        self.settled(claim, due)
        self.drop_void(claim)
        self._set_alarm(claim)


# ------------------------------------------------------------ consumers


CONSUMER_MODE = 0o664
_WORDS = ("transient", "private", "memory")  # flags of `consumer` in ctl
_VALUES = ("backlog", "full", "order")
_STEP_BYTES = 65_536  # charged at once: a call for each small message would cost a tenth of its claim
_NEXT_S = 0.1  # a claim searches no longer for one more message


async def make(call: Call) -> Answer:
    """Make a consumer: with options by a line of `ctl`, which needs the right to write that; else as any file."""
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
    """Answer that the consumer exists, and change the given options by a line of `ctl`, unless it has them already."""
    answer, before = await is_there(call), dict[str, str | bool]()
    if not call.target.name.startswith("."):  # a stream's default consumer has no options
        own = call.target.node.state
        before = {"over": own.over, "transient": own.transient, "private": own.private, "memory": own.memory}
        before |= {"backlog": str(own.backlog), "full": own.full, "order": "key" if own.rules.ordered else "sequence"}
    after = before | _options(call)
    if after != before:
        await _set_options(call, after)
    return answer


def _options(call: Call) -> dict[str, str | bool]:
    """Return the options of `consumer` in `ctl` that a request gives. Raises BadCommand for one without its value."""
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
    """Return the backlog, oldest first, without claiming it; with `after`, only later sequences."""
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
    """A reader of messages from a handle; each read claims one."""

    def __init__(self, call: Call, handle: ConsumerHandle, most: int, room: Callable[[], bool] = lambda: True) -> None:
        """`most`: the most messages to read. `room` reserves a place for one more, and returns whether it could."""
        self._call, self._handle, self._most, self._room = call, handle, most, room
        self.size = self._charged = 0  # bytes

    async def collect(self, seconds: float, add: Callable[[bytes, int, int], None]) -> None:
        """Pass the present messages to `add`: bytes, sequence, delivery. Waits up to `seconds` for the first only."""
        count = 0
        while count < self._most and self.size < limits.HTTP_CLAIM_BYTES and self._room():
            try:
                step, most = self._handle.read(WHOLE), _NEXT_S if count else seconds
                if isinstance(step, Wait) and not (step.settled or (most and not count)) and step.cancel(TimedOut()):
                    return
                # A step that was not cancelled here still searches the present messages, and ends by itself. For
                # further messages it is bounded: the search may outlast the leases of those already claimed.
                data = await self._call.front.await_step(step, most or None, looks=not count)
            except TimedOut:
                return
            except MqfsError:
                if count:
                    return  # with the messages so far; the next request fails
                raise
            shown = self._handle.shown
            if shown is None or shown[0].sequence not in self._handle.claims:
                return  # end-of-file: the consumer was removed, or the server stops
            add(data, shown[0].sequence, shown[1])
            self.size += len(data)
            count += 1
            if self.size > self._charged:
                self._charged = self.size + _STEP_BYTES
                try:  # before the next read: its message may have the maximum size
                    self._call.front.hold(self._charged + limits.MESSAGE_BYTES)
                except OverLimit:
                    return  # with the messages so far
            await self._call.front.pause()


def _lease(call: Call) -> float:
    word = call.option("lease")
    seconds = limits.HTTP_LEASE_S if word is None else parse_duration(word) / 1e9
    if not 1 <= seconds <= limits.HTTP_LEASE_MOST_S:
        raise BadRequest(f"lease {word!r} (expected 1s to 12h)")
    return seconds


async def claim(call: Call) -> Answer:
    """Claim up to `max` messages; each line of the answer has a message and the token to settle it."""
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

    def done(sent: bool) -> None:
        if not sent:
            claims.release(mine)

    return Answer(200, b"".join(lines), LINES, [*NO_STORE, SANDBOX], done)


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
    """Perform `ack`, `nack`, `release`, `dead` or `touch` for tokens, one a line: for each claim request all or none of
    its tokens."""
    verb, claims = call.target.verb, call.front.claims
    suffix = _suffix(call, verb)
    lease = _lease(call) if verb == "touch" else 0.0
    call.tree.access(call.user, call.target.node, os.R_OK | os.W_OK)
    chosen: dict[OpenClaim, dict[str, int]] = {}
    left: set[str] = set()  # tokens that are not settled
    void: set[str] = set()  # numbers of claim requests with a void token, none of whose messages are settled
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
        except MqfsError:  # some of the messages may be settled
            claims.drop_void(mine)
            raise
        if verb == "touch":
            claims.lease(mine, sequences, lease)
        else:
            claims.settled(mine, sequences)
        await call.front.await_step(step)
    return _not_settled(call, [token for token in given if token in left]) if left else Answer(204)


def _command(handle: ConsumerHandle, verb: str, sequences: list[int], suffix: str) -> Step[int]:
    """Settle messages of a handle, all or none. Raises Stale where one is not claimed, and settles none then."""
    sequences = sorted(sequences, key=handle.claims.__contains__)  # unclaimed ones first: the first line fails
    lines = [command_lines(f"{verb} {sequence}{suffix}") for sequence in sequences]
    fit = max(limits.CTL_BYTES // max(map(len, lines)), 1)
    step: Step[int] = 0
    for at in range(0, len(lines), fit):
        step = handle.write(b"".join(lines[at : at + fit]))
    return step


def _suffix(call: Call, verb: str) -> str:
    """Return the arguments after a sequence in a command."""
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
    """Return the answer for tokens that were not settled, as they are void or of a claim request with a void one. It
    lists them: one a line in plain text, else as `tokens`."""
    plain = "json" not in call.request.headers.get("accept", "*/*")
    why = Stale(f"not settled: {len(tokens)} claims, void or of a request with a void one")
    kind, body = problem(why, plain, tokens=tokens)
    return Answer(410, "".join(f"{token}\n" for token in tokens).encode() if plain else body, kind)


async def seek(call: Call) -> Answer:
    """Move the consumer, which makes all its claims void."""
    try:
        word = call.body.decode().strip()
    except UnicodeDecodeError:
        raise BadRequest("seek: not UTF-8 (expected a word of seek)") from None
    await write(call, call.target.node, command_lines(f"seek {quote_word(word)}"))
    return Answer(204)


# ---------------------------------------------------------------- taking


async def take(call: Call) -> Answer:
    """Take messages from a stream under `deliver one` and `ack read`: those that reached the client are
    acknowledged."""
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
            with suppress(MqfsError):  # each by itself: a message whose lease has expired is redelivered
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
