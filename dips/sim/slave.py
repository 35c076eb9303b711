"""A simulated slave: a process around the real core and Shard, on a machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import Any, Protocol, cast

from dips.errors import DipsError, FailedMirror
from dips.identity.names import PeerRole
from dips.ids import VersionId
from dips.outer.kernel_pool import KernelPool, Kernels
from dips.outer.versions import Versions
from dips.protocol.effects import (
    Apply,
    Commit,
    Fold,
    KeepSeed,
    Measure,
    OpenPull,
    Order,
    Persist,
    Registered,
    Retire,
)
from dips.protocol.events import MirrorReport
from dips.protocol.manifest import Manifest
from dips.protocol.options import Options
from dips.sim.agent import SimMasterLink
from dips.sim.disk import SimDisk, Snapshot
from dips.sim.flow import SimLane
from dips.sim.heap import Chance, Heap, Timer
from dips.sim.loop import SimExecutor, SimLog, SimLoop
from dips.sim.network import Network, SimAuthority, SimTlsSource
from dips.sim.scenario import Scenario
from dips.sim.streams import LANE_KEY, DataNetwork
from dips.slave.core import SlaveCore
from dips.slave.flow import ZmqFlow
from dips.slave.mirror_plan import MirrorJob, MirrorJobKind, MirrorPlan, Restored
from dips.slave.ports import Meters, ReadSnapshot, ShardMethod, ShardWork, SlaveIdentity, WorkOnDisk
from dips.slave.runtime import ShardThread, SlaveRuntime
from dips.slave.shard import Shard
from dips.transport.backoff import Backoff
from dips.transport.intake import CONCURRENT_STREAMS, FLOOR_BYTES
from dips.transport.seal import KeyPair
from dips.wire.generated import slave_pb2

# ---- mirror ----------------------------------------------------------------------------------------------------------
# A mirror survives every disk; it is slow, or gone, at times. A copy interrupted by a crash leaves no complete
# snapshot.


COPY_S = 0.4  # duration of a snapshot's copy, at most double
MIRROR_BACKOFF_S = (0.5, 4.0)


class SimMirror:
    """The content of the mirror; belongs to no machine."""

    def __init__(self, disk: SimDisk, rng: Random) -> None:
        self.disk, self.rng = disk, rng
        self.files: dict[VersionId, Snapshot] = {}
        self.copied_at: dict[VersionId, float] = {}  # when each version was copied
        self.gone = False
        self.slowness = 1.0

    def rot_newest(self) -> VersionId | None:
        """Flip a bit of the newest copy but not of the original on the disk; return its version, None if there
        is none.
        """
        whole = [version for version, copy in self.files.items() if copy.good]
        if not whole:
            return None
        newest = max(whole)
        self.files[newest] = replace(self.files[newest], rotten=True)
        return newest

    def repair_mirror(self) -> None:
        """Make the mirror available and fast."""
        self.gone, self.slowness = False, 1.0


class MirrorShell:
    """Keeps the mirror of one incarnation of a slave."""

    def __init__(self, mirror: SimMirror, loop: SimLoop) -> None:
        self._mirror, self._loop = mirror, loop
        self._plan = MirrorPlan(Backoff(*MIRROR_BACKOFF_S, mirror.rng))
        self._timer: asyncio.TimerHandle | None = None
        self._rotten: dict[VersionId, Snapshot] = {}  # copies that this process has read and found rotten

    def report(self) -> MirrorReport:
        """Return the mirror's part of a heartbeat."""
        return self._plan.report(self._loop.time())

    def want(self, versions: tuple[VersionId, ...]) -> None:
        """Set the versions that the mirror should hold, as the master orders."""
        self._plan.want(versions)
        self._look()

    def begin_restore(
        self,
        on_disk: tuple[VersionId, ...],
        look_for: tuple[VersionId, ...],
        done: Callable[[Restored | Exception], None],
    ) -> None:
        """Restore at once, which fails if the mirror is gone."""
        if self._mirror.gone:
            self._plan.on_failed("the mirror is gone", self._loop.time())
            done(FailedMirror("the mirror is gone"))
        else:
            done(self._restore(on_disk, look_for))

    def _restore(self, on_disk: tuple[VersionId, ...], look_for: tuple[VersionId, ...]) -> Restored:
        disk, mirror = self._mirror.disk, self._mirror
        newest = max((v.round for v in on_disk), default=0)
        newer = [v for v in self._list_whole() if v not in on_disk and (v.round > newest or v in look_for)]
        whole = tuple(v for v in newer if mirror.files[v].good)
        for version in whole:
            disk.bring_back(version, mirror.files[version])
        self._rotten |= {v: mirror.files[v] for v in newer if v not in whole}
        if len(whole) < len(newer):
            self._list_whole()  # so that copies just found rotten are not reported as complete
        self._look()
        return Restored(whole, "a copy in its mirror is rotten" if len(whole) < len(newer) else "")

    def _list_whole(self) -> tuple[VersionId, ...]:
        """Return the versions that are complete by their manifests, except for copies found rotten."""
        files = self._mirror.files
        outdated = tuple(v for v in files if self._rotten.get(v) is files[v])
        whole = tuple(v for v in files if v not in outdated)
        self._plan.on_listed(whole, outdated)
        return whole

    def _look(self) -> None:
        """Begin the next job if one is due, else plan the next check."""
        now = self._loop.time()
        job = self._plan.next_job(now)
        if job is not None:
            work_s = COPY_S * self._mirror.slowness * (1.0 + self._mirror.rng.random())
            self._loop.call_later(work_s if job.kind is MirrorJobKind.COPY else 0.0, self._end, job)
            return
        due = self._plan.next_deadline(now)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look) if due < inf else None

    def _end(self, job: MirrorJob) -> None:
        mirror, problem = self._mirror, ""
        if mirror.gone:
            problem = "the mirror is gone"
        elif job.kind is MirrorJobKind.LIST:
            self._list_whole()
        elif job.kind is MirrorJobKind.DELETE:
            for version in job.versions:
                del mirror.files[version]
            self._plan.on_done(job)
        else:
            snapshot = mirror.disk.files.get(job.versions[0])
            if snapshot is None or not snapshot.good:
                problem = f"{job.versions[0]} is not whole on this disk"
            else:
                mirror.files[job.versions[0]] = replace(
                    snapshot
                )  # a separate file, so that rot on the disk does not affect it
                mirror.copied_at[job.versions[0]] = self._loop.time()
                self._plan.on_done(job)
        if problem:
            self._plan.on_failed(problem, self._loop.time())
        self._look()


