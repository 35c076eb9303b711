"""The simulated master: a process around the real MasterCore and Ledger, and its calls to the slaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

from dips.dataclass import replace
from dips.errors import StaleTerm, UnavailableSlave
from dips.master.core import (
    Action,
    HeartbeatReply,
    MasterCore,
    PollOptions,
    SentOrder,
    SlaveEndpoint,
    SlaveProgress,
    WriteRecords,
)
from dips.protocol import events
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Acknowledged, Effect, Exit, Failed, Note, Order, Reply
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.manifest import Manifest
from dips.protocol.membership import Judge
from dips.protocol.options import Options
from dips.protocol.records import LedgerState, Record, VersionCommitted
from dips.sim.disk import LedgerDisk
from dips.sim.heap import Chance, Heap, Timer, Trace
from dips.sim.network import Network

# ---- slave client ---------------------------------------------------------------------------------------------------


RESEND_S = 1.5  # after which an order without an answer is sent again under its number


class SimSlaveClient:
    """Sends orders; `pass_on` reads arrivals when the master runs, `take_event` receives the end of each order."""

    def __init__(
        self,
        heap: Heap,
        network: Network,
        pass_on: Callable[[Callable[[], None]], None],
        take_event: Callable[[events.Event], None],
    ) -> None:
        self._heap, self._network, self._pass_on, self._take_event = heap, network, pass_on, take_event
        self._open: dict[int, SentOrder] = {}  # orders without an answer, by number

    def send_order(self, order: Order) -> None:
        self._open[order.number] = SentOrder(order, self._heap.now)
        self._send_sent(self._open[order.number])

    def on_progress(self, progress: SlaveProgress) -> None:
        """Extend the deadlines of a slave's orders, since it has worked or waits for its disk."""
        for sent in self._open.values():
            order = sent.order
            if order.slave == progress.slave and (progress.waiting is None or order.number in progress.waiting):
                sent.on_progress(self._heap.now, progress.most_s)

    def _send_sent(self, sent: SentOrder) -> None:
        left_s = min(sent.left_s(self._heap.now), RESEND_S)

        def on_answer(answer: Any) -> None:
            self._pass_on(partial(self._on_answer, sent, answer))

        self._network.call_host("master", sent.order.slave, sent.order, left_s, on_answer)

    def _on_answer(self, sent: SentOrder, answer: Any) -> None:
        """Turn a slave's answer, refusal or silence into an event, or send the order again."""
        event: events.Event | None
        if answer is None:
            event = sent.on_error(UnavailableSlave("no answer"), self._heap.now)
        elif isinstance(answer, Failed):
            event = sent.on_error(answer.error(answer.message), self._heap.now)
        else:
            event = sent.on_answer(answer)
        if event is None:
            self._send_sent(sent)
        else:
            self._open.pop(sent.order.number, None)
            self._take_event(event)


# ---- master ---------------------------------------------------------------------------------------------------------
# The simulated master: a process around the real MasterCore and Ledger, on a machine.
#
# The core decides; this shell delivers messages and time to it, writes its records in transactions that take time, and
# performs its actions. A crash loses the process; the transaction under way is written completely or not at all, also
# if the machine stops between two of its statements.


Answer = Callable[[Any], None]
WRITE_S = 0.02  # duration of a transaction, at most ten times as long
POLLS = PollOptions(patience_s=1.4, pause_s=0.12, longest_pause_s=0.12)  # simulated callers give up earlier
VERDICTS = frozenset({events.ClusterSilent, events.SlaveSilent, events.TrainerChanged, events.BandwidthMeasured})

FACTS = frozenset(
    {events.PushStaged, events.PushRefused, events.OperatorReported, events.ClusterExpelled}
)  # acknowledged at once


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

    def rare_event_occurred(self, what: str) -> None:
        """Called for a rare event that has no hook of its own; coverage counts it by this name."""


class MasterWorld(Protocol):
    """The parts of the world that a master needs."""

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
    """The machine, as seen by a process on it."""

    rng: Random
    disk: LedgerDisk
    process: MasterProcess | None
    zombies: list[MasterProcess]  # processes that are stopped and taken for dead; each has a successor

    @property
    def world(self) -> MasterWorld: ...


