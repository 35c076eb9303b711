"""Long work: every constant shrunk, so that all that grows with a model lasts five times what guards it.

Inner steps, transfers, measures, folds, outer steps, snapshots and loads. Even seeds run without faults: nothing may be
lost by time alone, so no push is dropped, no round skipped, no slave lost. Odd ones meet faults: every invariant holds,
and the run goes on when they have stopped.
"""

from __future__ import annotations

from dataclasses import replace

from dips.protocol.effects import Note
from dips.protocol.options import TimingOptions
from dips.sim.heap import Chance
from dips.sim.scenario import ClusterShape, Scenario
from dips.sim.world import World
from tests.simulation.checks import Invariant
from tests.simulation.drawn import scenario_of
from tests.simulation.sabotage import sabotaged
from tests.simulation.trial import Failure, Result, Trial

TIMES = 5
GUARD_S = 2.0  # of an order, of a silent transfer, of a trainer that may hang
LASTS_S = 700.0
FAULTS_S = 300.0  # of an odd seed: faults strike in so many seconds, and then heals what they did
PATIENCE = 9.0  # times the bounds of Liveness, which are those of short work
LEAST_VERSIONS = {True: 3, False: 1}  # without faults, with


def ends_silently(seed: int) -> bool:
    """Whether each snapshot of this seed ends with an fsync that reports nothing, for five times an order's guard."""
    return bool(seed // 4 % 2)


def long_scenario(seed: int) -> Scenario:
    """Draw a run of two slaves and two or three clusters."""
    rng, drawn = Chance(seed).generator_for("long"), scenario_of(seed)
    timing = TimingOptions(
        window_s=0.6, heartbeat_s=1.0, lease_heartbeats=4, hang_s=GUARD_S, order_s=GUARD_S,
        compute_s=2 * TIMES * GUARD_S if ends_silently(seed) else GUARD_S,  # a disk that is silent for longer hangs
        transfer_s=GUARD_S, least_transfer_s=GUARD_S, busy_retry_s=0.7,
    )  # fmt: skip
    shapes = tuple(
        ClusterShape(rng.randint(1, 2), TIMES * GUARD_S * (1.0 + 0.3 * rng.random()), overlap=rng.random() < 0.5)
        for _ in range(rng.randint(2, 3))
    )
    if seed // 2 % 2:  # who overlaps moves in fragments, an inner step apart: links are idle for longer than the guards
        shapes = tuple(replace(shape, fragments=3 if shape.overlap else 1) for shape in shapes)
    options = replace(drawn.options, timing=timing, stop=replace(drawn.options.stop, versions=0))
    chunk_s = 0.8 * GUARD_S
    return replace(
        drawn,
        clusters=shapes,
        slaves=2,
        slots=len(shapes) - (seed % 3 == 2),  # in a third of the seeds there are fewer: they wait for one another
        layers=rng.randint(12, 14),
        inner_steps=2,
        options=options,
        lasts_s=LASTS_S,
        quiet_at=FAULTS_S if seed % 2 else 0.0,
        steady=not seed % 2,
        work_s=TIMES * GUARD_S,
        stall_s=GUARD_S,
        chunk_s=chunk_s,
    )


class NothingLostInvariant(Invariant):
    """Where nothing fails, time alone ends nothing."""

    number = 12
    ENDS = ("push_dropped", "round_skipped", "slave_lost", "cluster_gone")

    def note_logged(self, note: Note) -> None:
        self.require(note.kind not in self.ENDS, f"{note.kind} without any fault: {dict(note.fields)}")


class LongTrial(Trial):
    """The run of a long seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(World(seed, long_scenario(seed)), PATIENCE)
        for machine in self.world.machines.values() if ends_silently(seed) else ():
            machine.disk.fsync_s = TIMES * GUARD_S

    def play(self) -> Result:
        """Play it, with faults or without."""
        steady = self.world.scenario.steady
        result = self.run([NothingLostInvariant(self.world)] if steady else [], None if steady else self.faults.plan)
        if result.failure is None and result.versions < LEAST_VERSIONS[steady]:
            result.failure = Failure(12, f"it made {result.versions} versions", tuple(self.world.trace.lines()))
        return result


def play_long(task: tuple[int, str | None]) -> Result:
    """Play one long seed, perhaps with a rule broken."""
    seed, sabotage = task
    with sabotaged(sabotage):
        return LongTrial(seed).play()
