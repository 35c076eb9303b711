"""The one thread that owns the shard, seen from everywhere else: work goes in, in order; a standing comes out.

Orders, news of the data flow and healing all run here, one after another, so the shard needs no lock. Heartbeats must
not wait for an Apply of minutes: they read `standing`, which is replaced as a whole after each piece of work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from dips.ids import PullId, PushId
from dips.protocol.effects import Apply, Commit, Order, Persist
from dips.slave.actions import BeginDiskOrder, EndDiskOrder, ExecuteOrder, ShardWork
from dips.slave.open_transfers import Report
from dips.slave.shard import Shard
from dips.slave.standing import Standing
from dips.telemetry.histogram import Histogram
from dips.telemetry.logs import Log

T = TypeVar("T")


class ShardThread:
    """Gives a shard its thread; also the inbox (`ports.FlowEvents`) into which the data flow reports.

    `thread` is an executor of exactly one thread; `on_reports` is called, in that thread, with what a piece of work
    has left to tell the master.
    """

    def __init__(self, thread: Executor, clock: Callable[[], float], log: Log) -> None:
        self._thread, self._clock, self._log = thread, clock, log
        self._shard: Shard | None = None
        self._disk_began = 0.0
        self.on_reports: Callable[[list[Report]], None] = lambda reports: None
        self.standing = Standing(0, 0, None, (), 0, 0)
        self.apply_s = 0.0  # what the last Apply took
        self.persist_s = 0.0  # what the last snapshot took
        self.spent: dict[str, Histogram] = {}  # seconds by kind of order

    def own_shard(self, shard: Shard) -> None:
        """Own `shard` from now on; called once, before anything else."""
        self._shard = shard
        self.standing = Standing.of_shard(shard)

    def submit_job(self, job: Callable[[Shard], T]) -> Future[T]:
        """Do `job` on the shard's thread, after everything that was given before."""
        return self._thread.submit(self._run_job, job)

    def perform_work(self, work: ShardWork) -> Future[object]:
        """Do what the core asked for; orders are timed."""
        return self.submit_job(lambda shard: self._time_work(work, shard))

    # ---- what the data flow reports, from its own threads --------------------------------------------

    def on_push_staged(self, push: PushId, nbytes: int) -> None:
        """Pass on that a push is whole."""
        self._submit_report("staged", lambda shard: shard.transfers.on_push_staged(push, nbytes))

    def on_push_refused(self, push: PushId, reason: str) -> None:
        """Pass on that a push cannot be completed."""
        self._log.warning("push_refused", push=str(push), reason=reason)
        self._submit_report("refused", lambda shard: shard.transfers.on_push_refused(push, reason))

    def on_pull_released(self, pull: PullId, reason: str) -> None:
        """Pass on that nobody reads for a pull any more."""
        self._submit_report("released", lambda shard: shard.transfers.on_pull_released(pull, reason))

    def on_source_moved(self, pull: PullId) -> None:
        """Pass on that nobody reads a pull's former source any more."""
        self._submit_report("moved", lambda shard: shard.transfers.on_source_moved(pull))

    # ---- on the shard's thread -----------------------------------------------------------------------

    def _submit_report(self, what: str, job: Callable[[Shard], None]) -> None:
        def log_failure() -> None:
            try:
                self._run_job(job)
            except Exception:  # nobody waits for this job's result, so the log must tell of it
                self._log.exception("flow_event_failed", what=what)
                raise

        self._thread.submit(log_failure)

    def _run_job(self, job: Callable[[Shard], T]) -> T:
        shard = self._shard
        assert shard is not None, "own_shard() comes first"
        try:
            return job(shard)
        finally:
            self.standing = Standing.of_shard(shard)
            reports = shard.take_reports()
            if reports:
                self.on_reports(reports)

    def _time_work(self, work: ShardWork, shard: Shard) -> object:
        began = self._clock()
        result = work.run_on(shard)
        if isinstance(work, ExecuteOrder):
            self._record_time(work.order, self._clock() - began)
        elif isinstance(work, BeginDiskOrder) and callable(result):  # else an answer is repeated
            self._disk_began = began
        elif isinstance(work, EndDiskOrder) and not isinstance(work.result, Exception):
            self._record_time(work.order, self._clock() - self._disk_began)
        return result

    def _record_time(self, order: Order, took_s: float) -> None:
        if isinstance(order.body, Apply):
            self.apply_s = took_s
        elif isinstance(order.body, Persist):
            self.persist_s = took_s
        kind = type(order.body).__name__
        if kind.lower() not in self.spent:
            self.spent = {**self.spent, kind.lower(): Histogram()}  # replaced as a whole: others read it
        self.spent[kind.lower()].observe_value(took_s)
        # An outer step is one line: its Commit.
        log = self._log.info if isinstance(order.body, Commit) else self._log.debug
        log("order", kind=kind, number=order.number, term=order.term, took_s=took_s)
