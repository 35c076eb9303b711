"""A simulated slave: a process around the real core and Shard, on a machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from typing import Any, Protocol

from dips.errors import DipsError, FailedMirror
from dips.ids import VersionId
from dips.outer.kernel_pool import KernelPool, Kernels
from dips.outer.versions import Versions
from dips.protocol.effects import (
    Apply,
    Commit,
    Failed,
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
from dips.sim.agent import error_of
from dips.sim.disk import SimDisk, Snapshot
from dips.sim.flow import SimFlow
from dips.sim.heap import Gate, Heap, Timer
from dips.sim.network import Network
from dips.sim.scenario import Scenario
from dips.sim.streams import LANE_KEY, DataNetwork
from dips.slave.core import SlaveCore
from dips.slave.mirror_plan import MirrorJob, MirrorJobKind, MirrorPlan, Restored
from dips.slave.ports import (
    Actions,
    AnswerOrder,
    CallMaster,
    EndSlave,
    FlowEvent,
    KeepInMirror,
    Meters,
    ReadSnapshot,
    RestoreFromMirror,
    ShardMethod,
    ShardWork,
    SlaveIdentity,
    SlaveTiming,
    WorkOnDisk,
    WriteLog,
)
from dips.slave.shard import Shard
from dips.transport.backoff import Backoff
from dips.wire.chunks import LayerLayout

# ---- mirror ----------------------------------------------------------------------------------------------------------
# A mirror survives every disk; it is slow, or gone, at times. A copy interrupted by a crash leaves no complete
# snapshot.


COPY_S = 0.4  # duration of a snapshot's copy, at most double
MIRROR_BACKOFF_S = (0.5, 4.0)


class Later(Protocol):
    """Plans an action of this incarnation, done only if it still runs."""

    def __call__(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer: ...


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

    def __init__(self, mirror: SimMirror, later: Later, heap: Heap) -> None:
        self._mirror, self._later, self._heap = mirror, later, heap
        self._plan = MirrorPlan(Backoff(*MIRROR_BACKOFF_S, mirror.rng))
        self._timer: Timer | None = None
        self._rotten: dict[VersionId, Snapshot] = {}  # copies that this process has read and found rotten

    def report(self) -> MirrorReport:
        """Return the mirror's part of a heartbeat."""
        return self._plan.report(self._heap.now)

    def want(self, versions: tuple[VersionId, ...]) -> None:
        """Set the versions that the mirror should hold, as the master orders."""
        self._plan.want(versions)
        self._look()

    def restore(self, on_disk: tuple[VersionId, ...], look_for: tuple[VersionId, ...]) -> Restored:
        """Restore versions newer than the disk's, or requested ones. Raises FailedMirror if the mirror is gone."""
        disk, mirror = self._mirror.disk, self._mirror
        if mirror.gone:
            self._plan.on_failed("the mirror is gone", self._heap.now)
            raise FailedMirror("the mirror is gone")
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
        now = self._heap.now
        job = self._plan.next_job(now)
        if job is not None:
            work_s = COPY_S * self._mirror.slowness * (1.0 + self._mirror.rng.random())
            self._later(work_s if job.kind is MirrorJobKind.COPY else 0.0, "a mirror works", lambda: self._end(job))
            return
        due = self._plan.next_deadline(now)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._later(due - now, "a mirror's deadline", self._look) if due < inf else None

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
                mirror.copied_at[job.versions[0]] = self._heap.now
                self._plan.on_done(job)
        if problem:
            self._plan.on_failed(problem, self._heap.now)
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


def order_s(body: type, disk: SimDisk, rng: Random, least_s: float) -> float:
    """Draw the duration of an order of this class; at least `least_s` if its work grows with the model."""
    slowness = disk.slowness if body in (Persist, Retire, KeepSeed) else 1.0
    drawn_s = WORK_S.get(body, 0.0) * slowness * (1.0 + rng.random())
    return max(drawn_s, least_s) if body in GROWS else drawn_s


def shard_work_s(work: ShardWork, disk: SimDisk, rng: Random, least_s: float) -> float:
    """Draw the time for which the shard is busy with `work`; snapshots are written, read and deleted in parallel."""
    return order_s(type(work.order.body), disk, rng, least_s) if work.method is ShardMethod.EXECUTE else 0.0


