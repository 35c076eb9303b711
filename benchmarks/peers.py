"""An outer round of Di-PS beside those of peers that a user would take instead, and what a killed worker costs.

Four clusters as processes on hosts of their own behind links of 100 Mbit/s (namespaces.py), inner steps that are slept,
one model of equal bytes; each peer is installed by pip into an environment of its own (peer_environments.py) and does
what peer_rank.py says. One cluster is killed by SIGKILL and started again after 2 s.

Measured are the seconds that the outer loop takes of a round (median over clusters and rounds), the bytes on a
cluster's link in a round, the memory at the peak of a cluster's processes and of those that serve, the longest outer
step of the others after the kill, and when the killed one took part again. A peer that does not install, or whose
rounds stop, is a row that says so. hivemind looks for a group for at least 5 s, its default.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import namespaces
from benchmarks.harness import Bench, main
from benchmarks.lone_slave import equal_layers
from benchmarks.namespaces import End
from benchmarks.peer_environments import CACHE, PEERS, make_environment
from benchmarks.peer_rank import LAYERS, OuterStepSeen, PeerPlan
from benchmarks.peer_run import PeerRun, PeerWork, read_steps
from benchmarks.whole_run import Processes, WholeRun
from tests.chaos.predict import LR, MOMENTUM

SYSTEMS = ("ours", "gloo", "torchft", "hivemind", "flower")
CLUSTERS, SLAVES = 4, 2
LINK_MBIT = 100.0
INNER_STEPS, STEP_S = 10, 0.1
PARAMETERS, QUICK_PARAMETERS = 4_000_000, 400_000
ROUNDS, QUICK_ROUNDS, SETTLING = 10, 4, 2
AFTER = 5  # outer steps of each of the others after the kill
DEAD_S = 2.0
WITHIN_S = 240.0


class PeersRun(WholeRun):
    """Ours, with the trainer of peer_rank.py; `slaves` on hosts of their own."""

    def __init__(self, work: PeerWork, directory: Path, hosts: Mapping[str, End]) -> None:
        super().__init__(
            directory, equal_layers(work.numel, LAYERS), clusters=work.clusters, slaves=SLAVES, versions=0,
            window_s=None, hosts=hosts,
        )  # fmt: skip
        self._work, self.processes = work, self._processes

    def steps(self) -> dict[str, list[OuterStepSeen]]:
        """The outer steps that each cluster has seen."""
        return {name: read_steps(self.meeting / f"{name}.steps") for name in self.clusters}

    def _keys(self, name: str) -> dict[str, Any]:
        return {"pace": {"aligned": INNER_STEPS}, "max_restarts": 1000}

    def _words(self, name: str) -> list[str]:
        plan = PeerPlan(
            system="ours", rank=self.clusters.index(name), coordinator="", ip="", directory="", meeting="",
            steps=str(self.meeting / f"{name}.steps"), lr=LR, momentum=MOMENTUM, **asdict(self._work),
        )  # fmt: skip
        return ["benchmarks.peer_rank", json.dumps(asdict(plan))]


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """What one system showed; None: its rounds stopped, or the killed one did not take part again."""

    round_s: float
    moved: float  # bytes on a cluster's link in a round
    cluster_peak: int
    server_peak: int
    worst_s: float | None
    back_s: float | None


def live(system: str, python: Path | None, work: PeerWork, rounds: int) -> PeerSeen:
    """Run one system, kill a cluster; raise RuntimeError if the first rounds do not come within WITHIN_S."""
    servers = ["master", *(f"ps{i}" for i in range(SLAVES if system == "ours" else 0))]
    names = [*servers, *(f"c{i}" for i in range(work.clusters))]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dips-bench-"))) / "run"
        hosts = stack.enter_context(namespaces.network(dict.fromkeys(names, LINK_MBIT)))
        run: PeersRun | PeerRun = (
            PeersRun(work, directory, hosts)
            if system == "ours"
            else PeerRun(system, python or Path(sys.executable), work, directory, hosts)
        )
        stack.enter_context(run)
        if not _until(run, dict.fromkeys(run.clusters, SETTLING + rounds)):
            raise RuntimeError(
                f"not {SETTLING + rounds} outer steps within {WITHIN_S:g} s: {_last_words(run.processes)}"
            )
        calm = {name: each[SETTLING:] for name, each in run.steps().items()}
        peaks = {name: run.processes.peak_memory(name) for name in names}
        *others, victim = run.clusters
        killed = run.processes.kill(victim)
        time.sleep(DEAD_S)
        run.start(victim)
        seen = {name: len(each) for name, each in run.steps().items()}
        went_on = _until(run, {name: seen[name] + AFTER for name in others})
        came_back = _until(run, {victim: seen[victim] + 1})
        after = run.steps()
    inner_s = work.inner_steps * work.step_s
    gaps = [
        second.at - first.at - inner_s  # the time of attempts that failed is in no line
        for name in others
        for first, second in pairwise(after[name])
        if second.at > killed
    ]
    back = [step.at - killed for step in after[victim] if step.at > killed and step.took_part]
    return PeerSeen(
        round_s=median(step.took_s for each in calm.values() for step in each),
        moved=median((each[-1].moved - each[0].moved) / (len(each) - 1) for each in calm.values()),
        cluster_peak=max(peaks[name] for name in run.clusters),
        server_peak=sum(peaks[name] for name in servers),
        worst_s=max(gaps) if went_on else None,
        back_s=min(back) if came_back and back else None,
    )


def _until(run: PeersRun | PeerRun, counts: Mapping[str, int]) -> bool:
    """Wait until these clusters have seen so many outer steps; return whether they did within WITHIN_S."""
    over = time.monotonic() + WITHIN_S
    while any(len(run.steps()[name]) < count for name, count in counts.items()):
        if time.monotonic() > over:
            return False
        time.sleep(0.2)
    return True


def _last_words(processes: Processes) -> str:
    logs = (file.read_text(errors="replace").strip() for file in sorted(processes.directory.glob("*.log")))
    return next((log.splitlines()[-1] for log in logs if log), "nothing was printed")


def measure(bench: Bench) -> None:
    """Each system in turn."""
    bench.skip_if(namespaces.missing())
    numel = bench.args.parameters or (QUICK_PARAMETERS if bench.quick else PARAMETERS)
    work = PeerWork(CLUSTERS, numel, INNER_STEPS, STEP_S)
    ours: PeerSeen | None = None
    for system in bench.args.system or SYSTEMS:
        python, reason = make_environment(system, bench.args.environments, bench.say) if system in PEERS else (None, "")
        if reason:
            bench.row(f"{system}: {reason}", 0.0, "")
            continue
        bench.say(f"{system}: {numel:,} parameters, {CLUSTERS} clusters")
        try:
            seen = live(system, python, work, QUICK_ROUNDS if bench.quick else ROUNDS)
        except RuntimeError as error:
            bench.row(f"{system}: {error}", 0.0, "")
            continue
        ours = seen if system == "ours" else ours
        _report(bench, system, seen, ours)
    bench.note(f"{numel:,} fp32 parameters, links of {LINK_MBIT:g} Mbit/s, {INNER_STEPS} inner steps of {STEP_S:g} s")


def _report(bench: Bench, system: str, seen: PeerSeen, ours: PeerSeen | None) -> None:
    for what, field, unit in (
        ("seconds of an outer round", "round_s", "s"),
        ("bytes on a cluster's link in a round", "moved", "B"),
        ("memory of a cluster's processes at the peak", "cluster_peak", "B"),
        ("memory of what serves", "server_peak", "B"),
        ("longest outer step of the others after a kill", "worst_s", "s"),
        ("the killed one takes part again after", "back_s", "s"),
    ):
        value = getattr(seen, field)
        if value is None:
            bench.row(f"{what}, {system}: not within {WITHIN_S:g} s", 0.0, "")
            continue
        of = getattr(ours, field) if ours is not None and system != "ours" else None
        bench.row(f"{what}, {system}", value, unit, against="ours" if of else "", of=of)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--parameters", type=int)
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="all by default; may be repeated")
    parser.add_argument("--environments", type=Path, default=CACHE, metavar="DIRECTORY", help=f"of peers; {CACHE}")


if __name__ == "__main__":
    main("peers", __doc__, measure, add_arguments)
