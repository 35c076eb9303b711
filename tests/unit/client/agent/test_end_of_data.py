"""The end of the data, as the agent decides it: what was trained since the last push is pushed, and settled."""

from __future__ import annotations

import pytest

from dips.client.agent.push_pull import AGAIN_S
from dips.client.agent.ranges import END_S
from dips.client.agent.state import Channel, list_remarks
from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    PullMoved,
    PullNow,
    PushMoved,
    PushNow,
    RangeGiven,
    RangesEnded,
    RangeWanted,
)
from dips.ids import GENESIS
from dips.protocol.effects import Acknowledged, Committed, Finished, Pending, Progress, Ranges, Refused
from dips.protocol.enums import ClusterStanding, OutcomeKind
from dips.protocol.events import ClusterLeft, PushFinished, RangesRequested
from dips.protocol.heartbeats import ClusterHeartbeatAnswer
from tests.unit.client.agent.play import V1, Play, outcome

ENDED = RangesEnded("no data range is left to lease", False)
UNSETTLED = RangesEnded(ENDED.reason, False, unsettled=True)


def last_range_of(play: Play, steps: int) -> None:
    """Lease one range, the last; train it."""
    play.begin(ranges=(7,))
    assert play.send(RangeWanted(1, 1)) == RangeGiven(7)
    assert play.asked(RangesRequested, Channel.RANGES).seq == 1
    play.reply(Ranges((), True), Channel.RANGES)
    play.step(steps)


def ask_again(play: Play, want: RangeWanted = RangeWanted(1, 2)) -> Answer | None:
    """Its own are settled: it asks once more, and the master has none."""
    assert isinstance(play.send(want), AskAgain)
    play.reply(Ranges((), True), Channel.RANGES)
    return play.send(want)


def settle(play: Play, moved: PushMoved, kind: OutcomeKind) -> None:
    """The push is committed and settled, and what it brings is pulled."""
    assert isinstance(play.send(moved), AskAgain)
    play.reply(Committed())
    play.reply(outcome(kind))
    verdict = play.send(moved)
    assert isinstance(verdict, PullNow)
    play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    play.reply(Acknowledged())


def push(play: Play) -> PushFinished:
    """Push all that is carried, until it is settled."""
    verdict = play.push_until_granted()
    moved = PushMoved(1, next(play.number), verdict.seq, True, "", 100)
    play.send(moved)
    pushed = play.asked(PushFinished)
    settle(play, moved, OutcomeKind.ACCEPTED if pushed.tokens else OutcomeKind.GATED)
    return pushed


def test_the_rest_is_pushed_with_its_range() -> None:
    """Three steps after the last push: they are pushed with the range that they used up, and nothing is lost."""
    play = Play()
    last_range_of(play, 3)
    assert play.send(RangeWanted(1, 2)) == UNSETTLED
    pushed = push(play)
    assert (pushed.tokens, pushed.ranges) == (30, (7,))
    assert ask_again(play) == ENDED
    assert play.core.leave_run() == ClusterLeft(0, "west", 1, 30) and play.s.account.lost == 0


def test_a_run_that_is_extended_by_an_epoch_has_ranges_again() -> None:
    """While its last version is pulled: the master was asked no more, and the trainer ended."""
    play = Play()
    last_range_of(play, 3)
    play.send(RangeWanted(1, 2))
    push(play)
    for finished in (V1, None):
        heard = ClusterHeartbeatAnswer(3, 10.0, ClusterStanding.LIVE, None, None, Progress(40, 1000, finished))
        play.do(play.core.on_heartbeat_reply(1, heard, play.now))
        answer = play.send(RangeWanted(1, 2))
        assert isinstance(answer, RangesEnded if finished else AskAgain)
    assert play.asked(RangesRequested, Channel.RANGES).seq == 2


def test_a_run_that_has_more_ranges_before_its_last_push_is_settled_goes_on() -> None:
    """It was extended by an epoch, or an undone version's ranges are free again: the trainer ended with exit code 0."""
    play = Play()
    last_range_of(play, 3)
    assert play.send(RangeWanted(1, 2)) == UNSETTLED
    push(play)
    assert isinstance(play.send(RangeWanted(1, 2)), AskAgain)
    play.reply(Ranges((9,), False), Channel.RANGES)
    assert play.send(RangeWanted(1, 2)) == RangeGiven(9)


