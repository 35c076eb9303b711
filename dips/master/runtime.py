"""The daemon's shell around the core: inbox, futures, the ledger's thread, a task for each order. It decides nothing.

What must stay true: one event loop owns the core, and it never waits for the disk. Messages that have arrived are
passed in before the core acts on any deadline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dips.errors import UnavailableMaster
from dips.master.core import MasterCore
from dips.master.journal import Journal
from dips.master.meters import RoundMeters
from dips.master.outbox import Action, HeartbeatReply, SlaveEndpoint, SlaveProgress, WriteRecords
from dips.master.ports import Outside
from dips.protocol.effects import Exit, Note, Order, Reply, Result
from dips.protocol.events import Event
from dips.protocol.heartbeats import ClusterHeartbeat, SlaveHeartbeat
from dips.protocol.records import Record
from dips.protocol.view import RunView
from dips.tasks import start_task
from dips.telemetry.logs import Log
from dips.telemetry.timeline import Timeline
from dips.view.judging import judge_run

EXIT_BUG = 70  # EX_SOFTWARE
FLUSH_S = 5.0  # longest wait of a graceful stop for records being written

# Notes of every successful round: an outer step logs one line, version_committed. The timeline has all of them.
ROUTINE = frozenset(
    {
        *("push_granted", "push_committed", "round_opened", "round_applying", "round_persisting", "version_durable"),
    }
)


class Runtime:
    """One term of a master. `clock` returns monotonic seconds."""

    def __init__(
        self,
        core: MasterCore,
        outside: Outside,
        *,
        clock: Callable[[], float],
        log: Log,
        timeline: Timeline,
        journal: Journal | None = None,
    ) -> None:
        self._core, self._outside, self._clock = core, outside, clock
        self._log, self._timeline, self._journal, self.meters = log, timeline, journal, RoundMeters()
        self._inbox: deque[Callable[[float], None]] = deque()
        self._arrived = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_req = 0
        self._writing: asyncio.Task[None] | None = None
        self._orders: set[asyncio.Task[None]] = set()
        self.on_slave_heartbeat: Callable[[SlaveHeartbeat], None] = lambda heartbeat: None  # called with each
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    # ---- for servicers and app -------------------------------------------------------------------------------------

    def put_event(self, event: Event) -> None:
        """Put an event on the inbox."""
        self._put_arrived(lambda now: self._core.take_event(event, now))

    async def ask_core(self, make: Callable[[int], Event]) -> Result:
        """Put a question on the inbox and return its answer, once everything before it is durable."""
        req, answer = self._new_answer()
        try:
            self.put_event(make(req))  # decoding may raise
            result: Result = await answer
            return result
        finally:
            self._answers.pop(req, None)
            self._core.withdraw_question(req)

    async def take_heartbeat(self, heartbeat: ClusterHeartbeat | SlaveHeartbeat) -> Any:
        """Process a heartbeat; return its ClusterHeartbeatAnswer or SlaveHeartbeatAnswer."""
        if isinstance(heartbeat, SlaveHeartbeat):
            self.on_slave_heartbeat(heartbeat)
        req, answer = self._new_answer()
        self._put_arrived(lambda now: self._core.on_heartbeat(req, heartbeat, now))
        try:
            return await answer
        finally:
            self._answers.pop(req, None)

    def build_view(self) -> RunView:
        """Return the view of the run: the core's part and those outside it, judged with the newest heartbeats."""
        now = self._clock()
        view = self._outside.complete_view(self._core.build_view(now))
        if self._journal is not None:
            view = replace(view, journal=self._journal.read_status())
        return judge_run(view, self._core.heartbeats, now, self._core.heartbeat_s)

    def explain_unready(self) -> str:
        """Return why the run cannot take an outer step now; empty if it can."""
        return self._core.explain_unready()

    def fail(self, error: BaseException) -> None:
        """End `run` with EXIT_BUG: a task of this process has failed, and its work is not done any more."""
        self.stop(EXIT_BUG)
        self._log.critical("a task of this master failed", error=repr(error), exc_info=error)

    def stop(self, code: int = 0) -> None:
        """End `run` with this exit code; only the first call counts."""
        if not self._code.done():
            self._code.set_result(code)
        self._arrived.set()

    async def run(self) -> int:
        """Serve until `stop` is called; return the exit code."""
        loop = asyncio.create_task(self._run_core(), name="loop")
        try:
            ends: list[asyncio.Future[Any]] = [self._code, loop]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._flush_records()
        finally:
            tasks = [loop, *self._orders, *([self._writing] if self._writing else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._refuse_all()
        return self._code.result()

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def _run_core(self) -> None:
        """Pass in what arrived, let the core act on what is due, and sleep until there is something to do."""
        try:
            while not self._code.done():
                now = self._clock()
                self._core.on_wake(now)
                while self._inbox:
                    self._inbox.popleft()(now)
                self._core.tick(now)
                self._carry_out(self._core.take_actions())
                await self._sleep_until(self._core.sleep_until(now))
        except Exception as error:  # noqa: BLE001 (whatever it is: the core's state can no longer be trusted)
            self._log.critical("the coordinator failed", error=repr(error), exc_info=error)
            self.stop(EXIT_BUG)

    async def _sleep_until(self, when: float) -> None:
        """Return at `when`, or as soon as something is in the inbox."""
        try:
            async with asyncio.timeout(max(0.0, when - self._clock())):
                await self._arrived.wait()
        except TimeoutError:
            pass  # nothing arrived before the deadline
        self._arrived.clear()

    def _put_arrived(self, arrived: Callable[[float], None]) -> None:
        self._inbox.append(arrived)
        self._arrived.set()

    def _new_answer(self) -> tuple[int, asyncio.Future[Any]]:
        if self._code.done():
            raise UnavailableMaster("this master is stopping")
        self._last_req += 1
        answer = self._answers[self._last_req] = asyncio.get_running_loop().create_future()
        return self._last_req, answer

    # ---- carrying out ----------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Order():
                    self._send_order(action)
                case Reply():
                    self._answer_question(action.req, action.result)
                case HeartbeatReply():
                    self._answer_question(action.req, action.answer)
                case WriteRecords():
                    self._writing = start_task(self._write_records(action.records), self.fail, "writer")
                case SlaveEndpoint():
                    self._outside.learn_address(action.slave, action.address)
                case SlaveProgress():
                    self._outside.on_progress(action)
                case Note():
                    (self._log.debug if action.kind in ROUTINE else self._log.info)(action.kind, **dict(action.fields))
                    self._timeline.record_mark(action.kind, **dict(action.fields))
                    self.meters.on_note(action.kind, dict(action.fields), self._clock())
                case Exit():
                    self._log.error("exit", code=action.code, reason=action.reason)
                    self.stop(action.code)

    def _answer_question(self, req: int, value: object) -> None:
        """Answer, unless the caller has gone."""
        future = self._answers.get(req)
        if future is not None and not future.done():
            future.set_result(value)

    async def _write_records(self, records: tuple[Record, ...]) -> None:
        self._writing = asyncio.current_task()
        try:
            await self._outside.write_records(records)
        except Exception as error:  # noqa: BLE001 (nothing behind it may leave, whatever it is)
            self._log.critical("a record could not be written", error=repr(error), exc_info=error)
            self._carry_out([self._core.on_write_failed(error)])
            return
        self._core.on_written()
        self._carry_out(self._core.take_actions())

    def _send_order(self, order: Order) -> None:
        task = start_task(self._execute_order(order), self.fail)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _execute_order(self, order: Order) -> None:
        begun, kind = self._clock(), type(order.body).__name__
        self._log.debug("order", order=order)
        ended = await self._outside.execute_order(order)
        took_s, how = self._clock() - begun, type(ended).__name__
        self._log.debug("order ended", number=order.number, slave=order.slave, kind=kind, how=how, took_s=took_s)
        self.put_event(ended)

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def _flush_records(self) -> None:
        """Write the records that were decided before the end, if possible; each write may release further ones."""
        try:
            async with asyncio.timeout(FLUSH_S):
                while self._writing is not None and not self._writing.done():
                    await asyncio.wait([self._writing])
        except TimeoutError:
            self._log.warning("stopped before everything was written", waited_s=FLUSH_S)

    def _refuse_all(self) -> None:
        for future in self._answers.values():
            if not future.done():
                future.set_exception(UnavailableMaster("this master is stopping"))
