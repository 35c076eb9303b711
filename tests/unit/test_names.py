"""A name means one thing: no class name stands in two files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("dips", "tests", "benchmarks", "configs", "deploy")


CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def class_names() -> dict[str, set[Path]]:
    """Every name that follows `class` at the beginning of a line, with its files; generated code left out."""
    found = defaultdict[str, set[Path]](set)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if "generated" not in path.parts:
                for name in CLASS.findall(path.read_text()):
                    found[name].add(path)
    return found


def defines(path: Path, name: str) -> bool:
    """Whether a class at the top of a file has this name; a line of a string is none."""
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in ast.parse(path.read_text()).body)


def test_every_class_has_a_name_of_its_own() -> None:
    """Whoever reads a class name, anywhere, knows which class is meant."""
    found = class_names()
    assert len(found) > 1000
    twice = {
        name: [path for path in sorted(paths) if defines(path, name)] for name, paths in found.items() if len(paths) > 1
    }
    twice = {name: paths for name, paths in twice.items() if len(paths) > 1}
    assert not twice, "\n".join(
        f"{name}: {', '.join(str(path.relative_to(ROOT)) for path in paths)}" for name, paths in sorted(twice.items())
    )
