"""A run of a peer: peer_rank.py on each cluster's host, and its coordinator on the host `master`.

The processes are ended by their own pids on exit; what they print lies in `<name>.log`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.namespaces import LINK, End
from benchmarks.peer_rank import OuterStepSeen, PeerPlan
from benchmarks.whole_run import Processes, free_port
from tests.chaos.predict import LR, MOMENTUM


@dataclass(frozen=True, slots=True)
class PeerWork:
    """What all of its clusters do."""

    clusters: int
    numel: int
    inner_steps: int
    step_s: float


class PeerRun:
    """`hosts` are named master, c0, c1, …; a process keeps its files in the directory of its name."""

    def __init__(self, system: str, python: Path, work: PeerWork, directory: Path, hosts: Mapping[str, End]) -> None:
        self.directory, self._hosts, self._system, self._python = directory, hosts, system, python
        self._work, self.clusters = work, [f"c{i}" for i in range(work.clusters)]
        self._address = f"{hosts['master'].ip}:{free_port()}"
        for name in ("master", *self.clusters):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self.processes = Processes(directory)

    def __enter__(self) -> Self:
        try:
            for name in ("master", *self.clusters):
                self.start(name)
        except BaseException:
            self.processes.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.processes.end()

    def start(self, name: str) -> object:
        """Start the coordinator or a cluster, once more if it was killed."""
        plan = PeerPlan(
            system=self._system, rank=self.clusters.index(name) if name in self.clusters else -1,
            coordinator=self._address, ip=self._hosts[name].ip, steps=str(self.directory / f"{name}.steps"),
            directory=str(self.directory / name), meeting=str(self.directory / "master"), lr=LR, momentum=MOMENTUM,
            **asdict(self._work),
        )  # fmt: skip
        words = [str(self._python), "-m", "benchmarks.peer_rank", json.dumps(asdict(plan))]
        return self.processes.start(name, self._hosts[name].command("env", f"GLOO_SOCKET_IFNAME={LINK}", *words))

    def steps(self) -> dict[str, list[OuterStepSeen]]:
        """The outer steps that each cluster has seen."""
        return {name: read_steps(self.directory / f"{name}.steps") for name in self.clusters}


def read_steps(path: Path) -> list[OuterStepSeen]:
    """The outer steps of a cluster, oldest first."""
    return [OuterStepSeen(*line) for line in read_lines(path)]


def read_lines(path: Path) -> list[Any]:
    """Lines of JSON; the last may be torn by its writer's death, or be still written."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
