"""The shell of a slave's core in the daemon: control server, calls to the master, the clock, the shard's thread.

It decides nothing (core.py and shard.py do). `SlaveRuntime` runs on the event loop; `ShardThread` owns the shard's
thread, and passes results and reports to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

from dips.errors import UnavailableMaster
from dips.ids import VersionId
from dips.protocol.effects import Acknowledged, Apply, Commit, Order, Persist, Registered, name_subject
from dips.protocol.events import Answer, PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.slave import ports
from dips.slave.core import SlaveCore
from dips.slave.mirror_plan import Restored
from dips.slave.shard import Shard
from dips.tasks import start_task
from dips.telemetry.logs import Log
from dips.telemetry.metrics import Histogram
from dips.transport.control import call_method
from dips.transport.endpoints import Endpoint
from dips.wire.generated import slave_pb2, slave_pb2_grpc
from dips.wire.messages import from_proto, to_proto, wrap_oneof

T = TypeVar("T")


class SlaveRuntime(slave_pb2_grpc.OrderServiceServicer):
    """One incarnation of a slave, and the `OrderService` through which its master sends orders."""

    def __init__(
        self,
        core: SlaveCore,
        thread: ShardThread,
        calls: MasterCalls,
        log: Log,
        mirror: SlaveMirror | None = None,
        disk: Executor | None = None,
    ) -> None:
        """`disk` has the threads for work on the disk, which goes on when `run` has ended; None: the loop's own."""
        self.core, self._thread, self._calls, self._log, self._mirror = core, thread, calls, log, mirror
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._answers: dict[ports.Ticket, asyncio.Future[Answer]] = {}
        self._tickets = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled; raise DipsError if the master refuses this slave for good."""
        self._thread.on_reports = self._pass_reports
        self._step_core(self.core.tick)
        try:
            await self._ended
        finally:
            self._stop_tasks()

    def fail(self, error: BaseException) -> None:
        """End `run` with this error."""
        if not self._ended.done():
            self._ended.set_exception(error)

    async def Execute(self, request: slave_pb2.Order, context: Any) -> slave_pb2.Answer:  # type: ignore[override]
        """Carry out an order of the master; a repeated (term, number) gets the remembered answer.

        Errors are sent by their class (transport/control.py).
        """
        order = from_proto(request, Order)
        self._tickets += 1
        ticket = self._tickets
        self._answers[ticket] = self._loop.create_future()
        self._step_core(partial(self.core.orders.take_order, ticket, order))
        try:
            reply = wrap_oneof(await self._answers[ticket], slave_pb2.Answer)
        finally:
            del self._answers[ticket]
            self.core.orders.drop_order(ticket)
        assert isinstance(reply, slave_pb2.Answer)
        return reply

    def _stop_tasks(self) -> None:
        self._thread.on_reports = lambda reports: None  # the loop may end before the shard's thread
        for task in self._tasks:
            task.cancel()

    # ---- carrying out the core's actions ---------------------------------------------------------------------------

    def _step_core(self, handle: Callable[[float], ports.Actions]) -> None:
        """Call the core and carry out the actions that it returns; an exception in it ends the process."""
        if self._ended.done():
            return
        try:
            for action in handle(self._loop.time()):
                self._do_action(action)
            self._plan_tick()
        except Exception as error:  # noqa: BLE001 (any exception is raised by run())
            self.fail(error)

    def _do_action(self, action: ports.SlaveAction) -> None:
        match action:
            case ports.ShardWork():
                self._thread.perform_work(action, partial(self._pass_result, action))
            case ports.AnswerOrder(ticket, answer):
                self._answer_order(ticket, answer)
            case ports.CallMaster():
                task = start_task(self._call_master(action), self.fail)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case ports.WorkOnDisk() | ports.ReadSnapshot():
                done = self._loop.run_in_executor(self._disk, _work_beside, action)
                done.add_done_callback(partial(self._on_disk_worked, action))
            case ports.RestoreFromMirror():
                assert self._mirror is not None, "a slave without a mirror has nothing to restore from"
                self._mirror.begin_restore(action.on_disk, action.look_for, partial(self._pass_result, action))
            case ports.KeepInMirror(versions):
                if self._mirror is not None:
                    self._mirror.want(versions)
            case ports.WriteLog(level, event, fields):
                getattr(self._log, level)(event, **fields)
            case ports.EndSlave(error):
                self.fail(error)

    def _pass_result(self, work: ports.SlaveWork, result: object) -> None:
        """Pass the end of work to the loop; called on any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._step_core, partial(self.core.on_done, work, result))

    def _on_disk_worked(self, work: ports.SlaveWork, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            self._step_core(partial(self.core.on_done, work, done.exception() or done.result()))

    async def _call_master(self, action: ports.CallMaster) -> None:
        reply: object
        try:
            reply = await self._calls.call_master(action.message, action.deadline_s)
        except Exception as error:  # noqa: BLE001 (the core decides by its class)
            reply = error
        self._step_core(partial(self.core.on_reply, action, reply))

    def _answer_order(self, ticket: ports.Ticket, answer: Answer | Exception) -> None:
        waiting = self._answers.get(ticket)
        if waiting is None or waiting.done():
            return  # the caller has hung up
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _plan_tick(self) -> None:
        """Have a timer at the core's deadline, or one before it: a deadline that moves to later needs no new one."""
        due = self.core.next_deadline()
        if due == inf or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._run_tick)

    def _run_tick(self) -> None:
        self._timer = None
        self._step_core(self.core.tick)

    def _pass_reports(self, reports: list[ports.Report]) -> None:
        """Pass the shard's reports to the loop; called on the shard's thread."""
        self._loop.call_soon_threadsafe(self._step_core, lambda now: self.core.reports.add_reports(reports))


