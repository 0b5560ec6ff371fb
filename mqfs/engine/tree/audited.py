"""Calls of the tree that leave an audit line: each change, and each refusal."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from mqfs.audit import REFUSALS
from mqfs.engine.nodes.places import path_of
from mqfs.syntax.token_line import print_path

P = ParamSpec("P")
T = TypeVar("T")


def audited(*, changes: bool) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For a method of the tree whose first arguments are a user and a node. `changes`: a line also where it is done."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        names = list(inspect.signature(method).parameters)

        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            tree: Any = args[0]
            if not tree.audit.changes:
                return method(*args, **kwargs)
            given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
            _, user, node, *_ = given.values()
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

    return decorate


def _print(given: dict[str, Any]) -> str:
    """The arguments that are names and numbers."""
    known = {key: value for key, value in given.items() if isinstance(value, str | int)}
    return ", ".join(f"{key} {value:o}" if key == "mode" else f"{key} {value}" for key, value in known.items())