# ---- slave work -----------------------------------------------------------------------------------------------------
# The duration of a simulated slave's work; its effect happens at the end.


WORK_S: dict[type, float] = {
    Measure: 0.03,
    Fold: 0.03,
    Apply: 0.06,
    Persist: 0.15,
    Commit: 0.02,
    Retire: 0.05,
    KeepSeed: 0.15,
}  # duration of an order, at most double
LOAD_S = 0.3


GROWS = frozenset({Measure, Fold, Apply, Persist})  # orders whose work grows with the model


def order_s(body: type, disk: SimDisk, rng: Random, least_s: float, short: float) -> float:
    """Draw the duration of an order of this class, the usual one times `short`; at least `least_s` if its work grows
    with the model.
    """
    slowness = disk.slowness if body in (Persist, Retire, KeepSeed) else 1.0
    drawn_s = short * WORK_S.get(body, 0.0) * slowness * (1.0 + rng.random())
    return max(drawn_s, least_s) if body in GROWS else drawn_s


def written_by(work: object) -> VersionId | None:
    """Return the version whose snapshot `work` writes; None if it writes none."""
    if isinstance(work, WorkOnDisk) and isinstance(work.order.body, Persist):
        return work.order.body.version
    return None


# ---- slave ----------------------------------------------------------------------------------------------------------
# The daemon's SlaveRuntime and ShardThread on a loop of the world's time, around the real core and shard. Replaced are
# the connections (SimMasterLink; orders arrive by `network.py`), the lane (flow.py) and the disk. Work of threads
# has its effect at the end of its time; a crash in between may leave a torn snapshot.


