"""The simulated master: the shipped core, runtime and services on a loop of the world's time (loop.py).

Replaced are the sockets (messages arrive by `network.py`; orders leave by `SimCalls`) and the disk under the real
Ledger. A crash loses the process; the transaction under way is written completely or not at all, also if the machine
stops between two of its statements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Any, Protocol, cast

from google.protobuf.message import Message

from dips.client.agent.agent import CALLS
from dips.identity.names import MASTER_NAME, PeerRole
from dips.master.app import MasterReload
from dips.master.core import Action, MasterCore, WriteRecords
from dips.master.runtime import ClusterServicer, MasterOutside, OperatorServicer, Runtime, SlaveServicer
from dips.protocol import events
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Acknowledged, Effect, Exit, Failed, Note, Order, Registered
from dips.protocol.heartbeats import (
    ClusterHeartbeat,
    ClusterHeartbeatAnswer,
    SlaveHeartbeat,
    SlaveHeartbeatAnswer,
)
from dips.protocol.manifest import Manifest
from dips.protocol.membership import Judge
from dips.protocol.options import Options
from dips.protocol.records import LedgerState, Record, VersionCommitted
from dips.sim.disk import LedgerDisk, SimLedger
from dips.sim.heap import Chance, Heap, Timer, Trace
from dips.sim.loop import SimLog, SimLoop
from dips.sim.network import Network, SimAuthority, SimTlsSource
from dips.sim.scenario import Scenario
from dips.tasks import start_task
from dips.transport.gate import PEM_KEY, Guard
from dips.wire.generated import slave_pb2
from dips.wire.messages import from_proto, to_proto, unwrap_oneof

# ---- calls to slaves ------------------------------------------------------------------------------------------------


class SimCalls:
    """The orders for one slave, in the place of transport/ordered_calls.py: sent until they are answered."""

    def __init__(self, network: Network, loop: SimLoop, slave: str, resend_s: float) -> None:
        """An order without an answer for `resend_s` is sent again under its number."""
        self._network, self._loop, self._slave, self._resend_s = network, loop, slave, resend_s

    async def ask(self, request: Message, *, needs_listener: bool = False) -> slave_pb2.Answer:
        """Return the reply, however many messages it takes; raise the slave's error."""
        answer = None
        while answer is None:
            answer = await self._network.ask_host(self._loop, "master", self._slave, request, self._resend_s)
        if isinstance(answer, Failed):
            raise answer.error(answer.message)
        return cast(slave_pb2.Answer, answer)

    async def close(self) -> None:
        """Do nothing: whoever waits is cancelled."""


# ---- master ---------------------------------------------------------------------------------------------------------


Answer = Callable[[Any], None]
Serve = Callable[[Any, Any], Awaitable[Message]]  # a method of a service
WRITE_S = 0.02  # duration of a transaction, at most ten times as long
VERDICTS = frozenset({events.ClusterSilent, events.SlaveSilent, events.TrainerChanged, events.BandwidthMeasured})

# Replies that are no oneof, by the message that they answer.
PLAIN_REPLIES: Mapping[type, type] = {
    ClusterHeartbeat: ClusterHeartbeatAnswer,
    SlaveHeartbeat: SlaveHeartbeatAnswer,
    events.SlaveRegistered: Registered,
    events.PushStaged: Acknowledged,
    events.PushRefused: Acknowledged,
}


class MasterObserver:
    """The hooks that a master calls; each does nothing by default."""

    def master_restored(self, state: LedgerState) -> None:
        """Called when a master starts from this state."""

    def record_written(self, record: Record) -> None:
        """Called when a record is durable."""

    def before_step(self, master: MasterProcess, event: events.Event) -> None:
        """Called before a Coordinator processes an event."""

    def after_step(self, master: MasterProcess, event: events.Event) -> None:
        """Called after a Coordinator has processed an event."""

    def heartbeat_read(self, role: str, name: str, incarnation: int) -> None:
        """Called when a master has read a heartbeat."""

    def silence_judged(self, verdict: events.Event) -> None:
        """Called when the Judge declares a cluster or slave silent, or its trainer hanging."""

    def note_logged(self, note: Note) -> None:
        """Called when a Coordinator writes to the log."""

    def order_leaves(self, order: Order) -> None:
        """Called when a master sends an order."""

    def master_died(self, process: MasterProcess, rows: bool, written: bool) -> None:
        """Called when a master's process dies; `rows`: while it wrote a version's row, which is durable if
        `written`.
        """

    def master_stopped(self, process: MasterProcess) -> None:
        """Called when a master has ended after SIGTERM."""

    def rare_event_occurred(self, what: str) -> None:
        """Called for a rare event that has no hook of its own; coverage counts it by this name."""


