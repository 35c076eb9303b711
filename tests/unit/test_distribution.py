"""What pip reads: the distribution bears a name of its own, and nothing sends a reader to PyPI's project `dips`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OTHERS = "dips"  # on PyPI, a package for the photometry of stars
REQUIRED = re.compile(r"[A-Za-z0-9._-]+")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_distribution_is_not_the_other_project(project: dict[str, Any]) -> None:
    """The import name and the four commands stay as they are."""
    assert project["name"] == "di-ps"
    assert set(project["scripts"]) == {"dips", "dips-master", "dips-slave", "dips-client"}


def test_extras_refer_to_this_distribution(project: dict[str, Any]) -> None:
    """An extra that names another extra by the old name would install the other project."""
    required = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = [match.group() for line in required if (match := REQUIRED.match(line))]
    assert OTHERS not in names
    assert names.count(project["name"]) >= 4, "no extra builds on another any more: this test looks at nothing"


@pytest.mark.parametrize("pattern", ["*.md", "docs/*.md", "deploy/**/*.md", "dips/**/*.py", "deploy/docker/*"])
def test_no_text_installs_the_other_project(pattern: str) -> None:
    """README, deployment notes, help texts and error messages."""
    wrong = re.compile(r"pip install (-\S+ )*['\"]?dips\b(?!/)")
    paths = sorted(ROOT.glob(pattern))
    assert paths
    told = [f"{path.relative_to(ROOT)}: {line}" for path in paths for line in path.read_text().splitlines()
            if wrong.search(line)]  # fmt: skip
    assert not told
