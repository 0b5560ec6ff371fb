"""The engines by the scheme of a URL. What an engine needs is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import cast

from mqfs.errors import NOT_INSTALLED, BadConfig, BadReplica
from mqfs.replica.log import ReplicatedLog

_OBJECTS = ("mqfs.replica.objects", "ObjectLog", "objects")
_STREAM = ("mqfs.replica.jetstream", "JetStreamLog", "nats")
_ENGINES = {
    "nats": _STREAM, "tls": _STREAM,
    "s3": _OBJECTS, "gs": _OBJECTS, "az": _OBJECTS, "file": _OBJECTS,
}  # fmt: skip


def check(url: str) -> None:
    """Raises BadConfig for a URL of no engine."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _ENGINES or not rest:
        known = "nats://HOST,HOST/NAME, s3://BUCKET/NAME, gs://, az:// or file:///DIR"
        raise BadConfig(f"--replica {url.partition('@')[2] or url!r}: unknown engine (expected {known})")


def open_log(url: str, *, create: bool = True) -> ReplicatedLog:
    """The log at that URL, reached once. `create`: whether it is made where there is none. Raises BadConfig and
    BadReplica, in one line."""
    check(url)
    module, name, extra = _ENGINES[url.partition("://")[0]]
    try:
        engine = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise BadReplica(f"--replica: {error.name}: {NOT_INSTALLED.format(extra)}") from None
    return cast(ReplicatedLog, engine(url, create=create))
