"""Ten failures that other systems met, and where ours is tested against each: a list that a test holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# Number: (the failure, files with a test `test_failure_<number>_<the failure>`).
FAILURES: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("fresh weights become the truth", ("chaos/test_ten_failures.py",)),
    2: ("bulk starves heartbeats", ("chaos/test_ten_failures.py",)),
    3: ("lost acknowledgement, lost run", ("chaos/test_ten_failures.py",)),
    4: ("a swallowed error", ("unit/slave/test_shard_rounds.py",)),
    5: ("a poisoned detector", ("unit/protocol/test_penalty.py", "chaos/test_ten_failures.py")),
    6: ("wrong mean, wrong sign", ("integration/test_outer_step.py",)),
    7: ("joining while busy", ("chaos/test_ten_failures.py",)),
    8: ("the coordinator dies", ("chaos/test_ten_failures.py",)),
    9: ("pieces of different steps in one checkpoint", ("chaos/test_ten_failures.py",)),
    10: ("memory that creeps", ("chaos/test_ten_failures.py",)),
}


@pytest.mark.parametrize("number", range(1, 11))
def test_each_of_the_ten_has_a_test_of_its_name(number: int) -> None:
    failure, files = FAILURES[number]
    name = f"test_failure_{number}_{re.sub('[^a-z]+', '_', failure)}"
    for file in files:
        assert f"def {name}(" in (TESTS / file).read_text(), f"{file} has no {name}"
