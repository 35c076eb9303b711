"""How many files a task takes at most (tests/structure.py)."""

from __future__ import annotations

import pytest

from tests.structure import TASKS, find_definitions, find_files

DEFINED = find_definitions()


@pytest.mark.parametrize("name", TASKS)
def test_a_task_takes_no_more_files_than_its_goal(name: str) -> None:
    """Each station is there, in one place; a move that spreads a task over more files is seen here."""
    task = TASKS[name]
    opened = find_files(task, DEFINED)
    assert len(opened) <= task.goal, opened
