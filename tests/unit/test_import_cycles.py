"""No two modules of Di-PS import each other, directly or in a circle; imports for type checking count too.

A circle can only be read, tested and moved as a whole. What two modules share belongs into a third below both.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

DIPS = Path(__file__).parents[2] / "dips"
Graph = Mapping[str, set[str]]


def module_name(path: Path) -> str:
    return ".".join(("dips", *path.relative_to(DIPS).with_suffix("").parts)).removesuffix(".__init__")


def imported_modules(source: str, modules: set[str]) -> set[str]:
    """Those of `modules` that a source text imports, anywhere in it, `if TYPE_CHECKING` included."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in modules else node.module or "")
    return found & modules


@cache
def import_graph() -> Graph:
    paths = {module_name(path): path for path in sorted(DIPS.rglob("*.py"))}
    return {name: imported_modules(path.read_text(), set(paths)) - {name} for name, path in paths.items()}


def find_cycle(graph: Graph) -> list[str]:
    """One circle as a path that ends where it begins; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # graphlib names predecessors: importers come last
    return []


def test_no_module_imports_itself_in_a_circle() -> None:
    """The imports of Di-PS are layers: whatever a module imports knows nothing of it."""
    cycle = find_cycle(import_graph())
    assert not cycle, "a circle of imports: " + " → ".join(cycle)


def test_a_circle_is_found_and_named() -> None:
    """A circle over three modules is reported in the order of its imports, whatever else is imported."""
    graph = {"a": {"b", "x"}, "b": {"c"}, "c": {"a"}, "x": set[str]()}
    cycle = find_cycle(graph)
    assert cycle[0] == cycle[-1] and set(cycle) == {"a", "b", "c"}
    assert all(imported in graph[importer] for importer, imported in pairwise(cycle))
    assert find_cycle({"a": {"b"}, "b": set()}) == []


def test_imports_for_type_checking_count() -> None:
    """An import that only a type checker follows is an import."""
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dips.sim import world\n"
    assert imported_modules(source, {"dips.sim", "dips.sim.world"}) == {"dips.sim.world"}
