"""Answers to rank 0 when a push or pull has ended or failed."""

from __future__ import annotations

from dips.client.agent.state import AgentState
from dips.client.ipc.messages import Answer, Over, TrainOn


def give_verdict(s: AgentState, verdict: Answer) -> None:
    """Set the answer to rank 0's question, which no longer waits; each repetition gets the same answer."""
    s.sync.verdict, s.sync.waiting = verdict, False


def conclude_question(s: AgentState, reason: str, again: bool = False) -> None:
    """Let the trainer train on, or end if the run is finished."""
    finished = s.membership.progress.finished
    if finished:
        give_verdict(s, Over(f"the run is finished with {finished}", s.fraction, s.sync.result))
    else:
        give_verdict(s, train_on(s, reason, again))


def train_on(s: AgentState, reason: str, again: bool = False) -> TrainOn:
    """Return the order to train on; with `again` ask at the next step, otherwise the transfer is over and the pace
    restarts.
    """
    if again:
        return TrainOn(reason, 1, s.fraction, s.sync.result, s.range_requests.recalls)
    if not s.settings.overlap:  # with overlap the pace restarted when the push was frozen
        s.pace.restart_count(s.now)
    return TrainOn(reason, max(1, s.pace.look_in(s.now)), s.fraction, s.sync.result, s.range_requests.recalls)
