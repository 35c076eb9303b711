"""The ledger's mirror: every transaction is in it before its answers leave, or the mirror is marked red.

The master waits for the mirror as it waits for its own disk, up to MIRROR_S. A mirror that takes longer, is full or
gone is no longer waited for: rounds go on, `dips status` shows how far it lags, and it is waited for again as soon as
it has caught up. So a ledger that is restored from a mirror that kept up has everything that was ever acknowledged;
from one that lagged it may not, and restore.py provides for that. While a standby may take over (`bind`) it is waited
for without end: then the lease decides (standby.py).

A later term is looked for after each write and before its effects leave; who claims a term does so before it reads. So
either this master finds the claim, or its successor finds the transaction: no clock is needed for that.

One daemon thread writes, in order. The queue is bounded: a mirror that falls too far behind gets a new base instead.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random

from dips.dataclass import dataclass
from dips.errors import DipsError, StaleTerm
from dips.master import restore
from dips.master.restore import MirroredTransaction
from dips.protocol.records import Record
from dips.protocol.view import LedgerMirrorView
from dips.store.mirror import MirrorStore
from dips.telemetry.logs import Log
from dips.transport.backoff import Backoff

MOST_QUEUED = 1_000  # transactions; with more, a new base is mostly smaller than what it replaces
LOGS_TO_A_BASE = 1_000  # transactions, then a new base, so that a restore reads no more files
BACKOFF_S = (0.5, 30.0)  # first and longest pause between two tries of a mirror that fails
BOUND_PAUSE_S = 0.5  # longest such pause while it is waited for without end


@dataclass(frozen=True, slots=True)
class _Waiting:
    number: int
    written: MirroredTransaction
    since: float
    done: Future[None]


class LedgerMirror:
    """The mirror of one term. `take_base` returns (number of transactions, a copy of the ledger's file, which is
    removed when it is mirrored or the mirror is closed), from any thread.
    """

    def __init__(
        self,
        store: MirrorStore,
        run: str,
        term: int,
        take_base: Callable[[], tuple[int, Path]],
        patience_s: float,
        clock: Callable[[], float],
        log: Log,
        *,
        bound: bool = False,
    ) -> None:
        """With `bound` it is waited for without end, until `unbind`: the lease lets a standby take over."""
        self._store, self._run, self._term, self._take_base = store, run, term, take_base
        self._patience_s, self._clock, self._log = patience_s, clock, log
        self._backoff = Backoff(*BACKOFF_S, Random())
        self._changed = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._base_due, self._behind = True, True
        self._behind_since = clock()
        self._unqueued = 0  # transactions that the next base contains
        self._copy: tuple[int, Path] | None = None  # for the base that is due: it could not be written yet
        self._reason = "nothing was written yet"
        self._logs = 0
        self._ended = self._fenced = False
        self._bound = bound
        self._thread = threading.Thread(target=self._keep, name="ledger-mirror", daemon=True)

    def start(self) -> bool:
        """Write the first base; return whether it was written within the patience. The thread goes on in any case."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: not self._behind or self._fenced, self._patience_s)
            return not self._behind

    def close(self) -> None:
        """Stop writing; a write in progress is not waited for."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def follow(self, number: int, records: Sequence[Record], wall: float) -> None:
        """Mirror transaction `number`, which is durable in the ledger; return when it is mirrored, or not waited for.

        Raise StaleTerm if a later master has begun its term in the mirror, having been restored from there.
        """
        done: Future[None] = Future()
        with self._changed:
            if self._fenced:
                raise StaleTerm(self._reason)
            self._put(_Waiting(number, MirroredTransaction(tuple(records), wall), self._clock(), done))
            if self._behind and not self._bound:
                return
        written = asyncio.wrap_future(done)
        try:
            async with asyncio.timeout(self._patience_s):
                await asyncio.shield(written)
        except TimeoutError:
            with self._changed:
                self._fall_behind(f"it took longer than {self._patience_s:g} s")
                waits = self._bound
            if waits:
                await written
        if self._fenced:
            raise StaleTerm(self._reason)

    def bind(self) -> bool:
        """Wait for the mirror without end from now on, unless it lags; return whether it is waited for."""
        with self._changed:
            self._bound = self._bound or not self._behind
            return self._bound and not self._behind

    def unbind(self) -> None:
        """Wait no longer than the patience again; what waits for a mirror that lags leaves."""
        with self._changed:
            self._bound = False
            if self._behind:
                self._release_all()

    def view(self) -> LedgerMirrorView:
        """Return how far the mirror lags, for status and metrics."""
        with self._changed:
            lags = self._unqueued + len(self._queue) if self._behind else 0
            behind_s = self._clock() - self._behind_since if self._behind else 0.0
            return LedgerMirrorView(self._behind, lags, behind_s, self._reason if self._behind else "")

    # ---- under the lock ----------------------------------------------------------------------------------------------

    def _put(self, waiting: _Waiting) -> None:
        if len(self._queue) >= MOST_QUEUED:
            self._unqueued += len(self._queue)
            self._queue.clear()
            self._base_due = True
        self._queue.append(waiting)
        self._changed.notify_all()

    def _fall_behind(self, reason: str) -> None:
        if not self._behind:
            self._log.error("ledger_mirror_lags", mirror=self._store.url, reason=reason)
            self._behind_since = self._queue[0].since if self._queue else self._clock()
        self._behind, self._reason = True, reason

    def _catch_up(self) -> None:
        """Wait for the mirror from now on, since nothing is left to write."""
        if self._behind:
            self._log.info("ledger_mirror_keeps_up", mirror=self._store.url, term=self._term)
        self._behind, self._reason = False, ""
        self._changed.notify_all()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while self._wait_for_work():
            try:
                if self._base_due:
                    self._write_base()
                else:
                    self._write_next()
                self._backoff.reset()
            except (DipsError, OSError, RuntimeError) as error:  # RuntimeError: the ledger's thread has ended
                pause_s = self._backoff.next_pause_s()
                with self._changed:
                    if self._behind or not self._bound:
                        self._fall_behind(str(error))
                    if not self._bound:
                        self._release_all()
                    self._changed.wait_for(lambda: self._ended, min(pause_s, BOUND_PAUSE_S if self._bound else pause_s))
        self._remove_copy()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._base_due or bool(self._queue))
            return not self._ended

    def _is_newest(self) -> bool:
        """Return whether no later term is claimed in this mirror; end if one is. Called after each write, and before a
        base is copied.
        """
        newest = restore.newest_term(self._store)
        if newest > self._term:
            with self._changed:
                self._fenced = True
                self._fall_behind(f"this is term {self._term}, its mirror {self._store.url} has term {newest}")
                self._release_all()
                self._ended = True
                self._changed.notify_all()
        return not self._fenced

    def _write_base(self) -> None:
        with self._changed:
            self._base_due = False  # a queue that overflows from here on needs another one
        try:
            if not self._is_newest():  # asked before the copy: a store that is away for days would cost one each try
                return
            number, copy = self._copy = self._find_copy()
            restore.write_base(self._store, self._run, self._term, number, copy)
            self._remove_copy()
            if not self._is_newest():
                return
        except BaseException:
            with self._changed:
                self._base_due = True
            raise
        with self._changed:
            self._logs = 0
            while self._queue and self._queue[0].number <= number:
                self._end(self._queue.popleft())
            if not self._base_due:
                self._unqueued = 0
                if not self._queue:
                    self._catch_up()

    def _find_copy(self) -> tuple[int, Path]:
        """Return the copy that could not be written, if all that came after it is queued, else a new one: a store that
        is full for days costs no more copies than one that has room.
        """
        if self._copy is not None and self._copy[1].exists():
            with self._changed:
                if not self._queue or self._queue[0].number <= self._copy[0] + 1:
                    return self._copy
        return self._take_base()

    def _remove_copy(self) -> None:
        if self._copy is not None:
            self._copy[1].unlink(missing_ok=True)
            self._copy = None

    def _write_next(self) -> None:
        with self._changed:
            waiting = self._queue[0]
        restore.write_transaction(self._store, self._run, self._term, waiting.number, waiting.written)
        if not self._is_newest():
            return
        with self._changed:
            if self._queue and self._queue[0] is waiting:
                self._queue.popleft()
            self._end(waiting)
            self._logs += 1
            self._base_due = self._base_due or self._logs >= LOGS_TO_A_BASE
            if not self._queue and not self._base_due:
                self._catch_up()

    def _release_all(self) -> None:
        """Release all waiting transactions, which must not wait for a mirror that fails."""
        for waiting in self._queue:
            self._end(waiting)

    @staticmethod
    def _end(waiting: _Waiting) -> None:
        if not waiting.done.done():
            waiting.done.set_result(None)
