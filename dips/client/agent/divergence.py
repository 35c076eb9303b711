"""Handling of a model that is no longer finite: `on_divergence` of the cluster file.

The ranks detected it, and none of the model was pushed. With `reset` they pull the head, drop their optimizer's state
and train on; otherwise they end with an error, and the next attempt pulls. A model that diverges repeatedly from the
run's own parameters and an empty optimizer is no transient: the job ends instead of holding its accelerators.
"""

from __future__ import annotations

from dips.client.agent.state import AgentState
from dips.client.agent.verdicts import give_verdict
from dips.client.ipc.messages import ErrorReply
from dips.errors import Diverged
from dips.protocol.enums import DivergencePolicy

MOST_RESETS = 5  # in a row, without a finite push between them; each costs a pull and H steps


def judge_divergence(s: AgentState, seq: int, reason: str) -> None:
    """Record the divergence; answer the ranks' question with an error unless they reset the model themselves."""
    policy = s.settings.on_divergence
    s.trainer.resets += 1
    s.record_mark("diverged", seq=seq, reason=reason, policy=str(policy))
    if policy is DivergencePolicy.RESET and s.trainer.resets <= MOST_RESETS:
        return
    error = Diverged(f"{reason} (on_divergence: {policy})")
    if s.trainer.resets > MOST_RESETS:
        error = Diverged(
            f"{reason}; {s.trainer.resets} times in a row, each from the run's parameters and an empty optimizer: look "
            "at its data, learning rate and precision (NaN in the first steps?)"
        )
    if policy is DivergencePolicy.STOP or s.trainer.resets > MOST_RESETS:
        s.fail_training(error)
    give_verdict(s, ErrorReply(type(error).__name__, str(error)))
