"""When what goes wrong: at any time, or at the moments that chance alone would seldom hit; then nothing any more.

Each kind draws from its own generator, so that a new one moves no other. A fault may wait for a moment: while a push or
a pull moves, behind a commit, while a version is being persisted, around its row.
"""

from __future__ import annotations

from functools import partial
from random import Random

from dips.ids import PullId, PushId
from dips.protocol.effects import Note
from dips.protocol.records import Record, VersionCommitted
from dips.sim.agent import SimAgent
from dips.sim.observer import Observer
from dips.sim.world import World
from tests.simulation import strikes
from tests.simulation.strikes import OPERATOR_S, Strike

FIRST_S, GAP_S = 4.0, 3.8  # until the first fault, between two; at most double

# What strikes at any time, and how often beside the others.
ANY_TIME: dict[str, tuple[int, Strike]] = {
    "crash_agent": (2, strikes.crash_agent),
    "leave": (1, strikes.leave),
    "crash_trainer": (1, strikes.crash_trainer),
    "crash_rank": (1, strikes.crash_rank),
    "hang": (1, strikes.hang),
    "zombie_agent": (2, strikes.zombie_agent),
    "pause_agent": (1, strikes.pause_agent),
    "diverge": (3, strikes.diverge),
    "crash_slave": (2, strikes.crash_slave),
    "pause_slave": (1, strikes.pause_slave),
    "full_disk": (3, strikes.full_disk),
    "slow_disk": (1, strikes.slow_disk),
    "rot": (1, strikes.rot),
    "old_snapshots": (1, strikes.old_snapshots),
    "lose_disk": (2, strikes.lose_disk),
    "lose_mirror": (1, strikes.lose_mirror),
    "slow_mirror": (1, strikes.slow_mirror),
    "crash_master": (2, strikes.crash_master),
    "pause_master": (2, strikes.pause_master),
    "zombie_master": (2, strikes.zombie_master),
    "slow_ledger": (1, strikes.slow_ledger),
    "full_ledger": (1, strikes.full_ledger),
    "old_ledger": (1, strikes.old_ledger),
    "lose_ledger": (2, strikes.lose_ledger),
    "cut": (3, strikes.cut),
    "clog": (1, strikes.clog),
    "cut_data": (1, strikes.cut_data),
    "clog_data": (2, strikes.clog_data),
    "partition": (1, strikes.partition),
    "whole_room": (1, strikes.whole_room),
}

# (moment, after it at most so many seconds, what strikes)
MOMENTS: tuple[tuple[str, float, Strike], ...] = (
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
AT_A_MOMENT = 0.4  # of all faults


class Faults(Observer):
    """Plans the faults of one world until its `quiet_at`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.count = 0
        self._armed: dict[str, list[tuple[float, Strike]]] = {}

    def plan(self, world: World) -> None:
        """Plan every fault now, so that nothing that happens moves the ones to come."""
        rng = self.world.chance.generator_for("faults")
        names, weights = list(ANY_TIME), [weight for weight, _ in ANY_TIME.values()]
        at = FIRST_S * (1.0 + rng.random())
        while at < self.world.scenario.quiet_at:
            moment, name, choice = rng.random(), rng.choices(names, weights)[0], rng.choice(MOMENTS)
            if moment < AT_A_MOMENT:
                self.world.call_later(at, f"a fault waits for a {choice[0]}", partial(self._arm, *choice))
            else:
                self.world.call_later(at, f"fault {name}", partial(self._strike, ANY_TIME[name][1]))
            at += GAP_S * (1.0 + rng.random())
        self.world.call_later(self.world.scenario.quiet_at, "the faults stop", self._stop)

    def _arm(self, moment: str, within_s: float, strike: Strike) -> None:
        self._armed.setdefault(moment, []).append((within_s, strike))

    def _at(self, moment: str) -> None:
        waiting = self._armed.get(moment)
        if waiting:
            within_s, strike = waiting.pop()
            what = f"fault {strike.__name__} at a {moment}"
            self.world.call_later(within_s * self._rng("moment").random(), what, partial(self._strike, strike))

    def _strike(self, strike: Strike) -> None:
        if self.world.heap.now < self.world.scenario.quiet_at:
            self.count += 1
            strike(self.world, self._rng(strike.__name__))

    def _rng(self, kind: str) -> Random:
        return self.world.chance.generator_for(f"fault/{kind}")

    # ---- the moments -----------------------------------------------------------------------------------------------

    def push_begun(self, agent: SimAgent, push: PushId) -> None:
        self._at("push")

    def pull_begun(self, agent: SimAgent, pull: PullId) -> None:
        self._at("pull")

    def note_logged(self, note: Note) -> None:
        if note.kind == "push_committed":
            self._at("commit")
        elif note.kind == "round_persisting":
            self._at("persist")
        elif note.kind == "stopped":
            self.world.call_later(
                OPERATOR_S, "the operator mends the disks, and starts the master again", self._mend_disks
            )

    def rare_event_occurred(self, what: str) -> None:
        if what == "old_ledger":
            put_back = self.world.put_newest_ledger_back
            self.world.call_later(OPERATOR_S, "the operator puts the newest ledger back", put_back)

    def _mend_disks(self) -> None:
        for machine in self.world.machines.values():
            machine.disk.repair_disk()
        self.world.crash_master()
        self.world.start_master()

    def record_written(self, record: Record) -> None:
        if isinstance(record, VersionCommitted):
            self._at("row")

    def _stop(self) -> None:
        """Everything is mended and everybody lives."""
        self._armed.clear()
        world = self.world
        world.network.repair_links()
        world.data.repair_links()
        world.master.disk.repair_disk()
        strikes.restore_if_all_is_lost(world)
        for machine in world.machines.values():
            machine.disk.repair_disk()
            if machine.mirror is not None:
                machine.mirror.repair_mirror()
            machine.start()
            if machine.process is not None:
                machine.process.gate.open()
        for cluster in world.clusters.values():
            cluster.site.diverged = 0
            for agent in cluster.live_agents:
                agent.gate.open()
            cluster.start()
        for zombie in list(world.master.zombies):
            zombie.wake_process()
        if world.master.disk.is_old_copy:
            world.put_newest_ledger_back()
        world.start_master()
        world.wake_master()
