"""Ranges that a trainer reports step by step: used up by the step that ends them, settled in part, taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.client.agent.state import Channel
from dips.client.ipc.messages import (
    AskAgain,
    Healed,
    PullMoved,
    PullNow,
    PushMoved,
    RangeGiven,
    RangesEnded,
    RangeWanted,
    Resume,
    Resumed,
    Saved,
    SaveWanted,
    Stepped,
    TrainOn,
)
from dips.protocol.data import BegunRange
from dips.protocol.effects import Acknowledged, Committed, Joined, Ranges
from dips.protocol.enums import ClusterStanding, OutcomeKind
from dips.protocol.events import PushFinished, RangesRequested
from tests.unit.client.agent.play import NONE_YET, V1, Play, grant, outcome


@pytest.fixture
def play() -> Play:
    """It has range 7, the second is 8."""
    play = Play()
    play.begin(ranges=(7, 8))
    assert play.send(RangeWanted(1, 1, ())) == RangeGiven(7)
    return play


def part(number: int, done: int) -> BegunRange:
    return BegunRange(number, done, 9)


def step(play: Play, left: tuple[int, ...], begun: BegunRange | None = None, attempt: int = 1) -> None:
    assert play.send(Stepped(attempt, 10, 2.0, True, left, begun)) is None


def push(play: Play, kind: OutcomeKind = OutcomeKind.ACCEPTED) -> PushFinished:
    """Push all that is carried, until it is settled and what it brings is pulled."""
    verdict, attempt = play.push_until_granted(), play.s.trainer.attempt
    moved = PushMoved(attempt, next(play.number), verdict.seq, True, "", 100)
    play.send(moved)
    pushed = play.asked(PushFinished)
    play.reply(Committed())
    play.reply(outcome(kind))
    pulling = play.send(moved)
    assert isinstance(pulling, PullNow)
    play.send(PullMoved(attempt, next(play.number), pulling.seq, True, "", 9))
    play.reply(Acknowledged())
    return pushed


def test_the_step_that_ends_a_range_settles_it(play: Play) -> None:
    """Also if it is the H-th: the push that the step brings has the range, and no push of nothing follows."""
    step(play, (7,), part(7, 4))
    step(play, ())
    pushed = push(play)
    assert (pushed.ranges, pushed.begun) == ((7,), None)


def test_what_is_left_of_a_range_goes_with_the_next(play: Play) -> None:
    """It is asked for more with samples of 7 left: 7 stays its range until they are trained."""
    step(play, (7,), part(7, 8))
    assert push(play).begun == part(7, 8)
    assert play.send(RangeWanted(1, 2, (7,))) == RangeGiven(8)
    assert play.s.account.carried.ranges == () and play.s.ranges.served == [7, 8]
    step(play, (8,), part(8, 3))
    pushed = push(play)
    assert (pushed.ranges, pushed.begun) == ((7,), part(8, 3))


@pytest.mark.parametrize("kind", [OutcomeKind.ACCEPTED, OutcomeKind.GATED])
def test_a_new_attempt_begins_where_settled_pushes_end(play: Play, kind: OutcomeKind) -> None:
    """4 samples were pushed and settled, 2 more trained: the next trainer has 7 from its fifth sample on."""
    step(play, (7,), part(7, 4))
    push(play, kind)
    step(play, (7,), part(7, 6))
    play.do(play.core.on_trainer_gone("it crashed", play.now))
    play.send(play.attach(launch=2, pid=8))
    play.pull(V1)
    assert play.send(RangeWanted(2, 1, ())) == RangeGiven(7, part(7, 4))


def test_a_leased_range_may_be_trained_in_part(play: Play) -> None:
    """By another cluster, which is gone."""
    assert play.send(RangeWanted(1, 2, ())) == RangeGiven(8)
    play.asked(RangesRequested, Channel.RANGES)
    play.reply(Ranges((3,), False, (part(3, 5),)), Channel.RANGES)
    assert play.send(RangeWanted(1, 3, ())) == RangeGiven(3, part(3, 5))


def test_what_is_left_at_the_end_of_the_data_is_trained_first(play: Play) -> None:
    """No range is left: nothing is pushed before the trainer has taken its last, smaller step."""
    step(play, (7,), part(7, 8))
    assert play.send(RangeWanted(1, 2, (7,))) == RangeGiven(8)
    play.reply(Ranges((), True), Channel.RANGES)
    ended = play.send(RangeWanted(1, 3, (8,)))
    assert isinstance(ended, RangesEnded) and not ended.unsettled and "a step of its own" in ended.reason
    step(play, ())
    ended = play.send(RangeWanted(1, 4, ()))
    assert isinstance(ended, RangesEnded) and ended.unsettled
    assert push(play).ranges == (7, 8)


def test_a_new_incarnation_takes_its_ranges_back(play: Play) -> None:
    """What the trainer still does with them counts for nothing, and it is told with the next answers."""
    step(play, (7,), part(7, 4))
    play.answer_heartbeat(ClusterStanding.GONE)
    assert isinstance(play.send(RangeWanted(1, 2, (7,))), AskAgain), "its next incarnation may get what was lost"
    play.reply(Joined(3, 2, V1, NONE_YET, (7,), begun=(part(7, 2),)))
    step(play, (7,), part(7, 6))
    assert play.s.account.carried.begun is None
    assert play.send(RangeWanted(1, 2, (7,))) == RangeGiven(7, part(7, 2), recalls=1)


def test_work_that_is_lost_is_given_again(play: Play) -> None:
    """A pull overwrites two steps: what they trained is served again, from where settled pushes end."""
    step(play, (7,), part(7, 4))
    push(play)
    step(play, (7,), part(7, 6))
    step(play, (7,), part(7, 8))
    play.pull(V1)  # as after a base that the ledger does not know
    answer = play.send(RangeWanted(1, 2, (7,)))
    assert answer == RangeGiven(7, part(7, 4), recalls=1)
    told = play.send(play.want_push())
    assert isinstance(told, TrainOn | AskAgain)


def test_what_a_push_that_diverged_had_is_given_again(play: Play) -> None:
    """All its work was frozen with it, so nothing is carried: the range that it left in part is served again, too."""
    step(play, (7,), part(7, 4))
    push(play)
    step(play, (7,), part(7, 6))
    seq = play.push_until_granted().seq
    diverged = PushMoved(1, next(play.number), seq, False, "w", 0, diverged=True)
    play.send(diverged)
    play.reply(Acknowledged())
    play.reply(grant(V1))
    pulling = play.send(diverged)
    assert isinstance(pulling, PullNow)
    told = play.send(PullMoved(1, next(play.number), pulling.seq, True, "", 9))
    assert isinstance(told, TrainOn) and told.recalls == 1
    assert play.send(RangeWanted(1, 2, ())) == RangeGiven(7, part(7, 4), recalls=1)


def test_a_checkpoint_knows_how_far_its_range_is(play: Play) -> None:
    """Resumed in another incarnation: 7 begins where the checkpoint's parameters are, not where settled pushes are."""
    step(play, (7,), part(7, 4))
    saved = play.send(SaveWanted(1))
    assert isinstance(saved, Saved) and saved.ahead == (7, 8) and saved.begun == (part(7, 4), BegunRange(7, 0, 0))
    other = Play()
    other.begin(inc=2, ranges=(7, 8))
    assert isinstance(other.send(Resume(1, saved)), Resumed)
    assert other.send(RangeWanted(1, 1, ())) == RangeGiven(7, part(7, 4))
    step(other, (7,), part(7, 6))
    assert push(other).begun == part(7, 6)


