"""What a subscription owes: a model of one group's log, and of who follows it.

A subscription gives every message of its streams, once, in the order in which they were written. One that it leaves
out must be one that the group does not keep any more (`depth`, `clear`, `replay`), and FellBehind says how many these
were: never fewer, and with what was given never more than there were sequences since it began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Sent:
    """A message. `cleared`: a clear removed it; `before`: how many were written to its stream before it."""

    stream: str
    body: bytes
    before: int
    cleared: bool = False
    restarts: int = 0  # how often the server was started when it was written


@dataclass
class Log:
    """One group. `depth`: messages, 0: all; `slack`: messages that a reader may be behind and lose nothing, whatever
    `replay` says."""

    replay: str = "off"
    depth: int = 0
    room: int = 0  # bytes of the newest messages that it surely keeps; 0: of all
    slack: int = 0
    sent: list[Sent] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)  # messages, by stream
    ends: list[int] = field(default_factory=list)  # bytes written up to the end of each
    places: dict[bytes, int] = field(default_factory=dict)  # where in `sent` a body is
    restarts: int = 0

    def append(self, stream: str, body: bytes) -> None:
        assert body not in self.places, "each is to be known by its body"
        before = self.written.get(stream, 0)
        self.places[body] = len(self.sent)
        self.ends.append((self.ends[-1] if self.ends else 0) + len(body) + 64)
        self.sent.append(Sent(stream, body, before, restarts=self.restarts))
        self.written[stream] = before + 1

    def clear(self, stream: str = "") -> None:
        for one in self.sent:
            one.cleared = one.cleared or stream in ("", one.stream)

    def is_newest(self, one: Sent) -> bool:
        return one.before == self.written[one.stream] - 1

    def may_be_gone(self, place: int) -> bool:
        """Whether the group need not have it any more, for a reader that has followed it since it was written."""
        one = self.sent[place]
        if one.cleared or (self.depth and self.written[one.stream] - one.before > self.depth):
            return True
        if self.room and self.ends[-1] - self.ends[place] + len(one.body) > self.room:
            return True
        if self.replay == "all" or (self.replay == "last" and self.is_newest(one)):
            return False
        return one.restarts < self.restarts or len(self.sent) - place > self.slack

    def is_kept_for_newcomers(self, place: int) -> bool | None:
        """Whether a reader that starts now and asks for the past gets it; None: that is not promised."""
        if self.may_be_gone(place):
            return None
        if self.replay == "all" or (self.replay == "last" and self.is_newest(self.sent[place])):
            return True
        return None


class Owed:
    """The messages that one subscription has yet to get, and the losses reported to it."""

    def __init__(
        self, log: Log, wants: Callable[[str], bool], *, existing: bool, next_sequence: int, sifts: bool
    ) -> None:
        """`next_sequence`: of the group, when it began. `sifts`: it is over a stream that is not there yet, and what
        others lose is perhaps reported to it."""
        self.log, self.wants = log, wants
        self.next = 0 if existing else len(log.sent)  # the place in the log up to which it was given all
        # The messages that were there before it began.
        self.old = {place: log.is_kept_for_newcomers(place) for place in range(len(log.sent))} if existing else {}
        self.first = 1 if existing else next_sequence
        self.restarts, self.away_to = log.restarts, 0  # what comes before that place was written while it was away
        self.is_back = True  # it was given a message that was written since the restart
        self.given = self.lost = self.told = 0
        self.perhaps = int(sifts)  # messages that are lost or not

    def reads(self) -> None:
        """It asks for the next, and reaches the server again unless it still has some from before the restart."""
        if self.restarts < self.log.restarts:
            self.restarts, self.is_back = self.log.restarts, False
            self.perhaps += self.log.replay != "all"  # a new server does not know what the one before had
        if not self.is_back:
            self.away_to = len(self.log.sent)

    def may_be_gone(self, place: int) -> bool:
        log = self.log
        away_to = self.away_to if self.restarts == log.restarts else len(log.sent)
        if place < away_to and log.replay != "all":
            return log.replay == "off" or not log.is_newest(log.sent[place]) or log.may_be_gone(place)
        return log.may_be_gone(place)

    def due(self) -> list[int]:
        """Places of what must yet come."""
        log, old = self.log, self.old
        rest = (place for place in range(self.next, len(log.sent)) if self.wants(log.sent[place].stream))
        return [place for place in rest if not self.may_be_gone(place) and old.get(place, True)]

    def message(self, stream: str, body: bytes, sequence: int, *, is_rest: bool = False) -> None:
        """It was given that one. `is_rest`: the last part of a body of two, whose first part is lost. Raises
        AssertionError where that must not be."""
        log = self.log
        place = self._place_of_rest(stream, body) if is_rest else log.places.get(body, -1)
        assert place >= 0, f"no client wrote {body[:20]!r}"
        assert log.sent[place].stream == stream, f"{body[:20]!r} is of {log.sent[place].stream}, not of {stream}"
        assert self.wants(stream), f"{stream} was not asked for"
        assert place >= self.next, f"{body[:20]!r} came again, or behind its place"
        missed = [p for p in range(self.next, place + is_rest) if self.wants(log.sent[p].stream)]
        for p in missed:
            promised = self.old.get(p, True)
            assert not promised or self.may_be_gone(p), f"{log.sent[p].body[:20]!r} was left out, and is kept"
            self.lost += bool(promised)
            self.perhaps += not promised  # it may have been gone before, and then is no loss
        self.next, self.given = place + 1, self.given + (not is_rest)
        self.is_back = self.is_back or log.sent[place].restarts == log.restarts
        self.bound(sequence + 1)

    def _place_of_rest(self, stream: str, body: bytes) -> int:
        """The first place to come of a body in that stream which ends so; -1: there is none."""
        sent = enumerate(self.log.sent[self.next :], self.next)
        return next((at for at, one in sent if one.stream == stream and one.body.endswith(body)), -1)

    def fell_behind(self, lost: int) -> None:
        assert lost > 0, "a loss reported without its count"
        self.told += lost
        # A ring may still have what the log has not; and where a floor is all that is known it may be above nothing.
        exact = self.log.replay == "all" and not self.log.room
        places = range(self.next if exact else 0, len(self.log.sent))
        self.perhaps += any(self.may_be_gone(p) and self.wants(self.log.sent[p].stream) for p in places)

    def bound(self, next_sequence: int) -> None:
        """All below that sequence was given, lost or not for it."""
        most = next_sequence - self.first
        assert self.given <= most

    def settled(self, next_sequence: int) -> None:
        """Check that it was given the newest of all, and that its losses were reported."""
        assert self.told >= self.lost, f"{self.told} losses reported of {self.lost}"
        most = next_sequence - self.first - self.given
        assert self.told <= most, f"{self.told} losses reported, where {most} sequences were not given"
        assert self.lost or self.perhaps or not self.told, f"{self.told} losses reported, and nothing was lost"


def wanted(patterns: Sequence[str], matches: Callable[[str, str], bool]) -> Callable[[str], bool]:
    """Whether a stream is one of those."""
    return lambda stream: any(pattern == stream or matches(pattern, stream) for pattern in patterns)
