"""A trial: one simulated world with every invariant looking on, and what was found."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dips.protocol.effects import Note
from dips.sim.observer import Observer
from dips.sim.scenario import Scenario
from dips.sim.world import Plan, World
from tests.simulation.accounts import (
    DataInvariant,
    OnceInvariant,
    SamplesInvariant,
    TokensInvariant,
    WholeInstallsInvariant,
)
from tests.simulation.checks import Violation
from tests.simulation.coverage import Coverage
from tests.simulation.drawn import FAULTS_S, QUIET_S, scenario_of
from tests.simulation.extensions import ExtendingOperator, TargetsInvariant
from tests.simulation.fairness import QueueInvariant
from tests.simulation.faults import Faults
from tests.simulation.fencing import FencingInvariant, MemoryInvariant, MonotoneInvariant
from tests.simulation.forgeries import ForgeryInvariant
from tests.simulation.indexes import IndexInvariant
from tests.simulation.liveness import LeaseInvariant, LivenessInvariant, ReadmissionInvariant
from tests.simulation.memory import LedgerMemoryInvariant
from tests.simulation.mix import Mix, ordinary
from tests.simulation.numerics import FiniteInvariant
from tests.simulation.operators import OperatorInvariant, TuningOperator
from tests.simulation.sabotage import SABOTAGES, sabotaged
from tests.simulation.versions import AuthorityInvariant, CommitInvariant, DurableInvariant, LineageInvariant

LEAST_ROUNDS, ENOUGH_ROUNDS = 5, 21
LEAST_QUIET_S = 28.0  # longer than a slot may leak, a lease and every deadline: what was left of the faults is over


@dataclass(frozen=True)
class Failure:
    """What was found: `number` of the invariant, or None for an error of the code itself."""

    number: int | None
    what: str
    trace: tuple[str, ...]


@dataclass
class Result:
    """How one seed went."""

    seed: int
    events: int = 0
    faults: int = 0
    failure: Failure | None = None
    kinds: dict[str, int] = field(default_factory=dict)  # notes of the Coordinators, counted
    seen: tuple[str, ...] = ()  # rows of coverage.py

    @property
    def versions(self) -> int:
        """Outer steps made, those that were undone too."""
        return self.kinds.get("version_committed", 0)

    @property
    def rounds(self) -> int:
        """Rounds that came to their end: applied or unchanged; skipped ones do not count."""
        return self.versions + self.kinds.get("round_unchanged", 0)


class NoteCounter(Observer):
    """Counts what the Coordinators wrote to the log."""

    def __init__(self, kinds: dict[str, int]) -> None:
        self._kinds = kinds

    def note_logged(self, note: Note) -> None:
        self._kinds[note.kind] = self._kinds.get(note.kind, 0) + 1


class Enough(Observer):
    """Ends a seed that has done what it is worth, when everybody has healed and gone on for long enough to trust it.

    One that heals slowly, or not at all, is played to its end, where the bounds of Liveness are.
    """

    def __init__(self, world: World, result: Result, liveness: LivenessInvariant) -> None:
        self._world, self._result, self._liveness = world, result, liveness

    def time_passed(self) -> None:
        quiet_s, rounds = (self._world.heap.now - FAULTS_S) / self._liveness.patience, self._result.rounds
        healed = quiet_s > LEAST_QUIET_S and rounds >= ENOUGH_ROUNDS and self._liveness.healed()
        if healed or (quiet_s >= QUIET_S and rounds >= LEAST_ROUNDS):
            self._world.stop()


class Trial:
    """A world, and everybody who looks on."""

    def __init__(self, world: World, patience: float = 1.0, mix: Mix = Mix()) -> None:
        """`patience`: times the bounds of Liveness, where links are slow by plan; `mix`: what the world may meet."""
        self.world, self.result = world, Result(world.seed)
        self.lineage, self.liveness = LineageInvariant(world), LivenessInvariant(world, patience)
        self.queue, self.samples = QueueInvariant(world), SamplesInvariant(world)
        self.faults, self.coverage = Faults(world, mix), Coverage(world)
        self.liveness.dead = self.faults.dead
        others = (
            AuthorityInvariant, CommitInvariant, DurableInvariant, OnceInvariant, FencingInvariant,
            WholeInstallsInvariant, TokensInvariant, DataInvariant, MonotoneInvariant, MemoryInvariant,
            LeaseInvariant, ReadmissionInvariant, IndexInvariant, TargetsInvariant, OperatorInvariant,
            LedgerMemoryInvariant,
        )  # fmt: skip
        numerics = FiniteInvariant(world, self.lineage.reference)
        self.invariants = [
            self.lineage,
            self.liveness,
            self.queue,
            self.samples,
            numerics,
            *(make(world) for make in others),
        ]

    def run(self, observers: Sequence[Observer] = (), plan: Plan | None = None) -> Result:
        """Play the world to its end, or to the first thing that is not as it must be."""
        result, world = self.result, self.world
        everybody = [*self.invariants, self.faults, self.coverage, NoteCounter(result.kinds), *observers]
        try:
            world.run(everybody, plan)
        except Violation as violation:
            result.failure = Failure(violation.number, str(violation), tuple(world.trace.lines()))
        except Exception as error:  # noqa: BLE001 (an error of the code under test is a finding, whatever its class)
            result.failure = Failure(None, f"{type(error).__name__}: {error}", tuple(world.trace.lines()))
        result.events, result.faults, result.seen = world.heap.events, self.faults.count, tuple(self.coverage.seen)
        return result

    def digest(self) -> str:
        """Fingerprint of everything that was made: equal for two runs of one seed."""
        parts = [f"{v} {c.bytes_of}" for v, c in self.lineage.reference.versions.items()]
        return hashlib.sha256("\n".join([str(self.world.heap.events), *parts]).encode()).hexdigest()


class SeedTrial(Trial):
    """The run of a seed: drawn shape, planned faults, and an end when it has shown enough."""

    def __init__(self, seed: int, scenario: Scenario | None = None, mix: Mix | None = None) -> None:
        mix = mix or ordinary(seed)
        world = World(seed, mix.apply_to(scenario or scenario_of(seed), seed))
        world.network.weather = mix.weather
        super().__init__(world, mix.patience, mix)

    def run(self, observers: Sequence[Observer] = (), plan: Plan | None = None) -> Result:
        planners = (ExtendingOperator(self.world), TuningOperator(self.world), ForgeryInvariant(self.world))

        def plan_all(world: World) -> None:
            self.faults.plan(world)
            for planner in planners:
                planner.plan()

        return super().run([Enough(self.world, self.result, self.liveness), *planners, *observers], plan or plan_all)


def play(task: tuple[int, str | None], mix: Callable[[int], Mix] = ordinary) -> Result:
    """Play one seed, perhaps with a rule broken, which then says what the seed meets."""
    seed, name = task
    broken = SABOTAGES[name] if name else None
    with sabotaged(name), _without_gc():
        if broken is not None:
            return SeedTrial(seed, broken.scenario(seed), broken.mix(seed)).run()
        return SeedTrial(seed, mix=mix(seed)).run()


@contextmanager
def _without_gc() -> Iterator[None]:
    """A world is small and soon over: to look for garbage in it meanwhile takes a tenth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
