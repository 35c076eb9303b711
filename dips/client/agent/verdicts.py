"""What rank 0 is answered when a push or pull is over, or leads nowhere."""

from __future__ import annotations

from dips.client.agent.state import AgentState
from dips.client.ipc.messages import Answer, Over, TrainOn


def give_verdict(s: AgentState, verdict: Answer) -> None:
    """Rank 0 no longer waits: its question has this answer, however often it is repeated."""
    s.sync.verdict, s.sync.waiting = verdict, False


def conclude_question(s: AgentState, reason: str, again: bool = False) -> None:
    """Have the trainer train on, or end if the run is finished."""
    finished = s.membership.progress.finished
    if finished:
        give_verdict(s, Over(f"the run is finished with {finished}", s.fraction, s.sync.result))
    else:
        give_verdict(s, train_on(s, reason, again))


def train_on(s: AgentState, reason: str, again: bool = False) -> TrainOn:
    """Look `again` at the next boundary; else a push or a pull is over, and the pace begins anew."""
    if again:
        return TrainOn(reason, 1, s.fraction, s.sync.result, s.range_requests.recalls)
    if not s.settings.overlap:  # there the pace began anew when the push was frozen
        s.pace.restart_count(s.now)
    return TrainOn(reason, max(1, s.pace.look_in(s.now)), s.fraction, s.sync.result, s.range_requests.recalls)
