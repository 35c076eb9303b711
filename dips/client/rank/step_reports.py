"""Rank 0's reports of inner steps to the agent: tokens, loss, and time of each.

A loss that an accelerator still computes is not waited for: its step is reported, in order, at a later step, when the
loss has arrived. No step is left unreported when the agent is asked a question whose answer depends on its counts.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from dips.client.ipc.messages import LossReported, Stepped
from dips.client.parallel.devices import DeferredScalar, is_deferred
from dips.client.rank.agent_client import AgentClient
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.losses import LossChannel, finite_or_none
from dips.client.rank.outer_state import OuterState
from dips.protocol.data import BegunRange

MOST_WAITING = 32  # inner steps waiting for their loss: the agent sees the progress at most this many steps late


class _Taken(NamedTuple):
    """An inner step with its state at the time."""

    tokens: int
    left: tuple[int, ...] | None  # data ranges with samples left, as in Stepped
    begun: BegunRange | None
    ended_s: float  # on the monotonic clock


class StepReports:
    """One rank's reports; `pipelined`: ranks other than 0 compute the loss."""

    def __init__(
        self, state: OuterState, collectives: JobCollectives, agent_client: AgentClient, *, pipelined: bool
    ) -> None:
        self._state, self._agent_client, self._is_first = state, agent_client, collectives.rank == 0
        self._losses = LossChannel(collectives) if pipelined else None
        self._waiting: deque[tuple[_Taken, DeferredScalar]] = deque()

    def report_step(self, tokens: int, loss: Any) -> None:
        """Report one inner step, at once or when its loss has arrived. Not collective."""
        if not self._is_first and self._losses is None:  # this rank reports nothing
            return
        step = _Taken(int(tokens), self._state.left, self._state.begun, time.monotonic())
        if is_deferred(loss):
            self._waiting.append((step, DeferredScalar(loss)))
            while self._waiting and (self._waiting[0][1].ready or len(self._waiting) > MOST_WAITING):
                self._report_oldest()
        else:
            self.flush_reports()
            self._report_loss(step, loss)

    def flush_reports(self) -> None:
        """Report every step until now; waits for their losses."""
        while self._waiting:
            self._report_oldest()

    def report_pipeline_losses(self) -> None:
        """In a pipeline, report the losses that another rank has computed since the last call. Collective."""
        if self._losses is None:
            return
        gathered = self._losses.gather_losses()
        if gathered is not None:
            self._agent_client.notify_agent(LossReported(self._state.attempt, *gathered))

    def _report_oldest(self) -> None:
        step, loss = self._waiting.popleft()
        self._report_loss(step, loss.read())

    def _report_loss(self, step: _Taken, loss: Any) -> None:
        shown = finite_or_none(loss)
        finite = loss is None or shown is not None
        if self._losses:
            self._losses.add_loss(shown, finite)
        if self._is_first:
            stepped = Stepped(self._state.attempt, step.tokens, shown, finite, step.left, step.begun)
            self._agent_client.report_step(stepped, step.ended_s)
