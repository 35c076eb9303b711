"""Every hook that an observer of the simulation overrides is one that the world calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from dips.sim.observer import HOOKS

HERE = Path(__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(HERE.glob("*.py"))}


def list_observers() -> Iterator[ast.ClassDef]:
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and {ast.unparse(b) for b in node.bases} & {"Observer", "Invariant"}:
                yield node


def test_an_observer_defines_no_hook_that_nobody_calls() -> None:
    """A hook that was renamed in the world alone would leave its invariant blind, and green."""
    used = {node.attr for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    unknown = [
        f"{observer.name}.{method.name}"
        for observer in list_observers()
        for method in observer.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if method.name not in HOOKS and method.name not in used
    ]
    assert unknown == []


def test_all_observers_are_looked_at() -> None:
    """The test above sees the invariants and what draws the failures."""
    found = {observer.name for observer in list_observers()}
    assert {"LineageInvariant", "TokensInvariant", "Faults", "Coverage"} <= found
