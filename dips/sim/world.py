"""One simulated world: the real Coordinator, Judge, Ledger, Shards and client cores; the rest is simulated.

`World(seed, scenario).run(observers)` runs it to its end. Failures are planned by the caller; by itself a world
has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from dips.errors import ConfigError
from dips.outer import reference
from dips.outer.kernel_pool import Kernels
from dips.protocol.effects import Exit
from dips.protocol.placement import place_layers
from dips.protocol.records import Record, RunRow
from dips.protocol.slaves import EXIT_OLD_LEDGER
from dips.sim.agent import SimCluster
from dips.sim.disk import LedgerDisk, SimDisk
from dips.sim.flow import SimLane
from dips.sim.heap import Chance, Heap, Timer, Trace
from dips.sim.master import Answer, MasterProcess, MasterWorld
from dips.sim.network import Network, ShownCall, SimAuthority
from dips.sim.observer import Monitor, Observer
from dips.sim.scenario import Scenario, Site
from dips.sim.seeder import SimSeeder
from dips.sim.sizes import SharedLinks
from dips.sim.slave import SimMirror, SlaveProcess, SlaveWorld
from dips.sim.streams import DataNetwork
from dips.sim.work import Books, NoiseModel, SimModel
from dips.slave.ports import F32

Plan = Callable[["World"], None]  # plans failures with World.call_later
STALL_S = 6.0  # a transfer without a new byte for this long is over; longer on a slow link
EVERYWHERE = 32  # events per slave after which all machines are checked, touched or not
RESTART_S = 1.0  # until a slave that ended by SIGTERM is restarted
EVERY = 16  # events between checks that only time can break


class Bookkeeper(Observer):
    """Updates the books from the ledger's records."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def record_written(self, record: Record) -> None:
        self._books.on_record(record)