def _work_beside(action: ports.WorkOnDisk | ports.ReadSnapshot) -> Answer | None:
    """Do work on the disk, on any thread."""
    return action.run()


class MasterCalls(Protocol):
    """The calls of a slave to its master."""

    async def call_master(self, message: ports.ToMaster, deadline_s: float) -> object:
        """Return the reply to `message`. Raises UnavailableMaster if none comes within `deadline_s`, and the errors
        that the master raised.
        """


class SlaveMirror(Protocol):
    """The mirror of a slave; both methods return at once."""

    def want(self, versions: tuple[VersionId, ...]) -> None:
        """Set the versions that the mirror should hold."""

    def begin_restore(
        self,
        on_disk: tuple[VersionId, ...],
        look_for: tuple[VersionId, ...],
        done: Callable[[Restored | Exception], None],
    ) -> None:
        """Restore the versions that are newer than `on_disk`, and those of `look_for`; `done` gets the result or the
        error, on any thread.
        """


class SlaveServiceLink:
    """The calls of a slave to the SlaveService of its master, by gRPC.

    `stub` and `heartbeat_stub` are on separate channels, so that no heartbeat waits for another call.
    """

    def __init__(self, stub: Any, heartbeat_stub: Any, master: Endpoint) -> None:
        self._master = master
        self._calls: dict[type, tuple[Any, type]] = {
            SlaveRegistered: (stub.Register, Registered),
            SlaveHeartbeat: (heartbeat_stub.Heartbeat, SlaveHeartbeatAnswer),
            PushStaged: (stub.Staged, Acknowledged),
            PushRefused: (stub.Refused, Acknowledged),
        }

    async def call_master(self, message: ports.ToMaster, deadline_s: float) -> object:
        """Implements MasterCalls."""
        method, kind = self._calls[type(message)]
        reply = await call_method(
            method,
            to_proto(message),
            deadline_s=deadline_s,
            peer=self._master,
            unavailable=UnavailableMaster,
            explain=isinstance(message, SlaveRegistered),
        )
        return from_proto(reply, kind)


