"""No package is a circle, imports for types counted."""

from __future__ import annotations

from collections.abc import Iterator

import grimp

from tests.house.today import PACKAGES, ROOT, check


def circles() -> Iterator[tuple[str, int]]:
    """Each package of whose modules some import each other in a circle, and how many those are."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)  # a cache may be stale
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
    """The child of a package that a module is in, or ""."""
    head = f"{package}."
    return head + module.removeprefix(head).partition(".")[0] if module.startswith(head) else ""


def rings(edges: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected parts of more than one (Tarjan, by two searches a node: the graphs are small)."""
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


def breaches() -> dict[str, int]:
    return dict(circles())


def test_no_package_is_a_circle() -> None:
    check("imports", breaches())


def test_the_engine_imports_nothing_for_types_alone() -> None:
    sources = (ROOT / "mqfs" / "engine").rglob("*.py")
    assert [path.name for path in sources if "TYPE_CHECKING" in path.read_text()] == []
