"""A training script whose inner steps have a length of their own: what the outer loop costs is the time beyond it.

    timed_rank.py CLUSTER MEETING PLAN        (a Plan as JSON)

An inner step touches every parameter once and sleeps until its length is over, so that two cores carry four clusters.
Standstill is all time in calls of `step`, and what inner steps end late by beside which something of the outer loop
moves; other steps that end late are the machine's, which would make them late without an outer loop.

The clusters meet, take `warm` outer steps on demand (links are measured, kernels compile), meet and train.
Writes to MEETING/CLUSTER.jsonl a Stretch for each version that is installed, and at the end what memory the outer loop
took. Between two stretches the clock stands still while the agent's own seconds are read.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from typing import Protocol

import torch

from benchmarks.accelerator import take_device
from benchmarks.namespaces import LINK
from benchmarks.outer_rank import BenchModel, meet
from dips.client import OuterLoop
from dips.ids import VersionId

WAKE_S = 0.5e-3  # before a step's end: a sleep ends late by some tenths of that
MOST_BATCH, CALIBRATION_STEPS = 1 << 20, 20  # of real steps
DRIFT_S = 1.0  # jitter is drawn anew after so much of training: drawn at each step it would be gone in the mean


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """What a rank is told."""

    clusters: int  # that meet
    layers: int
    numel: int  # of a layer
    step_s: float
    jitter: float = 0.0  # share by which the steps' length wanders, up and down
    warm: int = 0  # outer steps before the first stretch
    stretches: int = 0  # after so many it leaves; 0: at the end of the run
    train_s: float = 0.0  # after so long it leaves; 0: see `stretches`
    metrics: str = ""  # host:port of the agent's
    device: str = "cpu"  # on any other the steps are real, about as long as `step_s`, and nothing sleeps


@dataclass(slots=True)
class Stretch:
    """Training from one installed version to the next."""

    version: int = 0
    ended: float = 0.0  # Unix seconds
    steps: int = 0
    planned_s: float = 0.0  # the steps' lengths
    late_s: float = 0.0  # that the machine made them longer by
    slowed_s: float = 0.0  # that steps were longer by beside which a push or pull moved
    calls: list[float] = field(default_factory=list)  # seconds in each call of `step`
    spent: dict[str, float] = field(default_factory=dict)  # by cause, as the agent says
    moved: int = 0  # bytes on the host's own link, both ways; 0: it has none

    @property
    def alone_s(self) -> float:
        """What the steps would have taken without an outer loop."""
        return self.planned_s + self.late_s

    @property
    def standstill_s(self) -> float:
        return sum(self.calls) + self.slowed_s


class Lengths:
    """How long the next inner step is."""

    def __init__(self, plan: TimedPlan, seed: str) -> None:
        self._plan, self._rng = plan, random.Random(seed)
        self._factor, self._left_s = 1.0, 0.0

    def next_s(self) -> float:
        if self._left_s <= 0:
            self._factor = 1.0 + self._plan.jitter * self._rng.uniform(-1.0, 1.0)
            self._left_s = DRIFT_S
        length_s = self._plan.step_s * self._factor
        self._left_s -= length_s
        return length_s


class Memory:
    """Host and device memory of this process above what it has now."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._resident = _status("VmRSS")
        self._device = torch.accelerator.is_available()
        if self._device:
            torch.accelerator.reset_peak_memory_stats()
            self._allocated = torch.accelerator.memory_allocated()

    def beyond(self) -> dict[str, int | None]:
        """Bytes at the peak; no device, no number."""
        device = torch.accelerator.max_memory_allocated() - self._allocated if self._device else None
        return {"host": _status("VmHWM") - self._resident, "device": device}


class SleptSteps:
    """Inner steps that touch every parameter once and sleep until their length is over."""

    def __init__(self, plan: TimedPlan, seed: str) -> None:
        self._lengths = Lengths(plan, seed)

    def take_step(self, model: BenchModel) -> float:
        """Take one; return its length."""
        length_s, begun = self._lengths.next_s(), time.perf_counter()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-6)
        over = begun + length_s
        time.sleep(max(0.0, over - time.perf_counter() - WAKE_S))
        while time.perf_counter() < over:
            pass
        return length_s