def disk_work_s(work: WorkOnDisk | ReadSnapshot, disk: SimDisk, rng: Random, least_s: float) -> float:
    """Draw the duration of `work` on the disk, in parallel to the shard's."""
    if isinstance(work, ReadSnapshot) or isinstance(work.order.body, OpenPull):  # a pull of an archive reads it first
        return max(LOAD_S, least_s)
    drawn_s = order_s(type(work.order.body), disk, rng, least_s)
    return drawn_s + disk.fsync_s if written_by(work) is not None else drawn_s


def written_by(*works: ShardWork | WorkOnDisk | ReadSnapshot) -> VersionId | None:
    """Return the version whose snapshot is being written, None if none of `works` writes one."""
    for work in works:
        match work:
            case WorkOnDisk() | ShardWork(ShardMethod.BEGIN_ON_DISK):
                if isinstance(work.order.body, Persist):
                    return work.order.body.version
    return None


def attempt_work(work: Callable[..., object], *details: object) -> object:
    """Return the result of work, or the error to be passed to the core."""
    try:
        return work(*details)
    except (DipsError, OSError) as error:
        return error


# ---- slave ----------------------------------------------------------------------------------------------------------
# It is a shell of `dips.slave.core`: the work that the daemon does with a thread, gRPC and a clock (slave/runtime.py)
# is done here in simulated time. Work on the shard takes time and has its effect at the end; a crash in between may
# leave a torn snapshot.


DiskAction = WorkOnDisk | ReadSnapshot
_OF_ORDERS = (ShardMethod.EXECUTE, ShardMethod.BEGIN_ON_DISK)
_OF_REGISTRATION = (ShardMethod.FOLLOW, ShardMethod.END_LOAD)

BOOT_S = 0.1  # until a process registers
CALL_S = 2.0
BACKOFF_S = (0.2, 1.6)
BUSY_RETRY_S = 0.3
WORK_BYTES_PER_S = 1000.0


class SlaveObserver:
    """The hooks that a slave calls; each does nothing by default."""

    def slave_registered(self, process: SlaveProcess, answer: Registered) -> None:
        """Called when a slave's registration was answered."""

    def before_order(self, process: SlaveProcess, order: Order) -> None:
        """Called before a slave carries out an order."""

    def after_order(self, process: SlaveProcess, order: Order) -> None:
        """Called after a slave has carried out an order."""

    def slave_crashed(self, process: SlaveProcess) -> None:
        """Called before a slave's process dies."""

    def rare_event_occurred(self, what: str) -> None:
        """Called for a rare event that has no hook of its own; coverage counts it by this name."""


class SlaveWorld(Protocol):
    """The parts of the world that a slave needs."""

    heap: Heap
    network: Network
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


