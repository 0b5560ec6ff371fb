"""Tokens in the engine: what a scope and a path leave of a user's permissions, at every call that takes a user."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from mqfs.engine.core.portions import exhaust
from mqfs.errors import Denied, MqfsError
from mqfs.model import Grant, User, Wait
from mqfs.ring.server.registry import RingRegistry
from tests.support.hand import ANNA, ROOT
from tests.support.queues import Queues, drain, read, say

RW, RO, WO = os.O_RDWR, os.O_RDONLY, os.O_WRONLY


def holder(scope: str = "admin", path: str = "/", user: User = ANNA) -> User:
    return attrs.evolve(user, grant=Grant(user.uid, "7f3a", scope, tuple(filter(None, path.split("/")))))


def trees() -> Queues:
    """/g with s, t, a consumer w, a view, a part; /g/eu and /g/eu/in with streams; /other. All of it ANNA's."""
    queues = Queues("replay all", "consumer w", "bind all #")
    tree = queues.tree
    eu = tree.mkdir(ROOT, queues.group, "eu", 0o777)
    inner = tree.mkdir(ROOT, eu, "in", 0o777)
    tree.mkdir(ANNA, queues.group, "empty", 0o777)
    other = queues.mkdir("other")
    for group, name in ((queues.group, "t"), (eu, "e"), (inner, "i"), (other, "o")):
        tree.create(ROOT, group, name, 0o666)
    for path in ("", "g", "g/s", "g/t", "g/eu", "g/eu/e", "g/eu/in", "g/eu/in/i", "other", "other/o"):
        tree.setattr(ROOT, tree.find(ROOT, path), uid=ANNA.uid)
    tree.setattr(ROOT, tree.find(ROOT, "g/.consumers/w"), uid=ANNA.uid)
    tree.setattr(ROOT, tree.find(ROOT, "g/ctl"), uid=ANNA.uid)
    tree.mkdir(ANNA, tree.find(ANNA, "g/.txn"), "p", 0o777)
    return queues


# ------------------------------------------------------------ scope

OPENS = [  # file, flags, the least scope
    ("s", RO, "read"), ("s", WO, "write"), ("s", RW, "write"),
    ("all", RO, "read"), ("order", RO, "read"), (".kept/s", RO, "read"),
    (".stats", RO, "read"), (".who", RO, "read"), (".errors", RO, "read"),
    (".cursor", RW, "read"),
    (".consumers/w", RO, "read"), (".consumers/w", RW, "write"), (".consumers/w", WO, "write"),
    (".put", RW, "write"), (".put", WO, "write"), (".batch", WO, "write"), (".batch", RW, "write"),
    (".txn/p/s", WO, "write"), (".txn/p/.batch", WO, "write"), (".txn/ctl", WO, "write"), (".txn/ctl", RO, "read"),
    ("ctl", RO, "read"), ("ctl", WO, "admin"), ("ctl", RW, "admin"),
]  # fmt: skip
CALLS: list[tuple[str, str, Callable[[Any, User], object]]] = [
    ("create", "admin", lambda q, user: q.tree.create(user, q.group, "new", 0o666)),
    ("create a consumer", "admin", lambda q, user: q.tree.create(user, q.tree.find(ROOT, "g/.consumers"), "c", 0o666)),
    ("mkdir", "admin", lambda q, user: q.tree.mkdir(user, q.group, "new", 0o777)),
    ("mkdir of a part", "write", lambda q, user: q.tree.mkdir(user, q.tree.find(ROOT, "g/.txn"), "x", 0o777)),
    ("rmdir of a part", "write", lambda q, user: q.tree.rmdir(user, q.tree.find(ROOT, "g/.txn"), "p")),
    ("unlink", "admin", lambda q, user: q.tree.unlink(user, q.group, "t")),
    ("unlink a view", "admin", lambda q, user: q.tree.unlink(user, q.group, "all")),
    ("unlink an own file", "admin", lambda q, user: q.tree.unlink(user, q.group, "ctl")),
    ("rmdir", "admin", lambda q, user: q.tree.rmdir(user, q.group, "empty")),
    ("rename", "admin", lambda q, user: q.tree.rename(user, q.group, "t", q.group, "u")),
    ("chmod", "admin", lambda q, user: q.tree.setattr(user, q.tree.find(ROOT, "g/s"), mode=0o600)),
    ("chown", "admin", lambda q, user: q.tree.setattr(user, q.group, gid=ANNA.gid)),
    ("list", "read", lambda q, user: q.tree.entries(user, q.group)),
    ("access", "read", lambda q, user: q.tree.access(user, q.group, os.R_OK | os.X_OK)),
    ("access to sync", "write", lambda q, user: q.tree.access(user, q.tree.find(ROOT, "g/s"), os.W_OK)),
    ("seek", "admin", lambda q, user: say(q.worker(user=user), "seek first")),
    ("claim and ack", "write", lambda q, user: drain(q.worker(user=user))),
    ("commit", "write", lambda q, user: q.at(".txn/ctl", WO, user).write(b"commit n.1 p\n")),
]  # fmt: skip
ORDER = ("read", "write", "admin")


