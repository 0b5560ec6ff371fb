"""The options of the data source: names, in any case, and the parsing of their values. Opens nothing."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

COMMON = ("address", "user", "token", "retrySeconds", "msize")
READ = (
    *COMMON,
    "path",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "maxBytesPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "maxBytesPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "consumer",
    "groupIdPrefix",
)
SPARK_OPTIONS = ("checkpointLocation", "queryName", "outputMode")  # passed by Spark to every source and sink

_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


class OptionError(ValueError):
    """An unknown or missing option, or an invalid value."""


class Options:
    """Option values by name, in any case."""

    def __init__(self, values: Mapping[str, str], known: Iterable[str], owner: str) -> None:
        """`owner`: the part that the options are for, as errors name it ("the reader"). Raises OptionError for an
        unknown option."""
        names = {name.lower(): name for name in known}
        spark_options = {name.lower() for name in SPARK_OPTIONS}
        self._values: dict[str, str] = {}
        for name, value in values.items():
            if name.lower() in names:
                self._values[names[name.lower()]] = value
            elif name.lower() not in spark_options:
                raise OptionError(_unknown(name, names, owner))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, default)

    def required(self, name: str, expected: str) -> str:
        """Return a required value. Raises OptionError; `expected`: its valid forms, for the error."""
        value = self._values.get(name, "")
        if not value:
            raise OptionError(f"option {name}: missing (expected {expected})")
        return value

    def number(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        value = self._values.get(name)
        if value is None:
            return default
        if not re.fullmatch(r"\s*[0-9]{1,18}\s*", value) or int(value) < least:
            raise invalid(name, value, f"a whole number, at least {least}")
        return int(value)

    def size(self, name: str, default: int | None = None) -> int | None:
        """Return bytes, given with an optional K, M or G. Raises OptionError."""
        value = self._values.get(name)
        if value is None:
            return default
        match = re.fullmatch(r"([0-9]{1,18})\s*([bkmg]?)(?:i?b)?", value.strip().lower())
        if not match or not int(match[1]):
            raise invalid(name, value, "bytes above 0, as 1048576, 64m or 2g")
        return int(match[1]) * _SIZES[match[2]]

    def seconds(self, name: str, default: float) -> float:
        """Return seconds, given as a number with ms, s, m, h or d, or as a number of seconds. Raises OptionError."""
        value = self._values.get(name)
        if value is None:
            return default
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})\s*(ms|s|m|h|d)?", value.strip().lower())
        if not match:
            raise OptionError(f"option {name}: bad duration {_shown(value)} (expected 500ms, 30s, 5m, 2h or 7d)")
        return float(match[1]) * _UNITS[match[2] or "s"]

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if value.strip().lower() not in ("true", "false"):
            raise invalid(name, value, "true or false")
        return value.strip().lower() == "true"

    def object(self, name: str, expected: str) -> dict[str, Any]:
        """Return a JSON object. Raises OptionError; `expected`: an example, for the error."""
        value = self._values[name]
        try:
            read = json.loads(value)
        except ValueError:
            read = None
        if not isinstance(read, dict):
            raise invalid(name, value, expected)
        return read

    def one_of(self, *names: str) -> str | None:
        """Return the one of these options that is set; None if none is. Raises OptionError for several."""
        present = [name for name in names if name in self._values]
        if len(present) > 1:
            raise OptionError(f"options {' and '.join(present)}: more than one given (expected one)")
        return present[0] if present else None


def invalid(name: str, value: str, expected: str) -> OptionError:
    """Return the error for an invalid value."""
    return OptionError(f"option {name}: invalid value {_shown(value)} (expected {expected})")


def _shown(value: str) -> str:
    return repr(value if len(value) <= 80 else value[:77] + "...")


def _unknown(name: str, names: Mapping[str, str], owner: str) -> str:
    near = difflib.get_close_matches(name.lower(), list(names), 1)
    hint = f"did you mean {names[near[0]]}? " if near else ""
    known = " ".join(sorted(names.values(), key=str.lower))
    return f"option {name}: unknown to {owner} ({hint}expected one of: {known})"
