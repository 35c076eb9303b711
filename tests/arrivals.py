"""A world that replays the arrivals of another run: which pushes were made, and which round took them.

Each cluster pushes after as many inner steps as in the other run, and the commits of a round are held back from the
master until all are there; they are delivered together, in the other run's order. Everything else is the world's own.
So the results of another run can be computed again, and compared bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import xxhash

from dips.client.agent.account import Pace
from dips.codecs import Codec
from dips.errors import ConfigError
from dips.ids import PushId, VersionId
from dips.outer import kernels
from dips.outer.kernel_pool import Kernels
from dips.protocol.effects import Pending
from dips.protocol.enums import LayerUnit, OutcomeKind
from dips.protocol.events import PushFinished
from dips.protocol.heartbeats import ClusterHeartbeat
from dips.protocol.options import DataOptions, Options, StopOptions
from dips.protocol.records import FoldRow, OutcomeRow, Record, RoundEnded, VersionCommitted
from dips.sim.agent import SimAgent
from dips.sim.network import Answer, ShownCall, SimHost
from dips.sim.observer import Observer
from dips.sim.scenario import Scenario, Site
from dips.sim.work import SimModel
from dips.sim.world import World
from dips.slave.ports import F32
from dips.study.emulator import RANGES, make_scenario
from dips.study.fleet import Arrays, Fleet
from dips.study.learner import LearnedModel, Recipe
from dips.study.task import Task

NEVER = 1 << 30  # inner steps, and seconds of a step, of a cluster without further pushes
PATIENCE_S = 1.0  # a commit before its turn is answered Pending after this time, and repeated
SETTLED_HEARTBEATS = 1.5  # least time for which a commit is held: until its push is staged on every slave, and a
# heartbeat has reported its tokens. Otherwise the master would let it wait, and others would overtake it
NO_RATE = 0.0  # reported for every link: by its rate a held commit would be late, and would keep no window open


@dataclass(frozen=True, slots=True)
class Arrival:
    """One push that a round of the other run has settled."""

    cluster: str
    tokens: int
    inner_steps: int
    base: VersionId | None = None  # None: unknown, since the ledger does not record it for gated pushes


class SettledRound(Protocol):
    """A round as a ledger records it (RoundHistory, VersionCommitted)."""

    @property
    def folds(self) -> tuple[FoldRow, ...]: ...
    @property
    def outcomes(self) -> tuple[OutcomeRow, ...]: ...


def read_arrivals(rounds: Iterable[SettledRound]) -> list[tuple[Arrival, ...]]:
    """Return the pushes of each round, in the order of folding, then the gated ones; skipped rounds are omitted."""
    read = []
    for each in rounds:
        folded = [Arrival(f.push.cluster, f.tokens, f.inner_steps, f.base) for f in each.folds]
        gated = [o for o in each.outcomes if o.kind is OutcomeKind.GATED]
        read.append((*folded, *(Arrival(o.push.cluster, o.tokens, o.inner_steps) for o in gated)))
    return [pushes for pushes in read if pushes]


def find_settled(record: VersionCommitted | RoundEnded) -> list[str]:
    """Return the clusters whose pushes a round has settled; empty for a skipped round."""
    return [o.push.cluster for o in record.outcomes if o.kind is not OutcomeKind.SKIPPED]


class PlannedPace(Pace):
    """A pace by which a push is due after the number of inner steps that is first in `plan`."""

    def __init__(self, plan: deque[int]) -> None:
        super().__init__(steps=1)
        self._plan = plan

    def look_in(self, now: float) -> int:
        """Return the inner steps until the push is due; 0: it is due."""
        return max(0, self._plan[0] - self.since_push) if self._plan else NEVER


@dataclass
class PlannedSite(Site):
    """A cluster whose pushes are known in advance."""

    plan: deque[int] = field(default_factory=deque)  # inner steps of the pushes that are not settled yet

    def make_pace(self, inner_steps: int) -> Pace:
        return PlannedPace(self.plan)

    def draw_step_s(self) -> float:
        return super().draw_step_s() if self.plan else float(NEVER)


class ArrivalWorld(World):
    """A world whose clusters make the pushes of `rounds`, and whose rounds take those pushes."""

    def __init__(
        self, seed: int, scenario: Scenario, rounds: Sequence[tuple[Arrival, ...]], model: SimModel, kernels: Kernels
    ) -> None:
        self._rounds = rounds
        super().__init__(seed, scenario, model, kernels)
        self.door = _Door(self, self.master, rounds)
        self.network.attach_host("master", self.door)

    def make_site(self, number: int) -> Site:
        site = super().make_site(number)
        own = (push.inner_steps for pushes in self._rounds for push in pushes if push.cluster == site.name)
        return PlannedSite(**vars(site), plan=deque(own))


class _Door(Observer):
    """Receives messages for the master's machine, and holds commits until all of their round are there."""

    def __init__(self, world: World, master: SimHost, rounds: Iterable[tuple[Arrival, ...]]) -> None:
        self._world, self._master = world, master
        self._rounds = deque(tuple(push.cluster for push in pushes) for pushes in rounds)
        self._held: dict[str, tuple[PushFinished, Answer]] = {}  # the newest commit of each cluster
        self._came: dict[PushId, float] = {}  # when each commit first came
        self._passed: set[PushId] = set()
        self._taken = False  # the commits of the present round were delivered
        self._settled_s = SETTLED_HEARTBEATS * world.options.timing.heartbeat_s

    def on_message(self, sender: str, message: Any, answer: Answer) -> None:
        """Deliver or hold a message, as a SimHost; no certificate is asked for."""
        message = message.message if isinstance(message, ShownCall) else message
        if isinstance(message, ClusterHeartbeat):
            message = replace(message, bytes_per_s=NO_RATE)
        if not isinstance(message, PushFinished) or message.push in self._passed:
            self._master.on_message(sender, message, answer)
            return
        self._held[sender] = message, answer
        self._came.setdefault(message.push, self._world.heap.now)
        self._world.call_later(PATIENCE_S, "a commit waits for its turn", partial(self._put_off, message, answer))
        self._world.call_later(self._settled_s, "a commit may come", self._let_in)

    def record_written(self, record: Record) -> None:
        """Release the next round's commits when a round is settled."""
        settled = find_settled(record) if isinstance(record, VersionCommitted | RoundEnded) else []
        if not settled:
            return
        for name in settled:
            site = self._world.clusters[name].site
            assert isinstance(site, PlannedSite)
            site.plan.popleft()
        self._rounds.popleft()
        self._taken = False
        self._world.call_later(0.0, "the next round's commits", self._let_in)

    def _let_in(self) -> None:
        """Deliver all commits of a round at once: the window that the first one opens takes the others."""
        if self._taken or not self._rounds or not all(map(self._is_settled, self._rounds[0])):
            return
        self._taken = True
        for name in self._rounds[0]:
            message, answer = self._held.pop(name)
            self._passed.add(message.push)
            self._master.on_message(name, message, answer)

    def _is_settled(self, cluster: str) -> bool:
        held = self._held.get(cluster)
        return held is not None and self._world.heap.now >= self._came[held[0].push] + self._settled_s

    def _put_off(self, message: PushFinished, answer: Answer) -> None:
        if message.push not in self._passed:
            answer(Pending("its turn has not come"))


# ---- emulation -------------------------------------------------------------------------------------------------------
# The emulator's clusters take the same inner steps on the same batches, its Coordinator judges, weighs and merges them
# by the same rules, and each version must be equal bit for bit.

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
