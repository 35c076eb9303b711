"""The data ranges leased to this cluster, one after the other, and the final push of their remaining progress."""

from __future__ import annotations

from collections.abc import Sequence

from dips.client.ipc.messages import RangeGiven, RangesEnded, RangeWanted
from dips.client.rank.agent_client import AgentClient
from dips.client.rank.steps import OuterState, OuterSteps
from dips.errors import LocalProtocolError
from dips.protocol.data import BegunRange


class DataRanges:
    """Requests ranges from the agent; each request reports the former ranges as used up, except for those marked as
    left.
    """

    def __init__(self, state: OuterState, agent_client: AgentClient, outer_steps: OuterSteps) -> None:
        self._state, self._agent_client, self._outer_steps = state, agent_client, outer_steps
        self._asked = 0
        self.begun: BegunRange | None = None  # the trained part of the last given range; None: nothing of it

    def next_range(self) -> int | None:
        """Return the next range; None at the end of the data or of the run, once all progress is settled.

        Also returns None if the remaining samples of the last ranges must be trained first. Collective.
        """
        self._asked += 1
        while True:
            answer = self._agent_client.ask_until_answered(
                RangeWanted(self._state.attempt, self._asked, self._state.left)
            )
            if isinstance(answer, RangeGiven):
                self.begun, self._state.recalls = answer.begun, answer.recalls
                return answer.range
            if not isinstance(answer, RangesEnded):
                raise LocalProtocolError(f"expected RangeGiven or RangesEnded from the agent, got {answer!r}")
            if (self._state.left and not answer.finished) or self._settle_ranges(answer):
                return None

    def mark_position(self, left: Sequence[int], begun: BegunRange | None) -> None:
        """Set the position after the next inner step: only `left` have samples to train; `begun` is trained of the
        first.
        """
        self._state.left, self._state.begun = tuple(left), begun

    def _settle_ranges(self, ended: RangesEnded) -> bool:
        """Push the progress since the last push; return whether none is left to settle."""
        was_in_flight = self._outer_steps.in_flight
        self._outer_steps.settle_transfers()
        if was_in_flight and not self._state.finished:
            return False  # its outcome may have settled everything, or returned ranges: ask again
        if not self._state.finished and (ended.finished or ended.unsettled):
            # In a finished run nothing is pushed; the final version is pulled.
            self._outer_steps.run_outer_step(demanded=ended.unsettled)
        return self._state.finished or not ended.unsettled
