"""The data ranges leased to this cluster, one after the other, and the push of what is left at their end."""

from __future__ import annotations

from dips.client.ipc.messages import RangeGiven, RangesEnded, RangeWanted
from dips.client.rank.agent_client import AgentClient
from dips.client.rank.outer_state import OuterState
from dips.client.rank.outer_steps import OuterSteps
from dips.errors import LocalProtocolError


class DataRanges:
    """Asks the agent for ranges; each request reports the range before it as used up."""

    def __init__(self, state: OuterState, agent_client: AgentClient, outer_steps: OuterSteps) -> None:
        self._state, self._agent_client, self._outer_steps = state, agent_client, outer_steps
        self._asked = 0

    def next_range(self) -> int | None:
        """Return the next range; None at the end of the data or of the run, once all that was trained is settled.

        Collective.
        """
        self._asked += 1
        while True:
            answer = self._agent_client.ask_until_answered(RangeWanted(self._state.attempt, self._asked))
            if isinstance(answer, RangeGiven):
                return answer.range
            if not isinstance(answer, RangesEnded):
                raise LocalProtocolError(f"expected RangeGiven or RangesEnded from the agent, got {answer!r}")
            if self._settle_ranges(answer):
                return None

    def _settle_ranges(self, ended: RangesEnded) -> bool:
        """Push what was trained since the last push; return whether nothing is left to settle."""
        was_in_flight = self._outer_steps.in_flight
        self._outer_steps.settle_transfers()
        if was_in_flight and not self._state.finished:
            return False  # its outcome may have settled everything, or given ranges back: ask again
        if not self._state.finished and (ended.finished or ended.unsettled):
            # Of a finished run nothing is pushed: the final version is pulled.
            self._outer_steps.run_outer_step(demanded=ended.unsettled)
        return self._state.finished or not ended.unsettled
