"""The rules of a consumer: what holds back its messages, as it is recorded. What they do is in engine/delivery/flow.py.

order key       one message of a key is out at once, and the next of it waits until it is done
limit           claims at once: of the consumer, and of one key
rate, breaker   a number of deliveries, or of dead letters, in a time
paused          nothing is claimed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

UNTIL_RESUMED, TRIPPED = -1, -2  # of `paused`: by hand, by its breaker
Pace = tuple[int, int]  # a number, in nanoseconds; (0, 0): none


@attrs.frozen
class Rules:
    """Those of one consumer; as they are by default it has none."""

    ordered: bool = False  # `order key`
    limit: int = 0  # claims at once; 0: no bound
    key_limit: int = 0  # of one key; 0: no bound
    rate: Pace = (0, 0)  # deliveries
    breaker: Pace = (0, 0)  # dead letters: with more the consumer is paused
    paused: int = 0  # until that engine time, UNTIL_RESUMED or TRIPPED; 0: not at all

    @property
    def per_key(self) -> int:
        """Messages of one key that may be out at once; 0: no bound."""
        return 1 if self.ordered else self.key_limit

    def is_paused(self, now_ns: int) -> bool:
        return self.paused < 0 or now_ns < self.paused

    def encode(self) -> dict[str, Any]:
        """As the log has them: those that are set."""
        values = attrs.asdict(self, recurse=False)
        return {key: _plain(value) for key, value in values.items() if value != _NONE[key]}

    @classmethod
    def decode(cls, row: Mapping[str, Any]) -> Rules:
        """Keys of a newer version are ignored. `row` has the shapes of state/group.py."""
        known: dict[str, Any] = {key: value for key, value in row.items() if key in _NONE}
        known |= {key: tuple(known[key]) for key in ("rate", "breaker") if key in known}
        return cls(**{**known, "ordered": bool(known.get("ordered"))})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else int(value)


NO_RULES = Rules()
_NONE = attrs.asdict(NO_RULES, recurse=False)
