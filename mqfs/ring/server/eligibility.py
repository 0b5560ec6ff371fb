"""Which groups may have a ring, and which users may attach to it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from mqfs.engine.group import Group, Tree
from mqfs.engine.language.settings import NO_DEPTH, Settings
from mqfs.model import User


def is_excluded(group: Group, settings: Settings, user: User) -> bool:
    """Whether `ring owner` excludes a user. All clients of a ring must trust each other with the group's messages: by
    `ring owner` they are the owner, root and the server's user."""
    return settings.ring == "owner" and user.uid not in (group.state.uid, 0, os.geteuid())


def why_ended(now: Settings, settings: Settings, bounds: Iterable[str]) -> str:
    """Why new settings end a ring; "" if they do not."""
    for name in ("ttl", "keep", "words"):  # clients and the ring log have read them
        if getattr(settings, name) != getattr(now, name):
            return f"{name} changed"
    return why_not(settings, bounds)


def why_not(settings: Settings, bounds: Iterable[str]) -> str:
    """Why a group of such settings has no ring, or "": each write must be checked before it is appended. `bounds`: of
    its consumers with a backlog, the policy of each; "": the group's."""
    if settings.ring == "off":
        return "a group with 'ring off' has no ring"
    if settings.sender:
        return "a group with 'sender on' has no ring"
    if settings.data != "message":
        return f"a group with 'data {settings.data}' has no ring"
    if settings.full != "drop-old" and settings.depth is not NO_DEPTH:
        return f"a group with 'depth' and 'full {settings.full}' has no ring"
    for policy in (own or settings.full for own in bounds):
        if policy != "drop-old":
            return f"a group with a consumer with a backlog and 'full {policy}' has no ring"
    return ""


def why_unseen(tree: Tree, user: User, owners: Iterable[int]) -> str:
    """Why a user may not publish in shared memory, where neither its quota nor the audit sees it; "" if it may.
    `owners`: of the streams."""
    if tree.audit.publishes:
        return "rings: not with '--audit all'"
    quotas = tree.quotas
    if quotas is None:
        return ""
    if (quota := quotas.of(user.uid)) is not None and (quota.messages or quota.bytes):
        return "rings: the user has a quota of messages or bytes a second"
    bounded = quotas.bound_kept and any((own := quotas.of(uid)) is not None and own.kept for uid in set(owners))
    return "rings: the owner of a stream has a quota of kept bytes" if bounded else ""
