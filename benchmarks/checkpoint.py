"""An asynchronous checkpoint during an outer step against either alone: neither delays the other by more than a tenth.

A real master, slave, agent and two FSDP2 ranks under torchrun that save by `torch.distributed.checkpoint.async_save`,
gloo. The cluster's link is shaped by `tc tbf` and its disk takes a fixed rate, so that each alone lasts seconds of
little work: what is measured is whether one waits for the other (a lock, a collective), not how many cores there are.
What the cores cost is measured beside it, without a promise: the same with neither shaped. Seconds of an outer step are
those from the call to the new version, window included; training is sleep.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.harness import Bench, main
from benchmarks.lone_slave import equal_layers
from benchmarks.namespaces import End, missing, network
from benchmarks.whole_run import SITE, WholeRun

LAYERS, RANKS, STEP_S = 6, 2, 0.02
LEAST = 1 / 1.1
RUNS = 3  # of some 25 s each; a slow machine does not change what the link and the disk take
WITHIN_S = 240.0
TORCHRUN = ("--nproc-per-node", str(RANKS), "--master-addr", "127.0.0.1", "--master-port")
PORT = 29517  # where the namespace is the cluster's own


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured; `mbit` and `disk_bps` of 0: as much as the machine has."""

    name: str
    numel: int
    mbit: float
    disk_bps: float
    least: float | None


CASES = (
    # 8 MB: 3.3 s each way at 20 Mbit/s; each rank saves its half in as long as both ways take. Under `overlap: full`
    # the ranks look at what moves every half second, so shorter ones would measure that.
    Case("shaped", 2_040_000, 20.0, 0.6e6, LEAST),
    Case("loopback, own disk", 16_000_000, 0.0, 0.0, None),
)


class CheckpointRun(WholeRun):
    """A run of one cluster, whose ranks save; they end it."""

    def __init__(self, directory: Path, case: Case, overlap: str, hosts: dict[str, End]) -> None:
        super().__init__(directory, equal_layers(case.numel, LAYERS), clusters=1, slaves=1, versions=0, hosts=hosts)
        self._case, self._overlap = case, overlap

    @property
    def found(self) -> Path:
        return self.meeting / "found.jsonl"

    def _start_cluster(self, name: str) -> subprocess.Popen[bytes]:
        case, file = self._case, self.directory / f"{name}.yaml"
        cluster = {
            "shared": self._shared, "cluster": name, "master": self._address, "pace": {"steps": 1_000_000},
            "directory": name, "tls": False, "max_restarts": 0, "overlap": self._overlap,
        }  # fmt: skip
        file.write_text(yaml.safe_dump(cluster))
        words = [self.found, LAYERS, case.numel // LAYERS, STEP_S, case.disk_bps, RUNS]
        torchrun = ["env", "GLOO_SOCKET_IFNAME=lo", sys.executable, "-m", "torch.distributed.run", *TORCHRUN, str(PORT)]
        trainer = [*torchrun, "-m", "benchmarks.checkpoint_rank", *map(str, words)]
        return self._start(name, self._hosts[name], "dips.client.app", "--config", str(file), "--", *trainer)


def measure(bench: Bench) -> None:
    """Both cases, both ways to overlap."""
    bench.skip_if(missing())
    for case in CASES[:1] if bench.quick else CASES:
        for overlap in ("none", "full"):
            bench.say(f"{case.name}, overlap: {overlap}")
            lines = lived(case, overlap)
            for what, said in (("step", "outer step beside a save"), ("save", "save beside an outer step")):
                alone, both = (median(line[how][what] for line in lines) for how in ("alone", "both"))
                bench.row(
                    f"{said}, {case.name}, overlap: {overlap}", both, "s",
                    against="alone", of=alone, least=case.least, less=True,
                )  # fmt: skip
    shaped = CASES[0]
    bench.note(
        f"shaped: {shaped.mbit:g} Mbit/s, {4 * shaped.numel / 1e6:.1f} MB over {RANKS} ranks, each of "
        f"which writes {shaped.disk_bps / 1e6:g} MB/s; an outer step is push, window, update, snapshot and pull"
    )


def lived(case: Case, overlap: str) -> list[dict[str, Any]]:
    """Let one cluster take its turns; return what rank 0 wrote of each."""
    with ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dips-bench-")))
        hosts = stack.enter_context(network({SITE: None, "c0": case.mbit or None}))
        run = stack.enter_context(CheckpointRun(made / "run", case, overlap, hosts))
        run.finish(WITHIN_S)
        return [json.loads(line) for line in run.found.read_text().splitlines()]


if __name__ == "__main__":
    main("checkpoint", __doc__, measure)
