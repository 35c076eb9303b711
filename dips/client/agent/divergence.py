"""What becomes of a job whose model is not finite any more: `on_divergence` of the cluster file.

The ranks found it and nothing of it left them. With `reset` they pull the head, drop their optimizer's state and train
on; else they end with an error, and the next attempt pulls.
"""

from __future__ import annotations

from dips.client.agent.state import AgentState
from dips.client.agent.verdicts import give_verdict
from dips.client.ipc.messages import ErrorReply
from dips.errors import Diverged
from dips.protocol.enums import DivergencePolicy


def judge_divergence(s: AgentState, seq: int, reason: str) -> None:
    """Record it, and end the ranks' question with an error unless they mend the model themselves."""
    policy = s.settings.on_divergence
    s.record_mark("diverged", seq=seq, reason=reason, policy=str(policy))
    if policy is DivergencePolicy.RESET:
        return
    error = Diverged(f"{reason} (on_divergence: {policy})")
    if policy is DivergencePolicy.STOP:
        s.fail_training(error)
    give_verdict(s, ErrorReply(type(error).__name__, str(error)))
