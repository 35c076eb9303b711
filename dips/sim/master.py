"""The simulated master: a process around the real MasterCore and Ledger, on a machine (master_machine.py).

The core decides; this shell delivers messages and time to it, writes its records in transactions that take their time,
and carries out its actions. A crash loses the process; of the transaction under way all is written or nothing, also
when the machine stops between two of its statements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

from dips.dataclass import replace
from dips.errors import StaleTerm
from dips.master.core import MasterCore
from dips.master.held import PollOptions
from dips.master.outbox import Action, HeartbeatReply, SlaveEndpoint, SlaveProgress, WriteRecords
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Acknowledged, Effect, Exit, Note, Order, Reply
from dips.protocol.events import (
    BandwidthMeasured,
    ClusterExpelled,
    ClusterSilent,
    Event,
    OperatorReported,
    PushRefused,
    PushStaged,
    SlaveSilent,
    TrainerChanged,
)
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.manifest import Manifest
from dips.protocol.membership import Judge
from dips.protocol.options import Options
from dips.protocol.records import LedgerState, Record, VersionCommitted
from dips.sim.heap import Chance, Heap, Timer, Trace
from dips.sim.ledger_disk import LedgerDisk
from dips.sim.network import Network
from dips.sim.slave_client import SimSlaveClient

Answer = Callable[[Any], None]
WRITE_S = 0.02  # of a transaction, at most ten times that
POLLS = PollOptions(patience_s=1.4, pause_s=0.12, longest_pause_s=0.12)  # callers give up earlier than real ones
VERDICTS = frozenset({ClusterSilent, SlaveSilent, TrainerChanged, BandwidthMeasured})

FACTS = frozenset({PushStaged, PushRefused, OperatorReported, ClusterExpelled})  # are acknowledged at once


class MasterObserver:
    """The hooks that a master calls; each does nothing by default."""

    def master_restored(self, state: LedgerState) -> None:
        """A master starts from this state."""

    def record_written(self, record: Record) -> None:
        """A record is durable."""

    def before_step(self, master: MasterProcess, event: Event) -> None:
        """A Coordinator is about to take an event."""

    def after_step(self, master: MasterProcess, event: Event) -> None:
        """It has taken it."""

    def heartbeat_read(self, role: str, name: str, incarnation: int) -> None:
        """A master read a heartbeat."""

    def silence_judged(self, verdict: Event) -> None:
        """The Judge said that a cluster or slave is silent, or its trainer hangs."""

    def note_logged(self, note: Note) -> None:
        """A Coordinator wrote to the log."""

    def order_leaves(self, order: Order) -> None:
        """A master sends an order."""

    def master_died(self, process: MasterProcess, rows: bool, written: bool) -> None:
        """A master's process died; `rows`: while it wrote the row of a version, which is durable if `written`."""

    def rare_event_occurred(self, what: str) -> None:
        """Something rare happened that has no hook of its own; coverage counts it by this name."""