_OF_ORDERS = (ShardMethod.EXECUTE, ShardMethod.BEGIN_ON_DISK)
_OF_REGISTRATION = (ShardMethod.FOLLOW, ShardMethod.END_LOAD)

STOPPING_S = 0.1  # of work that is begun between SIGTERM and the end: its thread has no core at once
BOOT_S = 0.1  # until a process registers
TURN_S = 0.5  # the real lane has its turn every 0.05 s, and after each batch of frames
WORK_BYTES_PER_S = 1000.0
TRANSIT_CHUNKS = 12  # chunks requested at once: few, so that the pool is exhausted at times
SIZED_TRANSIT_CHUNKS = 256  # in a scenario with sizes, as many as of a real slave


class SlaveObserver:
    """The hooks that a slave calls; each does nothing by default."""

    def slave_registered(self, process: SlaveProcess, answer: Registered) -> None:
        """Called when a slave's registration was answered."""

    def order_arrives(self, process: SlaveProcess, request: slave_pb2.Order) -> None:
        """Called when an order arrives at a slave, before the slave takes it."""

    def before_order(self, process: SlaveProcess, order: Order) -> None:
        """Called before a slave carries out an order."""

    def after_order(self, process: SlaveProcess, order: Order) -> None:
        """Called after a slave has carried out an order."""

    def slave_crashed(self, process: SlaveProcess) -> None:
        """Called before a slave's process dies."""

    def slave_ending(self, process: SlaveProcess, waited_s: float) -> None:
        """Called while a slave that got SIGTERM waits for the end of its data flow."""

    def rare_event_occurred(self, what: str) -> None:
        """Called for a rare event that has no hook of its own; coverage counts it by this name."""


