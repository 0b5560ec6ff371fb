"""The shapes of the bodies of STATE, CHANGE and CLOCK records: what is read from a log has them, or is refused."""

from __future__ import annotations

from mqfs.shapes import Shape, is_flag, is_number, is_text, is_time_ns, listed, optional, row

_OWNED = {"mode": is_number, "uid": is_number, "gid": is_number}
_STREAM = row(is_number, is_number, is_number, is_number, is_text, is_time_ns, is_number, least=6)
_ENTRY = row(is_number, is_number, is_number, is_time_ns, is_flag)
_CONSUMER = row(
    is_number, is_number, is_number, is_number, is_text, is_text, is_time_ns, is_flag, is_flag, is_number,
    is_number, listed(row(is_number, is_number)), listed(_ENTRY), is_text, is_flag, least=13,
)  # fmt: skip
_ANCHOR = (is_time_ns, is_time_ns, is_time_ns, is_text, is_time_ns)
STATE: dict[str, Shape] = {
    **_OWNED,
    "group": is_number,
    "parent": is_number,
    "name": is_text,
    "made": is_time_ns,
    "ctl": listed(is_text),
    "streams": listed(_STREAM),
    "next_stream": is_number,
    "files": listed(row(is_number, is_number, is_number, is_number)),
    "dropped": listed(row(is_number, is_number)),
    "clock": listed(row(is_number, *_ANCHOR, least=3)),
}
STATE_GIVEN: dict[str, Shape] = {
    "consumers": listed(_CONSUMER),
    "views": listed(row(is_number, is_text, is_time_ns, listed(is_text))),
    "ids": listed(row(is_text, is_time_ns, is_number)),
    "id_users": listed(is_time_ns),
    "producers": listed(row(is_text, is_number, is_number, is_time_ns)),
}
CHANGES: dict[str, dict[str, Shape]] = {
    "make": {**_OWNED, "stream": is_number, "name": is_text, "time": is_time_ns},
    "remove": {"stream": is_number},
    "rename": {"stream": is_number, "name": is_text},
    "attributes": {**_OWNED, "file": is_number},
    "ctl": {"lines": listed(is_text)},
    "floor": {"floors": listed(row(is_number, is_number))},
    "drop": {"stream": is_number, "sequences": listed(is_number)},
    "clock": {"sequence": is_number, "anchor": row(*_ANCHOR, least=2)},
    "consumer": {"number": is_number, "transient": is_flag, "private": is_flag, "backlog": is_number},
    "forget": {"number": is_number},
    "bind": {"number": is_number, "name": is_text, "pattern": is_text, "time": is_time_ns},
    "unbind": {"name": is_text, "pattern": optional(is_text)},
    "id": {"id": is_text, "until": is_time_ns, "sequence": is_number},
    "commit": {"producer": is_text, "number": is_number, "uid": is_number, "engine": is_time_ns},
    "forget producers": {"producers": listed(is_text)},
}
CHANGES_GIVEN: dict[str, dict[str, Shape]] = {
    "consumer": {
        **_OWNED,
        "name": is_text,
        "over": is_text,
        "time": is_time_ns,
        "low": is_number,
        "open": listed(is_number),
        "full": is_text,
        "memory": is_flag,
    },
    "id": {"uid": is_number},
    "forget producers": {"uids": listed(is_number)},
}
