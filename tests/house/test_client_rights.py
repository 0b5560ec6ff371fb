"""A front end acts as its client: it makes no other user, skips no check of permissions, and changes state only through
the tree. Exceptions are listed here, with their reasons."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.house.today import ROOT, name_of, sources

FRONT_ENDS = ("mqfs/bridge", "mqfs/fq", "mqfs/http", "mqfs/ninep", "mqfs/ring")
IDENTITY = {"uid", "gid", "groups", "grant"}  # attributes of a user
# Parts of a group, which only the tree changes for a user; and their methods that only read.
PARTS = {"consumers", "held", "log", "publisher", "retention", "store", "transactions", "views"}
LOOKS = {"bounds", "get", "has_room", "items", "keys", "of", "require_writable", "values"}
MAKES = {"make_stream", "remove_stream", "rename_stream"}

# By function: the number of exceptions, and why none of them gives a client more than its permissions.
TAKES = "records that clients of a ring published, who have r and w on all of its group"
ALLOWED = {
    "mqfs/fq/exchanges.py Exchanges.__init__": (1, "makes the server's user, for the two below"),
    "mqfs/fq/exchanges.py Exchanges.start": (1, "the group of all exchanges, before the first client"),
    "mqfs/fq/exchanges.py Exchanges._remove_each": (1, "of queues of an earlier run, or whose last client has gone"),
    "mqfs/fq/exchanges.py _maker": (1, "a client whose rights were asked, as the group of the directory"),
    "mqfs/fq/exchanges.py Exchanges._make": (1, "asks w and x of the group of all exchanges before"),
    "mqfs/fq/exchanges.py Exchanges._hold": (1, "its callers ask r and w of the consumer, by `require`"),
    "mqfs/fq/exchanges.py Exchanges.command": (2, "its callers ask r, w and x of the group, by `require`"),
    "mqfs/fq/exchanges.py Exchanges.make_stream": (2, "asks w and x of the group before; root's are its owner's"),
    "mqfs/http/dialects/durable_state.py ": (1, "reads back what was written for clients that may only write"),
    "mqfs/http/dialects/durable_streams.py _make_catalog": (1, "as the group's owner, for who may make streams there"),
    "mqfs/http/dialects/durable_streams.py _remove_expired": (1, "as the owner, who said when the stream ends"),
    "mqfs/http/gate.py Gate.user": (1, "the user of a token"),
    "mqfs/ninep/server/operations.py _attached": (1, "the user of a token"),
    "mqfs/ninep/server/operations.py attach": (1, "keeps that user"),
    "mqfs/ninep/server/operations.py become": (1, "a file that this request made, as open(2) has it"),
    "mqfs/ninep/server/operations.py opened": (1, "passes that on"),
    "mqfs/ninep/server/fids.py Fid.open_node": (1, "passes that on"),
    "mqfs/ninep/server/linux_operations.py lcreate.then": (1, "says whether this request made it"),
    "mqfs/ninep/server/linux_operations.py acting": (1, "a group that the user is a member of"),
    "mqfs/ninep/server/connection.py Server.serve_descriptors": (1, "standard input is of who started the server"),
    "mqfs/ring/server/intake.py RingIntake._append": (3, TAKES),
    "mqfs/ring/server/intake.py RingIntake._take_rows": (1, TAKES),
    "mqfs/ring/server/ring_log.py RingLog.__init__": (1, "a ring is its group's log while there is one"),
    "mqfs/ring/server/ring_log.py RingLog._restore_bucket": (1, "then the log is the store's again"),
    "mqfs/ring/server/ring_log.py RingLog.release": (1, "what readers of the ring had may go"),
}


def owner(node: ast.expr) -> str:
    """Return the last name before an attribute: `log` of `group.log.change`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def makes_user(node: ast.AST) -> bool:
    """Whether a node makes a user or a peer, or changes a user."""
    if not isinstance(node, ast.Call):
        return False
    called = owner(node.func)
    if called == "evolve":
        return any(keyword.arg in IDENTITY for keyword in node.keywords)
    return called in ("User", "Peer") or (called == "user" and ast.unparse(node.func) == "identity.user")


def goes_around(node: ast.AST) -> bool:
    """Whether a node skips a check of permissions, or changes a group without the tree."""
    if not isinstance(node, ast.Call):
        return False
    if any(keyword.arg == "made" for keyword in node.keywords):
        return True
    if not isinstance(node.func, ast.Attribute):
        return False
    of = node.func.value
    part = isinstance(of, ast.Attribute) and of.attr in PARTS and ast.unparse(of.value) != "self"
    part = part and node.func.attr not in LOOKS
    return part or (node.func.attr in MAKES and owner(of) in ("group", "node"))


def trees() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text()) for path in map(Path, sources(*FRONT_ENDS))}


def kept_users(tree: ast.Module) -> Iterator[str]:
    """Yield the names of attributes and functions that hold or return a user made here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and makes_user(node.value):
            yield from (target.attr for target in node.targets if isinstance(target, ast.Attribute))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
            returned = [part.value for part in node.body if isinstance(part, ast.Return) and part.value]
            yield from [node.name] * any(map(makes_user, returned))


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield each node with the name of its class and function."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        where = f"{outer}.{node.name}".lstrip(".") if named else outer
        yield where, node
        yield from functions(node, where)


def places() -> Counter[str]:
    """Count the exceptions in each function."""
    found: Counter[str] = Counter()
    parsed = trees()
    users = {name for tree in parsed.values() for name in kept_users(tree)}
    for file, tree in parsed.items():
        for where, node in functions(tree):
            used = (
                isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load) and owner(node) in users
            )
            found[f"{file} {where}"] += used or makes_user(node) or goes_around(node)
    return +found


def test_front_ends_act_as_their_clients() -> None:
    found = places()
    more = {where: count for where, count in found.items() if count > ALLOWED.get(where, (0, ""))[0]}
    assert not more, f"new places where a front end does not act as its client: {more}"
    assert found == {where: count for where, (count, _) in ALLOWED.items()}, "fewer places: shorten the list"
    assert (ROOT / "mqfs/engine/group.py").read_text().count("def make_stream") == 1  # of MAKES