class SlaveWorld(Protocol):
    """The parts of the world that a slave needs."""

    heap: Heap
    chance: Chance
    network: Network
    authority: SimAuthority
    data: DataNetwork
    scenario: Scenario
    options: Options
    manifest: Manifest
    kernels: Kernels

    @property
    def monitor(self) -> SlaveObserver: ...
    @property
    def master_is_deceived(self) -> bool: ...
    def frame_refused(self, why: str) -> None: ...
    def call_later(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer: ...


class SlaveHost(Protocol):
    """The machine, as seen by a process on it."""

    name: str
    layers: tuple[int, ...]
    rng: Random
    disk: SimDisk
    mirror: SimMirror | None

    @property
    def world(self) -> SlaveWorld: ...
    def mark_touched(self) -> None: ...
    def on_exit(self) -> None: ...


class WatchedShard(Shard):
    """The shard of a simulated slave: the observers learn which orders it carries out."""

    process: SlaveProcess

    def perform_work(self, work: ShardWork) -> object:
        process = self.process
        try:
            return self._watch_order(work) if work.method in _OF_ORDERS else super().perform_work(work)
        except Exception as error:
            if not isinstance(error, DipsError | OSError):
                process.loop.fail(error)
            raise
        finally:
            if work.method in _OF_REGISTRATION:
                process.undeceived = not process.world.master_is_deceived
            process.stop_vain_writer()

    def _watch_order(self, work: ShardWork) -> object:
        process, monitor = self.process, self.process.world.monitor
        if self.fences.has_answered(work.order.number):
            monitor.rare_event_occurred("answer_lost")
        monitor.before_order(process, work.order)
        try:
            return super().perform_work(work)
        finally:
            monitor.after_order(process, work.order)


class SlaveLog(SimLog):
    """The log of a slave: the world counts the frames that it refuses."""

    def __init__(self, fail: Callable[[BaseException], None], frame_refused: Callable[[str], None]) -> None:
        super().__init__(fail)
        self._frame_refused = frame_refused

    def debug(self, event: str, **fields: Any) -> None:
        if event == "frame_refused":
            self._frame_refused(fields["reason"])


class SlaveProcess:
    """One incarnation of a slave."""

    def __init__(self, machine: SlaveHost, nonce: str) -> None:
        self.machine, self.world, self.name, self.nonce = machine, machine.world, machine.name, nonce
        world, settings, rng = self.world, self.world.scenario, self.world.chance.generator_for(f"loop/{self.name}")
        self.loop = SimLoop(world.heap, rng, self.name, self._work_time)
        self._on_disk = self.loop.threads
        self._on_shard = SimExecutor(self.loop, self._work_time, alone=True)
        self._on_disk.ended = self._on_shard.ended = machine.mark_touched
        log: Any = SlaveLog(self.loop.fail, world.frame_refused)
        transit_chunks = TRANSIT_CHUNKS if world.scenario.sizes is None else SIZED_TRANSIT_CHUNKS
        self.flow = ZmqFlow(
            settings.run,
            self.name,
            (f"{self.name}:2",),
            settings.chunk_bytes,
            transit_chunks * max(settings.chunk_bytes, FLOOR_BYTES),
            CONCURRENT_STREAMS,
            world.data.stall_s,
            self.loop.time,
            KeyPair(LANE_KEY, cast(Any, None)),
            log=log,
            make_lane=self._make_lane,
            in_place=True,
            pause=self._pause,
        )
        self.flow.set_layers(world.manifest, machine.layers)
        self.versions = Versions(
            KernelPool(world.kernels), settings.slots, settings.pinned, settings.pull_codec,
        )  # fmt: skip
        thread = ShardThread(self._on_shard, self.loop.time, log)
        self.shard = WatchedShard(
            self.name, self.versions, machine.disk, self.flow, thread.on_flow_event, self._prepare
        )  # fmt: skip
        self.shard.process = self
        thread.own_shard(self.shard)
        identity = SlaveIdentity(
            settings.run, self.name, nonce, f"{self.name}:1", (f"{self.name}:2",), "master", LANE_KEY,
            machine.disk.nonce,
        )  # fmt: skip
        self.core = SlaveCore(
            identity,
            settings.calls.slave,
            lambda: thread.standing,
            self.flow.list_transfers,
            self._meters,
            machine.rng,
        )
        self._mirror = MirrorShell(machine.mirror, self.loop) if machine.mirror else None
        with self.loop.running():
            tls = SimTlsSource(world.authority, self.name, PeerRole.SLAVE, self.loop.time)
            master = SimMasterLink(world.network, self.loop, tls, self.name)
            self.runtime = SlaveRuntime(self.core, thread, master, log, self._mirror)
        self.undeceived = False  # whether the master that last sent Hold has the newest ledger
        self._booted = False  # whether its control server answers
        self._run: asyncio.Task[None] | None = None
        self._ending_s: float | None = None  # since SIGTERM, how long its data flow has been ending
        self.loop.call_later(BOOT_S, self._boot)

    def _make_lane(self, *arguments: Any) -> SimLane:
        turn_s = TURN_S if self.world.scenario.sizes is None else self.world.options.timing.heartbeat_s
        self.lane = SimLane(self.loop, self.machine.mark_touched, self._pause, turn_s, *arguments)
        return self.lane

    @property
    def holds(self) -> bool:
        """Whether the present master has answered Hold, as far as the slave knows."""
        return self.core.serving and self.undeceived

    def kill_process(self) -> None:
        self.world.monitor.slave_crashed(self)
        self.loop.kill()
        for work in self._on_disk.under_way:
            if (version := written_by(work.subject)) is not None:
                self._die_writing(version)

    def _die_writing(self, version: VersionId) -> None:
        if version not in (self.versions.prepared, self.versions.served_version) or version in self.machine.disk.files:
            return
        theta, momentum = self.versions.theta(version), self.versions.momentum(version)
        fate = self.machine.rng.random()
        if fate < 0.4:
            self.machine.disk.tear_snapshot(version, theta, momentum)
        elif fate < 0.7 and self.machine.disk.takes_files:
            self.machine.disk.write_snapshot(version, theta, momentum)

    def take_order(self, request: slave_pb2.Order, answer: Callable[[Any], None]) -> None:
        """Serve an order of the master that has arrived, as gRPC would."""
        if self._booted:
            self.world.monitor.order_arrives(self, request)
            self.loop.serve_call(partial(self.runtime.Execute, request, None), answer)

    def _boot(self) -> None:
        self._booted = True
        self.machine.mark_touched()
        self._run = self.loop.create_task(self.runtime.run())
        self._run.add_done_callback(self._on_end)

    def terminate(self) -> None:
        """End by SIGTERM, which the process may find a moment later."""
        if self._run is not None:
            self._ending_s = 0.0
            self.loop.deliver_signal(self._run.cancel)

    def _on_end(self, run: asyncio.Task[None]) -> None:
        if not run.cancelled():
            self.loop.fail(AssertionError(f"{self.name} ends: {run.exception()!r}"))
        elif self._ending_s is not None and not self.loop.dead:
            self.flow.close()
            self._on_shard.shutdown()
            self._on_disk.shutdown()
            self.world.call_later(0.0, f"{self.name} exits", self.machine.on_exit)

    def _pause(self, seconds: float) -> None:
        """Let the shard's thread work, perhaps, while the loop waits for the end of the data flow."""
        assert self._ending_s is not None, "nothing else ends a simulated data flow"
        self._ending_s += seconds
        self.world.monitor.slave_ending(self, self._ending_s)
        if self._on_shard.under_way and self.machine.rng.random() < 0.5:
            self._on_shard.end_early(self._on_shard.under_way[0])

    @property
    def has_ended(self) -> bool:
        """Whether it has ended after SIGTERM."""
        return self._run is not None and self._run.cancelled()

    def _prepare(self, registered: Registered) -> None:
        self.machine.disk.nonce = self.nonce
        self.world.monitor.slave_registered(self, registered)

    # ---- threads ---------------------------------------------------------------------------------------------------

    def _work_time(self, work: object, *done: object) -> float:
        """Draw the duration of work, and note it if the scenario has sizes."""
        seconds, shared = self._draw_work_s(work), self.world.data.shared
        if seconds and shared is not None and self._ending_s is None:
            what = work.order.body if isinstance(work, WorkOnDisk | ShardWork) else work
            shared.note_work(self.name, type(what), seconds)
        return seconds

    def _draw_work_s(self, work: object) -> float:
        """Draw the duration of work on the shard, or beside it on the disk; events of the data flow take no time."""
        disk, rng, scenario = self.machine.disk, self.machine.rng, self.world.scenario
        least_work_s, load_s = scenario.least_work_s, scenario.short * LOAD_S
        if self._ending_s is not None:
            return STOPPING_S
        match work:
            case ReadSnapshot():
                return max(load_s, least_work_s(Persist))
            case WorkOnDisk():
                body = type(work.order.body)
                if body is OpenPull:  # a pull of an archive reads it first
                    return max(load_s, least_work_s(Persist))
                drawn_s = order_s(body, disk, rng, least_work_s(body), scenario.short)
                return drawn_s + disk.fsync_s if written_by(work) is not None else drawn_s
            case ShardWork(ShardMethod.EXECUTE):
                body = type(work.order.body)
                least_s = least_work_s(body)
                if least_s and self.shard.fences.has_answered(work.order.number):
                    return 0.0  # the answer is repeated without the work
                return order_s(body, disk, rng, least_s, scenario.short)
        return 0.0

    def stop_vain_writer(self) -> None:
        """End the writing of a snapshot whose version was abandoned: the writer notices at its next piece."""
        for work in list(self._on_disk.under_way):
            written = written_by(work.subject)
            if written is not None and written not in (self.versions.prepared, self.versions.served_version):
                self._on_disk.end_early(work)

    def _meters(self) -> Meters:
        """Return the bytes worked through by kernels and disk, at a constant rate but in an fsync; and the mirror."""
        mirror = self._mirror.report() if self._mirror is not None else None
        silent = self.machine.disk.fsync_s > 0.0
        worked_s = self._on_shard.worked_s() + self._on_disk.worked_s(
            lambda work: not silent or not written_by(work.subject)
        )
        return Meters(work_bytes=int(WORK_BYTES_PER_S * worked_s), mirror=mirror)
