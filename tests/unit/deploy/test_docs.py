"""What the documents of deploy/ and configs/examples/ show is Python, and files that they name exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from dips.identity.paths import REVOCATIONS

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "deploy" / "README.md", *sorted((ROOT / "configs" / "examples").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_what_is_shown_of_ours_exists(document: Path) -> None:
    """Python blocks can be read, and what they import from dips is there."""
    for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dips"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_files_that_are_named_exist(document: Path) -> None:
    """Paths of the repository, wherever they stand."""
    for name in re.findall(r"\b((?:deploy|configs)/[\w./-]*\w)", document.read_text()):
        assert (ROOT / name).exists(), f"{document.name} names {name}"


def test_the_list_that_pods_are_given_is_the_one_that_was_written() -> None:
    """`dips certs revoke ca/ …` writes ca/crl.pem; certs/ has the copy of before, by which nobody is revoked."""
    (replaced,) = re.findall(r"--from-file=(\S+) --dry-run", DOCUMENTS[0].read_text())
    assert replaced == f"ca/{REVOCATIONS}"
