"""A transfer under way in this rank: its thread, and what the ranks agree on when they look at it together (why.md 7).

Whoever began it either stands still until it is over (`finish`) or trains on and looks now and then (`look`). The first
rank that fails ends it for all.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from dips.client.rank.collectives import JobCollectives
from dips.client.rank.transfer import TransferStats
from dips.errors import DipsError, LocalProtocolError, Unavailable


def do_nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What all ranks agreed on: every one of them moved all of its bytes, or the transfer failed."""

    ok: bool
    reason: str  # as this rank saw it
    nbytes: int  # over all ranks
    torn: bool = False  # a pull that failed after its first layer was installed


class BackgroundTransfer(ABC):
    """A push or pull that was begun on all ranks."""

    @abstractmethod
    def finish(self, poll_s: float) -> TransferResult:
        """Stand still until it is over; the ranks meet at least every `poll_s`."""

    @abstractmethod
    def look(self) -> TransferResult | None:
        """What came of it, or None while it moves; stands still for nothing. Collective."""

    @abstractmethod
    def cancel(self) -> None:
        """End it on this rank, whatever the others do."""


class StreamedTransfer(BackgroundTransfer):
    """A pull that is installed layer by layer while the training stands still: it moves when it is finished."""

    def __init__(self, stream: Callable[[float], TransferResult]) -> None:
        self._stream = stream

    def finish(self, poll_s: float) -> TransferResult:
        return self._stream(poll_s)

    def look(self) -> TransferResult | None:
        raise LocalProtocolError("install: streaming and overlap: full exclude each other")

    def cancel(self) -> None:
        pass  # nothing moves between two calls


class ThreadedTransfer(BackgroundTransfer):
    """A transfer that moves in its thread."""

    def __init__(
        self,
        job: TransferThread,
        seq: int,
        total: int,
        voice: JobCollectives,
        tell: Callable[[], str],
        after: Callable[[], None] = do_nothing,
    ) -> None:
        """`tell` says how far it is and returns why to give up; `after` is called once, when it is over."""
        self._job, self._seq, self._total, self._voice, self._tell = job, seq, total, voice, tell
        self._after = after

    def finish(self, poll_s: float) -> TransferResult:
        while (moved := self._look(poll_s)) is None:
            pass
        return moved

    def look(self) -> TransferResult | None:
        return self._look(0.0)

    def cancel(self) -> None:
        self._job.cancel()

    def _look(self, wait_s: float) -> TransferResult | None:
        job = self._job
        job.wait(wait_s)
        job.halt(self._tell())
        # The same transfer on all ranks (seq both ways), all of them well, all of them done.
        low, high, well, done = self._voice.least([self._seq, -self._seq, int(job.error is None), int(job.done)])
        failed = not well or low != -high
        if not failed and not done:
            return None
        if failed:
            job.cancel()
        self._after()
        return TransferResult(not failed, job.reason if failed else "", self._total)


class TransferThread:
    """One transfer in a thread; an error that nobody foresaw is raised where the ranks have agreed to give up."""

    def __init__(self, work: Callable[[threading.Event], TransferStats] | None) -> None:
        self.error: BaseException | None = None
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        if work is not None:
            self._thread = threading.Thread(target=self._run, args=(work,), name="dips-transfer", daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    @property
    def reason(self) -> str:
        return f"{type(self.error).__name__}: {self.error}" if self.error else "another rank failed"

    def wait(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def halt(self, reason: str) -> None:
        """Count the transfer as failed for `reason`, unless that is empty or it has failed already."""
        if reason and self.error is None:
            self.error = Unavailable(reason)

    def cancel(self) -> None:
        """End the transfer and wait for its end; raise its error if it is none of Di-PS's."""
        own = self.error
        self._cancel.set()
        if self._thread is not None:
            self._thread.join()
        if own is not None and not isinstance(own, DipsError):
            raise own
        self.error = own  # that it was cancelled is no reason

    def _run(self, work: Callable[[threading.Event], TransferStats]) -> None:
        try:
            work(self._cancel)
        except BaseException as error:  # noqa: BLE001 (raised by cancel(), in the rank's own thread)
            self.error = error
