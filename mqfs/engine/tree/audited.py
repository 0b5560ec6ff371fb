"""Calls of the tree that leave an audit line: each change, and each refusal."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from mqfs.engine.nodes import path_of
from mqfs.model import User
from mqfs.net.audit import REFUSALS
from mqfs.syntax.token_line import print_path

LOOKS = ("walk", "access", "entries", "open")
CHANGES = ("create", "mkdir", "unlink", "rmdir", "rename", "setattr")


def audit_calls(tree: Any) -> None:
    """Let the methods of a tree whose first arguments are a user and a node leave lines, from now on. One without an
    audit pays nothing."""
    for name in LOOKS:
        setattr(tree, name, _refusals(tree, getattr(tree, name)))
    for name in CHANGES:
        setattr(tree, name, _changes(tree, getattr(tree, name)))


def _refusals(tree: Any, method: Any) -> Any:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except REFUSALS as error:
            user, path, _ = explain(method, args, kwargs)
            tree.audit.note(user, method.__name__, path, error.detail, status="refused")
            raise

    return call


def _changes(tree: Any, method: Any) -> Any:
    refusals = _refusals(tree, method)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        user, path, detail = explain(method, args, kwargs)  # before: it may be gone then
        done = refusals(*args, **kwargs)
        tree.audit.note(user, method.__name__, path, detail)
        return done

    return call


def explain(method: Any, args: Any, kwargs: Any) -> tuple[User, str, str]:
    """Who called it, of what, and its arguments in words."""
    given: dict[str, Any] = {**dict(zip(inspect.signature(method).parameters, args, strict=False)), **kwargs}
    user, node, *_ = given.values()
    path = (*path_of(node), given.pop("name")) if "name" in given else path_of(node)
    return user, print_path(path), _print(given)


def _print(given: dict[str, Any]) -> str:
    """The arguments that are names and numbers."""
    known = {key: value for key, value in given.items() if isinstance(value, str | int)}
    return ", ".join(f"{key} {value:o}" if key == "mode" else f"{key} {value}" for key, value in known.items())