class MasterProcess:
    """One incarnation of the master, with its term. A shell around MasterCore, as dips/master/runtime.py is."""

    def __init__(self, machine: MasterHost) -> None:
        self.machine, self.world = machine, machine.world
        self.ledger = machine.disk.open_ledger()
        machine.disk.begin_mirror(self.ledger.start_term())
        state = self.ledger.read_state()
        now, timing = self.world.heap.now, self.world.options.timing
        self.trusted = not machine.disk.is_old_copy  # whether its decisions are compared with the reference
        if self.trusted:
            self.world.monitor.master_restored(state)
        self.coordinator = Coordinator(state, self.world.manifest, self.world.options, now)
        judge = Judge.from_state(timing, state, now)
        self.core = MasterCore(self.coordinator, judge, timing, now, polls=POLLS, step=self._step_watched)
        self.alive = True
        self.inbox: list[Callable[[], None]] | None = None  # messages held while it is stopped; None: it runs
        self.writing: Sequence[Record] = ()
        self._answers: dict[int, Answer] = {}
        self._slaves = SimSlaveClient(self.world.heap, self.world.network, self._on_arrival, self._on_order_ended)
        self._last_req = 0
        self._timer: Timer | None = None
        self._due = 0.0  # when the core must be called again
        self._carry_out()

    @property
    def presides(self) -> bool:
        """Whether it is the run's master, neither a zombie nor on an old ledger."""
        return self.trusted and self is self.machine.process

    @property
    def all_is_written(self) -> bool:
        """Whether all its decisions are durable."""
        return not self.writing and not self.core.has_unwritten()

    def kill_process(self) -> None:
        """Kill the process, by SIGKILL or its own exit."""
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
        rows = any(isinstance(r, VersionCommitted) for r in self.writing)
        self.world.monitor.master_died(self, rows, self._ends_writing())

    def _ends_writing(self) -> bool:
        """End the transaction under way by chance; return True if it is durable."""
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
        """Stop the process by SIGSTOP, or with its machine; messages are held."""
        if self.inbox is None:
            self.inbox = []

    def wake_process(self) -> None:
        """Continue the process: the core notices the gap, reads the held messages, and only then checks deadlines."""
        if self.inbox is None or not self.alive:
            return
        came, self.inbox = self.inbox, None
        self.core.on_wake(self.world.heap.now)
        for read in came:
            read()
        self._run_core()

    def _on_arrival(self, read: Callable[[], None]) -> None:
        """Read an arrived message now, or when the process runs again."""
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
        if self._due > self.world.heap.now:  # the deadline has moved
            self._plan_wake()
        else:
            self.core.on_wake(self.world.heap.now)
            self._run_core()

    def _run_core(self) -> None:
        if self.alive:
            self.core.tick(self.world.heap.now)
            self._carry_out()

    def _carry_out(self) -> None:
        """Perform the core's actions, and plan its next call."""
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

    # ---- messages in ---------------------------------------------------------------------------------------------

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

    def _step_watched(self, event: events.Event, now: float) -> list[Effect]:
        """Let the Coordinator process an event, with the observers' hooks around it."""
        monitor = self.world.monitor
        if type(event) in VERDICTS and self.presides:
            monitor.silence_judged(event)
        monitor.before_step(self, event)
        effects = self.coordinator.step(event, now)
        monitor.after_step(self, event)
        return effects

    # ---- actions out ---------------------------------------------------------------------------------------------

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
                pass  # hosts of the simulated network are reached by name
            case SlaveProgress():
                self._slaves.on_progress(action)

    def write_records(self, records: Sequence[Record]) -> None:
        self.writing = records
        delay_s = WRITE_S * (1.0 + 9.0 * self.machine.rng.random() ** 3) * self.machine.disk.slowness
        self.world.heap.call_later(delay_s, "the ledger writes", lambda: self.on_written(records))

    def on_written(self, records: Sequence[Record]) -> None:
        """End the transaction; if it is durable, actions that waited for it may leave."""
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

    def _on_order_ended(self, event: events.Event) -> None:
        self.core.take_event(event, self.world.heap.now)


def _sender_of(heartbeat: ClusterHeartbeat | SlaveHeartbeat) -> tuple[str, str, int]:
    if isinstance(heartbeat, ClusterHeartbeat):
        return "cluster", heartbeat.cluster, heartbeat.inc
    return "slave", heartbeat.slave, heartbeat.sinc
