"""Open claims: the one thing that outlives a request.

A claim belongs to an open handle, so each claim request keeps its handle here until its messages are settled or their
leases end. It holds their tokens and leases; the consumer decides what becomes of a message: it may end a claim before,
as at the end of the group's own lease and at a seek. Then the claim is void, and is dropped here when its user has no
room for more, at a command that names it, and by the alarm, which rings at the end of either lease.
"""

from __future__ import annotations

import hmac
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Set
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import attrs

from mqfs import limits
from mqfs.engine.core.timers import CONSUMERS, Alarm
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadRequest, Denied, MqfsError, OverLimit, Stale
from mqfs.model import Grant, User

MAC_BYTES = 16


@attrs.define(eq=False)
class OpenClaim:
    """The messages of one claim request: the delivery and the end of the lease (engine time) of each."""

    number: int
    secret: str  # of its tokens
    handle: Any  # of the consumer
    node: Any
    user: User
    account: Hashable
    alarm: Alarm
    has_place: bool = False  # of its account's, for a message that it waits for
    deliveries: dict[int, int] = attrs.Factory(dict)
    due_ns: dict[int, int] = attrs.Factory(dict)


class Claims:
    """All open claims of the front end."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._key = os.urandom(32)  # tokens are of this run
        self._numbers = count(1)
        self._open: dict[int, OpenClaim] = {}
        self._of_user: Counter[Hashable] = Counter()

    def room(self, account: Hashable, wanted: int) -> int:
        """How many messages more a user may claim, of those wanted. Raises OverLimit where that is 0."""
        if self._of_user[account] + wanted > limits.HTTP_USER_CLAIMS:
            for claim in [claim for claim in self._open.values() if claim.account == account and claim.due_ns]:
                self.drop_void(claim)
        left = limits.HTTP_USER_CLAIMS - self._of_user[account]
        if left <= 0:
            raise OverLimit(f"open claims: {limits.HTTP_USER_CLAIMS} of this user (expected an ack or release first)")
        return min(left, wanted)

    def take_place(self, claim: OpenClaim) -> bool:
        """Count the next message of a claim request, before it waits for it: others of its user may wait, too. False:
        that user has no room for it."""
        if not claim.has_place and self._of_user[claim.account] < limits.HTTP_USER_CLAIMS:
            self._of_user[claim.account] += 1
            claim.has_place = True
        return claim.has_place

    def give_place(self, claim: OpenClaim) -> None:
        """The claim request waits for no further message."""
        self._of_user[claim.account] -= claim.has_place
        claim.has_place = False

    def begin(self, handle: Any, node: Any, user: User, account: Hashable) -> OpenClaim:
        """A claim request; without messages yet, and with a place for the first. `account`: charged with them; `room`
        was asked for it."""
        number = next(self._numbers)
        alarm = Alarm(self._tree.timers, node.group, CONSUMERS, "ending leases", partial(self._expire, number))
        secret = hmac.digest(self._key, f"{number}.{user.uid}".encode(), "sha256")[:MAC_BYTES].hex()
        claim = self._open[number] = OpenClaim(number, secret, handle, node, user, account, alarm)
        self.take_place(claim)
        return claim

    def add(self, claim: OpenClaim, sequence: int, delivery: int) -> str:
        """A message that its handle claimed, in the place that was taken for it. Returns the token."""
        claim.deliveries[sequence] = delivery
        claim.has_place = False
        return self._token(claim, sequence)

    def lease(self, claim: OpenClaim, sequences: Iterable[int], seconds: float) -> None:
        """From now on."""
        due = self._tree.clock.engine_ns() + int(seconds * 1e9)
        claim.due_ns.update(dict.fromkeys(sequences, due))
        self._set_alarm(claim)

    def _set_alarm(self, claim: OpenClaim) -> None:
        """For the first lease that ends: of the client, or of the group, which ends one without a word."""
        if claim.due_ns:
            due, own = min(claim.due_ns.values()), claim.node.group.settings.lease
            claim.alarm.at(min(due, self._tree.clock.engine_ns() + own) if own else due)

    def _token(self, claim: OpenClaim, sequence: int) -> str:
        return f"{claim.number}.{sequence}.{claim.deliveries[sequence]}.{claim.secret}"

    def find(self, token: str, uid: int, node: Any) -> tuple[OpenClaim, int]:
        """The claim and the sequence of a token. Raises Stale where it is gone, Denied if it is another user's."""
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
        """They are in flight no more."""
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
        """Drop the messages that the consumer took back."""
        held = () if claim.node.removed else claim.handle.claims
        self.settled(claim, [sequence for sequence in claim.deliveries if sequence not in held])

    def command(self, claim: OpenClaim, line: str) -> None:
        """A command whose result is not awaited; a claim that is gone stays so."""
        with suppress(MqfsError):
            claim.handle.write(f"{line}\n".encode())

    def release(self, claim: OpenClaim) -> None:
        """The messages did not reach the client: requeue them, not counted as failed."""
        for sequence in list(claim.deliveries):
            self.command(claim, f"release {sequence}")
        self.settled(claim, list(claim.deliveries))

    def end_grants(self, ended: Set[Grant]) -> None:
        """Release the claims of tokens that are revoked, changed or expired."""
        for claim in [claim for claim in self._open.values() if claim.user.grant in ended]:
            self.settled(claim, list(claim.deliveries))

    def _expire(self, number: int, now_ns: int) -> None:
        """Nack the messages whose lease ran out, each by itself, as others may be settled already. Drop void ones."""
        claim = self._open.get(number)
        if claim is None:
            return
        due = [sequence for sequence, due_ns in claim.due_ns.items() if due_ns <= now_ns]
        for sequence in due:
            self.command(claim, f"nack {sequence}")
        self.settled(claim, due)
        self.drop_void(claim)
        self._set_alarm(claim)
