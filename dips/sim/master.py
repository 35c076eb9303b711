"""The simulated master: a machine with the ledger's file, and a process around the real Coordinator, Judge and Ledger.

The runtime's outbox rule is part of this world: effects leave in their order, records are written in one transaction
that takes its time, and nothing behind a record leaves before it is durable. A crash loses the process; of the
transaction under way all is written or nothing, also when the machine stops between two of its statements.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from dips.errors import StaleTerm, UnresponsiveSlave
from dips.master.ledger import Ledger
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Acknowledged, Effect, Exit, Failed, Joined, Note, Order, Pending, Registered, Reply
from dips.protocol.events import (
    Blind,
    ClusterJoined,
    Event,
    OrderAnswered,
    OrderFailed,
    PushRefused,
    PushStaged,
    Ticked,
)
from dips.protocol.heartbeats import ClusterHeartbeat, ClusterHeartbeatAnswer, SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.protocol.membership import Judge
from dips.protocol.records import ClusterEnded, Record, RunRow, VersionCommitted
from dips.protocol.slaves import EXIT_STALE
from dips.sim.heap import Timer

if TYPE_CHECKING:
    from dips.sim.world import World

Answer = Callable[[Any], None]
WRITE_S = 0.02  # of a transaction, at most ten times that
PATIENCE_S = 1.4  # a question that is Pending is kept open so long, less than its asker waits
LOOK_AGAIN_S = 0.06  # after a change, which seldom comes alone
EXIT_LEDGER = 74  # a record could not be written: read the truth again (why.md 29)
RESEND_S = 1.5  # an order without an answer is sent again under its number


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
        self.slowness = 1.0
        self.full = False

    def mend(self) -> None:
        self.slowness, self.full = 1.0, False

    @property
    def old(self) -> bool:
        """An old copy lies there: what its master decides is not the run's truth."""
        return self._newest is not None

    def copy(self) -> sqlite3.Connection:
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

    def open(self) -> Ledger:
        return Ledger(self._db, None, lambda: 0.0)

    def tear(self, records: list[Record], statements: int) -> bool:
        """Stop before the n-th statement of a write; what SQLite then finds is rolled back. True if it was through."""
        torn = TearingConnection(self._db, statements)
        try:
            Ledger(torn, None, lambda: 0.0).write(records)  # type: ignore[arg-type]
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
    """Where the master lives."""

    def __init__(self, world: World, row: RunRow) -> None:
        self.world = world
        self.rng = world.chance.of("master")
        self.disk = LedgerDisk(row)
        self.process: MasterProcess | None = None
        self.zombies: list[MasterProcess] = []  # stopped, and taken for dead: each has a successor
        world.network.attach("master", self)

    def start(self) -> None:
        if self.process is None:
            self.process = MasterProcess(self)

    def crash(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.die()

    def abandon(self) -> MasterProcess | None:
        """Another will be started beside it, on the same ledger: another host, a mount without locks."""
        process, self.process = self.process, None
        if process is not None:
            process.pause()
            self.zombies.append(process)
        return process

    def receive(self, sender: str, message: Any, answer: Answer) -> None:
        if self.process is not None:
            self.process.receive(message, answer)


class MasterProcess:
    """One life of the master: one term."""

    def __init__(self, machine: MasterMachine) -> None:
        self.machine, self.world = machine, machine.world
        self.ledger = machine.disk.open()
        self.ledger.start_term()
        state = self.ledger.state()
        now = self.world.heap.now
        self.trusted = not machine.disk.old  # what it decides is compared with the twins
        if self.trusted:
            self.world.watch.restored(state)
        self.coordinator = Coordinator(state, self.world.manifest, self.world.options, now)
        self.judge = Judge.restored(self.world.options.timing, state, now)
        self.alive = True
        self.exited = ""
        self.inbox: list[Callable[[], None]] | None = None  # while nobody looks, what came in
        self.paused_at = 0.0
        self.outbox: deque[Effect] = deque()
        self.writing: list[Record] | None = None
        self._answers: dict[int, Answer] = {}
        self._questions = 0
        self._kept: list[tuple[Any, Answer, float]] = []  # questions that were Pending
        self._again: Timer | None = None
        self._tick: Timer | None = None
        self._due: float | None = None  # the deadline that it is planned for
        self._step(Ticked())

    def die(self) -> None:
        """SIGKILL, or its own exit."""
        self.alive = False
        if self._tick is not None:
            self._tick.cancel()
        rows = any(isinstance(r, VersionCommitted) for r in self.writing or ())
        self.world.watch.master_died(self, rows, self._ends_writing())

    def _ends_writing(self) -> bool:
        """The transaction under way ends as the disk pleases; True if it is durable."""
        fate, disk = self.machine.rng.random(), self.machine.disk
        if self.writing is None or self in self.machine.zombies or disk.full or fate >= 0.8:
            return False
        if fate < 0.5:
            self.ledger.write(self.writing)
        elif not disk.tear(self.writing, self.machine.rng.randint(1, 5)):
            self.world.watch.met("torn_ledger")
            return False
        self._recorded(self.writing)
        return True

    # ---- not looking -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """SIGSTOP, or a machine that stands still: everything waits, outside too much goes on."""
        if self.inbox is None:
            self.inbox, self.paused_at = [], self.world.heap.now

    def wake(self) -> None:
        """Say how long nobody looked, read what lies there, and only then look at the clock."""
        if self.inbox is None or not self.alive:
            return
        came, self.inbox = self.inbox, None
        self.be_blind(self.world.heap.now - self.paused_at)
        for read in came:
            read()
        self._pump()
        self._look()

    def be_blind(self, gap_s: float) -> None:
        self.judge.shift(gap_s)
        self._step(Blind(gap_s))

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def receive(self, message: Any, answer: Answer) -> None:
        if not self.alive:
            return
        if self.inbox is not None:
            self.inbox.append(lambda: self.receive(message, answer))
        elif isinstance(message, ClusterHeartbeat):
            self._cluster_beat(message, answer)
        elif isinstance(message, SlaveHeartbeat):
            self._slave_beat(message, answer)
        elif isinstance(message, PushStaged | PushRefused):
            self._step(message)
            self._say(Acknowledged(), answer)
        else:
            self._ask(message, answer, self.world.heap.now + PATIENCE_S)

    def _ask(self, message: Any, answer: Answer, until: float) -> None:
        """Ask the Coordinator; a question that is Pending is kept open until then, as the real servicer does."""

        def told(result: Any) -> None:
            if isinstance(result, Pending) and self.world.heap.now < until - 1e-9:
                self._kept.append((message, answer, until))
                self._look_again(until - self.world.heap.now)
            else:
                answer(result)

        self._step(replace(message, req=self._question(told)), message)

    def _look_again(self, delay_s: float) -> None:
        """Ask all that is kept once more, in so many seconds at the latest."""
        at = self.world.heap.now + delay_s
        if self._again is None or not self._again.alive or self._again.at > at:
            if self._again is not None:
                self._again.cancel()
            self._again = self.world.heap.after(delay_s, "the master looks again", self._ask_again)

    def _ask_again(self) -> None:
        self._again = None
        if self.inbox is not None:
            self.inbox.append(self._ask_again)
        elif self.alive:
            kept, self._kept = self._kept, []
            for question in kept:
                self._ask(*question)

    def _cluster_beat(self, beat: ClusterHeartbeat, answer: Answer) -> None:
        self._heard("cluster", beat.cluster, beat.inc)
        for event in self.judge.on_cluster_heartbeat(beat, self.world.heap.now):
            if self.presides:
                self.world.watch.judged(event)
            self._step(event)
        standing, push, pull = self.coordinator.cluster_standing(beat.cluster, beat.inc)
        lease_s = self.world.options.timing.lease_s
        told = ClusterHeartbeatAnswer(self.coordinator.term, lease_s, standing, push, pull, self.coordinator.progress())
        self._say(told, answer)

    def _slave_beat(self, beat: SlaveHeartbeat, answer: Answer) -> None:
        self._heard("slave", beat.slave, beat.sinc)
        for event in self.judge.on_slave_heartbeat(beat, self.world.heap.now):
            self._step(event)
        register, as_of, pushes, pulls = self.coordinator.slave_live(beat.slave, beat.sinc)
        register = register or beat.term != self.coordinator.term
        lease_s = self.world.options.timing.lease_s
        self._say(SlaveHeartbeatAnswer(self.coordinator.term, lease_s, register, as_of, pushes, pulls), answer)

    def _heard(self, role: str, name: str, life: int) -> None:
        if self.presides:
            self.world.watch.beat_read(role, name, life)

    def _question(self, answer: Answer) -> int:
        self._questions += 1
        self._answers[self._questions] = answer
        return self._questions

    def _say(self, told: Any, answer: Answer) -> None:
        """Answers to beats stand in the same outbox: they too may tell only what is durable."""
        self.outbox.append(Reply(self._question(answer), told))
        self._pump()

    # ---- deciding --------------------------------------------------------------------------------------------------

    def _step(self, event: Event, asked: Any = None) -> None:
        now = self.world.heap.now
        if isinstance(event, ClusterJoined):  # it may fence a life, whose tokens the beats have told
            for told in self.judge.report_tokens(event.cluster):
                self._step(told)
        self.world.watch.before_step(self, event)
        effects = self.coordinator.step(event, now)
        self.world.watch.after_step(self, event)
        for effect in effects:
            if isinstance(effect, Reply) and isinstance(effect.result, Joined):
                self.judge.welcome_cluster(asked.cluster, effect.result.inc, now)
            elif isinstance(effect, Reply) and isinstance(effect.result, Registered):
                self.judge.welcome_slave(asked.slave, effect.result.sinc, now)
            elif isinstance(effect, ClusterEnded):
                self.judge.forget_cluster(effect.cluster)
        self.outbox.extend(effects)
        if self._kept and (asked is None or any(not isinstance(effect, Reply) for effect in effects)):
            self._look_again(LOOK_AGAIN_S)  # something has changed
        self._pump()
        self._plan_tick()

    def _plan_tick(self) -> None:
        due = min(self.coordinator.next_deadline(), self.judge.next_deadline())
        tick = self._tick
        if tick is not None and tick.alive and self._due == due:
            return  # most events move no deadline
        if tick is not None:
            tick.cancel()
        self._due = due
        if self.alive and due < inf:
            delay_s = max(0.0, due - self.world.heap.now) + 0.001
            self._tick = self.world.heap.after(delay_s, "the master's deadline", self._look)

    def _look(self) -> None:
        """A deadline may have passed: let the judge speak, then the Coordinator."""
        self._due = None
        if not self.alive or self.inbox is not None:
            return
        for verdict in self.judge.verdicts(self.world.heap.now):
            if self.presides:
                self.world.watch.judged(verdict)
            self._step(verdict)
        self._step(Ticked())

    # ---- the outbox ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Let effects leave, up to the first record that is not durable."""
        while self.alive and self.outbox and self.writing is None and self.inbox is None:
            if isinstance(self.outbox[0], Record):
                records = [e for e in self.outbox if isinstance(e, Record)]  # group commit: all that lie ready
                self.outbox = deque(e for e in self.outbox if not isinstance(e, Record))
                self.write(records)
            else:
                self._leave(self.outbox.popleft())

    def write(self, records: list[Record]) -> None:
        self.writing = records
        delay_s = WRITE_S * (1.0 + 9.0 * self.machine.rng.random() ** 3) * self.machine.disk.slowness
        self.world.heap.after(delay_s, "the ledger writes", lambda: self.wrote(records))

    def wrote(self, records: list[Record]) -> None:
        """The transaction is durable; what waited behind it may leave."""
        if not self.alive:
            return
        if self.machine.disk.full:
            self._leave(Exit(EXIT_LEDGER, "database or disk is full"))
            return
        try:
            self.ledger.write(records)
        except StaleTerm as error:
            self._leave(Exit(EXIT_STALE, str(error)))
            return
        self._recorded(records)
        self.writing = None
        self._pump()

    def _recorded(self, records: list[Record]) -> None:
        if self.trusted:
            self.world.watch.recorded(records)

    @property
    def presides(self) -> bool:
        """It is the run's master, and no zombie or deceived by an old ledger."""
        return self.trusted and self is self.machine.process

    def _leave(self, effect: Effect) -> None:
        if isinstance(effect, Order):
            if self.trusted:
                self.world.watch.order_leaves(effect)
            SentOrder(self, effect).send()
        elif isinstance(effect, Reply):
            self._answers.pop(effect.req)(effect.result)
        elif isinstance(effect, Note):
            self.world.trace.add(self.world.heap.now, f"note {effect.kind}", *(f"{k}={v}" for k, v in effect.fields))
            self.world.watch.noted(effect)
        elif isinstance(effect, Exit):
            self.exited = effect.reason
            self.world.master_exits(self, effect)

    def order_ended(self, order: Order, answer: Any) -> None:
        """Turn a slave's answer, or its silence, into an event."""
        event: Event
        if isinstance(answer, OrderAnswered):
            event = answer
        elif isinstance(answer, Failed):
            event = OrderFailed(order.slave, order.sinc, order.number, answer.error, answer.message)
        else:
            event = OrderFailed(
                order.slave, order.sinc, order.number, UnresponsiveSlave, "no answer before the deadline"
            )
        if self.inbox is not None:
            self.inbox.append(lambda: self._step(event))
        elif self.alive:
            self._step(event)


class SentOrder:
    """An order under way: sent again under its number until it is answered or its deadline is over."""

    def __init__(self, master: MasterProcess, order: Order) -> None:
        self.master, self.order = master, order
        self.until = master.world.heap.now + order.deadline_s

    def send(self) -> None:
        left = self.until - self.master.world.heap.now
        network = self.master.world.network
        network.call("master", self.order.slave, self.order, min(left, RESEND_S), self._ended)

    def _ended(self, answer: Any) -> None:
        over = self.master.world.heap.now >= self.until - 1e-9
        if answer is None and not over and self.master.alive:
            self.send()
        else:
            self.master.order_ended(self.order, answer)
