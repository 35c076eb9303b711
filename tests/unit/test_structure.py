"""How many files a task takes at most (tests/structure.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure import TASKS, find_definitions, find_files


@pytest.fixture(scope="module")
def defined() -> dict[str, list[Path]]:
    return find_definitions()


@pytest.mark.parametrize("name", TASKS)
def test_a_task_takes_no_more_files_than_its_goal(defined: dict[str, list[Path]], name: str) -> None:
    """Each station is there, in one place; a move that spreads a task over more files is seen here."""
    task = TASKS[name]
    opened = find_files(task, defined)
    assert len(opened) <= task.goal, opened
