"""A transfer in progress: this rank's thread, and the collective that decides whether all ranks are done
(docs/rationale.md#7).

The caller either waits until it is over (`wait`) or trains on and polls it now and then (`poll`). The first rank that
fails ends the transfer on all ranks.
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
    """What all ranks agreed on: every one of them moved all of its bytes, or the transfer failed."""

    ok: bool
    reason: str  # this rank's
    nbytes: int  # over all ranks
    torn: bool = False  # a pull that failed after its first fragment was merged
    diverged: bool = False  # a push that was not begun: the model is not finite on some rank


class BackgroundTransfer(ABC):
    """A push or pull that was begun on all ranks."""

    @abstractmethod
    def wait(self, poll_s: float) -> TransferResult:
        """Block until it is over; the ranks meet in a collective at least every `poll_s`. Collective."""

    @abstractmethod
    def poll(self) -> TransferResult | None:
        """Return its result, or None while it moves; does not block on the transfer. Collective."""

    @abstractmethod
    def cancel(self) -> None:
        """End it on this rank, whatever the others do."""

    @property
    def steps_until_due(self) -> int | None:
        """Inner steps after which a poll has something to do; None: no certain step."""
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
    """A transfer that moves in a thread of its own."""

    def __init__(
        self,
        thread: TransferThread,
        seq: int,
        total: Callable[[], int],
        collectives: JobCollectives,
        report_progress: Callable[[], str],
        finish: Callable[[], None] | None = None,
    ) -> None:
        """`report_progress` returns why to give up, or "".

        total   bytes over all ranks; asked when it is over
        finish  what is left to do, in a thread, when all ranks have moved all of theirs; on all ranks or on none
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
        """Find out with the other ranks whether the transfer is over."""
        thread = self._thread
        thread.join(wait_s)
        thread.mark_failed(self._report_progress())
        # Same transfer on all ranks (the smallest seq is the largest), no rank failed, all ranks are done.
        done = thread.done  # first: a thread that fails after a look at its error is not done by then
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
        """A number of this rank, whose least of all ranks is told to `_on_least_count`."""
        return 0

    def _on_least_count(self, count: int) -> None:
        """All ranks have come so far."""


class TransferThread:
    """One rank's transfer in a thread; an unforeseen error is raised after the ranks have agreed to give up."""

    def __init__(self, work: Callable[[threading.Event], object] | None) -> None:
        """`work` takes the event that cancels it; None: this rank moves nothing."""
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
        """Since it ended; 0 while it moves."""
        return 0.0 if self._ended_at is None else time.monotonic() - self._ended_at

    @property
    def reason(self) -> str:
        return f"{type(self.error).__name__}: {self.error}" if self.error else "another rank failed"

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def mark_failed(self, reason: str) -> None:
        """Count the transfer as failed for `reason`, unless that is empty or it has failed already."""
        if reason and self.error is None:
            self.error = Unavailable(reason)

    def cancel(self) -> None:
        """End the transfer and wait for its end; raise its error unless the next transfer may go better."""
        own = self.error
        self._cancel.set()
        if self._thread is not None:
            self._thread.join()
        if own is not None and (isinstance(own, ConfigError) or not isinstance(own, DipsError)):
            raise own
        self.error = own  # TransferCancelled, raised by this call, is no reason

    def _run_work(self, work: Callable[[threading.Event], object]) -> None:
        try:
            work(self._cancel)
        except BaseException as error:  # noqa: BLE001 (raised by cancel(), in the training thread)
            self.error = error
        self._ended_at = time.monotonic()
