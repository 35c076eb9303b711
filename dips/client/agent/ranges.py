"""Data ranges: leased from the master before they run out, served to the trainer one by one, settled with its pushes.

At the end of the data the remaining progress is pushed, so that every range is settled. The same happens when the
master has no more ranges for this cluster before its own are settled; then the master is asked again, and while only
other clusters hold ranges, which may come back, the trainer waits.
"""

from __future__ import annotations

from dips.client.agent.account import NOTHING, Portion
from dips.client.agent.push_pull import AGAIN_S
from dips.client.agent.state import (
    AgentState,
    Channel,
    SyncPhase,
    ask_master,
    close_channel,
    drop_remark,
    make_remark,
    repeat_question,
)
from dips.client.agent.training import use_ranges
from dips.client.ipc import messages
from dips.dataclass import replace
from dips.ids import VersionId
from dips.protocol.clusters import MAX_RANGES_ASKED
from dips.protocol.data import BegunRange
from dips.protocol.effects import Finished, Pending, Ranges, Refused
from dips.protocol.enums import RemarkSubject
from dips.protocol.events import RangesRequested

END_S = 600.0  # time for the last push to be settled at the end of the data

NONE_LEFT = "no data range is left to lease"
NONE_NOW = "no more data ranges are leased before those that this cluster holds are settled"


def give_range(s: AgentState, message: messages.RangeWanted) -> messages.Answer:
    """Use up the former range, and answer with the next one, the end of the data, or AskAgain."""
    if message.count != s.ranges.asked:
        s.ranges.begin_question(message.count)
        _use_up(s, message)
    finished = s.membership.progress.finished
    given = s.ranges.serve_range() if s.joined and not finished else None  # a former incarnation's ranges are gone
    over = s.ranges.exhausted and not s.ranges.asks_again
    if not s.ranges.waiting and not over and not is_asked(s) and s.joined and not _settles_first(s):
        ask_ranges(s)
    answer = _make_answer(s, given)
    s.trainer.starved = isinstance(answer, messages.AskAgain)
    return answer


def _settles_first(s: AgentState) -> bool:
    """Return whether the master has no range before ours are settled, and there is progress to settle."""
    holds = s.ranges.served or s.account.frozen != NOTHING or s.account.carried != NOTHING
    return s.ranges.is_held_back and bool(holds)


def _use_up(s: AgentState, message: messages.RangeWanted) -> None:
    if message.left is not None:
        use_ranges(s, message.left, None)
    elif s.trainer.must_pull:
        s.ranges.recall_ranges()  # the work on it will be overwritten by a pull
    else:
        for used in s.ranges.finish_ranges():
            s.account.use_up(used)


def _make_answer(s: AgentState, given: int | None) -> messages.Answer:
    finished = s.membership.progress.finished
    if given is not None:
        s.range_requests.ended_at = None
        return messages.RangeGiven(given, _begun_by(s, given), s.range_requests.recalls)
    if finished:
        return messages.RangesEnded(f"the run is finished with {finished}", True)
    if not s.joined:  # the next incarnation may get the ranges that this one has lost
        return messages.AskAgain(s.sync.reason)
    if is_asked(s) and not _asks_in_vain(s):
        return messages.AskAgain(s.range_requests.waits or "the master is asked for data ranges")
    return _end_data(s)


def _asks_in_vain(s: AgentState) -> bool:
    """Return whether no range was left when the master last answered, which is away for END_S since."""
    away_since = s.membership.unreachable_since
    return s.ranges.exhausted and away_since is not None and s.now - away_since >= END_S


def _begun_by(s: AgentState, given: int) -> BegunRange | None:
    """Return how far a range is trained: by carried progress after resuming from a checkpoint, else by settled
    pushes.
    """
    carried = s.account.carried.begun
    return carried if carried and carried.number == given else s.ranges.begun.get(given)


def _end_data(s: AgentState) -> messages.Answer:
    """Ask for a push of the remaining progress: no range is left, or none before ours are settled.

    If no range is left, progress that cannot be settled within END_S (no slot, an unreachable master) is given up.
    """
    requests, why = s.range_requests, NONE_LEFT if s.ranges.exhausted else NONE_NOW
    if s.ranges.served:
        return messages.RangesEnded(f"{why}: what is left of the last ones is a step of its own", False)
    if s.account.frozen == NOTHING and s.account.carried == NOTHING:
        return messages.RangesEnded(why, False)
    if s.ranges.exhausted and requests.ended_at is None:
        requests.ended_at = s.now
    if requests.ended_at is not None and s.now - requests.ended_at >= END_S:
        return _give_up_rest(s)
    ours = s.sync.phase in (SyncPhase.RESTING, SyncPhase.PUSHING, SyncPhase.PULLING)  # else the master must act first
    too_early = s.now < max(s.sync.backoff_until, requests.rest_again_at)
    if not ours or too_early or s.membership.unreachable_since is not None:
        return messages.AskAgain(s.sync.reason)
    requests.rest_again_at = s.now + AGAIN_S
    return messages.RangesEnded(why, False, unsettled=True)