class World:
    """All parts of a simulated run, for one seed."""

    def __init__(
        self, seed: int, scenario: Scenario, model: SimModel | None = None, kernels: Kernels = reference
    ) -> None:
        """Build the parts; `model` is the trained model, None: noise of the scenario's shape."""
        self.seed, self.scenario, self.options = seed, scenario, scenario.options
        self.heap, self.chance, self.trace, self.books = Heap(), Chance(seed), Trace(), Books()
        self.model: SimModel = model or NoiseModel(seed, scenario.layers, scenario.parameters)
        self.kernels = kernels
        self.manifest, self.genesis = self.model.manifest, self.model.genesis
        self.sizes = {i: layer.numel for i, layer in enumerate(self.manifest.layers)}
        self.monitor = Monitor()
        self.network = Network(self.heap, self.chance, self.monitor)
        self.authority = SimAuthority(scenario.run, self.heap)
        stall_s = scenario.stall_s or STALL_S * max((1.0, *scenario.slowness.values()))
        self.data = DataNetwork(
            self.heap, self.chance.generator_for("data"), self, scenario.run, self.manifest, scenario.slowness, stall_s
        )
        self.data.serial_s, self.data.chunk_bytes = scenario.chunk_s, scenario.chunk_bytes
        slaves = [f"slave-{i}" for i in range(scenario.slaves)]
        if scenario.sizes is not None:
            self.data.shared = SharedLinks(self.heap, scenario.sizes, slaves, scenario.lasts_s)
        if scenario.steady:
            self.network.repair_links()
            self.data.repair_links()
        self.touched: dict[str, SlaveMachine] = {}
        self.looked_at: list[SlaveMachine] = []
        self._look_everywhere = self._stopped = False
        self._everywhere = EVERYWHERE * scenario.slaves
        self._asleep_s = 0.0
        self._asleep_since: float | None = None
        self.master_sleeps = 0  # how often the master was stopped
        placement = place_layers(self.manifest, slaves)
        self.machines = {name: SlaveMachine(self, name, layers) for name, layers in placement}
        self.clusters = {name: SimCluster(self, self.make_site(i)) for i, name in enumerate(scenario.names)}
        row = self._run_row(placement)
        self.master = MasterMachine(self, row)
        self.seeder = None if scenario.seeded else SimSeeder(self, row)

    def make_site(self, number: int) -> Site:
        """Return the machines of a cluster of the scenario."""
        name, shape = self.scenario.names[number], self.scenario.clusters[number]
        rng = self.chance.generator_for(f"cluster/{name}")
        fragments = min(shape.fragments, len(self.sizes))
        ways = shape.aligned_steps, shape.overlap, shape.restarts, fragments, shape.jitter, shape.straggles
        return Site(name, shape.ranks, shape.step_s, rng, *ways)

    def _run_row(self, placement: tuple[tuple[str, tuple[int, ...]], ...]) -> RunRow:
        return RunRow(
            run=self.scenario.run,
            config_digest=self.scenario.config_digest,
            manifest=self.manifest.to_json(),
            placement=placement,
            genesis=tuple(xxhash.xxh3_128_hexdigest(a.tobytes()) for a in self.genesis.values()),
            genesis_norms=tuple(float(np.linalg.norm(a.astype(np.float64))) for a in self.genesis.values()),
        )

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(self, observers: Sequence[Observer] = (), plan: Plan | None = None) -> None:
        """Run the scenario to its end; an error of an observer or a part ends it."""
        self.monitor.add_observers([*observers, Bookkeeper(self.books)])
        try:
            self._start_parts(plan)
            with np.errstate(all="ignore"):  # a diverged model is no error: the gate detects it
                self._play_events()
            self.monitor.at_rest()
        finally:
            self.master.close()
            for machine in self.machines.values():
                machine.close()
            for cluster in self.clusters.values():
                cluster.close()
            if self.seeder is not None:
                self.seeder.close()

    def _play_events(self) -> None:
        heap, trace, lasts_s = self.heap, self.trace.add_event, self.scenario.lasts_s
        next_event, touched, time_passed = heap.next_event, self.touched, self.monitor.time_passed
        often = self._everywhere
        while (timer := next_event()) is not None and timer.at < lasts_s and not self._stopped:
            trace(timer)
            timer.action()
            events = heap.events
            everywhere = self._look_everywhere or events % often == 0
            if everywhere or touched:
                self._look_at_touched(everywhere)
            if events % EVERY == 0:
                time_passed()

    def stop(self) -> None:
        """End the run with the present event, since its purpose is fulfilled."""
        self._stopped = True

    def _start_parts(self, plan: Plan | None) -> None:
        self.master.start()
        for machine in self.machines.values():
            machine.start()
        for cluster, shape in zip(self.clusters.values(), self.scenario.clusters, strict=True):
            if not shape.late:
                cluster.start()
        if self.seeder is not None:
            self.seeder.start()
        if plan is not None:
            plan(self)

    def _look_at_touched(self, everywhere: bool) -> None:
        """Let the observers check the machines that the event touched, and at intervals all machines.

        The state of a machine is changed through its process and its disk only, and both mark it as touched.
        """
        self.looked_at = list((self.machines if everywhere else self.touched).values())
        self._look_everywhere = False
        self.touched.clear()
        self.monitor.after_event()

    def look_everywhere(self) -> None:
        """Check every machine after this event."""
        self._look_everywhere = True

    def call_later(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer:
        return self.heap.call_later(delay_s, what, action)

    # ---- the master's machine --------------------------------------------------------------------------------------

    @property
    def master_asleep_s(self) -> float:
        """The total time in seconds for which no master has been running."""
        return self._asleep_s + (self.heap.now - self._asleep_since if self._asleep_since is not None else 0.0)

    @property
    def master_is_deceived(self) -> bool:
        """Whether the master works on an old copy of the ledger, so that its head may be wrong."""
        return self.master.disk.is_old_copy

    def crash_master(self) -> None:
        self.master.crash()
        self._pause_master()

    def terminate_master(self) -> None:
        """End the master by SIGTERM, which it may find a moment later; it is restarted."""
        if self.master.process is not None:
            self.master.process.terminate()

    def start_master(self) -> None:
        if self.master.process is None:
            self._wake_master()
            self.master.start()

    def pause_master(self) -> None:
        if self.master.process is not None and not self.master.process.stopped:
            self.master.process.loop.stop_process()
            self._pause_master()

    def wake_master(self) -> None:
        if self.master.process is not None and self.master.process.stopped:
            self._wake_master()
            self.master.process.loop.continue_process()

    def abandon_master(self) -> MasterProcess | None:
        """Stop the master and take it for dead."""
        zombie = self.master.abandon_process()
        self._pause_master()
        return zombie

    def master_exits(self, process: MasterProcess, effect: Exit) -> None:
        """Process a master that ended by itself; it is restarted, unless it has a successor or refuses its ledger."""
        self.trace.add_line(self.heap.now, f"the master exits with {effect.code}", effect.reason)
        if process is not self.master.process:
            process.kill_process()
            if process in self.master.zombies:
                self.master.zombies.remove(process)
                self.monitor.rare_event_occurred("zombie_master")
            return
        self.crash_master()
        if effect.code == EXIT_OLD_LEDGER:
            assert self.master.disk.is_old_copy, effect.reason
            self.monitor.rare_event_occurred("old_ledger")  # an operator must restore the newest one
        else:
            self.call_later(1.0, "the master starts again", self.start_master)

    def put_newest_ledger_back(self) -> None:
        self.crash_master()
        self.master.disk.put_newest_back()
        self.start_master()

    def _pause_master(self) -> None:
        if self._asleep_since is None:
            self._asleep_since = self.heap.now
            self.master_sleeps += 1

    def _wake_master(self) -> None:
        self._asleep_s = self.master_asleep_s
        self._asleep_since = None

    # ---- calls between the parts --------------------------------------------------------------------------

    def lane_of(self, slave: str) -> SimLane | None:
        process = self.machines[slave].process
        return process.lane if process is not None and not process.loop.stopped else None

    def frame_refused(self, why: str) -> None:
        """Count a frame that a slave or a rank refused."""
        self.monitor.rare_event_occurred("frame")

    def updates_landed(self, depth: int) -> None:
        """Count a rank's pull of all its pieces from a slave as updates of the version that it held."""
        self.monitor.rare_event_occurred("updates" if depth == 1 else "two_updates")


# ---- slave machine ---------------------------------------------------------------------------------------------------


class SlaveMachineWorld(SlaveWorld, Protocol):
    """The parts of the world that the machine needs."""

    chance: Chance
    genesis: dict[int, F32]
    touched: dict[str, SlaveMachine]


class SlaveMachine:
    """The machine of a slave: its name, its disk, and its process if there is one."""

    def __init__(self, world: SlaveMachineWorld, name: str, layers: tuple[int, ...]) -> None:
        self.world, self.name, self.layers = world, name, layers
        self.rng = world.chance.generator_for(f"slave/{name}")
        genesis = {layer: world.genesis[layer] for layer in layers}
        self.disk = SimDisk(
            genesis,
            world.chance.generator_for(f"disk/{name}"),
            lambda: world.monitor.rare_event_occurred("snapshot"),
            world.scenario.seeded,
        )
        rng = world.chance.generator_for(f"mirror/{name}")
        self.mirror = SimMirror(self.disk, rng) if world.scenario.mirrors else None
        self.process: SlaveProcess | None = None
        self.lives = 0
        self._touched = world.touched
        world.network.attach_host(name, self)

    def mark_touched(self) -> None:
        """Note that the machine may have changed since the invariants were last checked."""
        self._touched[self.name] = self

    def start(self) -> None:
        if self.process is None:
            self.mark_touched()
            try:
                self.disk.require_owner()
            except ConfigError:
                self.world.monitor.rare_event_occurred("foreign_disk")  # an operator must restart it
                return
            self.lives += 1
            self.disk.begin_process()
            self.process = SlaveProcess(self, f"{self.name}-{self.lives}")

    def crash(self) -> None:
        """Kill the process by SIGKILL: a snapshot being written may be torn, complete, or not begun."""
        self.mark_touched()
        process, self.process = self.process, None
        if process is not None:
            process.kill_process()

    def on_exit(self) -> None:
        """Process the end of a process that got SIGTERM."""
        if self.process is not None and self.process.has_ended:
            self.crash()
            self.world.call_later(RESTART_S, f"{self.name} starts again", self.start)

    def close(self) -> None:
        """End the process with the world."""
        if self.process is not None:
            self.process.loop.kill()

    def on_message(self, sender: str, message: Any, answer: Callable[[Any], None]) -> None:
        if self.process is not None:
            self.process.take_order(message, answer)


# ---- master machine --------------------------------------------------------------------------------------------------


class MasterMachine:
    """The machine on which masters run."""

    def __init__(self, world: MasterWorld, row: RunRow) -> None:
        self.world = world
        self.rng = world.chance.generator_for("master")
        self.disk = LedgerDisk(row)
        self.process: MasterProcess | None = None
        self._raised: list[Record] = []  # records raised by a restore, reported when a master starts
        self.zombies: list[MasterProcess] = []  # processes that are stopped and taken for dead; each has a successor
        world.network.attach_host("master", self)

    def start(self) -> None:
        if self.process is None:
            for record in self._raised:
                self.world.monitor.record_written(record)
            self._raised = []
            self.process = MasterProcess(self)

    def crash(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill_process()

    def lose_disk(self) -> None:
        """Lose the machine with all its processes; another one starts from the ledger's mirror."""
        self._end_all()
        self._raised = self.disk.lose_disk()

    def restore_beside_wal(self, directory: Path) -> None:
        """Move the ledger's file away after a crash, but not its WAL; restore it on files in `directory`."""
        self._end_all()
        self._raised = self.disk.restore_beside_wal(directory)

    def _end_all(self) -> None:
        self.crash()
        for zombie in self.zombies:
            zombie.kill_process()
        self.zombies.clear()

    def close(self) -> None:
        """End all processes and the disk, when the run is over."""
        for process in (*self.zombies, *([self.process] if self.process is not None else [])):
            process.loop.kill()
        self.disk.close()

    def abandon_process(self) -> MasterProcess | None:
        """Stop the process and take it for dead; another will be started on the same ledger (another host, a mount
        without locks).
        """
        process, self.process = self.process, None
        if process is not None:
            process.loop.stop_process()
            self.zombies.append(process)
        return process

    def on_message(self, sender: str, message: Any, answer: Answer) -> None:
        if self.process is None:
            return
        if isinstance(message, ShownCall):
            self.process.on_message(message.message, answer, message.shown)
        else:
            self.process.on_message(message, answer)
