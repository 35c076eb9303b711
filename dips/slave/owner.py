"""The one thread that owns the shard, seen from everywhere else: jobs go in, in order; a standing comes out.

Orders, news of the data flow and healing all run here, one after another, so the shard needs no lock. Beats must not
wait for an Apply of minutes: they read `standing`, which is replaced as a whole after each job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Apply, Order, Persist
from dips.protocol.events import Answer
from dips.slave.shard import Shard
from dips.telemetry.logs import Log

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Standing:
    """What a beat says of the shard."""

    sinc: int
    term: int
    memory: VersionId | None
    staged: tuple[PushId, ...]
    pool_used: int
    pool_limit: int


class Owner:
    """Gives a shard its thread; also the inbox (`ports.FlowEvents`) into which the data flow reports.

    `thread` is an executor of exactly one thread; `changed` is called, in that thread, after each job that leaves
    something to tell the master.
    """

    def __init__(self, thread: Executor, clock: Callable[[], float], log: Log) -> None:
        self._thread, self._clock, self._log = thread, clock, log
        self._shard: Shard | None = None
        self._writing = asyncio.Lock()
        self._persists: set[asyncio.Task[Answer]] = set()
        self.changed: Callable[[], None] = lambda: None
        self.standing = Standing(0, 0, None, (), 0, 0)
        self.apply_s = 0.0  # what the last Apply took
        self.persist_s = 0.0  # what the last snapshot took
        self.spent: dict[str, tuple[float, int]] = {}  # seconds and number of orders, by kind

    def take(self, shard: Shard) -> None:
        """Own `shard` from now on; called once, before anything else."""
        self._shard = shard
        self._publish()

    async def run(self, job: Callable[[Shard], T]) -> T:
        """Do `job` on the owner's thread, after everything that was given before; raise what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._do, job)

    async def execute(self, order: Order) -> Answer:
        """Carry out an order of the master on the owner's thread; the writing of what is served runs beside it."""
        if not isinstance(order.body, Persist):
            return await self.run(lambda shard: self._timed(shard, order))
        # Shielded: who gave the order may hang up and ask again, the writer goes on and its end must be heard.
        task = asyncio.ensure_future(self._persist(order))
        self._persists.add(task)
        task.add_done_callback(self._persists.discard)
        return await asyncio.shield(task)

    async def _persist(self, order: Order) -> Answer:
        """Write one snapshot after another, so that a repeated Persist finds the first one done."""
        async with self._writing:
            begun = self._clock()
            work = await self.run(lambda shard: shard.begin_persist(order))
            if callable(work):
                work = await self._write_beside(order, work)
            self._took(order, self._clock() - begun)
            return work

    async def _write_beside(self, order: Order, write: Callable[[], str]) -> Answer:
        digest: str | None = None
        try:
            digest = await asyncio.get_running_loop().run_in_executor(None, write)
        finally:
            answer = await self.run(lambda shard: shard.end_persist(order, digest))
        assert answer is not None  # a writer that failed has raised
        return answer

    # ---- what the data flow reports, from its own threads --------------------------------------------

    def staged(self, push: PushId, nbytes: int) -> None:
        """Pass on that a push is whole."""
        self._later("staged", lambda shard: shard.staged(push, nbytes))

    def refused(self, push: PushId, reason: str) -> None:
        """Pass on that a push cannot be completed."""
        self._log.warning("push_refused", push=str(push), reason=reason)
        self._later("refused", lambda shard: shard.refused(push, reason))

    def released(self, pull: PullId, reason: str) -> None:
        """Pass on that nobody reads for a pull any more."""
        self._later("released", lambda shard: shard.released(pull, reason))

    def moved(self, pull: PullId) -> None:
        """Pass on that nobody reads a pull's former source any more."""
        self._later("moved", lambda shard: shard.moved(pull))

    # ---- on the owner's thread -----------------------------------------------------------------------

    def _later(self, what: str, job: Callable[[Shard], None]) -> None:
        def logged() -> None:
            try:
                self._do(job)
            except Exception:  # nobody waits for this job's result, so the log must tell of it
                self._log.exception("flow_event_failed", what=what)
                raise

        self._thread.submit(logged)

    def _do(self, job: Callable[[Shard], T]) -> T:
        assert self._shard is not None, "take() comes first"
        try:
            return job(self._shard)
        finally:
            self._publish()
            if self._shard.has_reports:
                self.changed()

    def _publish(self) -> None:
        assert self._shard is not None
        shard, versions = self._shard, self._shard.versions
        self.standing = Standing(
            shard.sinc, shard.term, versions.memory, shard.staged_pushes, versions.used_bytes, versions.limit_bytes
        )

    def _timed(self, shard: Shard, order: Order) -> Answer:
        begun = self._clock()
        answer = shard.execute(order)
        self._took(order, self._clock() - begun)
        return answer

    def _took(self, order: Order, took: float) -> None:
        if isinstance(order.body, Apply):
            self.apply_s = took
        elif isinstance(order.body, Persist):
            self.persist_s = took
        kind = type(order.body).__name__.lower()
        seconds, count = self.spent.get(kind, (0.0, 0))
        self.spent = {**self.spent, kind: (seconds + took, count + 1)}  # replaced as a whole: others read it
        self._log.info("order", kind=type(order.body).__name__, number=order.number, term=order.term, took_s=took)
