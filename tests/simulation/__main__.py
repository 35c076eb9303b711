"""`python -m tests.simulation`: play many seeds of the simulated world, or one, and tell what was found.

A failing seed prints itself, the invariant, its last events and the command that plays it again; the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import Pool
from statistics import median

from tests.simulation.coverage import POINTS, ROWS, WAYS
from tests.simulation.found import FOUND
from tests.simulation.last_range import play_last_range
from tests.simulation.long import play_long
from tests.simulation.mix import core, former, swarm
from tests.simulation.sabotage import SABOTAGES
from tests.simulation.trial import Result, play

SEEDS_EACH = 64  # then a process is replaced: its garbage, about 4 MB a seed, goes with it uncollected
GAMES = {
    "": play,
    "swarm": partial(play, mix=swarm),
    "core": partial(play, mix=core),
    "former": partial(play, mix=former),
    "long": play_long,
    "last-range": play_last_range,
}
MUST_MEET = 1000  # seeds: in so many no row of the coverage may be empty


def play_all(seeds: Sequence[int], jobs: int, sabotage: str | None = None, game: str = "") -> Iterator[Result]:
    """Play all seeds on `jobs` processes, in the order of the seeds."""
    tasks, play_one = [(seed, sabotage) for seed in seeds], GAMES[game]
    if jobs == 1 or len(tasks) == 1:
        yield from map(play_one, tasks)
        return
    gc.freeze()
    with Pool(jobs, initializer=gc.disable, maxtasksperchild=SEEDS_EACH) as pool:
        yield from pool.imap(play_one, tasks)


def report(result: Result, sabotage: str | None = None, game: str = "") -> str:
    """Everything that a person needs of a failing seed."""
    assert result.failure is not None
    words = (f" --{game}" if game else "") + (f" --sabotage {sabotage}" if sabotage else "")
    again = f"python -m tests.simulation --seed {result.seed}{words}"
    trace = "\n".join(result.failure.trace)
    return f"seed {result.seed} fails: {result.failure.what}\n{trace}\nplay it again: {again}"


def summary(results: list[Result], seconds: float) -> str:
    """One paragraph about many seeds."""
    failed = [r.seed for r in results if r.failure]
    kinds = {k for r in results for k in r.kinds}
    notes = ", ".join(f"{k} {sum(r.kinds.get(k, 0) for r in results)}" for k in sorted(kinds))
    which = f": {', '.join(map(str, failed))}" if failed else ""
    lines = [
        f"{len(results)} seeds in {seconds:.1f} s ({seconds / len(results):.3f} s each), {len(failed)} failed{which}"
    ]
    for what, numbers in spread(results).items():
        lines.append(f"{what:<34} median {median(numbers):>6.0f}   least {min(numbers):>6.0f}")
    return "\n".join([*lines, notes])


def spread(results: list[Result]) -> dict[str, list[int]]:
    """What a seed is worth, in numbers."""
    return {
        "events": [r.events for r in results],
        "completed rounds (not skipped)": [r.rounds for r in results],
        "versions": [r.versions for r in results],
        "faults": [r.faults for r in results],
    }


def covered(results: list[Result]) -> dict[str, int]:
    """How many seeds met each row."""
    return {row: sum(row in r.seen for r in results) for row in (*ROWS, *POINTS, *WAYS)}


def coverage(results: list[Result]) -> str:
    """The table of rows and crash points, each with the number of seeds that met it."""
    seeds = covered(results)
    rows = [f"{seeds[row]:>7}  {what}" for row, what in ROWS.items()]
    points = [f"{seeds[row]:>7}  {what}" for row, what in POINTS.items()]
    ways = [f"{seeds[row]:>7}  {what}" for row, what in WAYS.items()]
    heads = ("  seeds  failures", "", "  seeds  crash points", "", "  seeds  ways to run")
    return "\n".join([heads[0], *rows, *heads[1:3], *points, *heads[3:], *ways])


def play_found(jobs: int) -> bool:
    """Play the seeds that found something; print those that fail, and return whether all hold."""
    started, count, failed = time.monotonic(), 0, 0
    for game, found in FOUND.items():
        for result in play_all([seed for seeds in found.values() for seed in seeds], jobs, game=game):
            count += 1
            if result.failure is not None:
                failed += 1
                print(report(result, game=game), flush=True)
    print(f"{count} seeds that found something: {failed} failed, {time.monotonic() - started:.1f} s", flush=True)
    return not failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="how many seeds (default 300)")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="A", help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, metavar="S", help="play this seed alone")
    parser.add_argument("--found", action="store_true", help="play first what found something before (found.py)")
    parser.add_argument(
        "--sabotage", choices=sorted(SABOTAGES), metavar="NAME", help=f"break a rule: {', '.join(SABOTAGES)}"
    )
    games = parser.add_mutually_exclusive_group()
    for flag, what in (
        ("swarm", "each seed draws its own faults, weather and deadlines (mix.py)"),
        ("core", "what dies last stays dead, and the rest must go on (mix.py)"),
        ("former", "without crossings, as seeds were drawn before there were any (crossings.py)"),
        ("long", "work that lasts five times what guards it (long.py)"),
        ("last-range", "restarts in the last data range (last_range.py)"),
    ):
        games.add_argument(f"--{flag}", dest="game", action="store_const", const=flag, default="", help=what)
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="processes (default 2)")
    parser.add_argument("--verbose", action="store_true", help="a line for each seed")
    return parser.parse_args()


def main() -> int:
    """Play what the command line asks for; return the exit code."""
    options = _arguments()
    seeds = (
        range(options.seed, options.seed + 1)
        if options.seed is not None
        else range(options.first, options.first + options.seeds)
    )
    game = options.game
    held = play_found(options.jobs) if options.found else True
    started, results = time.monotonic(), list[Result]()
    for result in play_all(seeds, options.jobs, options.sabotage, game):
        results.append(result)
        if result.failure is not None:
            print(report(result, options.sabotage, game), flush=True)
        elif options.verbose:
            print(
                f"seed {result.seed}: {result.events} events, {result.rounds} rounds, {result.faults} faults",
                flush=True,
            )
        if len(results) % 50 == 0:
            print(f"{len(results)} of {len(seeds)} seeds", file=sys.stderr, flush=True)
    if game in ("", "swarm", "core"):
        print(coverage(results) + "\n")
    print(summary(results, time.monotonic() - started))
    many = len(results) >= MUST_MEET and not game
    missed = [row for row, seeds in covered(results).items() if not seeds] if many else []
    if missed and options.sabotage is None:
        print(f"no seed met: {', '.join(missed)}")
    return 1 if missed or not held or any(r.failure for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
