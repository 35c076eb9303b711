"""A name means one thing: no class name stands in two files."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("dips", "tests", "benchmarks", "configs", "deploy")


def class_names() -> dict[str, set[str]]:
    """Every class at the top of a file, with the files that define one of this name; generated code left out."""
    found = defaultdict[str, set[str]](set)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "generated" not in path.parts:
                for node in ast.parse(path.read_text()).body:
                    if isinstance(node, ast.ClassDef):
                        found[node.name].add(str(path.relative_to(ROOT)))
    return found


def test_every_class_has_a_name_of_its_own() -> None:
    """Whoever reads a class name, anywhere, knows which class is meant."""
    twice = {name: sorted(files) for name, files in class_names().items() if len(files) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(files)}" for name, files in sorted(twice.items()))
