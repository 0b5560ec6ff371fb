"""Calls of the tree that leave an audit line: each change, and each refusal."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from mqfs.audit import REFUSALS
from mqfs.engine.nodes.places import path_of
from mqfs.syntax.token_line import print_path

LOOKS = ("walk", "access", "entries", "open")
CHANGES = ("create", "mkdir", "unlink", "rmdir", "rename", "setattr")


def audit_calls(tree: Any) -> None:
    """Let the methods of a tree whose first arguments are a user and a node leave lines, from now on. One without an
    audit pays nothing."""
    for name in (*LOOKS, *CHANGES):
        setattr(tree, name, _audited(tree, getattr(tree, name), name in CHANGES))


def _audited(tree: Any, method: Any, changes: bool) -> Any:
    names = list(inspect.signature(method).parameters)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        user, node, *_ = given.values()
        path = (*path_of(node), given.pop("name")) if "name" in given else path_of(node)  # it may be gone then
        try:
            done = method(*args, **kwargs)
        except REFUSALS as error:
            tree.audit.note(user, method.__name__, print_path(path), error.detail, status="refused")
            raise
        if changes:
            tree.audit.note(user, method.__name__, print_path(path), _print(given))
        return done

    return call


def _print(given: dict[str, Any]) -> str:
    """The arguments that are names and numbers."""
    known = {key: value for key, value in given.items() if isinstance(value, str | int)}
    return ", ".join(f"{key} {value:o}" if key == "mode" else f"{key} {value}" for key, value in known.items())
