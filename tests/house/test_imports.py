"""Folders are layers, without import cycles at run time. Imports only for types stay within a folder.

Front ends import little of the engine: further imports are counted in today.json.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import grimp

from tests.house.today import PACKAGES, ROOT, check, name_of, sources

FRONT_ENDS = "http", "ninep", "fq", "fuse", "client", "ring"
ABOVE = {"__init__.py", "ring"}  # modules that these import for types are below them
FOR_FRONT_ENDS = {"mqfs.engine.tree.tree", "mqfs.engine.files.handle", "mqfs.engine.language.message_formats"}


def circles() -> Iterator[tuple[str, int]]:
    """Yield each package with an import cycle among its modules, and the number of modules in cycles."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)  # a cache may be stale
    packages = {name.rpartition(".")[0] for name in graph.modules} - {""}
    for package in sorted(packages):
        below = {
            child: {
                sibling(package, other)
                for module in family(graph, child)
                for other in graph.find_modules_directly_imported_by(module)
            }
            for child in graph.find_children(package)
        }
        if size := sum(map(len, rings(below))):
            yield package, size


def family(graph: grimp.ImportGraph, module: str) -> set[str]:
    return {module, *graph.find_descendants(module)}


def sibling(package: str, module: str) -> str:
    """Return the child of a package that has a module, or ""."""
    head = f"{package}."
    return head + module.removeprefix(head).partition(".")[0] if module.startswith(head) else ""


def rings(edges: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components of more than one node, by two searches per node: the graphs are
    small."""
    found, seen = [], set()
    for start in edges:
        if start not in seen:
            ring = {node for node in reached(edges, start) if start in reached(edges, node)}
            seen |= ring
            if len(ring) > 1:
                found.append(ring)
    return found


def reached(edges: dict[str, set[str]], start: str) -> set[str]:
    todo, done = [start], set()
    while todo:
        for node in edges.get(todo.pop(), ()):
            if node in edges and node not in done:
                done.add(node)
                todo.append(node)
    return done


def reaches() -> Iterator[tuple[str, int]]:
    """Yield each file of a front end, and how many modules of the engine it imports that are not for front ends."""
    for front in FRONT_ENDS:
        for path in sorted((ROOT / "mqfs" / front).rglob("*.py")):
            modules = {
                node.module
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mqfs.engine.")
            }
            if more := modules - FOR_FRONT_ENDS:
                yield name_of(path), len(more)


def breaches() -> dict[str, int]:
    return {**dict(circles()), **dict(reaches())}


def test_no_package_is_a_circle_and_front_ends_know_little() -> None:
    check("imports", breaches())


def for_types(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that are imported only for types."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (one.module or "" for one in node.body if isinstance(one, ast.ImportFrom))


def test_imports_for_types_stay_in_a_folder() -> None:
    """Otherwise a lower folder would depend on a higher one."""
    strange = [
        f"{name_of(path)}: {module}"
        for path in sources("mqfs")
        for module in for_types(ast.parse(path.read_text()))
        if module.startswith("mqfs.")
        and path.relative_to(ROOT / "mqfs").parts[0] not in ABOVE
        and module.split(".")[1] != path.relative_to(ROOT / "mqfs").parts[0]
    ]
    assert strange == []
