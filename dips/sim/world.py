"""One simulated world from one seed: the real Coordinator, Judge, Ledger and Shards among simulated everything else.

`World(seed).run()` plays it to its end and looks at every invariant after every event. The first part of a run is full
of faults; then they stop, and the second part shows that everything heals within its bounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import xxhash

from dips.protocol.effects import Exit, Note
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.options import Clip, DataOptions, Options, OuterOptions, PenaltyOptions, StopOptions, TimingOptions
from dips.protocol.placement import place
from dips.protocol.records import RunRow
from dips.protocol.slaves import EXIT_OLD_LEDGER
from dips.sim.coverage import Coverage
from dips.sim.faults import Faults
from dips.sim.fences import Fences, Liveness, Memory, Monotone, Patience, Patient
from dips.sim.flow import SimFlow
from dips.sim.heap import Chance, Heap, Timer, Trace
from dips.sim.invariants import Authority, Commit, Data, Durable, Finite, Lineage, Once, Tokens, WholeInstalls
from dips.sim.master import MasterMachine, MasterProcess
from dips.sim.network import Network
from dips.sim.site import Site
from dips.sim.slave import SlaveMachine
from dips.sim.strikes import OPERATOR_S
from dips.sim.transfer import DataNetwork
from dips.sim.watch import Invariant, Listener, Violation, Watch
from dips.sim.work import Books
from dips.slave.ports import F32

FAULTS_S = 76.0  # simulated seconds with faults
QUIET_S = 50.0  # and without
STALL_S = 6.0  # a transfer without a new byte for so long is over; longer on a slow link
NAMES = "abcdefghi"  # of clusters
EVERYWHERE = 32  # events for each slave: so often all of them are looked at, touched or not
LEAST_ROUNDS, ENOUGH_ROUNDS = 5, 21
LEAST_QUIET_S = 28.0  # longer than a slot may leak, a lease and every deadline: what was left of the faults is over
EVERY = 16  # events: so often is looked at what only time can break
NOISES = 32  # directions in which a trainer may go in one inner step


@dataclass(frozen=True)
class Settings:
    """What a seed chooses of the run's shape."""

    slaves: int
    layers: int
    ranks: tuple[int, ...]  # of each cluster
    step_s: tuple[float, ...]
    slots: int
    pinned: int
    inner_steps: int
    slowness: tuple[float, ...] = ()  # of each cluster's link; 1 where none is given
    run: str = "simulated"
    config_digest: str = "config"


@dataclass(frozen=True)
class Scenario:
    """A run whose shape is written down, without faults; the seed draws only the delays."""

    settings: Settings
    options: Options
    lasts_s: float
    patience: float = 1.0  # times the bounds of Liveness: a slow link is slow
    listeners: tuple[Listener, ...] = ()
    faults: Callable[[World], None] | None = None  # plans what goes wrong
    quiet_s: float | None = None  # at the end: so long nothing goes wrong; None: it never does


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


def settings_of(rng: Random) -> Settings:
    """Draw the shape of a run."""
    slaves, clusters = rng.randint(2, 3), rng.randint(2, 3)
    return Settings(
        slaves=slaves,
        layers=rng.randint(slaves, 4),
        ranks=tuple(rng.choice((1, 1, 2, 2, 3)) for _ in range(clusters)),
        step_s=tuple(0.12 + 0.3 * rng.random() for _ in range(clusters)),
        slots=rng.randint(1, 2),
        pinned=rng.randint(0, 1),
        inner_steps=rng.randint(2, 3),
    )


def options_of(rng: Random) -> Options:
    """Short deadlines, so that two minutes hold two dozen rounds; every option that changes what is safe is drawn."""
    timing = TimingOptions(
        window_s=rng.choice((0.3, 0.6, 1.2, None)),
        beat_s=1.9,
        lease_beats=4,
        hang_s=12.0,
        order_s=4.0,
        compute_s=8.0,
        transfer_s=12.0,
        busy_retry_s=0.7,
    )
    penalty = PenaltyOptions(warmup_rounds=2, history=4, gate_patience=3)
    outer = OuterOptions(clip=Clip(norm=rng.choice((0.05, 1.0))))
    stop = StopOptions(versions=rng.randint(8, 14) if rng.random() < 0.1 else 0)
    codec = rng.choices(("fp32", "bf16", "int8"), (6, 2, 2))[0]
    durability = rng.choices(("commit", "async"), (3, 1))[0]
    failing, requeue = rng.choices(("degrade", "stop"), (3, 1))[0], rng.choice(("none", "undone"))
    return Options(
        outer, penalty, stop, DataOptions(ranges=5000), timing, codec=codec,
        durability=durability, on_persist_failure=failing, requeue=requeue,
    )  # fmt: skip


