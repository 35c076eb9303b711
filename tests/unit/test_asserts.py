"""An assert says what is so and does nothing: `python -O` leaves asserts out, and a training environment may say so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dips"
ACTING = ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
LOOKS = {  # what an assert may call: these look, and change nothing
    *("all", "any", "isinstance", "issubclass", "len", "max", "min", "set", "sum"),  # of Python
    *("is_dataclass", "numel", "has_base"),
}


def acts(node: ast.AST) -> bool:
    """Whether a part of an assert may change something."""
    calls = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] not in LOOKS
    return calls or isinstance(node, ACTING)


def asserts_that_act(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)) if "assert" in text else ():
        if isinstance(node, ast.Assert) and any(map(acts, ast.walk(node.test))):
            yield ast.unparse(node)


def test_no_assert_of_the_package_acts() -> None:
    """Chunks were queued inside an assert: under `python -O` no push and no pull moved."""
    files = [path for path in PACKAGE.rglob("*.py") if "generated" not in path.parts]
    assert len(files) > 100
    assert {path.name: found for path in files if (found := list(asserts_that_act(path.read_text())))} == {}


@pytest.mark.parametrize(
    "line", ["assert queue.put(item)", "assert (n := next(rows)) > 0", "assert len(rows.pop()) > 1"]
)
def test_an_assert_that_acts_is_found(line: str) -> None:
    assert list(asserts_that_act(line)) == [ast.unparse(ast.parse(line))]