def test_a_master_that_stays_away_at_the_end_of_the_data_is_not_asked_for_ever() -> None:
    """It told that no range is left, and went after the last outcome: the job held its devices until it was back."""
    play = Play()
    last_range_of(play, 3)
    assert play.send(RangeWanted(1, 2)) == UNSETTLED
    push(play)
    play.lose_master(play.now)
    assert isinstance(play.send(RangeWanted(1, 2)), AskAgain)
    play.now += END_S
    assert play.send(RangeWanted(1, 2)) == ENDED


def test_a_rest_is_given_up_where_the_master_went_after_an_earlier_push() -> None:
    """Of its last range, after which it asks once more: END_S for that, and as long for the rest to be settled."""
    play = Play()
    last_range_of(play, 3)
    push(play)
    play.step(2)
    play.lose_master(play.now)
    for _ in range(2):
        assert isinstance(play.send(RangeWanted(1, 2)), AskAgain)
        play.now += END_S
    answer = play.send(RangeWanted(1, 2))
    assert isinstance(answer, RangesEnded) and "20 tokens" in answer.reason


def test_who_waits_for_ranges_of_others_does_not_end_without_the_master() -> None:
    """None was left; a rollback has freed some since, which others hold and may leave."""
    play = Play()
    last_range_of(play, 3)
    assert play.send(RangeWanted(1, 2)) == UNSETTLED
    push(play)
    assert isinstance(play.send(RangeWanted(1, 2)), AskAgain)
    play.reply(Pending("no data range is free: 2 are leased by east"), Channel.RANGES)
    play.lose_master(play.now)
    play.now += 2 * END_S
    assert isinstance(play.send(RangeWanted(1, 2)), AskAgain)


def test_a_last_range_of_exactly_h_steps_is_settled() -> None:
    """Its last step pushed all of its tokens before the range was known to be used up: a push of none settles it."""
    play = Play()
    last_range_of(play, 3)
    assert push(play).ranges == ()
    assert ask_again(play) == UNSETTLED
    pushed = push(play)
    assert (pushed.tokens, pushed.ranges) == (0, (7,))
    assert ask_again(play) == ENDED
    play.do(play.core.on_trainer_gone("it ended", play.now))
    play.send(play.attach(launch=2, pid=8))
    play.pull(V1)
    assert ask_again(play, RangeWanted(2, 1)) == ENDED, "after a restart it is not trained again"


def test_a_last_push_that_comes_to_nothing_is_tried_again() -> None:
    """A skipped round and a busy slave: the rest is pushed again, not before the time that was named."""
    play = Play()
    last_range_of(play, 3)
    assert play.send(RangeWanted(1, 2)) == UNSETTLED
    moved = play.push_until_committed()
    play.reply(outcome(OutcomeKind.SKIPPED, None, pull=False))
    assert isinstance(play.send(moved), AskAgain) and play.asks[Channel.SYNC].delay_s == AGAIN_S
    play.reply(Refused(5.0, "all 2 slots are in use"))
    assert isinstance(play.send(moved), AskAgain) and play.asks[Channel.SYNC].delay_s == 5.0
    assert push(play).tokens == 30
    assert ask_again(play) == ENDED


def test_a_push_that_is_still_being_settled_is_waited_for() -> None:
    """The master was away after the commit: the outcome of that push comes before another is asked for."""
    play = Play()
    last_range_of(play, 3)
    play.push_until_committed()
    play.lose_master(0.0)
    play.lose_master(1000.0)
    play.now = 1000.0
    assert isinstance(play.send(RangeWanted(1, 2)), AskAgain)
    play.reply(outcome(OutcomeKind.ACCEPTED, pull=False))
    assert ask_again(play) == UNSETTLED, "the range was not known to be used up when it was frozen"
    assert push(play).ranges == (7,)


def test_a_push_under_way_is_ended_first() -> None:
    """With `overlap: full` the ranks must come for it: they are not ordered to wait for themselves."""
    play = Play(overlap=True)
    last_range_of(play, 3)
    assert isinstance(play.push_until_granted(), PushNow)
    assert play.send(RangeWanted(1, 2)) == UNSETTLED


