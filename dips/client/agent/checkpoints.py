"""The outer loop's part of a cluster's own checkpoint, and resuming a trainer from it (docs/rationale.md#36, #37).

A checkpoint is valid for the cluster as long as none of its pushes was settled since it was saved: then the run still
waits for exactly the checkpoint's θ, progress and data ranges, and resuming is exact. If a push was settled since, the
checkpoint's work is in the global model already: the trainer pulls instead and is given the reason. It also pulls if
the checkpoint was saved while a push was under way (the frozen copy is gone), or if its ranges are leased to others by
now.
"""

from __future__ import annotations

from dips.client.agent.account import Portion
from dips.client.agent.ranges import ask_ranges, is_asked
from dips.client.agent.state import AgentState, SyncPhase
from dips.client.ipc.messages import Answer, AskAgain, ErrorReply, Healed, Resume, Resumed, Saved, SaveWanted
from dips.ids import VersionId
from dips.protocol.data import BegunRange


def save_progress(s: AgentState, _: SaveWanted) -> Saved:
    """Return the cluster's progress between two inner steps, to be saved in a checkpoint."""
    portion = s.account.carried
    return Saved(
        s.cluster,
        str(s.trainer.base),
        s.membership.settled,
        s.sync.phase is not SyncPhase.RESTING and s.sync.phase is not SyncPhase.CLOSING,
        portion.tokens,
        portion.inner_steps,
        portion.ranges,
        portion.loss_sum,
        portion.losses,
        s.ranges.ranges_ahead,
        s.pace.since_push,
        _begun_ahead(s),
    )


def _begun_ahead(s: AgentState) -> tuple[BegunRange, ...]:
    begun = s.ranges.begun | ({part.number: part} if (part := s.account.carried.begun) else {})
    return tuple(begun[number] for number in s.ranges.ranges_ahead if number in begun)


def resume_checkpoint(s: AgentState, message: Resume) -> Answer:
    """Resume from a checkpoint, after the trainer's first pull and before its first inner step."""
    saved, requests = message.saved, s.range_requests
    if s.sync.phase is not SyncPhase.RESTING or is_asked(s):
        return AskAgain(s.sync.reason)
    if s.account.carried.inner_steps or s.trainer.base is None:
        return ErrorReply("LocalProtocolError", "load_state_dict comes before the first inner step")
    if why := _why_overtaken(s, saved):
        return _pull_instead(s, why)
    claims = (*saved.ranges, *saved.ahead)
    missing = tuple(r for r in claims if r not in s.ranges.ranges_ahead)
    if missing and requests.claimed != claims:
        requests.claimed = claims
        ask_ranges(s, missing)
        return AskAgain("the master is asked for the checkpoint's data ranges")
    requests.claimed = ()
    if missing:
        return _pull_instead(s, f"data ranges {missing[:5]} of the checkpoint belong to others by now")
    _restore_progress(s, saved)
    return Resumed(s.sync.reason, s.pace.look_in(s.now) or 1)


def _why_overtaken(s: AgentState, saved: Saved) -> str:
    """Return why the run has moved on since the checkpoint was saved, so that a pull must replace it; empty if not."""
    if saved.cluster != s.cluster:
        return f"the checkpoint is of cluster {saved.cluster}"
    if saved.pending:
        return "it was saved while a push was out, whose merge is lost"
    if saved.settled != s.membership.settled:
        return f"{s.membership.settled - saved.settled} pushes of {saved.cluster} were settled since it was saved"
    return ""


def _pull_instead(s: AgentState, why: str) -> Healed:
    s.sync.pull_due = True
    s.record_mark("checkpoint_healed", reason=why)
    return Healed(why)


def _restore_progress(s: AgentState, saved: Saved) -> None:
    base = s.trainer.base = VersionId.parse(saved.base)
    s.account.lost -= min(saved.tokens, s.account.lost)  # tokens of this incarnation that are restored and so not lost
    s.account.carried = Portion(
        saved.tokens, saved.inner_steps, saved.ranges, saved.loss_sum, saved.losses, _carried_part(s, saved)
    )
    s.ranges.resume_ranges(saved.ranges, saved.ahead)
    s.pace.resume_count(saved.since_push)
    s.sync.reason = f"resumed on {base} with {saved.inner_steps} inner steps since its last push"
    s.record_mark("checkpoint_resumed", base=saved.base, tokens=saved.tokens, inner_steps=saved.inner_steps)


def _carried_part(s: AgentState, saved: Saved) -> BegunRange | None:
    """Return the range that is partly trained in the checkpoint but not in a settled push, or None."""
    return next((part for part in saved.begun if s.ranges.begun.get(part.number) != part), None)