class MasterWorld(Protocol):
    """What a master needs of the world around it."""

    heap: Heap
    chance: Chance
    trace: Trace
    network: Network
    options: Options
    manifest: Manifest

    @property
    def monitor(self) -> MasterObserver: ...
    def call_later(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer: ...
    def master_exits(self, process: MasterProcess, effect: Exit) -> None: ...


class MasterHost(Protocol):
    """The machine, as a process on it sees it."""

    rng: Random
    disk: LedgerDisk
    process: MasterProcess | None
    zombies: list[MasterProcess]  # stopped, and taken for dead: each has a successor

    @property
    def world(self) -> MasterWorld: ...


class MasterProcess:
    """One incarnation of the master: one term. A shell around MasterCore, as dips/master/runtime.py is."""

    def __init__(self, machine: MasterHost) -> None:
        self.machine, self.world = machine, machine.world
        self.ledger = machine.disk.open_ledger()
        machine.disk.begin_mirror(self.ledger.start_term())
        state = self.ledger.read_state()
        now, timing = self.world.heap.now, self.world.options.timing
        self.trusted = not machine.disk.is_old_copy  # what it decides is compared with the reference
        if self.trusted:
            self.world.monitor.master_restored(state)
        self.coordinator = Coordinator(state, self.world.manifest, self.world.options, now)
        judge = Judge.from_state(timing, state, now)
        self.core = MasterCore(self.coordinator, judge, timing, now, polls=POLLS, step=self._step_watched)
        self.alive = True
        self.inbox: list[Callable[[], None]] | None = None  # while it is stopped, what came in
        self.writing: Sequence[Record] = ()
        self._answers: dict[int, Answer] = {}
        self._slaves = SimSlaveClient(self.world.heap, self.world.network, self._on_arrival, self._on_order_ended)
        self._last_req = 0
        self._timer: Timer | None = None
        self._due = 0.0  # when the core must be looked at again
        self._carry_out()

    @property
    def presides(self) -> bool:
        """It is the run's master, and no zombie or deceived by an old ledger."""
        return self.trusted and self is self.machine.process

    @property
    def all_is_written(self) -> bool:
        """Nothing that it has decided waits for the disk."""
        return not self.writing and not self.core.has_unwritten()

    def kill_process(self) -> None:
        """SIGKILL, or its own exit."""
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
        rows = any(isinstance(r, VersionCommitted) for r in self.writing)
        self.world.monitor.master_died(self, rows, self._ends_writing())

    def _ends_writing(self) -> bool:
        """The transaction under way ends as the disk pleases; True if it is durable."""
        fate, disk = self.machine.rng.random(), self.machine.disk
        if not self.writing or self in self.machine.zombies or disk.full or fate >= 0.8:
            return False
        if fate < 0.5:
            self.ledger.write_records(self.writing)
        elif not disk.tear_write(self.writing, self.machine.rng.randint(1, 5)):
            self.world.monitor.rare_event_occurred("torn_ledger")
            return False
        self._report_records(self.writing)
        return True

    # ---- running, or stopped ---------------------------------------------------------------------------------------

    def pause_process(self) -> None:
        """SIGSTOP, or a machine that stands still: everything waits, outside too much goes on."""
        if self.inbox is None:
            self.inbox = []

    def wake_process(self) -> None:
        """Run again: the core notices the gap, reads what came meanwhile, and only then looks at deadlines."""
        if self.inbox is None or not self.alive:
            return
        came, self.inbox = self.inbox, None
        self.core.on_wake(self.world.heap.now)
        for read in came:
            read()
        self._run_core()

    def _on_arrival(self, read: Callable[[], None]) -> None:
        """Something reached this process: it is read now, or when the process runs again."""
        if self.inbox is not None:
            self.inbox.append(read)
        elif self.alive:
            self.core.on_wake(self.world.heap.now)
            read()
            self._carry_out()

    def _on_timer(self) -> None:
        self._timer = None
        if not self.alive or self.inbox is not None:
            return
        if self._due > self.world.heap.now:  # what it was planned for is over
            self._plan_wake()
        else:
            self.core.on_wake(self.world.heap.now)
            self._run_core()

    def _run_core(self) -> None:
        if self.alive:
            self.core.tick(self.world.heap.now)
            self._carry_out()

    def _carry_out(self) -> None:
        """Do what the core wants done, and plan when it is looked at again."""
        for action in self.core.take_actions() if self.alive else ():
            if self.alive:
                self._do_action(action)
        if not self.alive:
            return
        self._due, timer = self.core.sleep_until(self.world.heap.now), self._timer
        if timer is None or timer.at > self._due:
            if timer is not None:
                timer.cancel()
            self._plan_wake()

    def _plan_wake(self) -> None:
        due_in_s = self._due - self.world.heap.now
        self._timer = self.world.heap.call_later(due_in_s, "the master's deadline", self._on_timer)

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def on_message(self, message: Any, answer: Answer) -> None:
        self._on_arrival(lambda: self._read_message(message, answer))

    def _read_message(self, message: Any, answer: Answer) -> None:
        now = self.world.heap.now
        kind = type(message)
        if kind is ClusterHeartbeat or kind is SlaveHeartbeat:
            if self.presides:
                self.world.monitor.heartbeat_read(*_sender_of(message))
            self.core.on_heartbeat(self._new_req(answer), message, now)
        elif kind in FACTS:
            self.core.take_event(message, now)
            answer(Acknowledged())
        else:
            self.core.take_event(replace(message, req=self._new_req(answer)), now)

    def _new_req(self, answer: Answer) -> int:
        self._last_req += 1
        self._answers[self._last_req] = answer
        return self._last_req

    def _step_watched(self, event: Event, now: float) -> list[Effect]:
        """Let the Coordinator decide while the invariants watch."""
        monitor = self.world.monitor
        if type(event) in VERDICTS and self.presides:
            monitor.silence_judged(event)
        monitor.before_step(self, event)
        effects = self.coordinator.step(event, now)
        monitor.after_step(self, event)
        return effects

    # ---- what goes out ---------------------------------------------------------------------------------------------

    def _do_action(self, action: Action) -> None:
        match action:
            case Order():
                if self.trusted:
                    self.world.monitor.order_leaves(action)
                self._slaves.send_order(action)
            case Reply():
                self._answers.pop(action.req)(action.result)
            case HeartbeatReply():
                self._answers.pop(action.req)(action.answer)
            case WriteRecords():
                self.write_records(action.records)
            case Note():
                fields = (f"{k}={v}" for k, v in action.fields)
                self.world.trace.add_line(self.world.heap.now, f"note {action.kind}", *fields)
                self.world.monitor.note_logged(action)
            case Exit():
                self.world.master_exits(self, action)
            case SlaveEndpoint():
                pass  # hosts of the simulated network are reached by their names
            case SlaveProgress():
                self._slaves.on_progress(action)

    def write_records(self, records: Sequence[Record]) -> None:
        self.writing = records
        delay_s = WRITE_S * (1.0 + 9.0 * self.machine.rng.random() ** 3) * self.machine.disk.slowness
        self.world.heap.call_later(delay_s, "the ledger writes", lambda: self.on_written(records))

    def on_written(self, records: Sequence[Record]) -> None:
        """The transaction has ended; if it is durable, what waited behind it may leave."""
        if not self.alive:
            return
        try:
            if self.machine.disk.full:
                raise OSError("database or disk is full")
            self.ledger.write_records(records)
        except (OSError, StaleTerm) as error:
            exits = self.core.on_write_failed(error)
            self._on_arrival(lambda: self.world.master_exits(self, exits))
            return
        self._report_records(records)
        self.writing = ()
        self._on_arrival(self.core.on_written)

    def _report_records(self, records: Sequence[Record]) -> None:
        if self.trusted:
            self.machine.disk.mirror_records(records)
            for record in records:
                self.world.monitor.record_written(record)

    def _on_order_ended(self, event: Event) -> None:
        self.core.take_event(event, self.world.heap.now)


def _sender_of(heartbeat: ClusterHeartbeat | SlaveHeartbeat) -> tuple[str, str, int]:
    if isinstance(heartbeat, ClusterHeartbeat):
        return "cluster", heartbeat.cluster, heartbeat.inc
    return "slave", heartbeat.slave, heartbeat.sinc
