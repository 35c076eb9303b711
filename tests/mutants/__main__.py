"""Test every mutant of the table: `python -m tests.mutants [--only WORD] [--list] [-j JOBS] [-v]`.

With `--random N` mutants are drawn by `--seed` instead; those that the tests of their own file do not find meet all
tests of their room.

First every selection of tests runs on the tree as it is, since a test that is red anyway finds nothing. Exit code 1 if
one of them fails, or if a mutant survived or no longer applies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.mutants.drawing import draw_mutants, widened
from tests.mutants.mutant import Mutant
from tests.mutants.runner import GOOD, TIMEOUT_S, WIDE_TIMEOUT_S, MutantResult, MutantVerdict, check_clean, run
from tests.mutants.tables import MUTANTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="mutants whose name or place has this word")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="draw N mutants instead (drawing.py)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("-v", "--verbose", action="store_true", help="print what the tests of each mutant printed last")
    chosen = parser.parse_args()
    drawn = draw_mutants(chosen.random, chosen.seed)
    mutants = [m for m in drawn or MUTANTS if chosen.only in m.name or chosen.only in m.where]
    if chosen.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.where}: {mutant.change}\n    {mutant.tests}")
        print(f"{len(mutants)} mutants")
        return 0
    began, verdicts = time.monotonic(), Counter[MutantVerdict]()
    rooms = defaultdict[str, Counter[MutantVerdict]](Counter)
    timeout_s = WIDE_TIMEOUT_S if drawn else TIMEOUT_S  # a file without tests of its own meets all of its room at once
    if failed := check_clean(mutants, chosen.jobs, timeout_s):
        print("\n\n".join(["these tests fail on the tree as it is:", *failed]))
        return 1
    print(f"every selection passes on the tree as it is ({time.monotonic() - began:.0f} s)", flush=True)
    for result in _run_drawn(mutants, chosen.jobs) if drawn else run(mutants, chosen.jobs):
        verdicts[result.verdict] += 1
        if drawn:
            rooms[result.mutant.room][result.verdict] += 1
        print(f"{result.verdict.value:<22} {result.seconds:6.1f} s  {result.mutant.name}", flush=True)
        if chosen.verbose or result.verdict not in GOOD:
            print("    " + result.text.replace("\n", "\n    "), flush=True)
    counts = ", ".join(f"{verdicts[v]} {v.value}" for v in MutantVerdict if verdicts[v])
    print(f"{len(mutants)} mutants in {time.monotonic() - began:.0f} s: {counts}")
    for room, found in sorted(rooms.items()):
        print(f"  {room:<12} {found[MutantVerdict.SURVIVED]} of {found.total()} survived")
    return 0 if set(verdicts) <= GOOD else 1


def _run_drawn(mutants: list[Mutant], jobs: int) -> Iterator[MutantResult]:
    """The nearest tests first; what they do not find meets all tests of its room."""
    left = list[Mutant]()
    for result in run(mutants, jobs, WIDE_TIMEOUT_S):
        if result.verdict is MutantVerdict.SURVIVED and widened(result.mutant).tests != result.mutant.tests:
            left.append(widened(result.mutant))
        else:
            yield result
    if failed := check_clean(left, jobs, WIDE_TIMEOUT_S):
        print("\n\n".join(["these tests fail on the tree as it is:", *failed]))
    yield from run(left, jobs, WIDE_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
