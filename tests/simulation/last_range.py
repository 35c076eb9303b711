"""The last data range: restarts at every point of it, and still each sample is trained once and the run is finished.

Ranges are as long as H inner steps, one more or less, or anything else, mostly with a rest that goes with the next one;
there may be one range only, and fewer than clusters. Ranks, trainers, agents, slaves and the master crash and come
back, and agents sleep until their lease is over: at times drawn from when the last range is leased to when all is
settled, or right after a push was committed. No disk is lost: a rollback undoes work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import inf

from dips.codecs import Codec
from dips.ids import PushId
from dips.protocol.effects import Note
from dips.protocol.options import RANGES_HELD, DataOptions, Options, OuterOptions, PenaltyOptions, TimingOptions
from dips.protocol.records import RangesLeased, Record, RunFinished
from dips.sim.heap import Chance
from dips.sim.observer import Observer
from dips.sim.scenario import ClusterShape, DataShape, Scenario
from dips.sim.world import World
from tests.simulation import strikes
from tests.simulation.checks import Invariant
from tests.simulation.sabotage import sabotaged
from tests.simulation.trial import Result, Trial

LASTS_S, QUIET_S = 400.0, 150.0
AFTER_S = 12.0  # the run is over, and nothing comes after it
SPAN_S = 4.0  # after the last range's own inner steps: its last push, window, outer step and pull
STRIKES = (
    strikes.crash_rank, strikes.crash_trainer, strikes.crash_agent, strikes.crash_agent, strikes.pause_agent,
    strikes.crash_master, strikes.crash_slave,
)  # fmt: skip
MOST_STRIKES = 5
AT_A_COMMIT, COMMIT_S = 0.4, 1.0  # of all strikes: within so many seconds after a push was committed


def last_range_scenario(seed: int) -> Scenario:
    """Draw a run that its data ends."""
    rng = Chance(seed).generator_for("last range")
    inner_steps, step_samples = rng.randint(2, 4), rng.choice((1, 3, 4))
    steps = rng.choice((inner_steps - 1, inner_steps, inner_steps, inner_steps + 1, rng.randint(1, 9)))
    rest = rng.choice((0, 0, rng.randrange(step_samples)))
    shape = DataShape(max(1, steps * step_samples + rest), step_samples)
    clusters = tuple(
        ClusterShape(
            rng.choice((1, 2)), 0.12 + 0.3 * rng.random(), overlap=rng.random() < 0.4, restarts=rng.choice((0, 3))
        )
        for _ in range(rng.randint(1, 3))
    )
    ranges = rng.choice((1, max(1, len(clusters) - 1), rng.randint(2, 8)))
    timing = TimingOptions(
        window_s=rng.choice((0.3, 0.6)), heartbeat_s=1.9, lease_heartbeats=4, hang_s=12.0, order_s=4.0,
        compute_s=8.0, transfer_s=12.0, busy_retry_s=0.7,
    )  # fmt: skip
    options = Options(
        OuterOptions(), PenaltyOptions(gates=()), data=DataOptions(ranges=ranges), timing=timing,
        codec=rng.choice((Codec.FP32, Codec.INT8)),
    )  # fmt: skip
    held = Chance(seed).generator_for("ranges held").choice((RANGES_HELD, 1, 3))
    options = replace(options, ranges_held=held)
    return Scenario(
        clusters, slaves=2, layers=2, slots=rng.randint(1, 2), pinned=1, inner_steps=inner_steps, options=options,
        lasts_s=LASTS_S, ranges_at_once=rng.choice((1, 2)), quiet_at=QUIET_S, samples=shape,
    )  # fmt: skip


class LastRangeInvariant(Invariant):
    """Each sample of the data is in a settled push, and the run that has them all is finished."""

    number = 10

    def __init__(self, world: World, shape: DataShape, settled: Mapping[tuple[int, int], PushId]) -> None:
        super().__init__(world)
        self.samples, self.settled = world.options.data.ranges * shape.range_samples, settled
        self.finished_at = inf

    def record_written(self, record: Record) -> None:
        if isinstance(record, RunFinished):
            self.finished_at = self.world.heap.now
            count = len(self.settled)
            self.require(count == self.samples, f"the run is finished with {count} of {self.samples} samples")

    def time_passed(self) -> None:
        if self.world.heap.now > self.finished_at + AFTER_S:
            self.world.stop()

    def at_rest(self) -> None:
        self.require(self.finished_at < inf, f"not finished: {len(self.settled)} of {self.samples} samples are settled")


class LastRangeStrikes(Observer):
    """Restarts whatever there is, from the lease of the last range on."""

    def __init__(self, world: World, span_s: float) -> None:
        self._world, self._span_s, self._planned = world, span_s, False
        self._rng = world.chance.generator_for("last range/strikes")
        self._armed = 0  # strikes that wait for a commit
        self.count = 0

    def record_written(self, record: Record) -> None:
        last = self._world.options.data.ranges - 1
        if isinstance(record, RangesLeased) and last in record.ranges and not self._planned:
            self._planned = True
            for _ in range(self._rng.randint(1, MOST_STRIKES)):
                if self._rng.random() < AT_A_COMMIT:
                    self._armed += 1
                else:
                    self._strike_within(self._span_s)

    def note_logged(self, note: Note) -> None:
        if note.kind == "push_committed" and self._armed:
            self._armed -= 1
            self._strike_within(COMMIT_S)

    def _strike_within(self, seconds: float) -> None:
        strike = self._rng.choice(STRIKES)
        at = seconds * self._rng.random()
        self._world.call_later(at, f"fault {strike.__name__}", partial(self._strike, strike))

    def _strike(self, strike: strikes.Strike) -> None:
        self.count += 1
        strike(self._world, self._rng)


def play_last_range(task: tuple[int, str | None]) -> Result:
    """Play one seed, perhaps with a rule broken."""
    seed, sabotage = task
    scenario = last_range_scenario(seed)
    assert scenario.samples is not None
    steps = 2 * scenario.samples.range_samples / scenario.samples.step_samples
    with sabotaged(sabotage):
        trial = Trial(World(seed, scenario))
        struck = LastRangeStrikes(trial.world, SPAN_S + steps * max(shape.step_s for shape in scenario.clusters))
        result = trial.run([LastRangeInvariant(trial.world, scenario.samples, trial.samples.settled), struck])
    result.faults = struck.count
    return result
