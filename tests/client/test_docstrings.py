"""Everything public of the library is documented in Google style: each parameter, what comes back, what is raised."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

import mqfs
from mqfs import client as sync
from mqfs import testing
from mqfs.client import aio

CLASSES: list[type] = [
    *(kind for name in sync.__all__ if inspect.isclass(kind := getattr(sync, name))),
    *(kind for name in aio.__all__ if inspect.isclass(kind := getattr(aio, name))),
]
FUNCTIONS: list[Callable[..., Any]] = [
    mqfs.connect, mqfs.open, mqfs.serve, mqfs.escape, mqfs.unescape, aio.connect, aio.open, testing.server,
]  # fmt: skip
# Calls that end something, or look at what is here already: they raise nothing of their own.
SILENT = {
    "close", "aclose", "stop", "join", "finish", "interrupt", "lost", "unsubscribe", "abort", "cancel_handlers",
    "writable", "escape", "open", "lag", "empty", "qsize",
}  # fmt: skip


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    for call in FUNCTIONS:
        yield f"{call.__module__}.{call.__name__}", call
    for kind in CLASSES:
        for name, member in inspect.getmembers(kind):
            owner = next((base for base in kind.__mro__ if name in vars(base)), None)
            of_ours = owner is not None and owner.__module__.startswith("mqfs.")
            if of_ours and not name.startswith("_") and callable(member) and not inspect.isclass(member):
                yield f"{kind.__name__}.{name}", member


def section(text: str, name: str) -> str:
    found = re.search(rf"^{name}:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    return found[1] if found else ""


def lacks(name: str, call: Callable[..., Any]) -> list[str]:
    """The things missing from its docstring."""
    text = inspect.getdoc(call)
    if not text:
        return ["a docstring"]
    signature = inspect.signature(call)
    arguments = section(text, "Args")
    names = [p.name for p in signature.parameters.values() if p.name not in ("self", "cls")]
    missing = [n for n in names if not re.search(rf"^ {{4}}\**{n}: \S", arguments, re.MULTILINE)]
    described = re.findall(r"^ {4}\**(\w+): ", arguments, re.MULTILINE)
    missing += [f"no parameter {n}" for n in described if n not in names]
    if signature.return_annotation not in (None, "None", inspect.Signature.empty):
        missing += [] if section(text, "Returns") or section(text, "Yields") else ["Returns"]
    if name.rpartition(".")[2] not in SILENT and not section(text, "Raises"):
        missing.append("Raises")
    return missing


def test_every_call_is_documented() -> None:
    found = {name: missing for name, call in methods() if (missing := lacks(name, call))}
    assert found == {}
    assert len([*methods()]) > 130


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_and_attribute_is_documented(kind: type) -> None:
    text = inspect.getdoc(kind) or ""
    assert text
    attributes = section(text, "Attributes")
    fields = [f.name for f in attrs.fields(kind)] if attrs.has(kind) else list(getattr(kind, "_fields", ()))
    for name in fields:
        assert re.search(rf"^ {{4}}{name}: \S", attributes, re.MULTILINE), name
    for name, member in vars(kind).items():
        if isinstance(member, property) and not name.startswith("_"):
            assert member.__doc__, name
