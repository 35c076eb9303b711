"""EDiT on a mesh of real ranks (gloo) whose steps are slept: what a sync delays, and what stragglers cost.

    python -m benchmarks mesh --part delay          2 × 2, 12 layers, two nodes on a shaped link; needs root
    python -m benchmarks mesh --part stragglers     8 replicas of one rank, the times of the paper's Table 6 scaled down

delay: the all-reduce of the model takes 0.8 of a forward. A sync whose layers land in the forward is held against one
that lands before it, in turn with steps that have none. Its first layer cannot hide. Beside it torchft's DiLoCo moves
the same bytes over the same link, from an environment of its own (peer_environments.py).

stragglers: throughput of all replicas over that of training in step (Baseline), each beside its closed form. Random: in
each step one replica, drawn, lags. Constant: one always lags. Repeat: each all-reduce of the model is done 40 times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Bench, main
from benchmarks.namespaces import End, missing, wire
from benchmarks.peer_environments import CACHE, make_environment
from benchmarks.record import ROOT
from benchmarks.whole_run import free_port

WITHIN_S = 300.0

# ---- delay ----------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 12, 640
FORWARD_S, SHARE = 2.0, 0.8  # of a forward that the all-reduce of the model takes
MBIT = LAYERS * WIDTH * WIDTH * 4 * 8 / (SHARE * FORWARD_S) / 1e6
MOST_ADDED = 0.2  # of what a blocking sync adds
TORCHFT_PORTS = {"ports": [29511, 29512], "lighthouses": [29521, 29522]}  # in namespaces of our own


def measure_delay(bench: Bench) -> None:
    """What a sync adds to a forward, hidden and not."""
    if lacks := missing():
        bench.note(f"delay was not measured: {lacks}")
        return
    rounds = 3 if bench.quick else 7
    with wire(mbit=MBIT) as (near, far):
        nodes = [near, near, far, far]
        found = run_ranks(lambda rank, words: nodes[rank].command(*words), near, 4, {"part": "delay", "rounds": rounds})
    took = {kind: median(max(of[kind][i] for of in found) for i in range(rounds)) for kind in ("none", "whole", "lazy")}
    whole, lazy = took["whole"] - took["none"], took["lazy"] - took["none"]
    bench.row("a forward without a sync", took["none"], "s")
    bench.row("a sync adds, all at once before the forward", whole, "s")
    bench.row(
        "a sync adds, layer by layer in the forward", lazy, "s",
        against="0.2 of a blocking one", of=MOST_ADDED * whole, least=1.0, less=True,
    )  # fmt: skip
    held = max(of["held"] / of["layer"] for of in found)
    name = "outer state on the device, in arrays of the largest layer"
    bench.row(name, held, "", against="two layers", of=5.0, least=1.0, less=True)
    link = f"{MBIT:.3g} Mbit/s between two namespaces"
    bench.note(f"{LAYERS} layers of {WIDTH}², 2 × 2, {link}, forward of {FORWARD_S:g} s")
    bench.note("two layers: two sums, and of one of them last parameters, momentum and next momentum")
    _measure_torchft(bench, rounds)


def _measure_torchft(bench: Bench, rounds: int) -> None:
    """The same bytes over the same link by torchft's DiLoCo: at once, and a step after they are taken."""
    python, reason = make_environment("torchft", bench.args.environments, bench.say)
    if python is None:
        bench.row(f"torchft: {reason}", 0.0, "")
        return
    numbers = {"layers": LAYERS, "width": WIDTH, "forward_s": FORWARD_S, "rounds": rounds}
    with wire(mbit=MBIT) as (near, far):
        nodes, places = [near, near, far, far], {"ips": [near.ip, far.ip], **TORCHFT_PORTS}
        words = (str(python), "-m", "benchmarks.mesh_torchft_rank")
        found = run_ranks(lambda rank, words: nodes[rank].command(*words), near, 4, numbers | places, words)
    for delay, how in enumerate(("at once", "merged a step after it is taken")):
        added = median(max(of[delay][i] for of in found) for i in range(rounds))
        bench.row(f"torchft's DiLoCo: a sync adds, {how}", added, "s")
    bench.note("torchft's delay hides the transfer under a whole step, and takes an update that is a step old")


# ---- stragglers -----------------------------------------------------------------------------------------------------

REPLICAS, STEPS, SECONDS = 8, 128, 600.0  # τ and τ_time of the paper
BASELINE_S = 4.70  # of a step of Baseline: 4.5 s of lag take it from 225.75 to 115.29 TFLOPS
LOCAL_S = BASELINE_S * 225.75 / 236.50  # of EDiT, without an all-reduce of gradients
LAG_S = 4.5  # the largest of Table 6
REPEATED_S = BASELINE_S * (225.75 / 85.18 - 1)  # 40 all-reduces of the model
SCALE, QUICK_SCALE = 20.0, 60.0
BASELINE_STEPS = 32
NEAR_FORM = 0.05


