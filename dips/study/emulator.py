"""One run of real models in virtual time: the real Coordinator, ledger, agents' minds, data flow and outer step."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean

import torch

from dips.ids import GENESIS, VersionId
from dips.protocol.effects import Note
from dips.protocol.options import DataOptions, Options, OuterOptions, PenaltyOptions, StopOptions, TimingOptions
from dips.protocol.records import Record, VersionCommitted
from dips.sim.observer import Observer
from dips.sim.scenario import ClusterShape, Scenario
from dips.sim.world import World
from dips.slave.ports import F32
from dips.study.learner import LearnedModel, Recipe

CHUNK_BYTES = 1 << 16
HEARTBEAT_S = 4.0  # of virtual time: an inner step takes about one
SLOTS = 4
FOREVER_S = 1e7
RANGES = 1 << 20  # more than any study's inner steps: each takes one


@dataclass(frozen=True, slots=True)
class Fleet:
    """The clusters of a run: what an inner step takes on each, and when they push."""

    step_s: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    inner_steps: int = 32
    aligned: bool = False
    overlap: bool = False
    jitter: float = 0.1  # of step_s


@dataclass(slots=True)
class Emulated:
    """What came of a run."""

    loss: float = float("nan")  # of the last version, nats per byte
    tokens: int = 0  # accepted
    lasted_s: float = 0.0  # of virtual time
    versions: int = 0
    clipped: int = 0
    gated: int = 0
    staleness: list[int] = field(default_factory=list)  # of each accepted push
    shares: dict[str, int] = field(default_factory=dict)  # accepted tokens by cluster
    steps: dict[str, int] = field(default_factory=dict)  # inner steps by cluster

    @property
    def effective_clusters(self) -> float:
        """1/Σshare²."""
        total = sum(self.shares.values())
        return 1.0 / sum((tokens / total) ** 2 for tokens in self.shares.values()) if total else 0.0

    @property
    def mean_staleness(self) -> float:
        return mean(self.staleness) if self.staleness else 0.0


class _Account(Observer):
    """Keeps what the ledger says, and ends the world with the run."""

    def __init__(self, world: World, result: Emulated) -> None:
        self._world, self._result, self._finished = world, result, False
        self.head: VersionId = GENESIS

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self._result.versions += 1
            self._result.clipped += record.clipped
            for fold in record.folds:
                self._result.staleness.append(record.parent.version - fold.base.version)
                shares = self._result.shares
                shares[fold.push.cluster] = shares.get(fold.push.cluster, 0) + fold.tokens
                self._result.tokens += fold.tokens
            self.head = record.version

    def note_logged(self, note: Note) -> None:
        if note.kind == "push_gated":
            self._result.gated += 1
        self._finished = self._finished or note.kind == "run_finished"

    def time_passed(self) -> None:
        if self._finished and all(
            m.process is not None and m.process.versions.served_version == self.head
            for m in self._world.machines.values()
        ):
            self._world.stop()


def emulate(
    fleet: Fleet,
    recipe: Recipe,
    tokens: int,
    seed: int,
    outer: OuterOptions | None = None,
    penalty: PenaltyOptions | None = None,
) -> Emulated:
    """Train until `tokens` are accepted, in virtual time; the same arguments give the same bits."""
    torch.set_num_threads(1)
    model, result = LearnedModel(recipe, seed), Emulated()
    world = World(seed, _make_scenario(fleet, tokens, outer, penalty), model)
    account = _Account(world, result)
    world.run([account])
    result.lasted_s, result.steps = world.heap.now, model.steps
    result.loss = model.evaluate(_read_head(world, account.head))
    return result


def _make_scenario(fleet: Fleet, tokens: int, outer: OuterOptions | None, penalty: PenaltyOptions | None) -> Scenario:
    timing = TimingOptions(heartbeat_s=HEARTBEAT_S, hang_s=10_000.0)
    options = Options(
        outer=outer or OuterOptions(),
        penalty=penalty or PenaltyOptions(),
        stop=StopOptions(tokens=tokens),
        data=DataOptions(ranges=RANGES),
        timing=timing,
    )
    aligned = fleet.inner_steps if fleet.aligned else 0
    shapes = tuple(
        ClusterShape(1, step_s, aligned_steps=aligned, overlap=fleet.overlap, jitter=fleet.jitter)
        for step_s in fleet.step_s
    )
    return Scenario(
        shapes, slaves=2, layers=4, slots=SLOTS, pinned=2, inner_steps=fleet.inner_steps, options=options,
        lasts_s=FOREVER_S, ranges_at_once=fleet.inner_steps, chunk_bytes=CHUNK_BYTES, run="study",
    )  # fmt: skip


def _read_head(world: World, head: VersionId) -> dict[int, F32]:
    found: dict[int, F32] = {}
    for machine in world.machines.values():
        assert machine.process is not None
        found |= dict(machine.process.versions.theta(head))
    return found
