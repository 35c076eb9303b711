"""The simulated master: a machine with the ledger's file, and processes around the real MasterCore and Ledger.

The core decides; this shell delivers messages and time to it, writes its records in transactions that take their time,
and carries out its actions. A crash loses the process; of the transaction under way all is written or nothing, also
when the machine stops between two of its statements.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dips.errors import StaleTerm, UnavailableSlave
from dips.master.core import MasterCore
from dips.master.held import PollOptions
from dips.master.ledger import MEMORY, Ledger
from dips.master.ledger_rebuild import MirroredTransaction, rebuild
from dips.master.orders import SentOrder
from dips.master.outbox import Action, HeartbeatReply, SlaveEndpoint, WriteRecords
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Acknowledged, Effect, Exit, Failed, Note, Order, Reply
from dips.protocol.events import (
    BandwidthMeasured,
    ClusterSilent,
    Event,
    OrderAnswered,
    PushRefused,
    PushStaged,
    SlaveSilent,
    TrainerChanged,
)
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.manifest import Manifest
from dips.protocol.membership import Judge
from dips.protocol.options import Options
from dips.protocol.records import LedgerState, Record, RunRow, VersionCommitted
from dips.sim.heap import Chance, Heap, Timer, Trace
from dips.sim.network import Network

Answer = Callable[[Any], None]
WRITE_S = 0.02  # of a transaction, at most ten times that
POLLS = PollOptions(patience_s=1.4, pause_s=0.06, longest_pause_s=0.06)  # callers give up earlier than real ones
VERDICTS = frozenset({ClusterSilent, SlaveSilent, TrainerChanged, BandwidthMeasured})
RESEND_S = 1.5  # an order without an answer is sent again under its number


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


class Torn(Exception):
    """The machine stopped between two statements of a transaction."""


class TearingConnection:
    """The ledger's SQLite connection, which stops for good before its n-th statement."""

    def __init__(self, db: sqlite3.Connection, statements: int) -> None:
        self._db = db
        self._left = statements

    def execute(self, sql: str, *parameters: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise Torn
        return self._db.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


class LedgerDisk:
    """The ledger's file: every process opens it anew and finds what was durable."""

    def __init__(self, row: RunRow) -> None:
        self._db = Ledger.create(":memory:", row)._db
        self._newest: sqlite3.Connection | None = None  # while an old copy lies in its place
        self._copies: list[sqlite3.Connection] = []
        self._mirrored_base = self._db.serialize()
        self._mirrored_since: list[MirroredTransaction] = []
        self._mirrored_term = 0
        self.slowness = 1.0
        self.full = False

    def repair_disk(self) -> None:
        self.slowness, self.full = 1.0, False

    @property
    def is_old_copy(self) -> bool:
        """An old copy lies there: what its master decides is not the run's truth."""
        return self._newest is not None

    def copy_file(self) -> sqlite3.Connection:
        """A backup of the file as it is now."""
        copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.backup(copy)
        self._copies.append(copy)
        return copy

    def put_back(self, copy: sqlite3.Connection) -> None:
        """Somebody restores a backup, not knowing that the newest file is still to be had."""
        self._newest, self._db = self._db, copy

    def put_newest_back(self) -> None:
        """The act that the master's refusal asks for."""
        if self._newest is not None:
            self._db, self._newest = self._newest, None

    def begin_mirror(self, term: int) -> None:
        """A term has begun: the mirror gets a base, unless this is an old copy."""
        if not self.is_old_copy:
            self._mirrored_base, self._mirrored_since, self._mirrored_term = self._db.serialize(), [], term

    def mirror_records(self, records: Sequence[Record]) -> None:
        """A transaction is durable, and in the mirror before anybody is told."""
        self._mirrored_since.append(MirroredTransaction(tuple(records), 0.0))

    def lose_disk(self) -> list[Record]:
        """The disk is gone for good; the next master starts with what its mirror holds. Return what was raised."""
        self._copies.append(self._db)
        self._db = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
        self._db.deserialize(self._mirrored_base)
        _, raised = rebuild(self.open_ledger(), self._mirrored_term, self._mirrored_since)
        return raised

    def open_ledger(self) -> Ledger:
        return Ledger(self._db, None, lambda: 0.0)

    def tear_write(self, records: Sequence[Record], statements: int) -> bool:
        """Stop before the n-th statement of a write; what SQLite then finds is rolled back. True if it was through."""
        torn = TearingConnection(self._db, statements)
        try:
            Ledger(torn, None, lambda: 0.0).write_records(records)  # type: ignore[arg-type]
        except Torn:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return False
        return True

    def close(self) -> None:
        self.put_newest_back()
        for db in (self._db, *self._copies):
            db.close()


class MasterMachine:
    """The machine on which masters run."""

    def __init__(self, world: MasterWorld, row: RunRow) -> None:
        self.world = world
        self.rng = world.chance.generator_for("master")
        self.disk = LedgerDisk(row)
        self.process: MasterProcess | None = None
        self.zombies: list[MasterProcess] = []  # stopped, and taken for dead: each has a successor
        world.network.attach_host("master", self)

    def start(self) -> None:
        if self.process is None:
            self.process = MasterProcess(self)

    def crash(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill_process()

    def lose_disk(self) -> None:
        """The machine is lost, with every process on it; another one starts with what the ledger's mirror holds."""
        self.crash()
        for zombie in self.zombies:
            zombie.kill_process()
        self.zombies.clear()
        for record in self.disk.lose_disk():
            self.world.monitor.record_written(record)

    def abandon_process(self) -> MasterProcess | None:
        """Another will be started beside it, on the same ledger: another host, a mount without locks."""
        process, self.process = self.process, None
        if process is not None:
            process.pause_process()
            self.zombies.append(process)
        return process

    def on_message(self, sender: str, message: Any, answer: Answer) -> None:
        if self.process is not None:
            self.process.on_message(message, answer)


class MasterProcess:
    """One incarnation of the master: one term. A shell around MasterCore, as dips/master/runtime.py is."""

    def __init__(self, machine: MasterMachine) -> None:
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
        self.exited = ""
        self.inbox: list[Callable[[], None]] | None = None  # while it is stopped, what came in
        self.writing: Sequence[Record] = ()
        self._answers: dict[int, Answer] = {}
        self._last_req = 0
        self._timer: Timer | None = None
        self._carry_out()

    @property
    def presides(self) -> bool:
        """It is the run's master, and no zombie or deceived by an old ledger."""
        return self.trusted and self is self.machine.process

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
        if self.alive and self.inbox is None:
            self.core.on_wake(self.world.heap.now)
            self._run_core()

    def _run_core(self) -> None:
        if self.alive:
            self.core.tick(self.world.heap.now)
            self._carry_out()

    def _carry_out(self) -> None:
        """Do what the core wants done, and plan when it is looked at again: the earlier of two times does no harm."""
        for action in self.core.take_actions() if self.alive else ():
            if self.alive:
                self._do_action(action)
        if not self.alive:
            return
        now = self.world.heap.now
        due, timer = self.core.sleep_until(now), self._timer
        if timer is not None and timer.at <= due:
            return
        if timer is not None:
            timer.cancel()
        self._timer = self.world.heap.call_later(due - now, "the master's deadline", self._on_timer)

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def on_message(self, message: Any, answer: Answer) -> None:
        self._on_arrival(lambda: self._read_message(message, answer))

    def _read_message(self, message: Any, answer: Answer) -> None:
        now = self.world.heap.now
        if isinstance(message, ClusterHeartbeat | SlaveHeartbeat):
            if self.presides:
                self.world.monitor.heartbeat_read(*_sender_of(message))
            self.core.on_heartbeat(self._new_req(answer), message, now)
        elif isinstance(message, PushStaged | PushRefused):
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
                self._send_order(SentOrder(action, self.world.heap.now))
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
                self._exit_process(action)
            case SlaveEndpoint():
                pass  # hosts of the simulated network are reached by their names

    def _exit_process(self, action: Exit) -> None:
        self.exited = action.reason
        self.world.master_exits(self, action)

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
            self._on_arrival(lambda: self._exit_process(exits))
            return
        self._report_records(records)
        self.writing = ()
        self._on_arrival(self.core.on_written)

    def _report_records(self, records: Sequence[Record]) -> None:
        if self.trusted:
            self.machine.disk.mirror_records(records)
            for record in records:
                self.world.monitor.record_written(record)

    def _send_order(self, sent: SentOrder) -> None:
        left_s = min(sent.left_s(self.world.heap.now), RESEND_S)

        def on_answer(answer: Any) -> None:
            self._on_arrival(lambda: self._on_order_answer(sent, answer))

        self.world.network.call_host("master", sent.order.slave, sent.order, left_s, on_answer)

    def _on_order_answer(self, sent: SentOrder, answer: Any) -> None:
        """Turn a slave's answer, its refusal or its silence into an event, or send the order again."""
        now = self.world.heap.now
        event: Event | None
        if isinstance(answer, OrderAnswered):
            event = sent.on_answer(answer.answer)
        elif isinstance(answer, Failed):
            event = sent.on_error(answer.error(answer.message), now)
        else:
            event = sent.on_error(UnavailableSlave("no answer"), now)
        if event is None:
            self._send_order(sent)
        else:
            self.core.take_event(event, now)


def _sender_of(heartbeat: ClusterHeartbeat | SlaveHeartbeat) -> tuple[str, str, int]:
    if isinstance(heartbeat, ClusterHeartbeat):
        return "cluster", heartbeat.cluster, heartbeat.inc
    return "slave", heartbeat.slave, heartbeat.sinc
