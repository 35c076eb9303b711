"""What a slave reports of its own accord, push by push: staged, or refused here. Sent until the master acknowledges it.

Pure. Reports are sent one after another, oldest first; every heartbeat names what is staged besides. A master that
knows better (Stale) learns the truth with the next Register.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from random import Random

from dips.errors import Busy, Stale, Unavailable
from dips.protocol.events import PushRefused, PushStaged
from dips.slave.actions import Actions, CallMaster, EndSlave, WriteLog
from dips.slave.open_transfers import RefusedReport, Report
from dips.slave.standing import SlaveTiming
from dips.transport.backoff import Backoff


class ReportQueue:
    """The reports that the master has not acknowledged yet."""

    def __init__(self, slave: str, timing: SlaveTiming, sinc: Callable[[], int], rng: Random) -> None:
        self._slave, self._timing, self._sinc = slave, timing, sinc
        self._waiting: deque[Report] = deque()
        self._telling: PushStaged | PushRefused | None = None
        self._again_at: float | None = None  # None: the call is under way, or there is none
        self._backoff = Backoff(*timing.backoff_s, rng)

    def next_deadline(self) -> float:
        return inf if self._again_at is None else self._again_at

    def add_reports(self, reports: Iterable[Report]) -> Actions:
        """Queue what the shard has to report."""
        self._waiting.extend(reports)
        return self._tell_next() if self._telling is None else []

    def tick(self, now: float) -> Actions:
        """Send again what was not acknowledged."""
        if now < self.next_deadline():
            return []
        assert self._telling is not None
        self._again_at = None
        return [CallMaster(self._telling, self._timing.call_s)]

    def on_reply(self, error: Exception | None, now: float) -> Actions:
        """The master has acknowledged it, or has not."""
        assert self._telling is not None
        if isinstance(error, Unavailable | Busy):
            self._again_at = now + self._backoff.next_pause_s()
            return []
        if error is not None and not isinstance(error, Stale):
            return [EndSlave(error)]
        fields = {"push": str(self._telling.push), "why": str(error)}
        actions: Actions = [WriteLog("info", "report_stale", fields)] if error is not None else []
        return actions + self._tell_next()

    def _tell_next(self) -> Actions:
        self._telling = None
        self._backoff.reset()
        if not self._waiting:
            return []
        report = self._waiting.popleft()
        self._telling = (
            PushRefused(self._slave, self._sinc(), report.push, report.reason)
            if isinstance(report, RefusedReport)
            else PushStaged(self._slave, self._sinc(), report.push, report.nbytes)
        )
        return [CallMaster(self._telling, self._timing.call_s)]