@pytest.mark.parametrize("left", [(7, 8), (8,)])
def test_a_checkpoint_whose_ranges_others_trained_further_is_pulled_over(play: Play, left: tuple[int, ...]) -> None:
    """Another cluster had range 7 meanwhile, and is gone, too: the checkpoint has trained the same samples."""
    step(play, (7,), part(7, 4))
    push(play)
    assert play.send(RangeWanted(1, 2, (7,))) == RangeGiven(8)
    step(play, left, part(left[0], 6))
    saved = play.send(SaveWanted(1))
    assert isinstance(saved, Saved)
    for done, answer in ((4, Resumed), (5, Healed), (6, Healed)):
        other = Play()
        other.begin(inc=2)
        other.s.membership.settled = 1
        other.send(Resume(1, saved))
        other.reply(
            Ranges(other.asked(RangesRequested, Channel.RANGES).claims, False, (part(7, done),)), Channel.RANGES
        )
        told = other.send(Resume(1, saved))
        assert isinstance(told, answer) and (answer is Resumed or "(7,) of the checkpoint were trained" in told.reason)
        assert other.s.account.carried.begun == (part(left[0], 6) if answer is Resumed else None)


def resume(saved: Saved, *begun: BegunRange) -> tuple[object, BegunRange | None]:
    """Return the answer to a checkpoint where these parts are settled by now, and what is carried then."""
    other = Play()
    other.begin(inc=2)
    other.s.membership.settled = saved.settled
    other.send(Resume(1, saved))
    other.reply(Ranges(other.asked(RangesRequested, Channel.RANGES).claims, False, begun), Channel.RANGES)
    return other.send(Resume(1, saved)), other.s.account.carried.begun