class SlaveProcess:
    """One incarnation of a slave."""

    def __init__(self, machine: SlaveHost, nonce: str) -> None:
        self.machine, self.world, self.name, self.nonce = machine, machine.world, machine.name, nonce
        settings, heartbeat_s = self.world.scenario, self.world.options.timing.heartbeat_s
        self.gate = Gate()  # closed while it is stopped
        self.flow = SimFlow(
            self.world.heap,
            settings.run,
            self.name,
            LayerLayout(self.world.manifest, machine.layers),
            self.world.data.stall_s,
            settings.chunk_bytes,
            machine.mark_touched,
            self.gate,
            self.world.frame_refused,
        )
        self.versions = Versions(
            KernelPool(self.world.kernels), settings.slots, settings.pinned, settings.pull_codec,
        )  # fmt: skip
        self.shard = Shard(self.name, self.versions, machine.disk, self.flow, self.on_flow_event, self._prepare)
        self.core = SlaveCore(
            SlaveIdentity(
                settings.run,
                self.name,
                nonce,
                f"{self.name}:1",
                (f"{self.name}:2",),
                "master",
                LANE_KEY,
                machine.disk.nonce,
            ),
            SlaveTiming(heartbeat_s, CALL_S, BACKOFF_S, BUSY_RETRY_S),
            self.shard.take_standing,
            self.flow.list_transfers,
            self._meters,
            machine.rng,
        )
        self.alive = True
        self._mirror = MirrorShell(machine.mirror, self._call_later, self.world.heap) if machine.mirror else None
        self._booted = False  # whether its control server answers
        self._undeceived = False  # whether the master that last sent Hold has the newest ledger
        self._work: deque[ShardWork] = deque()  # the first one is being done
        self._on_disk: dict[str, tuple[DiskAction, Timer]] = {}  # disk work in parallel, at most one of each kind
        self._began: dict[str, float] = {}  # start times of the present work, by kind
        self._silent: set[str] = set()  # kinds that wait for an fsync, which reports no progress
        self._worked_s = 0.0
        self._orders: dict[int, Callable[[Any], None]] = {}  # ticket → receiver of the answer
        self._tickets = 0
        self._timer: Timer | None = None
        self._call_later(BOOT_S, f"{self.name} begins", self._boot)

    @property
    def holds(self) -> bool:
        """Whether the present master has answered Hold, as far as the slave knows."""
        return self.core.serving and self._undeceived

    def kill_process(self) -> None:
        self.world.monitor.slave_crashed(self)
        self.alive = self.flow.alive = False
        if self._timer is not None:
            self._timer.cancel()
        version = written_by(*(work for work, _ in self._on_disk.values()), *([self._work[0]] if self._work else []))
        if version is not None:
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

    # ---- messages in ---------------------------------------------------------------------------------------------

    def take_order(self, order: Order, answer: Callable[[Any], None]) -> None:
        """Pass an order of the master to the core."""
        if self.alive and self._booted:
            self._tickets += 1
            self._orders[self._tickets] = answer
            self._do_actions(self.core.orders.take_order(self._tickets, order, self.world.heap.now))

    def on_flow_event(self, event: FlowEvent) -> None:
        """Process an event of the data flow: a push is complete, is given up, or a pull no longer reads."""
        self.shard.transfers.on_flow_event(event)
        self._send_reports()

    def _send_reports(self) -> None:
        reports = self.shard.take_reports()
        if reports:
            self._do_actions(self.core.reports.add_reports(reports))

    def _boot(self) -> None:
        self._booted = True
        self.machine.mark_touched()
        self._run_tick()

    def _meters(self) -> Meters:
        mirror = self._mirror.report() if self._mirror is not None else None
        return Meters(work_bytes=self._worked(), mirror=mirror)

    def _run_tick(self) -> None:
        self._timer = None
        self._do_actions(self.core.tick(self.world.heap.now))

    # ---- actions of the core ---------------------------------------------------------------------------------

    def _do_actions(self, actions: Actions) -> None:
        for action in actions:
            _SHELL[type(action)](self, action)
        self._plan_tick()

    def _call_master(self, action: CallMaster) -> None:
        def on_reply(reply: Any) -> None:
            self.gate.pass_on(partial(self._take_reply, action, reply))

        self.world.network.call_host(self.name, "master", action.message, action.deadline_s, on_reply)

    def _restore_from_mirror(self, action: RestoreFromMirror) -> None:
        assert self._mirror is not None, "who has no mirror does not ask"
        restored = attempt_work(self._mirror.restore, action.on_disk, action.look_for)
        self._do_actions(self.core.on_done(action, restored, self.world.heap.now))

    def _keep_in_mirror(self, action: KeepInMirror) -> None:
        if self._mirror is not None:
            self._mirror.want(action.versions)

    def _end_process(self, action: EndSlave) -> None:
        raise AssertionError(f"{self.name} ends: {action.error!r}")

    def _skip_log(self, action: WriteLog) -> None:
        """Do nothing: logs are not kept."""

    def _prepare(self, registered: Registered) -> None:
        self.machine.disk.nonce = self.nonce
        self.world.monitor.slave_registered(self, registered)

    def _plan_tick(self) -> None:
        due, timer = self.core.next_deadline(), self._timer
        if timer is not None and timer.alive and timer.at <= due:
            return  # early enough: later deadlines are planned then
        if timer is not None:
            timer.cancel()
        if due < inf:
            delay_s = max(0.0, due - self.world.heap.now)
            self._timer = self._call_later(delay_s, f"{self.name}'s deadline", self._run_tick)

    def _answer_order(self, action: AnswerOrder) -> None:
        answer, result = self._orders.pop(action.ticket), action.answer
        if isinstance(result, Exception) and not isinstance(result, DipsError):
            raise result
        answer(Failed(type(result), str(result)) if isinstance(result, DipsError) else result)

    def _take_reply(self, call: CallMaster, reply: Any) -> None:
        if self.alive:
            self._do_actions(self.core.on_reply(call, error_of(reply) or reply, self.world.heap.now))

    # ---- work on the shard, one piece after another ----------------------------------------------------------------

    def _queue_work(self, work: ShardWork) -> None:
        self._work.append(work)
        if len(self._work) == 1:
            self._begin_work()

    def _has_answered(self, work: ShardWork) -> bool:
        return self.shard.fences.has_answered(work.order.number)

    def _begin_work(self) -> None:
        work = self._work[0]
        work_s = shard_work_s(work, self.machine.disk, self.machine.rng, self.world.scenario.work_s)
        if self.world.scenario.work_s and work.method is ShardMethod.EXECUTE and self._has_answered(work):
            work_s = 0.0  # the answer is repeated without the work
        self._began["shard"] = self.world.heap.now
        if work_s:
            self._call_later(work_s, f"{self.name} works", self._end_work)
        else:
            self._end_work()

    def _end_work(self) -> None:
        work = self._work[0]
        self.machine.mark_touched()
        self._end_of("shard")
        if work.method in _OF_ORDERS:
            if self._has_answered(work):
                self.world.monitor.rare_event_occurred("answer_lost")
            self.world.monitor.before_order(self, work.order)
            result = attempt_work(self.shard.perform_work, work)
            self.world.monitor.after_order(self, work.order)
        else:
            result = attempt_work(self.shard.perform_work, work)
        if work.method in _OF_REGISTRATION:
            # The head of a master on an old ledger may be wrong.
            self._undeceived = not self.world.master_is_deceived
        self._do_actions(self.core.on_done(work, result, self.world.heap.now))
        self._send_reports()
        self._work.popleft()
        if self._work:
            self._begin_work()
        if self._on_disk:
            for beside, _ in list(self._on_disk.values()):
                if self._is_abandoned(beside):
                    self._end_on_disk(beside)

    # ---- work on the disk, in parallel -------------------------------------------------------------------------------

    def _begin_on_disk(self, work: DiskAction) -> None:
        kind = type(work).__name__
        assert kind not in self._on_disk, "snapshots are written and deleted one after another, and so are loads"
        self._began[kind] = self.world.heap.now
        work_s = disk_work_s(work, self.machine.disk, self.machine.rng, self.world.scenario.work_s)
        timer = self._call_later(work_s, f"{self.name}'s disk works", partial(self._end_on_disk, work))
        self._on_disk[kind] = work, timer
        if self.machine.disk.fsync_s and written_by(work) is not None:
            self._silent.add(kind)

    def _is_abandoned(self, work: DiskAction) -> bool:
        """Return whether the version being written was abandoned; the writer notices at its next piece."""
        written = written_by(work)
        return written is not None and written not in (self.versions.prepared, self.versions.served_version)

    def _end_on_disk(self, work: DiskAction) -> None:
        self.machine.mark_touched()
        kind = type(work).__name__
        self._on_disk.pop(kind)[1].cancel()
        self._end_of(kind)
        self._do_actions(self.core.on_done(work, attempt_work(work.run), self.world.heap.now))

    # ---- progress for heartbeats ---------------------------------------------------------------------------------

    def _worked(self) -> int:
        """Return the bytes worked through by kernels and disk: a constant rate while one of them works."""
        now = self.world.heap.now
        told = [now - began for what, began in self._began.items() if what not in self._silent]
        return int(WORK_BYTES_PER_S * (self._worked_s + sum(told)))

    def _end_of(self, what: str) -> None:
        began = self._began.pop(what)
        if what not in self._silent:
            self._worked_s += self.world.heap.now - began
        self._silent.discard(what)

    def _call_later(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer:
        due = partial(self.gate.pass_on, lambda: action() if self.alive else None)
        return self.world.heap.call_later(delay_s, what, due)


_SHELL: Mapping[type, Callable[[SlaveProcess, Any], None]] = {
    ShardWork: SlaveProcess._queue_work,
    CallMaster: SlaveProcess._call_master,
    AnswerOrder: SlaveProcess._answer_order,
    WorkOnDisk: SlaveProcess._begin_on_disk,
    ReadSnapshot: SlaveProcess._begin_on_disk,
    RestoreFromMirror: SlaveProcess._restore_from_mirror,
    KeepInMirror: SlaveProcess._keep_in_mirror,
    EndSlave: SlaveProcess._end_process,
    WriteLog: SlaveProcess._skip_log,
}
