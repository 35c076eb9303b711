"""The limit of open files: raised as far as it may be, and held against what is needed; in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from dips.daemon import raise_open_files
class Log:
    def warning(self, event, problem):
        print(problem)
try:
    raise_open_files(connections, "256 ranks on each of 4 lanes", Log())
except Exception as error:
    print(type(error).__name__, error)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def raised(soft: int, hard: int, connections: int) -> list[str]:
    words = [str(n) for n in (soft, hard, connections)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_soft_limit_becomes_the_hard_one() -> None:
    """A shell's 64 is no limit if 2,000 are allowed, which are enough for as many."""
    assert raised(64, 2000, 2000 - 128) == ["(2000, 2000)"]


@pytest.mark.parametrize(("hard", "begins"), [(128, "expected a limit"), (100, "ConfigError open files: expected")])
def test_a_hard_limit_that_is_too_low_is_named(hard: int, begins: str) -> None:
    """A warning as long as it serves some; an error if it serves nobody. Both say how many and where."""
    text, limits = raised(64, hard, 1024)
    assert text.startswith(begins) and "at least 1152 open files, for 256 ranks on each of 4 lanes" in text
    assert f"got {hard}" in text and "LimitNOFILE" in text and "ulimit" in text
    assert limits == f"({hard}, {hard})"
