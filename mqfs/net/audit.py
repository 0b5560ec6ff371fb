"""Audit lines: which user changed what, which was refused, and the first use of a token.

Lines go to the server's log, and never contain a secret or a body. Every change is logged. Of the refusals of one user
in one second, the first have a line each, then one line has the number of the others.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter

from mqfs import limits
from mqfs.errors import Denied, NotPermitted, shortened
from mqfs.model import User

log = logging.getLogger("mqfs.audit")
LEVELS = ("off", "changes", "all")
REFUSALS = (Denied, NotPermitted)


class Audit:
    """The audit log. `changes`: log changes of tree and settings, and refusals; `publishes`: log publishes, too."""

    def __init__(self, level: str = "off") -> None:
        self.changes, self.publishes = level != "off", level == "all"
        self._refusals: Counter[int] = Counter()  # in this second, by user
        self._second = 0.0  # when it began

    def tick(self) -> None:
        """Log how many refusals were left out, if a second is over. Called once a second."""
        if (now := time.monotonic()) - self._second < 1.0:
            return
        found, self._refusals, self._second = self._refusals, Counter(), now
        for uid, count in found.items():
            if count > limits.AUDIT_REFUSALS:
                detail = f"{count - limits.AUDIT_REFUSALS} more in a second"
                self._print(User(uid, uid), "left out", "", detail, "refused")

    def _is_left_out(self, user: User) -> bool:
        self.tick()
        self._refusals[user.uid] += 1
        return self._refusals[user.uid] > limits.AUDIT_REFUSALS

    def note(self, user: User, method: str, path: str, detail: str = "", *, status: str = "ok") -> None:
        """Log one line, if the audit is on."""
        if self.changes and not (status == "refused" and self._is_left_out(user)):
            self._print(user, method, path, detail, status)

    def _print(self, user: User, method: str, path: str, detail: str, status: str) -> None:
        values = {
            "user": str(user.uid),
            "token": user.grant.id if user.grant is not None else "",
            "from": user.where,
            "method": method,
            "path": path,
            "status": status,
            "detail": shortened(detail),
        }
        words = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
        log.info("audit %s", " ".join(words), extra={"fields": values})  # the fields, for a log in JSON


OFF = Audit()
