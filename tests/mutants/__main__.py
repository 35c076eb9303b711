"""Test every mutant: `python -m tests.mutants [--only WORD] [--list] [-j JOBS] [-v]`.

First every selection of tests runs on the tree as it is, since a test that is red anyway finds nothing. Exit code 1 if
one of them fails, or if a mutant survived or no longer applies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.mutants.runner import GOOD, MutantVerdict, check_clean, run
from tests.mutants.tables import MUTANTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="mutants whose name or place has this word")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("-v", "--verbose", action="store_true", help="print what the tests of each mutant printed last")
    chosen = parser.parse_args()
    mutants = [m for m in MUTANTS if chosen.only in m.name or chosen.only in m.where]
    if chosen.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.where}: {mutant.old!r} → {mutant.new!r}\n    {mutant.tests}")
        print(f"{len(mutants)} mutants")
        return 0
    began, verdicts = time.monotonic(), Counter[MutantVerdict]()
    if failed := check_clean(mutants, chosen.jobs):
        print("\n\n".join(["these tests fail on the tree as it is:", *failed]))
        return 1
    print(f"every selection passes on the tree as it is ({time.monotonic() - began:.0f} s)", flush=True)
    for result in run(mutants, chosen.jobs):
        verdicts[result.verdict] += 1
        print(f"{result.verdict.value:<22} {result.seconds:6.1f} s  {result.mutant.name}", flush=True)
        if chosen.verbose or result.verdict not in GOOD:
            print("    " + result.text.replace("\n", "\n    "), flush=True)
    counts = ", ".join(f"{verdicts[v]} {v.value}" for v in MutantVerdict if verdicts[v])
    print(f"{len(mutants)} mutants in {time.monotonic() - began:.0f} s: {counts}")
    return 0 if set(verdicts) <= GOOD else 1


if __name__ == "__main__":
    sys.exit(main())