class Counter(Listener):
    """Counts what the Coordinators told the log."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def noted(self, note: Note) -> None:
        self.result.kinds[note.kind] = self.result.kinds.get(note.kind, 0) + 1


class World:
    """Everything there is, for one seed."""

    def __init__(self, seed: int, scenario: Scenario | None = None) -> None:
        self.seed, self.scenario = seed, scenario
        self.heap, self.chance, self.trace, self.books = Heap(), Chance(seed), Trace(), Books()
        self.settings = scenario.settings if scenario else settings_of(self.chance.of("settings"))
        self.options = scenario.options if scenario else options_of(self.chance.of("options"))
        self.manifest = Manifest(
            tuple(
                Layer(f"layers.{i}", (Parameter(f"layers.{i}.w", (2,)), Parameter(f"layers.{i}.b", (1,))))
                for i in range(self.settings.layers)
            )
        )
        self.sizes = {i: layer.numel for i, layer in enumerate(self.manifest.layers)}
        rng = np.random.default_rng(seed)
        self.genesis: dict[int, F32] = {i: rng.standard_normal(n, dtype=np.float32) for i, n in self.sizes.items()}
        self._noise = rng.standard_normal((NOISES, max(self.sizes.values())), dtype=np.float32) * np.float32(0.02)
        self.quiet_at, self.ends_at = FAULTS_S, FAULTS_S + QUIET_S
        if scenario:
            self.ends_at = scenario.lasts_s
            self.quiet_at = 0.0 if scenario.quiet_s is None else scenario.lasts_s - scenario.quiet_s
        self.patience = scenario.patience if scenario else 1.0
        slowness = dict(zip(NAMES, self.settings.slowness, strict=False))
        stall_s = STALL_S * max((1.0, *self.settings.slowness))
        self.data = DataNetwork(
            self.heap, self.chance.of("data"), self, self.settings.run, self.manifest, slowness, stall_s
        )
        self.result = Result(seed)
        self.lineage = Lineage(self)
        self.faults = Faults(self)
        listeners = scenario.listeners if scenario else ()
        self.coverage, counter = Coverage(self), Counter(self.result)
        self.watch = Watch([*self._invariants(), self.faults, self.coverage, counter, *listeners])
        self.network = Network(self.heap, self.chance, self.watch)
        self.touched: dict[str, SlaveMachine] = {}
        self.looked_at: list[SlaveMachine] = []
        self.look_everywhere = False
        self._shown = False
        self._asleep_s = 0.0
        self._asleep_since: float | None = None
        self._populate()

    def _invariants(self) -> list[Invariant]:
        self.authority, self.liveness = Authority(self), Liveness(self)
        others = (Commit, Durable, Once, Fences, WholeInstalls, Finite, Tokens, Data)
        names = (Monotone, Memory, Patience, Patient)
        return [self.lineage, self.authority, self.liveness, *(make(self) for make in (*others, *names))]

    def _populate(self) -> None:
        names = [f"slave-{i}" for i in range(self.settings.slaves)]
        placement = place(self.manifest, names)
        row = RunRow(
            run=self.settings.run,
            config_digest=self.settings.config_digest,
            manifest=self.manifest.to_json(),
            placement=placement,
            genesis=tuple(xxhash.xxh3_128_hexdigest(a.tobytes()) for a in self.genesis.values()),
            genesis_norms=tuple(float(np.linalg.norm(a)) for a in self.genesis.values()),
        )
        self.machines = {name: SlaveMachine(self, name, layers) for name, layers in placement}
        self.sites = {
            name: Site(self, name, ranks, step_s)
            for name, ranks, step_s in zip(NAMES, self.settings.ranks, self.settings.step_s, strict=False)
        }
        self.master = MasterMachine(self, row)
        self.master.start()
        for machine in self.machines.values():
            machine.start()
        for site in self.sites.values():
            site.start()
        if self.scenario is None:
            self.faults.plan()
        else:
            self.network.mend()
            self.data.mend()
            if self.scenario.faults:
                self.scenario.faults(self)

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Play the seed to its end, or to the first thing that is not as it must be."""
        result = self.result
        try:
            while (timer := self.heap.next()) is not None and (timer.at < self.ends_at or self._goes_on(timer.at)):
                if self._shown:
                    break
                self.trace.event(timer)
                timer.action()
                self._look()
            self.watch.at_rest()
        except Violation as violation:
            result.failure = Failure(violation.number, str(violation), tuple(self.trace.lines()))
        except Exception as error:  # noqa: BLE001 (an error of the code under test is a finding, whatever its class)
            result.failure = Failure(None, f"{type(error).__name__}: {error}", tuple(self.trace.lines()))
        finally:
            self.master.disk.close()
        result.events, result.faults, result.seen = self.heap.events, self.faults.count, tuple(self.coverage.seen)
        return result

    def _has_shown(self) -> bool:
        """Has a seed done what it is worth, and everybody healed and gone on for long enough to trust it?

        One that heals slowly, or not at all, is played to its end, where the bounds of Liveness are.
        """
        enough = self.scenario is None and self.result.rounds >= ENOUGH_ROUNDS
        return enough and self.heap.now > self.quiet_at + LEAST_QUIET_S and self.liveness.healed()

    def _goes_on(self, at: float) -> bool:
        """A seed whose faults left no time for rounds is played a little longer."""
        return self.scenario is None and self.result.rounds < LEAST_ROUNDS and at < self.ends_at + QUIET_S

    def _look(self) -> None:
        """Let the invariants look at the machines that the event touched; now and then at all of them.

        What a machine holds is reached through its process and its disk only, and both say `touch`.
        """
        events = self.heap.events
        everywhere = self.look_everywhere or events % (EVERYWHERE * self.settings.slaves) == 0
        if everywhere or self.touched:
            self.looked_at = list((self.machines if everywhere else self.touched).values())
            self.look_everywhere = False
            self.touched.clear()
            self.watch.after_event()
        if events % EVERY == 0:
            self.watch.time_passed()
            self._shown = self._has_shown()

    def later(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer:
        return self.heap.after(delay_s, what, action)

    # ---- the master's machine --------------------------------------------------------------------------------------

    @property
    def master_asleep_s(self) -> float:
        """How long, since the beginning, no master was looking."""
        return self._asleep_s + (self.heap.now - self._asleep_since if self._asleep_since is not None else 0.0)

    def crash_master(self) -> None:
        self.master.crash()
        self._sleeps()

    def start_master(self) -> None:
        if self.master.process is None:
            self._woke()
            self.master.start()

    def pause_master(self) -> None:
        if self.master.process is not None and self.master.process.inbox is None:
            self.master.process.pause()
            self._sleeps()

    def wake_master(self) -> None:
        if self.master.process is not None and self.master.process.inbox is not None:
            self._woke()
            self.master.process.wake()

    def abandon_master(self) -> MasterProcess | None:
        """It is stopped, and taken for dead."""
        zombie = self.master.abandon()
        self._sleeps()
        return zombie

    def master_exits(self, process: MasterProcess, effect: Exit) -> None:
        """It leaves on its own account; something starts it again, if it is not the old one of two."""
        self.trace.add(self.heap.now, f"the master exits with {effect.code}", effect.reason)
        if process is not self.master.process:
            process.die()
            if process in self.master.zombies:
                self.master.zombies.remove(process)
                self.watch.met("zombie_master")
            return
        self.crash_master()
        if effect.code != EXIT_OLD_LEDGER:
            self.later(1.0, "the master starts again", self.start_master)
            return
        assert self.master.disk.old, effect.reason
        self.watch.met("old_ledger")
        self.later(OPERATOR_S, "the operator puts the newest ledger back", self.put_newest_ledger_back)

    def put_newest_ledger_back(self) -> None:
        self.crash_master()
        self.master.disk.put_newest_back()
        self.start_master()

    def restore_if_all_is_lost(self) -> None:
        """When disks rotted or were put back, and no version that is still on offer is whole on all of them."""
        disks = [machine.disk for machine in self.machines.values()]
        offered = [v for v in self.authority.lineage[1:] if v not in self.authority.retired]
        common = [v for v in offered if all(v in disk.good for disk in disks)]
        if not common and any(disk.harmed for disk in disks):
            self.look_everywhere = True
            for disk in disks:
                disk.restore()

    def _sleeps(self) -> None:
        if self._asleep_since is None:
            self._asleep_since = self.heap.now

    def _woke(self) -> None:
        self._asleep_s = self.master_asleep_s
        self._asleep_since = None

    # ---- what the parts ask of each other --------------------------------------------------------------------------

    def flow(self, slave: str) -> SimFlow | None:
        process = self.machines[slave].process
        return process.flow if process is not None and not process.gate.closed else None

    def frame_refused(self, why: str) -> None:
        """A slave or a rank would not take a frame."""
        self.watch.met("frame")

    def descend(self, theta: dict[int, F32], rng: Random) -> None:
        """One inner step: the whole model moves a little."""
        noise = self._noise[rng.randrange(NOISES)]
        for a in theta.values():
            a -= noise[: a.size]


def digest(world: World) -> str:
    """Fingerprint of everything that was made: equal for two runs of one seed."""
    parts = [f"{v} {c.bytes_of}" for v, c in world.lineage.twin.versions.items()]
    return hashlib.sha256("\n".join([str(world.heap.events), *parts]).encode()).hexdigest()
