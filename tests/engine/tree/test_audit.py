"""Audit lines: one for each change of the tree or its settings and each refusal, with who, what and how it ended."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable

import attrs
import pytest

from mqfs.engine.tree.open_files import audit_calls
from mqfs.errors import Denied, MqfsError
from mqfs.model import Grant, User
from mqfs.net.audit import Audit
from tests.support.hand import ANNA, BERT, ROOT
from tests.support.queues import Queues, drain, say

CARL = User(1_099, 1_099)
VALUE = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')
HOLDER = attrs.evolve(ANNA, where="9p tcp 3", grant=Grant(ANNA.uid, "7f3a", "admin", ("g",)))


def set_audit(queues: Queues, level: str = "changes") -> None:
    """As of the next start."""
    queues.tree.audit = Audit(level)
    if queues.tree.audit.changes:
        audit_calls(queues.tree)


def audited(level: str = "changes") -> Queues:
    queues = Queues("replay all")
    set_audit(queues, level)
    return queues


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """The lines since the last call, each whole."""
    rows = []
    for record in caplog.records:
        head, values = record.getMessage().split(" ", 1)
        rows.append({key: json.loads(value) for key, value in VALUE.findall(values)})
        assert head == "audit"
        assert values == " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in rows[-1].items())
    caplog.clear()
    return rows


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mqfs.audit")


def test_a_line_has_user_token_connection_method_path_status_and_detail(caplog: pytest.LogCaptureFixture) -> None:
    queues = audited()
    queues.tree.setattr(ROOT, queues.group, mode=0o777)
    caplog.clear()
    queues.tree.create(HOLDER, queues.group, 'a "b"', 0o640)
    assert caplog.messages == [
        'audit user="1001" token="7f3a" from="9p tcp 3" method="create" path="/g/a \\"b\\"" status="ok" '
        'detail="mode 640"'
    ]


CHANGES: list[tuple[Callable[[Queues], object], str, str, str]] = [
    (lambda q: q.tree.create(ROOT, q.group, "n", 0o600), "create", "/g/n", "mode 600"),
    (lambda q: q.tree.mkdir(ROOT, q.group, "n", 0o700), "mkdir", "/g/n", "mode 700"),
    (lambda q: q.tree.unlink(ROOT, q.group, "s"), "unlink", "/g/s", ""),
    (lambda q: q.tree.rmdir(ROOT, q.tree.root, "e"), "rmdir", "/e", ""),
    (lambda q: q.tree.rename(ROOT, q.group, "s", q.group, "t"), "rename", "/g/s", "new t"),
    (lambda q: q.tree.setattr(ROOT, q.tree.find(ROOT, "g/s"), mode=0o604), "setattr", "/g/s", "mode 604"),
    (lambda q: q.tree.setattr(ROOT, q.group, uid=7, gid=8), "setattr", "/g", "uid 7, gid 8"),
    (lambda q: q.ctl("ttl 1h"), "ctl", "/g/ctl", "ttl 1h"),
    (lambda q: q.ctl("consumer c s"), "ctl", "/g/ctl", "consumer c s"),
    (lambda q: q.ctl("clear s"), "ctl", "/g/ctl", "clear s"),
    (lambda q: q.ctl(f"drop s {q.put(b'x')}"), "ctl", "/g/ctl", "drop s 1"),
    (lambda q: q.ctl("redrive"), "ctl", "/g/ctl", "redrive"),
    (lambda q: q.ctl("eof s"), "ctl", "/g/ctl", "eof s"),
    (lambda q: say(q.worker(), "seek last"), "seek", "/g/.consumers/w", "last"),
    (lambda q: q.at(".txn/ctl", os.O_WRONLY).write(b"forget p"), "forget", "/g/.txn/ctl", "p"),
]


@pytest.mark.parametrize(("do", "method", "path", "detail"), CHANGES, ids=[f"{row[1]} {row[3]}" for row in CHANGES])
def test_a_change_is_one_line(
    caplog: pytest.LogCaptureFixture, do: Callable[[Queues], object], method: str, path: str, detail: str
) -> None:
    queues = Queues("replay all", "consumer w")
    queues.mkdir("e")
    queues.tree.mkdir(ROOT, queues.tree.find(ROOT, "g/.txn"), "a", 0o777)
    queues.at(".txn/ctl", os.O_WRONLY).write(b"commit p.1 a")
    set_audit(queues)
    do(queues)
    (row,) = lines(caplog)
    assert (row["user"], row["token"], row["status"]) == ("0", "", "ok")
    assert (row["method"], row["path"], row["detail"]) == (method, path, detail)


def test_each_line_of_a_write_to_ctl_is_one_and_a_refused_write_has_none(caplog: pytest.LogCaptureFixture) -> None:
    queues = audited()
    queues.ctl("# why", "", "depth 5", "bind v #")
    assert [row["detail"] for row in lines(caplog)] == ["depth 5", "bind v #"]
    with pytest.raises(MqfsError):
        queues.ctl("ttl 1h", "nonsense")
    assert lines(caplog) == []


PUT = b'{"stream":"s"} x'
WHOM = "uid 0 excludes uid 1001"
X, S, ROOTS = (f"mode {mode} of {WHOM}" for mode in (700, 600, 755))
MINE = "owned by uid 0 (expected that user or root, not uid 1001)"
REFUSALS: list[tuple[Callable[[Queues, User], object], str, str, str]] = [
    (lambda q, u: q.tree.walk(u, q.tree.find(ROOT, "x"), "s"), "walk", "/x/s", f"cannot enter 'x': {X}"),
    (lambda q, u: q.tree.entries(u, q.tree.find(ROOT, "x")), "entries", "/x", f"cannot read 'x': {X}"),
    (lambda q, u: q.tree.access(u, q.tree.find(ROOT, "x"), os.R_OK), "access", "/x", f"cannot read 'x': {X}"),
    (lambda q, u: q.at("s", os.O_WRONLY, u), "open", "/g/s", f"cannot write 's': {S}"),
    (lambda q, u: q.at("order", os.O_WRONLY, ROOT), "open", "/g/order", "'order': cannot be written"),
    (lambda q, u: q.tree.setattr(u, q.group, mode=0), "setattr", "/g", f"g: {MINE}"),
    (lambda q, u: q.tree.unlink(u, q.tree.root, "g"), "unlink", "/g", f"cannot write and enter '/': {ROOTS}"),
    (lambda q, u: q.at(".put", os.O_WRONLY, u).write(PUT), "write", "/g/.put", f"cannot write 's': {S}"),
]  # fmt: skip


@pytest.mark.parametrize(("do", "method", "path", "detail"), REFUSALS, ids=[row[1] + " " + row[2] for row in REFUSALS])
def test_a_refusal_is_one_line(
    caplog: pytest.LogCaptureFixture, do: Callable[[Queues, User], object], method: str, path: str, detail: str
) -> None:
    queues = Queues()
    queues.mkdir("x", mode=0o700)
    queues.tree.setattr(ROOT, queues.tree.root, mode=0o755)
    queues.tree.setattr(ROOT, queues.tree.find(ROOT, "g/s"), mode=0o600)
    set_audit(queues)
    with pytest.raises(MqfsError):
        do(queues, ANNA)
    (row,) = lines(caplog)
    assert (row["method"], row["path"], row["status"], row["detail"]) == (method, path, "refused", detail)


def test_what_changes_nothing_and_what_is_no_permission_leaves_no_line(caplog: pytest.LogCaptureFixture) -> None:
    queues = audited()
    queues.write("s", b"secret body")
    assert queues.shows(".kept/s") == [b"secret body"]
    say(queues.cursor("select s"), "seek first")
    with pytest.raises(MqfsError):
        queues.tree.find(ROOT, "g/nowhere")
    with pytest.raises(MqfsError):
        queues.tree.create(ROOT, queues.group, "s", 0o600)
    assert lines(caplog) == []


def test_a_line_is_one_line_and_bounded_whatever_the_name(caplog: pytest.LogCaptureFixture) -> None:
    queues = audited()
    queues.ctl(f"bind v {'x' * 400}")
    with pytest.raises(MqfsError):
        queues.tree.create(ROOT, queues.group, 'evil\naudit user="0"', 0o600)
    queues.tree.audit.note(ANNA, "create", '/evil\naudit user="0"')
    assert [len(row["detail"]) <= 256 for row in lines(caplog)] == [True, True]


def test_refusals_of_a_user_are_bounded_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a second; those of others, and changes, stand beside them."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    queues = audited()
    queues.tree.setattr(ROOT, queues.group, mode=0o755)

    def refuse(user: User, count: int) -> None:
        for _ in range(count):
            with pytest.raises(Denied):
                queues.tree.create(user, queues.group, "x", 0o640)

    caplog.clear()
    refuse(CARL, 1_000)
    refuse(BERT, 1)
    queues.tree.create(ROOT, queues.group, "y", 0o640)
    rows = lines(caplog)
    assert [row["user"] for row in rows] == [str(CARL.uid)] * 20 + [str(BERT.uid), "0"]
    queues.tree.audit.tick()
    assert lines(caplog) == []
    now += 1.0
    queues.tree.audit.tick()
    (row,) = lines(caplog)
    assert (row["user"], row["method"], row["detail"]) == (str(CARL.uid), "left out", "980 more in a second")
    refuse(CARL, 25)
    now += 5.0
    refuse(CARL, 1)
    assert [row["method"] for row in lines(caplog)] == ["create"] * 20 + ["left out", "create"]


def test_off_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    queues = audited("off")
    queues.ctl("ttl 1h")
    queues.tree.mkdir(ROOT, queues.group, "n", 0o700)
    queues.ctl("consumer w")
    drain(queues.worker())
    assert caplog.messages == []


def test_all_has_the_publishes_too_without_their_bodies(caplog: pytest.LogCaptureFixture) -> None:
    queues = audited("all")
    queues.write("s", b"secret body")
    queues.put(b"secret body")
    queues.at(".batch", os.O_WRONLY).write(b"\x14\0\0\0\x01\0\0\0s" + b"secret body")
    queues.tree.mkdir(ROOT, queues.tree.find(ROOT, "g/.txn"), "p", 0o777)
    queues.at(".txn/p/s", os.O_WRONLY).write(b"secret body")
    queues.cursor("select s")
    assert "secret" not in "".join(caplog.messages)
    assert [(row["method"], row["path"], row["detail"]) for row in lines(caplog)] == [
        ("publish", "/g/s", "11 bytes"),
        ("publish", "/g/.put", "27 bytes"),
        ("publish", "/g/.batch", "20 bytes"),
        ("mkdir", "/g/.txn/p", "mode 777"),
        ("publish", "/g/.txn/p/s", "11 bytes"),
    ]
