"""No module imports, by way of others, itself; imports for type checkers count."""

from __future__ import annotations

import grimp

PACKAGES = ("coppice", "orchestrator", "verifier_svc", "drafter_svc")


def circles(graph: grimp.ImportGraph) -> list[tuple[str, ...]]:
    """A shortest circle through each import that is part of one."""
    found = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            back = graph.find_shortest_chain(importer=imported, imported=module)
            if back is not None:
                found.add(tuple(sorted(back)))
    return sorted(found)


def test_a_circle_is_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [("a", "b", "c")]


def test_the_four_packages_have_no_import_circles() -> None:
    assert circles(grimp.build_graph(*PACKAGES)) == []
