"""Runs a slave's core in the daemon: gives it the clock, the shard's thread and the calls to the master.

Decides nothing (core.py does). Everything here runs on the event loop; the shard's thread and the snapshot writer hand
their results over to it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from dips.errors import UnavailableMaster
from dips.ids import VersionId
from dips.protocol.effects import Acknowledged, Order, Registered
from dips.protocol.events import Answer, PushRefused, PushStaged, SlaveRegistered
from dips.protocol.heartbeats import SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.slave.actions import (
    Actions,
    AnswerOrder,
    CallMaster,
    EndSlave,
    KeepInMirror,
    ReadSnapshot,
    RestoreFromMirror,
    ShardWork,
    WorkOnDisk,
    WriteLog,
)
from dips.slave.core import SlaveCore
from dips.slave.mirror_plan import Restored
from dips.slave.open_transfers import Report
from dips.slave.shard_thread import ShardThread
from dips.slave.snapshot_mirror import SnapshotMirror
from dips.tasks import start_task
from dips.telemetry.logs import Log
from dips.transport.control import call_method
from dips.transport.endpoints import Endpoint
from dips.wire.messages import from_proto, to_proto


class SlaveRuntime:
    """One incarnation of a slave; `stub` and `heartbeat_stub` are SlaveService stubs on channels of their own."""

    def __init__(
        self,
        core: SlaveCore,
        thread: ShardThread,
        stub: Any,
        heartbeat_stub: Any,
        master: Endpoint,
        log: Log,
        mirror: SnapshotMirror | None = None,
        restore: Callable[[tuple[VersionId, ...], tuple[VersionId, ...]], Restored] = lambda *_: Restored(()),
    ) -> None:
        """`restore` brings back from the mirror what is newer than the disk, and what is asked for; on any thread."""
        self._core, self._thread, self._log, self._mirror, self._restore = core, thread, log, mirror, restore
        self._peer = master
        self._calls: dict[type, tuple[Any, type]] = {
            SlaveRegistered: (stub.Register, Registered),
            SlaveHeartbeat: (heartbeat_stub.Heartbeat, SlaveHeartbeatAnswer),
            PushStaged: (stub.Staged, Acknowledged),
            PushRefused: (stub.Refused, Acknowledged),
        }
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._tickets = 0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Live until cancelled; raise DipsError if the master refuses this slave for good."""
        self._thread.on_reports = self._pass_reports
        self._step_core(self._core.tick)
        try:
            await self._ended
        finally:
            self._stop_tasks()

    def fail(self, error: BaseException) -> None:
        """End `run`: a task of this process has failed, which is our bug."""
        self._end_run(error)

    def explain_unready(self) -> str:
        """Why this slave serves nothing; empty: its master knows it as READY, at the head."""
        return self._core.explain_unready()

    async def execute_order(self, order: Order) -> Answer:
        """Have an order carried out, as servicer.py was asked; raise what it raised."""
        self._tickets += 1
        ticket = self._tickets
        self._answers[ticket] = self._loop.create_future()
        self._step_core(partial(self._core.take_order, ticket, order))
        try:
            return await self._answers[ticket]
        finally:
            del self._answers[ticket]
            self._core.drop_order(ticket)

    def _stop_tasks(self) -> None:
        self._thread.on_reports = lambda reports: None  # the loop may end before the shard's thread
        if not self._ended.done():
            self._ended.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    # ---- doing what the core wants -----------------------------------------------------------------------------------

    def _step_core(self, handle: Callable[[float], Actions]) -> None:
        """Tell the core something and do what it wants; our own fault in it ends the process, loudly."""
        if self._ended.done():
            return
        try:
            for action in handle(self._loop.time()):
                self._do_action(action)
            self._plan_tick()
        except Exception as error:  # noqa: BLE001 (whatever it is, run() raises it)
            self._end_run(error)

    def _do_action(self, action: object) -> None:
        match action:
            case AnswerOrder(ticket, answer):
                self._answer_order(ticket, answer)
            case CallMaster():
                task = start_task(self._call_master(action), self.fail)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case WorkOnDisk() | ReadSnapshot():
                done = self._loop.run_in_executor(None, action.run)
                done.add_done_callback(partial(self._on_done, action))
            case RestoreFromMirror():
                threading.Thread(target=self._restore_beside, args=(action,), name="restore", daemon=True).start()
            case KeepInMirror(versions):
                if self._mirror is not None:
                    self._mirror.want(versions)
            case WriteLog(level, event, fields):
                getattr(self._log, level)(event, **fields)
            case EndSlave(error):
                self._end_run(error)
            case _:
                self._perform_work(action)  # type: ignore[arg-type]  # all that is left is work on the shard

    def _restore_beside(self, action: RestoreFromMirror) -> None:
        """On a thread that ends with the process: a mount that hangs must not keep it alive."""
        result: object
        try:
            result = self._restore(action.on_disk, action.look_for)
        except Exception as error:  # noqa: BLE001 (the core decides by its class what it means)
            result = error
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._step_core, partial(self._core.on_done, action, result))

    def _perform_work(self, work: ShardWork) -> None:
        done = asyncio.wrap_future(self._thread.perform_work(work), loop=self._loop)
        done.add_done_callback(partial(self._on_done, work))

    def _on_done(self, work: ShardWork | WorkOnDisk | ReadSnapshot, done: asyncio.Future[Any] | Future[Any]) -> None:
        if done.cancelled():
            return
        result = done.exception() or done.result()
        self._step_core(partial(self._core.on_done, work, result))

    async def _call_master(self, action: CallMaster) -> None:
        method, kind = self._calls[type(action.message)]
        reply: object
        try:
            raw = await call_method(
                method,
                to_proto(action.message),
                deadline_s=action.deadline_s,
                peer=self._peer,
                unavailable=UnavailableMaster,
                explain=isinstance(action.message, SlaveRegistered),
            )
            reply = from_proto(raw, kind)
        except Exception as error:  # noqa: BLE001 (the core decides by its class what it means)
            reply = error
        self._step_core(partial(self._core.on_reply, action, reply))

    def _answer_order(self, ticket: int, answer: Answer | Exception) -> None:
        waiting = self._answers.get(ticket)
        if waiting is None or waiting.done():
            return  # who gave the order has hung up
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _end_run(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _plan_tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._core.next_deadline()
        self._timer = self._loop.call_at(due, self._step_core, self._core.tick) if due < inf else None

    def _pass_reports(self, reports: list[Report]) -> None:
        """On the shard's thread."""
        handle = partial(self._add_reports, reports)
        self._loop.call_soon_threadsafe(self._step_core, handle)

    def _add_reports(self, reports: list[Report], now: float) -> Actions:
        return self._core.add_reports(reports)
