"""Test every mutant of the table: `python -m tests.mutants [--only WORD] [--list] [-j JOBS] [-v]`.

With `--random N` mutants are drawn by `--seed` instead; each meets the tests that execute its line, as `make coverage`
noted them.

A test that is red anyway finds nothing: every selection of the table runs on the tree as it is before, each test that
found a drawn mutant after. Exit code 1 if one of them fails, or if a mutant survived or no longer applies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from tests.mutants.drawing import ExecutingTests, draw_mutants
from tests.mutants.runner import GOOD, MutantVerdict, check_clean, run
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
    drawn = draw_mutants(chosen.random, chosen.seed, ExecutingTests()) if chosen.random else []
    mutants = [m for m in drawn or MUTANTS if chosen.only in m.name or chosen.only in m.where]
    if chosen.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.where}: {mutant.change}\n    {mutant.tests}")
        print(f"{len(mutants)} mutants")
        return 0
    began, verdicts = time.monotonic(), Counter[MutantVerdict]()
    rooms = defaultdict[str, Counter[MutantVerdict]](Counter)
    if not drawn and not _are_clean((m.tests for m in mutants if not m.equivalent), chosen.jobs):
        return 1
    finders = list[str]()
    for result in run(mutants, chosen.jobs):
        finders += result.finders
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
    if drawn and not _are_clean(finders, chosen.jobs):
        return 1
    return 0 if set(verdicts) <= GOOD else 1


def _are_clean(selections: Iterable[str], jobs: int) -> bool:
    """Say how long these tests take on the tree as it is, or which of them fail."""
    began = time.monotonic()
    if failed := check_clean(selections, jobs):
        print("\n\n".join(["these tests fail on the tree as it is:", *failed]))
    else:
        print(f"what must find them passes on the tree as it is ({time.monotonic() - began:.0f} s)", flush=True)
    return not failed


if __name__ == "__main__":
    sys.exit(main())
