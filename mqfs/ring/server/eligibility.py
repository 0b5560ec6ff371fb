"""Which groups may have a ring, and which users may attach to it."""

from __future__ import annotations

import os

from mqfs.engine.group import Group
from mqfs.engine.language.settings import NO_DEPTH, Settings
from mqfs.model import User


def is_excluded(group: Group, settings: Settings, user: User) -> bool:
    """Who attaches trusts the others who do, with all the group's messages: by `ring owner` they are one user, and
    those who could do as much without it."""
    return settings.ring == "owner" and user.uid not in (group.state.uid, 0, os.geteuid())


def why_ended(now: Settings, settings: Settings, bounded: bool) -> str:
    """Why new settings end a ring; "" where it goes on."""
    for name in ("ttl", "keep"):  # clients and the journal were told of them
        if getattr(settings, name) != getattr(now, name):
            return f"{name} has changed"
    return why_not(settings, bounded)


def why_not(settings: Settings, bounded: bool) -> str:
    """Why a group of such settings has no ring: each write has to be looked at before it is appended."""
    if settings.ring == "off":
        return "a group with 'ring off' has no ring"
    if settings.data != "message":
        return f"a group with 'data {settings.data}' has no ring"
    if settings.full != "drop-old" and settings.depth is not NO_DEPTH:
        return f"a group with 'depth' and 'full {settings.full}' has no ring"
    if settings.full in ("reject", "block", "drop-new") and bounded:
        return f"a group with 'full {settings.full}' and a consumer with a backlog has no ring"
    return ""