def _give_up_rest(s: AgentState) -> messages.Answer:
    tokens, reason = s.account.unsettled_tokens, s.sync.reason
    s.record_mark("rest_given_up", attempt=s.trainer.attempt, tokens=tokens, reason=reason)
    rest = f"{tokens} tokens since the last push could not be settled in {END_S:g} s"
    return messages.RangesEnded(f"{NONE_LEFT}; {rest}: {reason}", False)


def ask_ranges(s: AgentState, claims: tuple[int, ...] = ()) -> None:
    """Ask the master for more data ranges, or for those in `claims`."""
    s.range_requests.seq += 1
    count = len(claims) or s.settings.ranges_at_once
    event = RangesRequested(0, s.cluster, s.membership.inc, s.range_requests.seq, count, claims)
    ask_master(s, Channel.RANGES, event)


def is_asked(s: AgentState) -> bool:
    """Return whether a question about data ranges is open."""
    return Channel.RANGES in s.questions


def on_leased(s: AgentState, result: Ranges) -> None:
    asked = s.questions[Channel.RANGES].event
    assert isinstance(asked, RangesRequested)
    close_channel(s, Channel.RANGES)
    s.range_requests.waits = ""
    drop_remark(s, RemarkSubject.RANGES)
    # that claimed ranges are unavailable does not mean that no range is left
    s.ranges.add_leased(result.ranges, result.exhausted and not asked.claims, result.begun)
    if not result.ranges:
        s.ranges.hold_back()


def on_no_more_ranges(s: AgentState, result: Finished) -> None:
    close_channel(s, Channel.RANGES)
    s.membership.progress = replace(s.membership.progress, finished=result.version)


def on_ranges_refused(s: AgentState, result: Refused) -> None:
    repeat_question(s, Channel.RANGES, result.retry_after_s)


def on_ranges_pending(s: AgentState, result: Pending) -> None:
    """Wait, since other clusters hold all ranges that are left: they come back, or the run ends with them."""
    s.range_requests.waits, s.ranges.exhausted = result.reason, False
    make_remark(s, RemarkSubject.RANGES, f"waits: {result.reason}")
    repeat_question(s, Channel.RANGES)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
# A checkpoint is valid for the cluster as long as none of its pushes was settled since it was saved: then the run still
# waits for exactly the checkpoint's θ, progress and data ranges, and resuming is exact. If a push was settled since,
# the checkpoint's work is in the global model already, or was rolled back: the trainer pulls instead and is given the
# reason. It also pulls if the checkpoint was saved while a push was under way (the frozen copy is gone), or after its
# lease had run out (the work of that incarnation is lost), or if its ranges are leased to others by now, or were
# meanwhile, who settled a part.


def save_progress(s: AgentState, _: messages.SaveWanted) -> messages.Saved:
    """Return the cluster's progress between two inner steps, to be saved in a checkpoint."""
    portion = s.account.carried
    return messages.Saved(
        s.cluster,
        str(s.trainer.base),
        s.membership.settled,
        _is_pending(s),
        portion.tokens,
        portion.inner_steps,
        portion.ranges,
        portion.loss_sum,
        portion.losses,
        s.ranges.ranges_ahead,
        s.pace.since_push,
        _list_parts(s),
    )


def _is_pending(s: AgentState) -> bool:
    """Return whether what is saved now cannot be resumed: a push has taken the progress, or a pull is to replace the
    model.
    """
    sync = s.sync
    untaken = sync.phase is SyncPhase.ASKING_PUSH or (sync.phase is SyncPhase.PUSHING and not sync.frozen)
    return s.trainer.must_pull or not (untaken or sync.phase in (SyncPhase.RESTING, SyncPhase.CLOSING))


