"""What goes wrong, and when: crashes of everybody, pauses, partitions, bad content, full disks; then nothing any more.

Each kind draws from its own generator. Some strike at a moment that chance alone would seldom hit: around the row of a
version, while a snapshot is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from dips.protocol.effects import Note
from dips.sim.watch import Listener

if TYPE_CHECKING:
    from dips.sim.world import World

FIRST_S, GAP_S = 6.0, 4.5  # until the first fault, between two; at most double
DOWN_S = 4.0  # a process that crashed is started again after at most so long, or half of it


class Faults(Listener):
    """Plans the faults of one world until its `quiet_at`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.count = 0
        self._armed: list[Callable[[], None]] = []  # strike when the next version is being persisted
        self._kinds: list[tuple[str, Callable[[], None]]] = [
            ("crash_cluster", self._crash_cluster),
            ("leave", self._leave),
            ("crash_trainer", self._crash_trainer),
            ("crash_slave", self._crash_slave),
            ("crash_master", self._crash_master),
            ("pause_master", self._pause_master),
            ("cut", self._cut),
            ("diverge", self._diverge),
            ("disk_full", self._disk_full),
            ("master_at_row", lambda: self._armed.append(self._crash_master)),
            ("slave_at_persist", lambda: self._armed.append(self._crash_slave)),
        ]

    def plan(self) -> None:
        """Plan every fault now, so that nothing that happens moves the ones to come."""
        rng = self.world.chance.of("faults")
        at = FIRST_S * (1.0 + rng.random())
        while at < self.world.quiet_at:
            name, strike = rng.choice(self._kinds)
            self.world.later(at, f"fault {name}", partial(self._strike, strike))
            at += GAP_S * (1.0 + rng.random())
        self.world.later(self.world.quiet_at, "the faults stop", self._stop)

    def noted(self, note: Note) -> None:
        if note.kind == "round_persisting" and self._armed:
            strike = self._armed.pop()
            self.world.later(1.2 * self._rng("strike").random(), "fault at the row", strike)

    def _strike(self, strike: Callable[[], None]) -> None:
        self.count += 1
        strike()

    def _stop(self) -> None:
        """Everything is mended and everybody lives."""
        self._armed.clear()
        world = self.world
        world.network.mend()
        world.data.mend()
        for machine in world.machines.values():
            machine.disk.full = False
            machine.start()
        for site in world.sites.values():
            site.diverged = 0
            site.start()
        world.master.start()
        world.wake_master()

    def _crash_cluster(self) -> None:
        rng = self._rng("crash_cluster")
        site = rng.choice(list(self.world.sites.values()))
        site.crash()
        self._again(rng.random(), f"{site.name} starts again", site.start)

    def _leave(self) -> None:
        rng = self._rng("leave")
        site = rng.choice(list(self.world.sites.values()))
        site.leave()
        self._again(rng.random(), f"{site.name} starts again", site.start)

    def _crash_trainer(self) -> None:
        self._rng("crash_trainer").choice(list(self.world.sites.values())).crash_trainer()

    def _crash_slave(self) -> None:
        rng = self._rng("crash_slave")
        machine = rng.choice(list(self.world.machines.values()))
        machine.crash()
        self._again(rng.random(), f"{machine.name} starts again", machine.start)

    def _crash_master(self) -> None:
        rng = self._rng("crash_master")
        self.world.crash_master()
        self._again(rng.random(), "the master starts again", self.world.start_master)

    def _pause_master(self) -> None:
        rng = self._rng("pause_master")
        self.world.pause_master()
        lease = self.world.options.timing.lease_s
        self.world.later(lease * (0.2 + 1.5 * rng.random()), "the master wakes", self.world.wake_master)

    def _cut(self) -> None:
        rng = self._rng("cut")
        other = rng.choice([*self.world.sites, *self.world.machines])
        until = self.world.heap.now + self.world.options.timing.lease_s * 1.6 * rng.random()
        ways = rng.choice(("both", "to", "from"))
        if ways != "from":
            self.world.network.cut(other, "master", until)
        if ways != "to":
            self.world.network.cut("master", other, until)

    def _diverge(self) -> None:
        rng = self._rng("diverge")
        rng.choice(list(self.world.sites.values())).diverged += rng.randint(1, 2)

    def _disk_full(self) -> None:
        rng = self._rng("disk_full")
        disk = rng.choice(list(self.world.machines.values())).disk
        disk.full = True

        def mend() -> None:
            disk.full = False

        self.world.later(6.0 * rng.random(), "a disk has room again", mend)

    def _rng(self, kind: str) -> Random:
        return self.world.chance.of(f"fault/{kind}")

    def _again(self, share: float, what: str, start: Callable[[], None]) -> None:
        self.world.later(DOWN_S * (0.5 + 0.5 * share) if share < 0.8 else 3.0 * DOWN_S, what, start)
