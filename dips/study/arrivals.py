"""The emulator fed with the arrivals of another run, to compute that run's results again.

The real run's ledger tells which pushes each round took, in which order, trained from which version and for how long.
The emulator's clusters take the same inner steps on the same batches, its Coordinator judges, weighs and merges them by
the same rules, and each version must be equal bit for bit. tests/integration/test_arrivals.py checks this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import xxhash

from dips.codecs import Codec
from dips.errors import ConfigError
from dips.outer import kernels
from dips.protocol.enums import LayerUnit
from dips.protocol.options import DataOptions, Options, StopOptions
from dips.protocol.records import Record, RoundEnded, VersionCommitted
from dips.sim.agent import SimAgent
from dips.sim.arrivals import Arrival, ArrivalWorld, find_settled
from dips.sim.observer import Observer
from dips.sim.site import Site
from dips.slave.ports import F32
from dips.study.emulator import RANGES, make_scenario
from dips.study.fleet import Arrays, Fleet
from dips.study.learner import LearnedModel, Recipe
from dips.study.task import Task

WINDOW_S = 1.0  # a round's commits arrive at one moment, so any window takes them all
ROUND_S = 60.0  # virtual time per round beside its inner steps: more than any round takes


@dataclass(frozen=True, slots=True)
class EmulatedVersion:
    """A version: its row, and xxh3-128 of each layer's θ and m, as in a slave's snapshot."""

    row: VersionCommitted
    theta: tuple[str, ...]
    momentum: tuple[str, ...]


def emulate_arrivals(
    task: Task,
    fleet: Fleet,
    recipe: Recipe,
    rounds: Sequence[tuple[Arrival, ...]],
    seed: int,
    options: Options,
    layers: LayerUnit = LayerUnit.BLOCK,
) -> list[EmulatedVersion]:
    """Make the versions of the rounds from their pushes. Raises ConfigError if the rounds cannot be reproduced.

    fleet   clusters with the names in the arrivals; the arrivals determine when they push
    recipe  its schedule follows versions: a cluster that trains on version v of n is at v/n
    """
    torch.set_num_threads(1)
    model = _PlannedModel(task, recipe, seed, fleet.names, layers=layers)
    steps, versions = sum(push.inner_steps for pushes in rounds for push in pushes), sum(map(_is_applied, rounds))
    timing = replace(options.timing, window_s=WINDOW_S)
    options = replace(options, stop=StopOptions(versions=versions), data=DataOptions(ranges=RANGES), timing=timing)
    lasts_s = ROUND_S * len(rounds) + steps * max(member.step_s for member in fleet.members)
    world = ArrivalWorld(seed, make_scenario(fleet, options, lasts_s, Codec.FP32), rounds, model, kernels)
    watch = _Watch(world, model, rounds, versions)
    world.run([world.door, watch])
    if watch.rounds:
        raise ConfigError(f"arrivals: {len(rounds) - len(watch.rounds)} of {len(rounds)} rounds could be made again")
    return watch.versions


def _is_applied(pushes: tuple[Arrival, ...]) -> bool:
    return any(push.base is not None for push in pushes)


class _PlannedModel(LearnedModel):
    """A model whose learning rate follows the version that a cluster trains on, which a ledger records."""

    def __init__(self, task: Task, recipe: Recipe, seed: int, names: tuple[str, ...], *, layers: LayerUnit) -> None:
        super().__init__(task, recipe, seed, names, layers=layers)
        self.progress = dict.fromkeys(names, 0.0)

    def take_inner_step(self, site: Site, theta: Arrays, progress: float) -> float:
        return super().take_inner_step(site, theta, self.progress[site.name])


class _Watch(Observer):
    """An observer that keeps every version, and compares each round with the expected one."""

    def __init__(
        self, world: ArrivalWorld, model: _PlannedModel, rounds: Sequence[tuple[Arrival, ...]], versions: int
    ) -> None:
        self._world, self._model, self._of_versions = world, model, versions
        self.rounds = deque(rounds)  # to come
        self.versions: list[EmulatedVersion] = []

    def pull_installed(self, agent: SimAgent) -> None:
        assert agent.base is not None
        self._model.progress[agent.name] = agent.base.version / self._of_versions

    def record_written(self, record: Record) -> None:
        if not isinstance(record, VersionCommitted | RoundEnded) or not find_settled(record):
            return
        self._compare_folds(record)
        if isinstance(record, VersionCommitted):
            self._keep_version(record)
        if not self.rounds:
            self._world.stop()

    def _compare_folds(self, record: VersionCommitted | RoundEnded) -> None:
        folds = record.folds if isinstance(record, VersionCommitted) else ()
        made = [Arrival(f.push.cluster, f.tokens, f.inner_steps, f.base) for f in folds]
        wanted = [push for push in self.rounds.popleft() if push.base is not None]
        if made != wanted:
            what = record.version if isinstance(record, VersionCommitted) else f"round {record.round}"
            raise ConfigError(f"arrivals: {what} was made of {wanted}; emulated, it is of {made}")

    def _keep_version(self, record: VersionCommitted) -> None:
        theta: dict[int, F32] = {}
        momentum: dict[int, F32] = {}
        for machine in self._world.machines.values():
            assert machine.process is not None
            theta |= dict(machine.process.versions.theta(record.version))
            momentum |= dict(machine.process.versions.momentum(record.version))
        self.versions.append(EmulatedVersion(record, _digest_layers(theta), _digest_layers(momentum)))


def _digest_layers(layers: dict[int, F32]) -> tuple[str, ...]:
    return tuple(xxhash.xxh3_128_hexdigest(layers[i].tobytes()) for i in sorted(layers))