@pytest.mark.parametrize("scope", ORDER)
def test_what_a_scope_may_open(scope: str) -> None:
    queues = trees()
    for name, flags, least in OPENS:
        if ORDER.index(scope) >= ORDER.index(least):
            queues.at(name, flags, holder(scope)).close()
        else:
            with pytest.raises(Denied) as caught:
                queues.at(name, flags, holder(scope))
            what = name.rpartition("/")[2]
            assert str(caught.value) == (f"token 7f3a has scope {scope} for {what} (expected {least})"), (name, flags)


@pytest.mark.parametrize("scope", ORDER)
@pytest.mark.parametrize(("name", "least", "call"), CALLS, ids=[name for name, *_ in CALLS])
def test_what_a_scope_may_do(name: str, least: str, call: Callable[[Any, User], object], scope: str) -> None:
    queues = trees()
    if ORDER.index(scope) >= ORDER.index(least):
        result = call(queues, holder(scope))
        assert not isinstance(result, Wait)
    else:
        with pytest.raises(Denied, match=rf"token 7f3a has scope {scope} for .* \(expected (write|{least})\)"):
            call(queues, holder(scope))


def test_a_reader_positions_his_own_cursor_and_writes_nothing() -> None:
    queues = trees()
    queues.write("s", b"one", b"two")
    handle = queues.at(".cursor", RW, holder("read"))
    say(handle, "select s")
    say(handle, "seek first")
    assert read(handle) == b"one"


def test_a_scope_never_gives_what_the_mode_refuses() -> None:
    queues = trees()
    queues.tree.setattr(ROOT, queues.tree.find(ROOT, "g/t"), mode=0, uid=0)
    with pytest.raises(Denied, match=r"cannot read 't': mode .* excludes uid 1001"):
        queues.at("t", RO, holder("admin"))
    queues.tree.setattr(ROOT, queues.tree.find(ROOT, "other"), mode=0o755)
    with pytest.raises(Denied, match=r"cannot write and enter 'other': mode .* excludes uid 1002"):
        queues.tree.create(holder("admin", user=User(1002, 1002)), queues.tree.find(ROOT, "other"), "x", 0o666)


def test_root_with_a_token_is_narrowed_too() -> None:
    queues = trees()
    with pytest.raises(Denied, match="scope read"):
        queues.at("s", WO, holder("read", user=ROOT))
    with pytest.raises(Denied, match=r"path of token 7f3a \(expected /g"):
        queues.tree.find(holder("admin", "/g", user=ROOT), "other")


# ------------------------------------------------------------ path