def lags(kind: str, steps: int, replica: int) -> list[float]:
    """The lag of each step of one replica; the draw of a step is the same for all."""
    if kind == "constant":
        return [LAG_S * (replica == 0)] * steps
    rng = random.Random(7)
    drawn = [rng.randrange(REPLICAS) for _ in range(steps)]
    return [LAG_S * (kind == "random" and replica == of) for of in drawn]


def form_baseline(kind: str) -> float:
    """Steps of all replicas per second of the paper, where each step waits for the slowest."""
    return REPLICAS / (BASELINE_S + {"random": LAG_S, "constant": LAG_S, "repeat": REPEATED_S}[kind])


def form_edit(kind: str) -> float:
    """Likewise of EDiT: an interval takes as long as the replica that lagged most in it."""
    slowest = max(STEPS * LOCAL_S + sum(lags(kind, STEPS, replica)) for replica in range(REPLICAS))
    return REPLICAS * STEPS / (slowest + (REPEATED_S if kind == "repeat" else 0.0))


def form_a_edit(kind: str) -> float:
    """Likewise of A-EDiT: each replica takes steps until the time is over; the last to end one ends the interval."""
    assert kind == "constant"
    each = [LOCAL_S + lags(kind, 1, replica)[0] for replica in range(REPLICAS)]
    counts = [ceil(SECONDS / step) for step in each]
    return sum(counts) / max(count * step for count, step in zip(counts, each, strict=True))


Case = tuple[str, str, str, Callable[[str], float], float, str]
CASES: Sequence[Case] = (  # name, how, kind of lag, closed form, least, paper
    ("EDiT, random lag of 4.5 s", "edit", "random", form_edit, 1.65, "1.82"),
    ("A-EDiT, constant lag of 4.5 s", "a-edit", "constant", form_a_edit, 1.8, "1.92"),
    ("EDiT, all-reduces repeated 40 times", "edit", "repeat", form_edit, 2.6, "2.77"),
)


def measure_stragglers(bench: Bench) -> None:
    """Throughput over Baseline's, with the largest lags of Table 6."""
    scale = QUICK_SCALE if bench.quick else SCALE
    runs = [(method, kind) for _, how, kind, *_ in CASES for method in ("baseline", how)]
    plan = {"part": "stragglers", "runs": runs, "scale": scale}
    found = run_ranks(lambda _, words: list(words), End("", "127.0.0.1"), REPLICAS, plan)
    rates = {
        run: sum(of[i]["steps"] for of in found) / max(of[i]["seconds"] for of in found) for i, run in enumerate(runs)
    }
    for name, how, kind, form, least, paper in CASES:
        ratio, expected = rates[how, kind] / rates["baseline", kind], form(kind) / form_baseline(kind)
        bench.row(f"{name}, over Baseline", ratio, "", against=f"at least (paper {paper})", of=least, least=1.0)
        off = abs(ratio / expected - 1.0)
        form_name = f"{name}: off the closed form {expected:.3g}"
        bench.row(form_name, off, "", against="5 %", of=NEAR_FORM, least=1.0, less=True)
    bench.note(f"steps slept, a second of the paper in {1 / scale:.3g} s; {REPLICAS} processes; one interval each")


# ---- ranks ----------------------------------------------------------------------------------------------------------


def run_ranks(
    place: Callable[[int, Sequence[str]], list[str]],
    at: End,
    ranks: int,
    plan: Mapping[str, Any],
    program: Sequence[str] = (sys.executable, "-m", "benchmarks.mesh_rank"),
) -> list[Any]:
    """Start the ranks of a program, each by the command that `place` makes; return what each found."""
    device = {"GLOO_SOCKET_IFNAME": "w0" if at.namespace else "lo"}
    common = {**os.environ, **device, "MASTER_ADDR": at.ip, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR", "RUST_LOG": "warn"}
    with tempfile.TemporaryDirectory(prefix="dips-bench-") as made, ExitStack() as stack:
        words = [*program, made, json.dumps(plan)]
        started = []
        for rank in range(ranks):
            process = subprocess.Popen(place(rank, words), env={**common, "RANK": str(rank)}, cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            if process.wait(WITHIN_S):
                raise RuntimeError(f"a rank ended with {process.returncode}")
        return [json.loads((Path(made) / f"rank{rank}.json").read_text()) for rank in range(ranks)]


PARTS = {"delay": measure_delay, "stragglers": measure_stragglers}


def measure(bench: Bench) -> None:
    """The parts that are named; all by default."""
    for part in [bench.args.part] if bench.args.part else PARTS:
        PARTS[part](bench)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=sorted(PARTS), help="only this one")
    parser.add_argument("--environments", type=Path, default=CACHE, metavar="DIRECTORY", help=f"of peers; {CACHE}")


if __name__ == "__main__":
    main("mesh", __doc__, measure, _arguments)
