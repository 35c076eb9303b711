"""What one seed meets: which faults, how often, at which moments, in which weather, and under which deadlines.

An ordinary seed meets everything, at fixed weights and under fixed deadlines. A seed of the swarm draws all of that for
itself: half of the faults and moments are left out, so that those which remain meet in ways that no fixed mix would
ever let them (Groce et al., Swarm Testing, ISSTA 2012). In a seed of the core, something is dead for good when the
faults stop, and the rest must go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from dips.sim.heap import Chance
from dips.sim.network import Weather
from dips.sim.scenario import Scenario
from tests.simulation import strikes
from tests.simulation.crossings import DRAWN, FEW_RANGES, SHORT_LINEAGE
from tests.simulation.drawn import DEADLINES, FAULTS_S, MORE_S, QUIET_S
from tests.simulation.strikes import Death, Strike

Moment = tuple[str, float, Strike]

# What strikes at any time.
ANY_TIME: dict[str, Strike] = {
    "crash_agent": strikes.crash_agent,
    "leave": strikes.leave,
    "crash_trainer": strikes.crash_trainer,
    "crash_rank": strikes.crash_rank,
    "hang": strikes.hang,
    "zombie_agent": strikes.zombie_agent,
    "pause_agent": strikes.pause_agent,
    "diverge": strikes.diverge,
    "crash_slave": strikes.crash_slave,
    "pause_slave": strikes.pause_slave,
    "full_disk": strikes.full_disk,
    "slow_disk": strikes.slow_disk,
    "rot": strikes.rot,
    "old_snapshots": strikes.old_snapshots,
    "lose_disk": strikes.lose_disk,
    "lose_mirror": strikes.lose_mirror,
    "slow_mirror": strikes.slow_mirror,
    "crash_master": strikes.crash_master,
    "pause_master": strikes.pause_master,
    "zombie_master": strikes.zombie_master,
    "slow_ledger": strikes.slow_ledger,
    "full_ledger": strikes.full_ledger,
    "old_ledger": strikes.old_ledger,
    "lose_ledger": strikes.lose_ledger,
    "cut": strikes.cut,
    "clog": strikes.clog,
    "cut_data": strikes.cut_data,
    "clog_data": strikes.clog_data,
    "partition": strikes.partition,
    "whole_room": strikes.whole_room,
}

# How often beside the others in an ordinary seed; once, where nothing is said.
WEIGHTS = {
    **dict.fromkeys(ANY_TIME, 1),
    "crash_agent": 2,
    "zombie_agent": 2,
    "diverge": 3,
    "crash_slave": 2,
    "full_disk": 3,
    "lose_disk": 2,
    "crash_master": 2,
    "pause_master": 2,
    "zombie_master": 2,
    "lose_ledger": 2,
    "cut": 3,
    "clog_data": 2,
}

# (moment, after it at most so many seconds, what strikes)
MOMENTS: tuple[Moment, ...] = (
    ("push", 1.2, strikes.crash_rank),
    ("push", 1.2, strikes.crash_agent),
    ("push", 1.2, strikes.crash_slave),
    ("push", 1.2, strikes.crash_master),
    ("push", 0.6, strikes.zombie_agent),
    ("pull", 0.4, strikes.crash_rank),
    ("pull", 0.4, strikes.crash_rank),
    ("pull", 0.5, strikes.crash_slave),
    ("commit", 0.8, strikes.crash_agent),
    ("commit", 1.5, strikes.crash_slave),
    ("persist", 0.5, strikes.crash_master),
    ("persist", 0.5, strikes.crash_slave),
    ("persist", 0.5, strikes.zombie_master),
    ("persist", 0.4, strikes.whole_room),
    ("row", 0.2, strikes.crash_master),
    ("row", 0.3, strikes.crash_slave),
    ("row", 0.02, strikes.cut_slave),
    ("persist", 0.4, strikes.cut_slave),
    ("persist", 0.4, strikes.cut_slave),
)

# What dies for good when the faults stop, in a seed of the core.
DEATHS: dict[str, Death] = {
    "a dead cluster": strikes.kill_for_good,
    "a cluster that is cut off": strikes.cut_for_good,
    "a cluster that hangs": strikes.hang_for_good,
    "a mirror": strikes.lose_mirror_for_good,
}

Deadlines = Mapping[str, float]  # of TimingOptions, by field
# What a seed of the swarm draws from; no choice makes a deadline shorter than a message or a piece of work may last.
DEADLINES_DRAWN: Mapping[str, tuple[float, ...]] = {
    "heartbeat_s": (0.5, 1.0, 1.9, 3.0),
    "lease_heartbeats": (3, 4, 5, 8),
    "hang_s": (4.0, 12.0, 20.0),
    "order_s": (2.0, 4.0, 9.0),
    "compute_s": (4.0, 8.0, 16.0),
    "transfer_s": (6.0, 12.0, 24.0),
    "least_transfer_s": (10.0, 30.0),
    "busy_retry_s": (0.2, 0.7, 2.0),
}
LINEAGE_KEPT = 3  # versions, in a seed with a short lineage: a master forgets what a run of a night would
RANGES_HELD = 3  # in a seed in which clusters may hold few
STALLS_S = (None, 4.0, 6.0, 10.0)  # a transfer that owes a byte for so long is over


@dataclass(frozen=True)
class Mix:
    """What one seed meets. Seconds, and shares."""

    any_time: Mapping[str, int] = field(default_factory=lambda: WEIGHTS)
    moments: tuple[Moment, ...] = MOMENTS
    first_s: float = 4.0  # until the first fault; at most double
    gap_s: float = 3.8  # between two; at most double
    at_a_moment: float = 0.4  # of all faults
    weather: Weather = field(default_factory=Weather)
    deadlines: Deadlines = field(default_factory=lambda: DEADLINES)
    stall_s: float | None = None
    crossings: Mapping[str, float] = field(default_factory=lambda: DRAWN)  # the share of seeds that meet each
    stays: str = ""  # of DEATHS: what is not mended when the faults stop

    @property
    def patience(self) -> float:
        """How many times longer than ordinary a wait may last.

        Every bound of Liveness is a sum of deadlines, each some times. If no deadline is more than p times the ordinary
        one, no such sum is. The weather adds nothing: it clears when the faults stop.
        """
        heartbeats = self.deadlines["heartbeat_s"], self.deadlines["lease_heartbeats"]
        ratios = [self.deadlines[key] / usual for key, usual in DEADLINES.items() if key != "lease_heartbeats"]
        lease = heartbeats[0] * heartbeats[1] / (DEADLINES["heartbeat_s"] * DEADLINES["lease_heartbeats"])
        return max(1.0, lease, *ratios)

    def apply_to(self, scenario: Scenario, seed: int) -> Scenario:
        """The same run under this mix's deadlines, and as long as they make it; perhaps with a short memory."""
        timing = replace(scenario.options.timing, **dict(self.deadlines))
        lasts_s = FAULTS_S + (QUIET_S + MORE_S) * self.patience
        options = replace(scenario.options, timing=timing)
        if Chance(seed).generator_for(SHORT_LINEAGE).random() < self.crossings.get(SHORT_LINEAGE, 0.0):
            options = replace(options, lineage_kept=LINEAGE_KEPT)
        if Chance(seed).generator_for(FEW_RANGES).random() < self.crossings.get(FEW_RANGES, 0.0):
            options = replace(options, ranges_held=RANGES_HELD)
        return replace(scenario, options=options, lasts_s=lasts_s, stall_s=scenario.stall_s or self.stall_s)


