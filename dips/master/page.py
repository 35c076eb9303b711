"""The master's part of the page (dips/page): watches the Coordinator, reads the ledger, and answers requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from dips.errors import UnavailableMaster
from dips.ids import VersionId
from dips.master.ledger import Ledger
from dips.master.ledger_history import RoundHistory
from dips.master.status import build_status
from dips.page.memory import PageMemory, RoundMemory
from dips.page.rates import SeenTransfers, SlaveRates
from dips.page.spans import SpanKind
from dips.page.view import make_state
from dips.protocol.effects import Effect
from dips.protocol.events import Event
from dips.protocol.records import LedgerState
from dips.telemetry.refusals import refusals_by_reason

if TYPE_CHECKING:
    from starlette.routing import Route

    from dips.master.core import Step
    from dips.master.runtime import Runtime

ROUNDS_RECALLED = 1_000  # read from the ledger at the start; 0.2 s for rounds of ten clusters, on one core
READ_S = 5.0  # deadline for the event loop's answer to the page
# A cluster's state → the kind of the open span in its lane.
_BUSY_WITH = {"pushing": SpanKind.PUSH, "committed": SpanKind.WAIT, "pulling": SpanKind.PULL}


class MasterPage:
    """The page of one term of the master. Only the routes are called outside the event loop."""

    def __init__(self, heartbeat_s: float) -> None:
        """`heartbeat_s` is that of the master's timing."""
        self._memory, self._heartbeat_s = PageMemory(), heartbeat_s
        self._rates, self._seen = SlaveRates(), SeenTransfers()

    def recall_ledger(self, ledger: Ledger, state: LedgerState) -> None:
        """Read the newest rounds from the ledger; before the first step."""
        self._memory.begin_lineage(tokens := sum(v.tokens for v in state.versions))
        recall_rounds(self._memory, ledger.read_history(ROUNDS_RECALLED), state.versions[-1].version, tokens)

    def watch_steps(self, step: Step) -> Step:
        """Wrap a step function so that the page sees events and effects."""

        def step_seen(event: Event, now: float) -> list[Effect]:
            effects = step(event, now)
            self._memory.watch_step(event, effects, time.time())
            return effects

        return step_seen

    def make_routes(self, runtime: Runtime) -> list[Route]:
        """Return the routes for an HTTP server, which may call them in its own thread; called on the master's loop."""
        from dips.page.routes import page_routes  # starlette: only for those who serve it

        loop = asyncio.get_running_loop()

        async def read_state() -> dict[str, Any]:
            return self.read_state(runtime)

        def read_in_loop() -> Mapping[str, Any]:
            try:
                asked = asyncio.run_coroutine_threadsafe(read_state(), loop)
            except RuntimeError as error:  # the loop is closed
                raise UnavailableMaster("this master is stopping") from error
            try:
                return asked.result(READ_S)
            except (TimeoutError, CancelledError) as error:
                asked.cancel()
                raise UnavailableMaster(f"the master's loop did not answer within {READ_S:g} s") from error

        return page_routes(read_in_loop)

    def read_state(self, runtime: Runtime) -> dict[str, Any]:
        """Return the whole document as of now."""
        now, wall = time.monotonic(), time.time()
        status = build_status(runtime.build_view(), runtime.heartbeats, now)
        busy = {
            name: kind for name, c in status["clusters"].items() if (kind := _BUSY_WITH.get(c["state"])) is not None
        }
        self._memory.end_idle_lanes(busy, wall)
        rates = self._rates.measure_rates(status["slaves"], now)
        seen = self._seen.note_transfers(status["slaves"], status["clusters"])
        return make_state(
            status, self._memory, rates=rates, seen=seen, heartbeat_s=self._heartbeat_s, wall=wall,
            refusals=refusals_by_reason(),
        )  # fmt: skip


def recall_rounds(memory: PageMemory, rounds: Sequence[RoundHistory], head: VersionId, tokens: int) -> None:
    """Add rounds to the memory, oldest first; `tokens` are those of the lineage that ends at `head`."""
    known = _tokens_of_lineage(rounds, head, tokens)
    for r in rounds:
        if r.ended is None:
            continue
        outcomes = tuple((o.push.cluster, str(o.kind), o.reason) for o in r.outcomes)
        version = str(r.version) if r.version is not None else None
        reason = r.reason or (f"undone: {r.undone}" if r.undone else "")
        kept = RoundMemory(r.round, "undone" if r.undone else r.kind, version, reason, r.opened, r.ended, {}, outcomes)
        losses = [(f.push.cluster, f.tokens, f.loss) for f in r.folds]
        memory.recall_round(kept, known.get(r.version) if r.version is not None else None, losses)


def _tokens_of_lineage(rounds: Sequence[RoundHistory], head: VersionId, tokens: int) -> dict[VersionId, int]:
    """Return the tokens of the head and of its ancestors among these rounds."""
    known = {head: tokens}
    for r in reversed(rounds):
        if r.version in known and r.parent is not None:
            known[r.parent] = known[r.version] - r.tokens
    return known