class ShardThread:
    """The thread of a shard, on which the data flow's events are processed, too.

    Orders, registration, dropping of unlisted transfers and the data flow's events run there, one after another, so the
    shard needs no lock. Heartbeats must not wait for an Apply of minutes: they read `standing`, which is replaced as a
    whole after each piece of work. `thread` is an executor of exactly one thread; `on_reports` is called, in that
    thread, with the reports for the master that a piece of work has left.
    """

    def __init__(
        self,
        thread: Executor,
        clock: Callable[[], float],
        log: Log,
        record_mark: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        """`record_mark` writes a line to the timeline: its kind, and fields by name."""
        self._thread, self._clock, self._log, self._record_mark = thread, clock, log, record_mark
        self._shard: Shard | None = None
        self._disk_began = 0.0
        self.on_reports: Callable[[list[ports.Report]], None] = lambda reports: None
        self.standing = ports.Standing(0, 0, None, (), 0, 0)
        self.apply_s = 0.0  # duration of the last Apply
        self.persist_s = 0.0  # duration of the last snapshot
        self.spent: dict[str, Histogram] = {}  # seconds by kind of order

    def own_shard(self, shard: Shard) -> None:
        """Take ownership of `shard`; called once, before anything else."""
        self._shard = shard
        self.standing = shard.take_standing()

    def perform_work(self, work: ports.ShardWork, done: Callable[[object], None]) -> None:
        """Submit work of the core after all earlier work; `done` gets its result or its error, on the thread."""
        self._thread.submit(self._run_work, work, done)

    def on_flow_event(self, event: ports.FlowEvent) -> None:
        """Submit an event of the data flow; called from its threads."""
        self._thread.submit(self._take_event, event)

    # ---- on the shard's thread -----------------------------------------------------------------------

    def _run_work(self, work: ports.ShardWork, done: Callable[[object], None]) -> None:
        result: object
        try:
            result = self._run_job(partial(self._time_work, work))
        except Exception as error:  # noqa: BLE001 (the core decides by its class)
            result = error
        done(result)

    def _take_event(self, event: ports.FlowEvent) -> None:
        try:
            self._run_job(lambda shard: shard.transfers.on_flow_event(event))
            self._mark_event(event)
        except Exception:  # the result of this job is not read, so the log must have the error
            self._log.exception("flow_event_failed", what=str(event))
            raise

    def _mark_event(self, event: ports.FlowEvent) -> None:
        """Write the end of a transfer to the timeline; `since_s` and `until_s` are seconds before now."""
        now = self._clock()
        match event:
            case ports.Staged(push, nbytes, ranks):
                parts = [
                    {"rank": r.rank, "nbytes": r.nbytes, "since_s": now - r.first_at, "until_s": now - r.last_at}
                    for r in ranks
                ]
                self._record_mark("push_staged", push=str(push), nbytes=nbytes, ranks=parts)
            case ports.PushOver(push, reason):
                self._record_mark("push_over", push=str(push), reason=reason)
            case ports.Released(pull, reason):
                self._record_mark("pull_released", pull=str(pull), reason=reason)

    def _run_job(self, job: Callable[[Shard], T]) -> T:
        shard = self._shard
        assert shard is not None, "own_shard comes first"
        try:
            return job(shard)
        finally:
            self.standing = shard.take_standing()
            reports = shard.take_reports()
            if reports:
                self.on_reports(reports)

    def _time_work(self, work: ports.ShardWork, shard: Shard) -> object:
        began = self._clock()
        result = shard.perform_work(work)
        match work.method:
            case ports.ShardMethod.EXECUTE:
                self._record_time(work.order, self._clock() - began)
            case ports.ShardMethod.BEGIN_ON_DISK if callable(result):  # else a remembered answer is repeated
                self._disk_began = began
            case ports.ShardMethod.END_ON_DISK:
                self._record_time(work.order, self._clock() - self._disk_began)
        return result

    def _record_time(self, order: Order, took_s: float) -> None:
        if isinstance(order.body, Apply):
            self.apply_s = took_s
        elif isinstance(order.body, Persist):
            self.persist_s = took_s
        kind = type(order.body).__name__
        if kind.lower() not in self.spent:
            self.spent = {**self.spent, kind.lower(): Histogram()}  # replaced as a whole, since other threads read it
        self.spent[kind.lower()].observe_value(took_s)
        self._record_mark(
            "order", order=kind, term=order.term, number=order.number, took_s=took_s, **name_subject(order.body)
        )
        # An outer step is one line: its Commit.
        log = self._log.info if isinstance(order.body, Commit) else self._log.debug
        log("order", kind=kind, number=order.number, term=order.term, took_s=took_s)
