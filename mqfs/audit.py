"""Audit lines: who changed what, who was refused what, and the first use of a token.

Owns the form of a line. They go to the server's log, none is left out there, and none has a secret or a body.
"""

from __future__ import annotations

import json
import logging

from mqfs.errors import Denied, NotPermitted, shortened
from mqfs.model import User

log = logging.getLogger("mqfs.audit")
LEVELS = ("off", "changes", "all")
REFUSALS = (Denied, NotPermitted)


class Audit:
    """Of one server. `changes`: of the tree and its settings, and refusals; `publishes`: these too."""

    def __init__(self, level: str = "off") -> None:
        self.changes, self.publishes = level != "off", level == "all"

    def note(self, user: User, method: str, path: str, detail: str = "", *, status: str = "ok") -> None:
        """One line, if it is on."""
        if self.changes:
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
            log.info("audit %s", " ".join(words))


OFF = Audit()