def _list_parts(s: AgentState) -> tuple[BegunRange, ...]:
    """Return the settled parts of the ranges that are used up and of the first ahead. If that is trained further, its
    part as carried comes first, where the release before looks, and ranges without a settled part have one of nothing.
    """
    carried, begun = s.account.carried, s.ranges.begun
    trained = (*carried.ranges, *s.ranges.ranges_ahead[:1])
    if carried.begun is None:
        return tuple(begun[number] for number in trained if number in begun)
    return (carried.begun, *(begun.get(number, BegunRange(number, 0, 0)) for number in trained))


def resume_checkpoint(s: AgentState, message: messages.Resume) -> messages.Answer:
    """Resume from a checkpoint, after the trainer's first pull and before its first inner step."""
    saved, requests = message.saved, s.range_requests
    if s.sync.phase is not SyncPhase.RESTING or is_asked(s):
        return messages.AskAgain(s.sync.reason)
    if s.account.carried.inner_steps or s.trainer.base is None:
        return messages.ErrorReply("LocalProtocolError", "load_state_dict comes before the first inner step")
    if why := _why_overtaken(s, saved):
        return _pull_instead(s, why)
    claims = (*saved.ranges, *saved.ahead)
    ahead, asked = set(s.ranges.ranges_ahead), set(requests.claimed)
    missing = tuple(r for r in claims if r not in ahead)
    if unasked := tuple(r for r in missing if r not in asked)[:MAX_RANGES_ASKED]:
        requests.claimed += unasked
        ask_ranges(s, unasked)
        return messages.AskAgain("the master is asked for the checkpoint's data ranges")
    requests.claimed = ()
    if missing:
        return _pull_instead(s, f"data ranges {missing[:5]} of the checkpoint belong to others by now")
    if further := _find_trained_further(s, saved):
        return _pull_instead(s, f"data ranges {further[:5]} of the checkpoint were trained further by others meanwhile")
    _restore_progress(s, saved)
    return messages.Resumed(s.sync.reason, s.pace.look_in(s.now) or 1)


def _find_trained_further(s: AgentState, saved: messages.Saved) -> tuple[int, ...]:
    """Return the ranges that the checkpoint has trained and of which more is settled by now.

    The release before saves no settled part of what is used up, nor of a range that is carried: there its own is found.
    """
    settled = {part.number: part for part in saved.begun}  # the last of each range
    pairs = [(s.ranges.begun.get(number), settled.get(number)) for number in (*saved.ranges, *saved.ahead[:1])]
    return tuple(now.number for now, was in pairs if now and was and (now.of != was.of or now.done > was.done))


def _why_overtaken(s: AgentState, saved: messages.Saved) -> str:
    """Return why the run has moved on since the checkpoint was saved, so that a pull must replace it; empty if not."""
    if saved.cluster != s.cluster:
        return f"the checkpoint is of cluster {saved.cluster}"
    if saved.pending:
        return "it was saved while a push was out, whose merge is lost, or before a pull that was to replace its model"
    since = s.membership.settled - saved.settled
    if since < 0:
        return f"{-since} pushes of {saved.cluster} that it was saved after were rolled back"
    if since:
        return f"{since} pushes of {saved.cluster} were settled or rolled back since it was saved"
    return ""


def _pull_instead(s: AgentState, why: str) -> messages.Healed:
    s.sync.pull_due = True
    s.record_mark("checkpoint_healed", reason=why)
    return messages.Healed(why)


def _restore_progress(s: AgentState, saved: messages.Saved) -> None:
    base = s.trainer.base = VersionId.parse(saved.base)
    if s.trainer.must_pull:  # its lease ran out meanwhile, and the checkpoint has replaced what a pull was to
        s.trainer.must_pull = s.sync.pull_due = False
    s.account.lost -= min(saved.tokens, s.account.lost)  # tokens of this incarnation that are restored and so not lost
    s.account.carried = Portion(
        saved.tokens, saved.inner_steps, saved.ranges, saved.loss_sum, saved.losses, _carried_part(s, saved)
    )
    s.ranges.resume_ranges(saved.ranges, saved.ahead)
    s.pace.resume_count(saved.since_push)
    s.sync.reason = f"resumed on {base} with {saved.inner_steps} inner steps since its last push"
    s.record_mark("checkpoint_resumed", base=saved.base, tokens=saved.tokens, inner_steps=saved.inner_steps)


def _carried_part(s: AgentState, saved: messages.Saved) -> BegunRange | None:
    """Return the range that is partly trained in the checkpoint but not in a settled push, or None."""
    first = (part for part in saved.begun if part.number in saved.ahead[:1])
    return next((part for part in first if s.ranges.begun.get(part.number) != part), None)
