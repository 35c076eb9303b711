"""A transfer in progress: this rank's thread, and the collective that decides whether all ranks are done
(docs/rationale.md#7).

The caller either waits for its end (`wait`) or trains on and polls it regularly (`poll`). The first rank that fails
ends the transfer on all ranks.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from dips.client.rank.collectives import JobCollectives
from dips.errors import ConfigError, DipsError, Unavailable


def do_nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result agreed on by all ranks: every rank moved all its bytes, or the transfer failed."""

    ok: bool
    reason: str  # of the failure on this rank
    nbytes: int  # over all ranks
    torn: bool = False  # the pull failed after its first fragment was merged
    diverged: bool = False  # the push was not begun: the model is not finite on some rank


class BackgroundTransfer(ABC):
    """A push or pull that was begun on all ranks."""

    @abstractmethod
    def wait(self, poll_s: float) -> TransferResult:
        """Block until the transfer is over; the ranks meet in a collective at least every `poll_s`. Collective."""

    @abstractmethod
    def poll(self) -> TransferResult | None:
        """Return the result, or None while the transfer moves; does not block on it. Collective."""

    @abstractmethod
    def cancel(self) -> None:
        """End the transfer on this rank, independently of the others."""

    @property
    def steps_until_due(self) -> int | None:
        """Inner steps after which a poll has something to do; None: at no particular step."""
        return None


class EndedTransfer(BackgroundTransfer):
    """A transfer that all ranks agreed not to begin."""

    def __init__(self, result: TransferResult) -> None:
        self._result = result

    def wait(self, poll_s: float) -> TransferResult:
        return self._result

    def poll(self) -> TransferResult | None:
        return self._result

    def cancel(self) -> None:
        pass  # nothing moves


class ThreadedTransfer(BackgroundTransfer):
    """A transfer that moves in its own thread."""

    def __init__(
        self,
        thread: TransferThread,
        seq: int,
        total: Callable[[], int],
        collectives: JobCollectives,
        report_progress: Callable[[], str],
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Follow a thread that has begun to move.

        total            returns the bytes over all ranks; called when the transfer is over
        report_progress  returns why to give up, or ""
        finish           remaining work, done in a thread once all ranks have moved all bytes; on all ranks or on none
        """
        self._thread, self._seq, self._total, self._collectives = thread, seq, total, collectives
        self._report_progress, self._finish = report_progress, finish

    def wait(self, poll_s: float) -> TransferResult:
        while (result := self._agree_on_result(poll_s)) is None:
            pass
        return result

    def poll(self) -> TransferResult | None:
        return self._agree_on_result(0.0)

    def cancel(self) -> None:
        self._thread.cancel()

    def _agree_on_result(self, wait_s: float) -> TransferResult | None:
        """Agree with the other ranks whether the transfer is over; return its result, or None."""
        thread = self._thread
        thread.join(wait_s)
        thread.mark_failed(self._report_progress())
        # Same transfer on all ranks (the smallest seq is the largest), no rank failed, all ranks are done.
        done = thread.done  # read before the error: a thread that fails in between does not count as done
        own = [self._seq, -self._seq, int(thread.error is None), int(done), self._own_count()]
        smallest_seq, minus_largest_seq, all_well, all_done, least_count = self._collectives.all_min(own)
        if not all_well or smallest_seq != -minus_largest_seq:
            self.cancel()
            return TransferResult(False, thread.reason, self._total())
        self._on_least_count(least_count)
        if not all_done:
            return None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._thread = TransferThread(lambda _: finish())
            return None
        return TransferResult(True, "", self._total())

    def _own_count(self) -> int:
        """Return a count of this rank; the least count over all ranks is passed to `_on_least_count`."""
        return 0

    def _on_least_count(self, count: int) -> None:
        """Process the least count over all ranks."""


class TransferThread:
    """One rank's transfer in a thread; an unexpected error is raised after the ranks have agreed to give up."""

    def __init__(self, work: Callable[[threading.Event], object] | None) -> None:
        """Start the thread; `work` takes the event that cancels it, None: this rank moves nothing."""
        self.error: BaseException | None = None
        self._ended_at: float | None = None
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        if work is not None:
            self._thread = threading.Thread(target=self._run_work, args=(work,), name="dips-transfer", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def idle_s(self) -> float:
        """Seconds since the thread ended; 0 while it runs."""
        return 0.0 if self._ended_at is None else time.monotonic() - self._ended_at

    @property
    def reason(self) -> str:
        return f"{type(self.error).__name__}: {self.error}" if self.error else "another rank failed"

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def mark_failed(self, reason: str) -> None:
        """Mark the transfer as failed for `reason`, unless that is empty or it has failed already."""
        if reason and self.error is None:
            self.error = Unavailable(reason)

    def cancel(self) -> None:
        """Cancel the transfer and wait for its end. Raises its error if it is a ConfigError or a bug, which would
        recur.
        """
        own = self.error
        self._cancel.set()
        if self._thread is not None:
            self._thread.join()
        if own is not None and (isinstance(own, ConfigError) or not isinstance(own, DipsError)):
            raise own
        self.error = own  # drop TransferCancelled, which this call has caused

    def _run_work(self, work: Callable[[threading.Event], object]) -> None:
        try:
            work(self._cancel)
        except BaseException as error:  # noqa: BLE001 (raised by cancel(), in the training thread)
            self.error = error
        self._ended_at = time.monotonic()
