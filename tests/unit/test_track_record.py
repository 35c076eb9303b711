"""docs/track-record.md: what it says finds a bug again is there, and each row says what the harness had lacked."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.tables import MUTANTS
from tests.simulation.found import FOUND
from tests.simulation.sabotage import SABOTAGES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/track-record.md").read_text()
HEAD = ["bug", "found by", "found again by", "what the harness had lacked"]
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]
    for line in TEXT.splitlines()
    if line.startswith("|")
]
BUGS = [row for row in ROWS if row != HEAD and set(row[0]) != set("-")]
NAMES_OF_MUTANTS = {mutant.name for mutant in MUTANTS}
FINDERS = sorted(
    {finder for row in BUGS for finder in re.findall(r"`([^`]+)`", row[2] if len(row) == len(HEAD) else "")}
)


@cache
def _tests_of(path: Path) -> frozenset[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(n.name for n in nodes if isinstance(n, functions) and n.name.startswith("test_"))


def is_there(finder: str) -> bool:
    """Whether a mutant, sabotage, seed, story or test of this name exists."""
    kind, _, name = finder.partition(": ")
    if kind == "mutant":
        return name in NAMES_OF_MUTANTS
    if kind == "sabotage":
        return name in SABOTAGES
    if kind == "seed":
        return any(int(name) in seeds for found in FOUND.values() for seeds in found.values())
    file, _, test = finder.partition("::")
    path = ROOT / file
    if not file.startswith("tests/") or not path.is_file():
        return False
    return path.suffix == ".txt" or (test in _tests_of(path) if test else bool(_tests_of(path)))


def test_each_row_is_whole() -> None:
    """Four cells, none of them empty, and a finder in each."""
    assert [row for row in BUGS if len(row) != len(HEAD) or not all(row) or "`" not in row[2]] == []
    assert len({row[0] for row in BUGS}) == len(BUGS) > 0


def test_what_finds_a_bug_again_is_there() -> None:
    assert [finder for finder in FINDERS if not is_there(finder)] == []


@pytest.mark.parametrize(
    "name", ["tests/unit/test_nowhere.py", "tests/unit/test_names.py::test_nothing", "mutant: x", "seed: -1"]
)
def test_a_finder_that_is_missing_is_noticed(name: str) -> None:
    assert not is_there(name)