def ordinary(seed: int) -> Mix:
    """Everything at fixed weights."""
    return Mix()


def former(seed: int) -> Mix:
    """As seeds were before there were crossings: those that are kept were found so."""
    return Mix(crossings={})


# Agents are stopped by SIGTERM again and again, and nothing else happens.
LEAVING = Mix(any_time={"leave": 1}, at_a_moment=0.0, gap_s=1.0, crossings={})


def crossed(*names: str) -> Mix:
    """As seeds were before, and each meets these crossings."""
    return Mix(crossings=dict.fromkeys(names, 1.0))


def swarm(seed: int) -> Mix:
    """Half of the faults and moments; weights, gaps, weather and deadlines as they fall."""
    rng = Chance(seed).generator_for("swarm")
    kinds = {name: rng.choice((1, 3, 10)) for name in ANY_TIME if rng.random() < 0.5}
    moments = tuple(moment for moment in MOMENTS if rng.random() < 0.5)
    return Mix(
        any_time=kinds or {rng.choice(list(ANY_TIME)): 1},
        moments=moments or (rng.choice(MOMENTS),),
        first_s=rng.choice((0.5, 4.0, 12.0)),
        gap_s=rng.choice((1.0, 2.0, 3.8, 8.0)),
        at_a_moment=rng.choice((0.1, 0.4, 0.9)),
        weather=_weather(rng),
        deadlines={key: rng.choice(values) for key, values in DEADLINES_DRAWN.items()},
        stall_s=rng.choice(STALLS_S),
    )


def _weather(rng: Random) -> Weather:
    return Weather(
        delay_s=rng.choice((0.001, 0.02, 0.1)),
        spread_s=rng.choice((0.0, 0.05, 0.3)),
        slow_share=rng.choice((0.0, 0.03, 0.1)),
        lost_share=rng.choice((0.0, 0.03, 0.1)),
        doubled_share=rng.choice((0.0, 0.05, 0.3)),
    )


def core(seed: int) -> Mix:
    """Something stays dead: every other seed in the ordinary mix, the others in one of the swarm."""
    stays = Chance(seed).generator_for("core").choice(list(DEATHS))
    return replace(swarm(seed) if seed % 2 else ordinary(seed), stays=stays)