class MasterWorld(Protocol):
    """The parts of the world that a master needs."""

    heap: Heap
    chance: Chance
    trace: Trace
    network: Network
    authority: SimAuthority
    scenario: Scenario
    options: Options
    manifest: Manifest

    @property
    def monitor(self) -> MasterObserver: ...
    def call_later(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer: ...
    def master_exits(self, process: MasterProcess, effect: Exit) -> None: ...


class MasterHost(Protocol):
    """The machine, as seen by a process on it."""

    rng: Random
    disk: LedgerDisk
    process: MasterProcess | None
    zombies: list[MasterProcess]  # processes that are stopped and taken for dead; each has a successor

    @property
    def world(self) -> MasterWorld: ...


class WatchedCore(MasterCore):
    """The core of a simulated master: the observers learn what it reads and what leaves it."""

    process: MasterProcess

    def on_heartbeat(self, req: int, heartbeat: ClusterHeartbeat | SlaveHeartbeat, now: float) -> None:
        if self.process.presides:
            self.process.world.monitor.heartbeat_read(*_sender_of(heartbeat))
        super().on_heartbeat(req, heartbeat, now)

    def take_actions(self) -> list[Action]:
        actions = super().take_actions()
        for action in actions:
            self.process.watch_action(action)
        return actions

    def on_write_failed(self, error: Exception) -> Exit:
        self.process.exit = super().on_write_failed(error)
        return self.process.exit


class MasterProcess:
    """One incarnation of the master, with its term."""

    def __init__(self, machine: MasterHost) -> None:
        self.machine, self.world = machine, machine.world
        self.ledger: SimLedger = machine.disk.open_ledger()
        machine.disk.begin_mirror(self.ledger.start_term())
        self.ledger.on_written = self._report_records
        state = self.ledger.read_state()
        world, now, timing = self.world, self.world.heap.now, self.world.options.timing
        calls = world.scenario.calls
        self.trusted = not machine.disk.is_old_copy  # whether its decisions are compared with the reference
        if self.trusted:
            world.monitor.master_restored(state)
        self.coordinator = Coordinator(state, world.manifest, world.options, now)
        judge = Judge.from_state(timing, state, now)
        self.core = WatchedCore(self.coordinator, judge, timing, now, polls=calls.polls, step=self._step_watched)
        self.core.process = self
        self.alive = True
        self.writing: Sequence[Record] = ()  # the transaction under way, until it is durable
        self.exit: Exit | None = None  # why it ends by itself
        self.stopping_since = inf  # when SIGTERM was found
        self.loop = SimLoop(world.heap, world.chance.generator_for("master's loop"), "the master", self._write_time)
        outside = MasterOutside(
            self.ledger,
            dial=lambda slave, *_: SimCalls(world.network, self.loop, slave, calls.resend_s),
            wall=float,
        )
        quiet = SimLog(self.loop.fail)
        self._guard = Guard(SimTlsSource(world.authority, MASTER_NAME, PeerRole.MASTER, self.loop.time))
        with self.loop.running():
            self.runtime = Runtime(
                self.core, outside, clock=self.loop.time, log=cast(Any, quiet), timeline=cast(Any, quiet)
            )
            reload = MasterReload(self._guard, self.runtime, cast(Any, quiet), self.loop.time, calls.look_s)
            start_task(reload.keep_expelling(), self.loop.fail)
        self._methods = _list_methods(self.runtime, self.loop.time)
        self.loop.create_task(self.runtime.run()).add_done_callback(self._on_end)

    @property
    def presides(self) -> bool:
        """Whether it is the run's master, neither a zombie nor on an old ledger."""
        return self.trusted and self is self.machine.process

    @property
    def stopped(self) -> bool:
        """Whether it is stopped, by SIGSTOP or with its machine."""
        return self.loop.stopped

    @property
    def all_is_written(self) -> bool:
        """Whether all its decisions are durable."""
        return not self.writing and not self.core.has_unwritten()

    def terminate(self) -> None:
        """End by SIGTERM, which the process may find a moment later."""
        self.loop.deliver_signal(self._stop)

    def _stop(self) -> None:
        self.stopping_since = min(self.stopping_since, self.loop.time())  # a second one changes nothing
        self.runtime.stop()

    def kill_process(self) -> None:
        """Kill the process, by SIGKILL or its own exit."""
        self.alive = False
        rows = any(isinstance(r, VersionCommitted) for r in self.writing)
        self.world.monitor.master_died(self, rows, self._ends_writing())
        self.loop.kill()

    def _ends_writing(self) -> bool:
        """End the transaction under way by chance; return True if it is durable."""
        fate, disk = self.machine.rng.random(), self.machine.disk
        if not self.writing or self in self.machine.zombies or disk.full or fate >= 0.8:
            return False
        if fate < 0.5:
            self.ledger.write_records(self.writing)
            return True
        if disk.tear_write(self.writing, self.machine.rng.randint(1, 5)):
            self._report_records(self.writing)
            return True
        self.world.monitor.rare_event_occurred("torn_ledger")
        return False

    def _on_end(self, run: asyncio.Task[int]) -> None:
        if self.exit is None and not run.cancelled():
            self.world.monitor.master_stopped(self)
        ended = self.exit or Exit(run.result(), "it was stopped")
        self.world.call_later(
            0.0, "the master exits", lambda: self.world.master_exits(self, ended) if self.alive else None
        )

    # ---- messages in -----------------------------------------------------------------------------------------------

    def on_message(self, message: Any, answer: Answer, shown: bytes = b"") -> None:
        """Serve a call that has arrived, as gRPC would; `shown` is the caller's certificate, "": nobody asks."""
        self.loop.serve_call(partial(self._serve_call, message, shown), answer)

    def put_event(self, event: events.Event) -> None:
        """Pass in an event of the process itself (`MasterReload`)."""
        self.loop.deliver(self.runtime.put_event, event)

    async def _serve_call(self, message: Any, shown: bytes) -> object:
        plain, (path, method) = PLAIN_REPLIES.get(type(message)), self._methods[type(message)]
        request = to_proto(message)
        if shown:
            self._guard.check_call(path, request, {PEM_KEY: (shown,)})
        reply = await method(request, None)
        return unwrap_oneof(reply) if plain is None else from_proto(reply, plain)

    def _step_watched(self, event: events.Event, now: float) -> list[Effect]:
        """Let the Coordinator process an event, with the observers' hooks around it."""
        monitor = self.world.monitor
        if type(event) in VERDICTS and self.presides:
            monitor.silence_judged(event)
        monitor.before_step(self, event)
        effects = self.coordinator.step(event, now)
        monitor.after_step(self, event)
        return effects

    # ---- what leaves -----------------------------------------------------------------------------------------------

    def watch_action(self, action: Action) -> None:
        """Let the observers see an action that leaves the core."""
        match action:
            case Order():
                if self.trusted:
                    self.world.monitor.order_leaves(action)
            case WriteRecords():
                self.writing = action.records
            case Note():
                fields = (f"{k}={v}" for k, v in action.fields)
                self.world.trace.add_line(self.world.heap.now, f"note {action.kind}", *fields)
                self.world.monitor.note_logged(action)
            case Exit():
                self.exit = action

    def _write_time(self, *args: object) -> float:
        drawn_s = WRITE_S * (1.0 + 9.0 * self.machine.rng.random() ** 3)
        return self.world.scenario.short * drawn_s * self.machine.disk.slowness

    def _report_records(self, records: Sequence[Record]) -> None:
        self.writing = ()
        if self.trusted:
            self.machine.disk.mirror_records(records)
            for record in records:
                self.world.monitor.record_written(record)


def _list_methods(runtime: Runtime, wall: Callable[[], float]) -> dict[type, tuple[str, Serve]]:
    """Return the methods of the master's services, each with its path, by the message that it takes."""

    def begin_run(proposed: events.RunProposed) -> None:
        raise AssertionError("a simulated run has its ledger from the beginning")

    clusters, slaves = ClusterServicer(runtime, wall=wall), SlaveServicer(runtime)
    operators = OperatorServicer(runtime, begin_run, wall=wall)
    served: dict[type, Any] = {
        **{question: getattr(clusters, method) for question, (method, _) in CALLS.items()},
        ClusterHeartbeat: clusters.Heartbeat,
        SlaveHeartbeat: slaves.Heartbeat,
        events.SlaveRegistered: slaves.Register,
        events.PushStaged: slaves.Staged,
        events.PushRefused: slaves.Refused,
        events.SeedAsked: operators.Seed,
        events.ExtensionAsked: operators.Extend,
        events.TuningAsked: operators.Tune,
        events.QuarantineAsked: operators.Quarantine,
        events.ReadmissionAsked: operators.Readmit,
    }
    services = {clusters: "Cluster", slaves: "Slave", operators: "Operator"}
    return {
        asked: (f"/dips.v1.{services[method.__self__]}Service/{method.__name__}", method)
        for asked, method in served.items()
    }


def _sender_of(heartbeat: ClusterHeartbeat | SlaveHeartbeat) -> tuple[str, str, int]:
    if isinstance(heartbeat, ClusterHeartbeat):
        return "cluster", heartbeat.cluster, heartbeat.inc
    return "slave", heartbeat.slave, heartbeat.sinc
