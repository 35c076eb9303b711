"""How many files a task takes (tests/structure.py): the figures reached are kept."""

from __future__ import annotations

import pytest

from tests.structure import TASKS, find_definitions, find_files

REACHED = dict[str, int]()  # files, where the goal is not reached yet
DEFINED = find_definitions()


@pytest.mark.parametrize("name", TASKS)
def test_a_task_takes_no_more_files_than_it_did(name: str) -> None:
    """Each station is there, in one place; a move that spreads a task over more files is seen here."""
    task = TASKS[name]
    opened = find_files(task, DEFINED)
    assert len(opened) <= REACHED.get(name, task.goal), opened
