"""The master's side of the status page (dips/view/page): records events and effects, reads past rounds from the
ledger, and makes the page's routes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from dips.errors import UnavailableMaster
from dips.master.ledger import Ledger
from dips.protocol.effects import Effect
from dips.protocol.enums import ClusterState
from dips.protocol.events import Event
from dips.protocol.records import LedgerState
from dips.protocol.view import SlaveView
from dips.telemetry.refusals import refusals_by_reason
from dips.view.page.document import make_state
from dips.view.page.memory import PageMemory, SpanKind

if TYPE_CHECKING:
    from starlette.routing import Route

    from dips.master.core import Step
    from dips.master.runtime import Runtime

SAMPLES = 6  # heartbeats over which a rate is the mean
ROUNDS_RECALLED = 1_000  # read from the ledger at the start; 0.2 s for rounds of ten clusters, on one core
AT_ONCE = 16  # of these; a round of a thousand clusters takes 0.7 MB
READ_S = 5.0  # deadline for the event loop's answer to the page
# State of a cluster → kind of the span that is open in its lane of the timeline.
_BUSY_WITH = {
    ClusterState.PUSHING: SpanKind.PUSH,
    ClusterState.COMMITTED: SpanKind.WAIT,
    ClusterState.PULLING: SpanKind.PULL,
}


class MasterPage:
    """The page of one term of the master. Only the routes are called outside the event loop."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options` are the run's options, which the page shows."""
        self._memory, self._options = PageMemory(), options
        self._rates = SlaveRates()

    def recall_ledger(self, ledger: Ledger, state: LedgerState) -> None:
        """Read the newest rounds from the ledger; before the first step."""
        number = ledger.find_round_before(ROUNDS_RECALLED)
        before = [v for v in state.versions if v.version.round <= number]
        self._memory.begin_lineage(before[-1].version, sum(v.tokens for v in before))
        while rounds := ledger.read_rounds_after(number, AT_ONCE):
            number = rounds[-1].round
            for r in rounds:
                self._memory.recall_round(r)

    def watch_steps(self, step: Step) -> Step:
        """Wrap a step function so that the page sees events and effects."""

        def step_seen(event: Event, now: float) -> list[Effect]:
            effects = step(event, now)
            self._memory.watch_step(event, effects, time.time())
            return effects

        return step_seen

    def make_routes(self, runtime: Runtime) -> list[Route]:
        """Return the routes for an HTTP server, which may call them in its own thread; called on the master's loop."""
        from dips.http.daemon import call_on_loop  # starlette: only for those who serve it
        from dips.view.page.routes import page_routes

        loop = asyncio.get_running_loop()

        def read_in_loop() -> Mapping[str, Any]:
            asked = call_on_loop(loop, lambda: self.read_state(runtime))
            try:
                return asked.result(READ_S)
            except (TimeoutError, CancelledError) as error:
                asked.cancel()  # a loop that was held up would build one document for each browser that asked
                raise UnavailableMaster(f"the master's loop did not answer within {READ_S:g} s") from error

        return page_routes(read_in_loop)

    def read_state(self, runtime: Runtime) -> dict[str, Any]:
        """Return the whole document as of now."""
        now, wall, view = time.monotonic(), time.time(), runtime.build_view()
        busy = {name: kind for name, c in view.clusters.items() if (kind := _BUSY_WITH.get(c.state)) is not None}
        self._memory.end_idle_lanes(busy, wall)
        rates = self._rates.measure_rates(view.slaves, now)
        return make_state(
            view, self._memory, wall=wall, rates=rates, refusals=refusals_by_reason(), options=self._options
        )


class SlaveRates:
    """Rates of each slave in bytes/s, computed from the sums that its heartbeats report."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[float, int, int]]] = {}  # (when, received, sent) of the last heartbeats

    def measure_rates(self, slaves: Mapping[str, SlaveView], now: float) -> dict[str, tuple[float, float]]:
        """Record the newest sums; return (received, sent) in bytes/s of each slave with at least two samples."""
        self._samples = {name: self._samples.get(name, deque(maxlen=SAMPLES)) for name in slaves}
        for name, peer in slaves.items():
            if peer.heartbeat is None:
                continue
            assert peer.heard_s is not None  # they come together
            at, received, sent = now - peer.heard_s, peer.heartbeat.bytes_in, peer.heartbeat.bytes_out
            samples = self._samples[name]
            if samples and (received < samples[-1][1] or sent < samples[-1][2]):
                samples.clear()  # a new process counts from 0
            if not samples or at - samples[-1][0] > 1e-3:  # not the same heartbeat again
                samples.append((at, received, sent))
        return {name: _rate_of(s[0], s[-1]) for name, s in self._samples.items() if len(s) > 1}


def _rate_of(a: tuple[float, int, int], b: tuple[float, int, int]) -> tuple[float, float]:
    seconds = b[0] - a[0]
    return (b[1] - a[1]) / seconds, (b[2] - a[2]) / seconds
