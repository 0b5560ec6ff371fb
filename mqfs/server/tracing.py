"""`-D`: lines on standard error for what a server is asked and does, by classes.

Front ends trace themselves. Calls of the engine, the store and the rings are traced by replacing methods of one object,
so that a server without a trace pays nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from time import perf_counter
from typing import Any

from mqfs.engine.tree.open_files import CHANGES, LOOKS, explain
from mqfs.engine.tree.tree import Tree
from mqfs.errors import BadConfig, MqfsError, printable
from mqfs.model import Wait
from mqfs.store.disk import Disk

FACES = ("9p", "fuse", "http")  # traced by -D without classes
CLASSES = (*FACES, "engine", "store", "ring")
SHOWN = 60  # characters shown of a value
_DISK = [name for name in dir(Disk) if not name.startswith("_")]
Line = Callable[[str], None]


def parse(text: str) -> frozenset[str]:
    """Return the classes of `on`, `off`, or words separated by commas. Raises BadConfig."""
    if text in ("on", "off"):
        return frozenset(FACES if text == "on" else ())
    words = frozenset(text.split(","))
    if unknown := words - set(CLASSES):
        raise BadConfig(f"-D {min(unknown)!r} (expected some of {','.join(CLASSES)})")
    return words


def printer(kind: str, classes: Iterable[str]) -> Line | None:
    """Return a function that prints lines of a class, or None if the class is not traced.

    A line that cannot be printed is dropped: the disk may be full, or the reader have ended, and the server has to work
    as without a trace.
    """
    if kind not in classes:
        return None

    def line(text: str) -> None:
        with contextlib.suppress(OSError):
            print(kind, text, file=sys.stderr, flush=True)

    return line


def trace_calls(target: object, names: Iterable[str], line: Line, show: Callable[..., str] | None = None) -> None:
    """Call `line` for each call of these methods: with the arguments by `show`, the outcome and the duration."""
    for name in names:
        setattr(target, name, _traced(name, getattr(target, name), line, show or _show_arguments))


def _traced(name: str, method: Any, line: Line, show: Callable[..., str]) -> Any:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        text, began = f"{name} {show(method, args, kwargs)}", perf_counter()
        try:
            done = method(*args, **kwargs)
        except (MqfsError, OSError) as error:
            line(f"{text} -> {printable(str(error))}")
            raise
        line(f"{text} -> {_show(done)}, {(perf_counter() - began) * 1e6:.0f} us")
        return done

    return call


def trace_tree(tree: Tree, line: Line) -> None:
    """Trace calls of front ends on the tree, and reads and writes of the files that they open."""
    trace_calls(tree, (*LOOKS, *CHANGES), line, _show_node)
    opening = tree.open

    def open_traced(*args: Any, **kwargs: Any) -> Any:
        handle = opening(*args, **kwargs)
        trace_calls(handle, ("read", "write"), lambda text: line(f"{handle.node.name}: {text}"))
        return handle

    tree.open = open_traced  # type: ignore[method-assign]


def trace_disk(line: Line) -> Disk:
    """Return a disk whose calls are traced."""
    disk = Disk()
    trace_calls(disk, _DISK, line)
    return disk


def _show_node(method: Any, args: Any, kwargs: Any) -> str:
    user, path, detail = explain(method, args, kwargs)
    return f"{path} uid {user.uid} {detail}".rstrip()


def _show_arguments(method: Any, args: Any, kwargs: Any) -> str:
    return " ".join([*map(_show, args), *(f"{name}={_show(value)}" for name, value in kwargs.items())])


def _show(value: object) -> str:
    """Return a short text of a value. Bytes are shown by their number: they may be secret, and long."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, Wait):
        return "waits" if not value.settled else "done"
    if value is None or isinstance(value, int | str):
        text = printable(str(value))
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return type(value).__name__
