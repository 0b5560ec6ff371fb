"""Checks of decoded JSON: types and ranges. The shape of each record is declared beside its decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any], bool]

_MOST = 1 << 63  # every number of a log fits a signed field of 64 bits


def is_number(value: Any) -> bool:
    """A count, sequence, mode or file number."""
    return type(value) is int and 0 <= value < _MOST


def is_time_ns(value: Any) -> bool:
    """A time or duration; the engine clock may begin anywhere."""
    return type(value) is int and -_MOST <= value < _MOST


def is_flag(value: Any) -> bool:
    return type(value) is bool or (type(value) is int and value in (0, 1))


def is_text(value: Any) -> bool:
    """A string that has bytes in UTF-8."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def optional(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def listed(shape: Shape) -> Shape:
    return lambda value: isinstance(value, list) and all(map(shape, value))


def row(*shapes: Shape, least: int = -1) -> Shape:
    """A list of values in that order, all or at least `least` of them."""
    fewest = least if least >= 0 else len(shapes)

    def check(value: Any) -> bool:
        fits = isinstance(value, list) and fewest <= len(value) <= len(shapes)
        return fits and all(shape(item) for shape, item in zip(shapes, value, strict=False))

    return check


def require(value: Any, keys: Mapping[str, Shape], given: Mapping[str, Shape] | None = None) -> None:
    """Check an object: `keys` are required, `given` are optional. Raises ValueError naming the key."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    for key, shape in keys.items():
        if key not in value:
            raise ValueError(f"lacks {key!r}")
        _require_shape(key, shape, value)
    for key, shape in (given or {}).items():
        if key in value:
            _require_shape(key, shape, value)


def _require_shape(key: str, shape: Shape, value: Mapping[str, Any]) -> None:
    if not shape(value[key]):
        raise ValueError(f"{key!r} has a wrong value: {str(value[key])[:80]!r}")
