"""Audit lines of publishes: `--audit all`."""

from __future__ import annotations

from mqfs.engine.files.handle import OpenFile
from mqfs.wait import Step


def audit_writes(handle: OpenFile) -> None:
    """Leave a line for each write to a handle from now on that is accepted."""
    write = handle.write

    def audited(data: bytes, offset: int = 0) -> Step[int]:
        step = write(data, offset)
        handle.audit("publish", f"{len(data)} bytes")
        return step

    handle.write = audited  # type: ignore[method-assign]