OUTSIDE = ["other", "other/o", "g/s", "g/nowhere", "nowhere", "ctl", ".stats", "g/.cursor", "g/.put", "g/all",
    "g/.kept", "g/.kept/s", "g/.consumers/w", "g/.consumers/.s", "g/.txn/p/s", "g/.txn", "g/eu2"]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_outside_of_its_path_a_token_is_denied_whether_there_is_anything_or_not(path: str) -> None:
    queues = trees()
    with pytest.raises(Denied) as caught:
        queues.tree.find(holder(path="/g/eu"), path)
    refused = next(f"/{head}" for head in heads(path) if not "/g/eu/".startswith(f"/{head}/"))
    assert str(caught.value) == f"{refused}: outside the path of token 7f3a (expected /g/eu)"


def heads(path: str) -> list[str]:
    names = path.split("/")
    return ["/".join(names[: count + 1]) for count in range(len(names))]


def test_the_groups_above_a_path_are_walked_through_and_nothing_else() -> None:
    queues, user = trees(), holder(path="/g/eu")
    tree = queues.tree
    group = tree.find(user, "g")
    assert tree.find(user, "g/eu/in/i").name == "i"
    assert tree.walk(user, tree.find(user, "g/eu"), "..") is group
    assert tree.walk(user, group, "..") is tree.root
    tree.access(user, group, os.X_OK)
    calls: list[Callable[[], object]] = [
        lambda: tree.entries(user, group),
        lambda: tree.access(user, group, os.R_OK),
        lambda: tree.create(user, group, "new", 0o666),
        lambda: tree.mkdir(user, group, "new", 0o777),
        lambda: tree.unlink(user, group, "s"),
        lambda: tree.rmdir(user, group, "eu"),
        lambda: tree.rename(user, group, "eu", group, "us"),
        lambda: tree.setattr(user, group, mode=0o700),
        lambda: tree.rmdir(user, tree.root, "g"),
    ]
    for call in calls:
        with pytest.raises(Denied, match=r"outside the path of token 7f3a \(expected /g/eu"):
            call()


def test_below_its_path_a_token_is_its_user() -> None:
    queues, user = trees(), holder(path="/g/eu")
    tree = queues.tree
    group = tree.find(user, "g/eu")
    tree.create(user, group, "new", 0o666)
    tree.mkdir(user, group, "sub", 0o777)
    tree.rename(user, group, "new", group, "newer")
    tree.setattr(user, tree.find(user, "g/eu/newer"), mode=0o600)
    handle = tree.open(user, tree.find(user, "g/eu/newer"), WO)
    handle.write(b"x")
    tree.open(user, tree.find(user, "g/eu/ctl"), RO)
    assert {node.name for node in exhaust(tree.entries(user, group))} >= {"e", "in", "newer", "sub"}
    tree.unlink(user, group, "newer")
    tree.rmdir(user, group, "sub")


@pytest.mark.parametrize(
    ("path", "file", "flags"),
    [("/g/s", "g/s", WO), ("/g/.consumers/w", "g/.consumers/w", RW), ("/g/.kept", "g/.kept/s", RO)],
)
def test_a_path_may_be_one_file(path: str, file: str, flags: int) -> None:
    queues, user = trees(), holder(path=path)
    queues.tree.open(user, queues.tree.find(user, file), flags).close()
    for other in ("g/t", "g/.put", "g/ctl", "g/eu"):
        with pytest.raises(Denied):
            queues.tree.find(user, other)


def test_a_path_is_of_names_as_they_are_now() -> None:
    queues, user = trees(), holder(path="/g/eu")
    tree = queues.tree
    node = tree.find(user, "g/eu/e")
    tree.rename(ROOT, queues.group, "eu", queues.group, "us")
    with pytest.raises(Denied, match="/g/us/e: outside"):
        tree.open(user, node, RO)


def test_a_ring_is_within_the_path_and_takes_the_scope_write() -> None:
    queues = trees()
    rings = RingRegistry(queues.store, lambda then: then())
    rings.resume(queues.group)
    for user, path in ((holder(path="/g/eu"), "g"), (holder(path="/g/eu"), "other"), (holder("read"), "g")):
        with pytest.raises(MqfsError) as caught:
            rings.attach(user, path)
        assert isinstance(caught.value, Denied)
        assert "token 7f3a" in str(caught.value)
