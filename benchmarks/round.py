"""A whole outer round through real daemons over loopback, beside the same work as plain gloo.

Master, two slaves, and clusters of one rank each that do not train: they meet, push, wait for their round and pull.
A round lasts from the meeting until the last cluster's `outer.step` has returned with the new version installed. Gloo:
torchrun with as many ranks; all-reduce of θ − θ_j and SGD(nesterov=True) on every rank, barrier to barrier.

A version is durable before it exists (`durability: commit`, the default). What is compared is the
round without its phase of persisting: nothing else goes on between Prepared and Persisted, so it is what a round
without durability takes. The whole round stands beside it, with its snapshots on a tmpfs and on the disk, and on the
tmpfs once more with certificates, so that lanes are encrypted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, main
from benchmarks.kernels import triad_rate
from benchmarks.lone_slave import equal_layers
from benchmarks.whole_run import Processes, WholeRun
from dips.outer.pool import BYTES
from dips.telemetry import timeline

LAYERS, SLAVES = 16, 2
TMPFS = Path("/dev/shm")
LEAST = 1 / 2.0  # at most twice gloo's time
SECURE = 1 / 1.15  # at most 1.15 times the plain round
APPLY_BANKS, CLOSING = 5, 0.6  # Apply reads three and writes two
PHASES = ("ask", "push", "measure and fold", "apply", "persist", "commit", "pull", "install and rest")
Mark = Mapping[str, Any]


def measure(bench: Bench) -> None:
    """Two and four clusters, on tmpfs and on disk."""
    numel = (10_000_000 if bench.quick else 100_000_000) // LAYERS * LAYERS
    for clusters in bench.args.clusters:
        bench.say(f"{clusters} clusters, {numel:,} parameters: gloo")
        times = gloo(numel, clusters, bench.runs)
        rounds: dict[str, list[dict[str, float]]] = {}
        for place, directory in (("tmpfs", TMPFS), ("disk", None)):
            bench.say(f"{clusters} clusters: Di-PS with {SLAVES} slaves, snapshots on {place}")
            rounds[place] = dips(numel, clusters, bench.runs, directory)
        bench.say(f"{clusters} clusters: Di-PS with certificates, so that lanes are encrypted")
        secure = dips(numel, clusters, bench.runs, TMPFS, secure=True)
        times += gloo(numel, clusters, bench.runs)
        plain = statistics.median(times)
        bench.row(f"gloo, {clusters} ranks", plain, "s")
        memory_s = APPLY_BANKS * BYTES * numel / triad_rate()
        for place, each in rounds.items():
            _rows(bench, f"{clusters} clusters, {place}", each, plain)
        bench.row(
            f"round with certificates, {clusters} clusters, tmpfs", statistics.median(r["round"] for r in secure), "s",
            against="without", of=statistics.median(r["round"] for r in rounds["tmpfs"]),
            least=SECURE if clusters == min(bench.args.clusters) else None, less=True,
        )  # fmt: skip
        # Space is reserved before Apply; to reserve it on a tmpfs is to fill pages with zeros.
        closing = statistics.median(r["apply"] for r in rounds["disk"])
        bench.row(
            f"closing to Prepared, {clusters} clusters", closing, "s",
            against="its bytes at the triad's rate", of=memory_s, least=CLOSING, less=True,
        )  # fmt: skip
    bench.note(
        "tmpfs, disk: where the snapshots lie; without persist: from the meeting to Prepared and Persisted to the end"
    )
    bench.note("slots = clusters, so that nobody is told Busy; the window closes when all are in")
    bench.note("ask: the grant; measure and fold: what is left of it after the last push; commit: row, flip, Outcome")


def _rows(bench: Bench, what: str, rounds: list[dict[str, float]], plain: float) -> None:
    middle = {name: statistics.median(r[name] for r in rounds) for name in ("round", *PHASES)}
    off = statistics.median(r["round"] - r["persist"] for r in rounds)
    bench.row(f"round without persist, {what}", off, "s", against="gloo", of=plain, least=LEAST, less=True)
    bench.row(f"round, {what}", middle["round"], "s", against="gloo", of=plain, less=True)
    for phase in PHASES:
        bench.row(f"  {phase}, {what}", middle[phase], "s")


def gloo(numel: int, ranks: int, runs: int) -> list[float]:
    """Seconds of each round but the first."""
    with tempfile.TemporaryDirectory() as directory:
        out, processes = Path(directory) / "out.json", Processes(Path(directory))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        try:
            run = processes.start(
                "gloo", [*torchrun, "-m", "benchmarks.gloo_rank", str(numel), str(runs + 1), str(out)]
            )
            processes.wait("gloo", run, 200)
        finally:
            processes.end()
        times: list[float] = json.loads(out.read_text())
    return times[1:]


def dips(numel: int, clusters: int, runs: int, parent: Path | None, secure: bool = False) -> list[dict[str, float]]:
    """The seconds of each round and of its phases, but the first round's."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="dips-bench-") as made:
        directory = Path(made)
        manifest = equal_layers(numel, LAYERS)
        with WholeRun(
            directory / "run", manifest, clusters=clusters, slaves=SLAVES, versions=runs + 1, secure=secure
        ) as run:
            run.finish(250)
            steps = {name: run.lines(name) for name in run.clusters}
            marks = {name: list(timeline.read_marks(run.timeline(name))) for name in run.clusters}
            master = list(timeline.read_marks(run.timeline("master")))
    versions = [f"v{v}@r{v}" for v in range(2, runs + 2)]
    return [phases(version, steps.values(), marks.values(), master) for version in versions]


def phases(
    version: str, steps: Collection[Sequence[Mark]], marks: Iterable[Sequence[Mark]], master: Sequence[Mark]
) -> dict[str, float]:
    """Cut the round that made `version` into what followed one another; raise ValueError if somebody was not in it."""
    own = [step for steps_of in steps for step in steps_of if step["version"] == version]
    if len(own) != len(steps):
        raise ValueError(f"{version}: {len(own)} clusters took part, expected all")
    begun, ended = min(s["begun"] for s in own), max(s["ended"] for s in own)
    seen = [mark for of in marks for mark in of if begun <= mark["at"] <= ended]

    def last(kind: str) -> float:
        return max(float(mark["at"]) for mark in seen if mark["kind"] == kind)

    number = version.partition("@r")[2]
    said = {mark["kind"]: float(mark["at"]) for mark in master if str(mark.get("round")) == number}
    ends = {
        "ask": last("push_begin"), "push": last("push_end"), "measure and fold": said["round_applying"],
        "apply": said["round_persisting"], "persist": said["version_committed"], "commit": last("pull_begin"),
        "pull": last("pull_end"), "install and rest": ended,
    }  # fmt: skip
    cuts = [begun, *(ends[phase] for phase in PHASES)]
    return {"round": ended - begun, **{p: b - a for p, a, b in zip(PHASES, cuts, cuts[1:], strict=False)}}


def arguments(parser: argparse.ArgumentParser) -> None:
    """What only this benchmark is told."""
    parser.add_argument("--clusters", type=int, nargs="+", default=[2, 4], metavar="N", help="how many (2 and 4)")


if __name__ == "__main__":
    main("round", __doc__, measure, arguments)