@pytest.mark.parametrize(("ranges", "ahead", "carried"), [((), (7, 8), part(7, 6)), ((7,), (8,), part(8, 6))])
def test_a_checkpoint_of_the_release_before_is_resumed(
    play: Play, ranges: tuple[int, ...], ahead: tuple[int, ...], carried: BegunRange
) -> None:
    """Release 0.1.0 saves of a range that is partly trained only how far it is carried, and nothing of what is used
    up: each such checkpoint was pulled over, as one that others had trained further.
    """
    step(play, (7,), part(7, 4))
    push(play)
    saved = play.send(SaveWanted(1))
    assert isinstance(saved, Saved)
    former = replace(saved, ranges=ranges, ahead=ahead, inner_steps=1, tokens=10, begun=(carried,))
    told, resumed = resume(former, part(7, 4))
    assert isinstance(told, Resumed) and resumed == carried
    assert isinstance(resume(former, BegunRange(carried.number, 7, part(7, 1).of))[0], Healed)


def test_a_checkpoint_whose_range_others_trained_as_far_is_pulled_over(play: Play) -> None:
    """Of 7 nothing was settled when it was saved, and by now as many samples are as it has trained: they are the same.

    The release before reads the part that comes first.
    """
    step(play, (7,), part(7, 4))
    saved = play.send(SaveWanted(1))
    assert isinstance(saved, Saved) and saved.begun[0] == part(7, 4)
    assert resume(saved)[1] == part(7, 4)
    assert isinstance(resume(saved, part(7, 4))[0], Healed)


def test_a_question_says_what_is_used_up(play: Play) -> None:
    """A trainer that reports ranges with its questions alone: all served ones but those it names are trained."""
    play.step()
    assert play.send(RangeWanted(1, 2, (7,))) == RangeGiven(8)
    assert play.s.account.carried.ranges == ()
    play.send(RangeWanted(1, 3, (8,)))
    assert play.s.account.carried.ranges == (7,)


def test_a_range_that_is_settled_is_forgotten(play: Play) -> None:
    """The parts that are known are those of ranges that are still to be trained: an agent lives for months."""
    step(play, (7,), part(7, 4))
    push(play)
    assert [*play.s.ranges.begun] == [7]
    step(play, ())
    push(play)
    assert not play.s.ranges.begun


def test_an_outcome_of_what_was_rolled_back_leaves_ranges_leased_anew_alone(play: Play) -> None:
    """The version of a push is undone before its outcome is heard: 7 is leased anew, of which 4 are trained."""
    step(play, ())
    assert play.send(RangeWanted(1, 2, ())) == RangeGiven(8)
    verdict = play.push_until_granted()
    play.send(PushMoved(1, next(play.number), verdict.seq, True, "", 100))
    play.reply(Committed())
    play.asked(RangesRequested, Channel.RANGES)
    play.reply(Ranges((7,), False, (part(7, 4),)), Channel.RANGES)
    play.reply(outcome(OutcomeKind.ACCEPTED))
    assert play.send(RangeWanted(1, 3, (8,))) == RangeGiven(7, part(7, 4))


def test_a_range_leased_anew_begins_where_the_master_says(play: Play) -> None:
    """Not where an undone version had it."""
    play.s.ranges.begun[3] = part(3, 5)
    assert play.send(RangeWanted(1, 2, ())) == RangeGiven(8)
    play.asked(RangesRequested, Channel.RANGES)
    play.reply(Ranges((3,), False), Channel.RANGES)
    assert play.send(RangeWanted(1, 3, ())) == RangeGiven(3)
