"""Data ranges: leased from the master before they run out, served to the trainer one by one, settled with its pushes.

At the end of the data the remaining progress is pushed, so that every range is settled. The same happens when the
master has no more ranges for this cluster before its own are settled; then the master is asked again, and while only
other clusters hold ranges, which may come back, the trainer waits.
"""

from __future__ import annotations

from dips.client.agent.account import NOTHING
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
from dips.client.ipc.messages import Answer, AskAgain, RangeGiven, RangesEnded, RangeWanted
from dips.dataclass import replace
from dips.protocol.data import BegunRange
from dips.protocol.effects import Finished, Pending, Ranges, Refused
from dips.protocol.enums import RemarkSubject
from dips.protocol.events import RangesRequested

END_S = 600.0  # time for the last push to be settled at the end of the data

NONE_LEFT = "no data range is left to lease"
NONE_NOW = "no more data ranges are leased before those that this cluster holds are settled"


def give_range(s: AgentState, message: RangeWanted) -> Answer:
    """Use up the former range, and answer with the next one, the end of the data, or AskAgain."""
    if message.count != s.ranges.asked:
        s.ranges.begin_question(message.count)
        _use_up(s, message)
    finished = s.membership.progress.finished
    given = s.ranges.serve_range() if s.joined and not finished else None  # a former incarnation's ranges are gone
    if not s.ranges.waiting and not s.ranges.exhausted and not is_asked(s) and s.joined and not _settles_first(s):
        ask_ranges(s)
    answer = _make_answer(s, given)
    s.trainer.starved = isinstance(answer, AskAgain)
    return answer


def _settles_first(s: AgentState) -> bool:
    """Return whether the master has no range before ours are settled, and there is progress to settle."""
    holds = s.ranges.served or s.account.frozen != NOTHING or s.account.carried != NOTHING
    return s.ranges.is_held_back and bool(holds)


def _use_up(s: AgentState, message: RangeWanted) -> None:
    if message.left is not None:
        use_ranges(s, message.left, None)
    elif s.trainer.must_pull:
        s.ranges.recall_ranges()  # the work on it will be overwritten by a pull
    else:
        for used in s.ranges.finish_ranges():
            s.account.use_up(used)


def _make_answer(s: AgentState, given: int | None) -> Answer:
    finished = s.membership.progress.finished
    if given is not None:
        s.range_requests.ended_at = None
        return RangeGiven(given, _begun_by(s, given), s.range_requests.recalls)
    if finished:
        return RangesEnded(f"the run is finished with {finished}", True)
    if not s.joined:  # the next incarnation may get the ranges that this one has lost
        return AskAgain(s.sync.reason)
    if (s.ranges.exhausted or _settles_first(s)) and not is_asked(s):
        return _end_data(s)
    return AskAgain(s.range_requests.waits or "the master is asked for data ranges")


def _begun_by(s: AgentState, given: int) -> BegunRange | None:
    """Return how far a range is trained: by carried progress after resuming from a checkpoint, else by settled
    pushes.
    """
    carried = s.account.carried.begun
    return carried if carried and carried.number == given else s.ranges.begun.get(given)


def _end_data(s: AgentState) -> Answer:
    """Ask for a push of the remaining progress: no range is left, or none before ours are settled.

    If no range is left, progress that cannot be settled within END_S (no slot, an unreachable master) is given up.
    """
    requests, why = s.range_requests, NONE_LEFT if s.ranges.exhausted else NONE_NOW
    if s.ranges.served:
        return RangesEnded(f"{why}: what is left of the last ones is a step of its own", False)
    if s.account.frozen == NOTHING and s.account.carried == NOTHING:
        return RangesEnded(why, False)
    if s.ranges.exhausted and requests.ended_at is None:
        requests.ended_at = s.now
    if requests.ended_at is not None and s.now - requests.ended_at >= END_S:
        return _give_up_rest(s)
    ours = s.sync.phase in (SyncPhase.RESTING, SyncPhase.PUSHING, SyncPhase.PULLING)  # else the master must act first
    too_early = s.now < max(s.sync.backoff_until, requests.rest_again_at)
    if not ours or too_early or s.membership.unreachable_since is not None:
        return AskAgain(s.sync.reason)
    requests.rest_again_at = s.now + AGAIN_S
    return RangesEnded(why, False, unsettled=True)


def _give_up_rest(s: AgentState) -> Answer:
    tokens, reason = s.account.unsettled_tokens, s.sync.reason
    s.record_mark("rest_given_up", attempt=s.trainer.attempt, tokens=tokens, reason=reason)
    rest = f"{tokens} tokens since the last push could not be settled in {END_S:g} s"
    return RangesEnded(f"{NONE_LEFT}; {rest}: {reason}", False)


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
    close_channel(s, Channel.RANGES)
    s.range_requests.waits = ""
    drop_remark(s, RemarkSubject.RANGES)
    # that claimed ranges are unavailable does not mean that no range is left
    s.ranges.add_leased(result.ranges, result.exhausted and not s.range_requests.claimed, result.begun)
    if not result.ranges and not s.range_requests.claimed:
        s.ranges.hold_back()


def on_no_more_ranges(s: AgentState, result: Finished) -> None:
    close_channel(s, Channel.RANGES)
    s.membership.progress = replace(s.membership.progress, finished=result.version)


def on_ranges_refused(s: AgentState, result: Refused) -> None:
    repeat_question(s, Channel.RANGES, result.retry_after_s)


def on_ranges_pending(s: AgentState, result: Pending) -> None:
    """Wait, since other clusters hold all ranges that are left: they come back, or the run ends with them."""
    s.range_requests.waits = result.reason
    make_remark(s, RemarkSubject.RANGES, f"waits: {result.reason}")
    repeat_question(s, Channel.RANGES)
