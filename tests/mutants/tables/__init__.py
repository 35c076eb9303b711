"""All mutants: a table for each part of the package.

    tests/unit/protocol/test_windows.py
    protocol.round.extend_window
        a window slides without end: min(...) → max(...)
    protocol.round.advance_round
        an arrival makes no window longer: without extend_window(...)

A line that begins with `tests/` names the tests that must find the mutants below it (several such lines are one
selection), one with `equivalent: ` says why no test can. A line that begins with anything else is a place. A mutant is
indented: its name, a colon, and `old → new` or `without old`; tests/mutants/mutant.py says what that means.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import BECOMES, EQUIVALENT, WITHOUT, Mutant


def read_table(text: str, name: str = "") -> Iterator[Mutant]:
    """Yield the mutants of a table; raise ValueError at a line that is none of its kinds."""
    tests, where, former = "", "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            former = ""
        elif line.startswith(("tests/", EQUIVALENT)):
            tests, where = f"{former} {line}".strip(), ""
            former = tests
        elif not line.startswith(" "):
            where, former = line, ""
        else:
            title, _, change = line.strip().partition(": ")
            old, arrow, new = change.partition(BECOMES)
            if not tests or not where or not change or bool(arrow) == change.startswith(WITHOUT):
                raise ValueError(
                    f"{name}:{number}: a mutant must be `name: old{BECOMES}new` or `name: {WITHOUT}old` below a line "
                    f"of tests and one of its place, got {line!r}"
                )
            yield Mutant(title, where, old.removeprefix("" if arrow else WITHOUT), new, tests)


MUTANTS = tuple(
    mutant for path in sorted(Path(__file__).parent.glob("*.txt")) for mutant in read_table(path.read_text(), path.name)
)
