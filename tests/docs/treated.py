"""What must come of each example of the manual: a table that modules beside fill and test_examples goes through."""

from __future__ import annotations

from collections.abc import Callable

from tests.docs.pages import Block
from tests.docs.scene import Scene

Treatment = Callable[[Scene, Block], None]
PREPARED: dict[str, Callable[[Scene], None]] = {}
TREATED: dict[str, dict[str, Treatment]] = {}


def prepared(name: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """The state before the first example of that page is typed."""

    def keep(function: Callable[[Scene], None]) -> Callable[[Scene], None]:
        PREPARED[name] = function
        return function

    return keep


def treated(name: str, begins: str) -> Callable[[Treatment], Treatment]:
    """How the example of that page that begins so is typed, and what must come of it."""

    def keep(function: Treatment) -> Treatment:
        assert TREATED.setdefault(name, {}).setdefault(begins, function) is function
        return function

    return keep


def treatment(name: str, block: Block) -> Treatment:
    known = TREATED.get(name, {})
    found = [begins for begins in known if block.text.startswith(begins)]
    assert len(found) == 1, f"{name}: nothing, or not one thing, says what must come of this example: {block.text}"
    return known[found[0]]
