"""When what goes wrong: at any time, or at the moments that chance alone would seldom hit; then nothing any more.

Each kind draws from its own generator, so that a new one moves no other. A fault may wait for a moment: while a push or
a pull moves, behind a commit, while a version is being persisted, around its row. What strikes, and how often, is said
by a mix (mix.py).
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
from tests.simulation.crossings import CROSSINGS
from tests.simulation.mix import ANY_TIME, DEATHS, Mix
from tests.simulation.strikes import OPERATOR_S, Strike

CROSSED_FROM, CROSSED_TO = 0.15, 0.85  # of the time with faults: a crossing needs something before it, and after it


class Faults(Observer):
    """Plans the faults of one world until its `quiet_at`."""

    def __init__(self, world: World, mix: Mix) -> None:
        self.world, self.mix = world, mix
        self.count = 0
        self.dead: set[str] = set()  # clusters that stay dead, cut off or hung: nobody waits for what they do
        self._armed: dict[str, list[tuple[float, Strike]]] = {}

    def plan(self, world: World) -> None:
        """Plan every fault now, so that nothing that happens moves the ones to come."""
        rng, mix = self.world.chance.generator_for("faults"), self.mix
        names, weights = list(mix.any_time), list(mix.any_time.values())
        at = mix.first_s * (1.0 + rng.random())
        while at < self.world.scenario.quiet_at:
            moment, name, choice = rng.random(), rng.choices(names, weights)[0], rng.choice(mix.moments)
            if moment < mix.at_a_moment:
                self.world.call_later(at, f"a fault waits for a {choice[0]}", partial(self._arm, *choice))
            else:
                self.world.call_later(at, f"fault {name}", partial(self._strike, ANY_TIME[name]))
            at += mix.gap_s * (1.0 + rng.random())
        self._plan_crossings()
        self.world.call_later(self.world.scenario.quiet_at, "the faults stop", self._stop)

    def _plan_crossings(self) -> None:
        """Each kind draws by itself whether this seed meets it, and when."""
        for name, strike in CROSSINGS.items():
            share = self.mix.crossings.get(name, 0.0)
            rng = self._rng(name)
            meets, moment = rng.random() < share, rng.uniform(CROSSED_FROM, CROSSED_TO)
            if meets:
                at = self.world.scenario.quiet_at * moment
                self.world.call_later(at, f"crossing {name}", partial(self._strike, strike))

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
        """Everything is mended and everybody lives; but what this mix has die for good."""
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
                machine.process.loop.continue_process()
        for cluster in world.clusters.values():
            cluster.site.diverged = 0
            for agent in cluster.live_agents:
                agent.gate.open()
            cluster.start()
        for zombie in list(world.master.zombies):
            zombie.loop.continue_process()
        if world.master.disk.is_old_copy:
            world.put_newest_ledger_back()
        world.start_master()
        world.wake_master()
        if self.mix.stays:
            self.dead.update(DEATHS[self.mix.stays](world, self._rng("for good")))
