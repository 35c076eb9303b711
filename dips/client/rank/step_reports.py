"""What rank 0 reports to the agent of each inner step: tokens and loss."""

from __future__ import annotations

from typing import Any

from dips.client.ipc.messages import LossReported, Stepped
from dips.client.rank.agent_client import AgentClient
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.losses import LossChannel, finite_or_none
from dips.client.rank.outer_state import OuterState


class StepReports:
    """One rank's reports; `pipelined`: other ranks than 0 compute the loss."""

    def __init__(
        self, state: OuterState, collectives: JobCollectives, agent_client: AgentClient, *, pipelined: bool
    ) -> None:
        self._state, self._agent_client, self._is_first = state, agent_client, collectives.rank == 0
        self._losses = LossChannel(collectives) if pipelined else None

    def report_step(self, tokens: int, loss: Any) -> None:
        """Report one inner step; not collective."""
        # A loss that is not needed is not read: that may wait for an accelerator.
        shown = finite_or_none(loss) if self._is_first or self._losses else None
        finite = loss is None or shown is not None
        if self._losses:
            self._losses.add_loss(shown, finite)
        if self._is_first:
            state = self._state
            self._agent_client.notify_agent(Stepped(state.attempt, int(tokens), shown, finite, state.left, state.begun))

    def report_pipeline_losses(self) -> None:
        """In a pipeline, report the losses that another rank has computed since the last call; collective."""
        if self._losses is None:
            return
        gathered = self._losses.gather_losses()
        if gathered is not None:
            self._agent_client.notify_agent(LossReported(self._state.attempt, *gathered))