class RealSteps:
    """Inner steps on an accelerator: forward, backward and AdamW of the layers as matrices, of a fitting batch.

    Its length is the median of some steps before there is an outer loop.
    """

    def __init__(self, model: BenchModel, step_s: float) -> None:
        first = next(model.parameters())
        self._width = int(first.numel() ** 0.5)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        self._length_s = 0.0
        self._batch = torch.randn(64, self._width, device=first.device)
        while self._time_steps(model, 3) < step_s and self._batch.shape[0] < MOST_BATCH:
            self._batch = self._batch.repeat(2, 1)
        self._length_s = self._time_steps(model, CALIBRATION_STEPS)

    def take_step(self, model: BenchModel) -> float:
        """Take one; return the length that it has alone."""
        x, square = self._batch, self._width**2
        for parameter in model.parameters():
            x = torch.tanh(x @ parameter[:square].view(self._width, self._width))
        x.square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch.accelerator.synchronize()
        return self._length_s

    def _time_steps(self, model: BenchModel, count: int) -> float:
        took = []
        for _ in range(count):
            begun = time.perf_counter()
            self.take_step(model)
            took.append(time.perf_counter() - begun)
        return median(took)


def warm_up(outer: OuterLoop, model: BenchModel, steps: SleptSteps | RealSteps) -> None:
    """Take one outer step, at once."""
    base = outer.version
    while outer.version == base:
        steps.take_step(model)
        outer.step(tokens=1)
        if not outer.moving and outer.version == base:
            outer.push()


def main(name: str, meeting: Path, plan: TimedPlan) -> None:
    model = BenchModel(plan.layers, plan.numel).to(take_device(plan.device, 0))
    steps: SleptSteps | RealSteps = SleptSteps(plan, name) if plan.device == "cpu" else RealSteps(model, plan.step_s)
    memory = Memory()
    with OuterLoop(model) as outer, (meeting / f"{name}.jsonl").open("w", buffering=1) as out:
        for number in range(plan.warm):
            meet(meeting, name, plan.clusters, number)
            warm_up(outer, model, steps)
        meet(meeting, name, plan.clusters, plan.warm)
        before, number = spent(plan.metrics), 0
        over = time.perf_counter() + (plan.train_s or inf)
        while not outer.finished and (number < plan.stretches or not plan.stretches) and time.perf_counter() < over:
            stretch = train(outer, model, steps)
            now = spent(plan.metrics)
            stretch.spent = {cause: seconds - before[cause] for cause, seconds in now.items()}
            before, number = now, number + 1
            out.write(json.dumps(asdict(stretch)) + "\n")
        out.write(json.dumps(memory.beyond()) + "\n")
        if plan.stretches or plan.train_s:  # the first to leave must not disturb the last round of the others
            meet(meeting, name, plan.clusters, plan.warm + 1)


class TimedOuter(Protocol):
    """The part of OuterLoop by which training is timed."""

    version: VersionId
    finished: bool
    moving: bool

    def step(self, *, tokens: int) -> object: ...


def train(outer: TimedOuter | OuterLoop, model: BenchModel, steps: SleptSteps | RealSteps) -> Stretch:
    """Train until another version is installed."""
    stretch, base, moved = Stretch(), outer.version, count_moved()
    while outer.version == base and not outer.finished:
        moving, begun = outer.moving, time.perf_counter()
        length_s = steps.take_step(model)
        called = time.perf_counter()
        outer.step(tokens=1)
        stretch.calls.append(time.perf_counter() - called)
        stretch.steps, stretch.planned_s = stretch.steps + 1, stretch.planned_s + length_s
        beyond_s = called - begun - length_s
        stretch.slowed_s += beyond_s if moving else 0.0
        stretch.late_s += 0.0 if moving else beyond_s
    stretch.version, stretch.ended, stretch.moved = outer.version.version, time.time(), count_moved() - moved
    return stretch


def count_moved() -> int:
    """Return the bytes that this host's link has moved, both ways; 0 without a link of its own."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(row[1]) + int(row[9]) for line in lines if (row := line.split())[0] == f"{LINK}:"), 0)


def spent(address: str) -> dict[str, float]:
    """Seconds by cause since its start, as the agent told Prometheus at most a second ago; sums of rounds even out."""
    if not address:
        return {}
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    rows = (line.split() for line in lines if line.startswith('dips_agent_seconds_total{cause="'))
    return {row[0].split('"')[1]: float(row[1]) for row in rows}


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), TimedPlan(**json.loads(sys.argv[3])))