def test_a_rest_that_nobody_takes_is_given_up() -> None:
    """After END_S the loop ends, and the reason says how much is lost."""
    play = Play()
    last_range_of(play, 3)
    assert play.send(RangeWanted(1, 2)) == UNSETTLED
    play.send(play.want_push())
    play.reply(Refused(2 * END_S, "all 2 slots are in use"))
    assert isinstance(play.send(RangeWanted(1, 2)), AskAgain)
    play.now += END_S
    answer = play.send(RangeWanted(1, 2))
    assert isinstance(answer, RangesEnded) and not answer.unsettled
    assert "30 tokens" in answer.reason and "all 2 slots are in use" in answer.reason
    assert [fields["tokens"] for kind, fields in play.marks if kind == "rest_given_up"] == [30]


@pytest.mark.parametrize("steps", [0, 3])
def test_a_finished_run_takes_no_rest(steps: int) -> None:
    """The run ended meanwhile: its final version is pulled instead."""
    play = Play()
    last_range_of(play, steps)
    play.send(play.want_push())
    play.reply(Finished(GENESIS))
    assert play.send(RangeWanted(1, 2)) == RangesEnded(f"the run is finished with {GENESIS}", True)


# ---- others hold what is left ----------------------------------------------------------------------------------------

FIRST = RangesEnded("no more data ranges are leased before those that this cluster holds are settled", False, True)


def held_back(play: Play) -> None:
    """One range is trained, and the master has no more before it is settled."""
    play.begin(ranges=(7,))
    assert play.send(RangeWanted(1, 1)) == RangeGiven(7)
    play.reply(Ranges((), False), Channel.RANGES)
    play.step(3)
    assert isinstance(play.send(RangeWanted(1, 2)), AskAgain), "it may have some by now"
    assert play.asked(RangesRequested, Channel.RANGES).seq == 2
    play.reply(Ranges((), False), Channel.RANGES)
    assert play.send(RangeWanted(1, 2)) == FIRST


def test_its_own_are_settled_before_it_waits_for_those_of_others() -> None:
    """It pushes, then asks again, and trains on with what comes back: it does not end, though nothing was free."""
    play = Play()
    held_back(play)
    assert push(play).ranges == (7,)
    want = RangeWanted(1, 2)
    assert isinstance(play.send(want), AskAgain)
    assert play.asked(RangesRequested, Channel.RANGES).seq == 3
    waits = "no data range is free: 3 are leased by east"
    play.reply(Pending(waits), Channel.RANGES)
    assert play.send(want) == AskAgain(waits) and play.s.trainer.starved
    assert [r.text for r in list_remarks(play.s) if waits in r.text], "`dips status` names whom it waits for"
    assert play.asked(RangesRequested, Channel.RANGES).seq == 3, "the same question, repeated"
    play.now += 10 * END_S
    assert isinstance(play.send(want), AskAgain), "others may take as long as they like"
    play.reply(Ranges((9,), False), Channel.RANGES)
    assert play.send(want) == RangeGiven(9) and not list_remarks(play.s)


def test_what_cannot_be_settled_is_not_given_up_while_more_may_come() -> None:
    """END_S is for a run whose data is at its end; a cluster at its bound tries on, and counts from then."""
    play = Play()
    held_back(play)
    play.now += 2 * END_S
    assert play.send(RangeWanted(1, 2)) == FIRST


def test_the_end_is_told_when_the_last_of_others_is_settled() -> None:
    play = Play()
    held_back(play)
    push(play)
    assert isinstance(play.send(RangeWanted(1, 2)), AskAgain)
    play.reply(Ranges((), True), Channel.RANGES)
    assert play.send(RangeWanted(1, 2)) == ENDED


def test_the_next_attempt_asks_anew() -> None:
    """Its questions are counted from 1 again, and what the one before was told is not for it."""
    play = Play()
    play.begin(ranges=(7,))
    assert play.send(RangeWanted(1, 1)) == RangeGiven(7)
    play.reply(Ranges((), False), Channel.RANGES)
    play.do(play.core.on_trainer_gone("it broke", play.now))
    play.send(play.attach(launch=2, pid=8))
    play.pull(V1)
    assert play.send(RangeWanted(2, 1)) == RangeGiven(7)
    assert play.asked(RangesRequested, Channel.RANGES).seq == 2
