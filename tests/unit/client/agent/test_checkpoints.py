"""Checkpoints of a cluster, as its agent resumes from them: exactly, or by a pull."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.client.agent.state import Channel
from dips.client.ipc.messages import (
    AskAgain,
    ErrorReply,
    Healed,
    PullMoved,
    PullWanted,
    PushMoved,
    RangeGiven,
    RangesEnded,
    RangeWanted,
    Resume,
    Resumed,
    Saved,
    SaveWanted,
)
from dips.ids import GENESIS
from dips.protocol.clusters import MAX_RANGES_ASKED
from dips.protocol.effects import Acknowledged, Committed, Joined, Ranges
from dips.protocol.enums import ClusterStanding, OutcomeKind
from dips.protocol.events import PushRequested, RangesRequested
from tests.unit.client.agent.play import NONE_YET, H, Play, grant, outcome


def saved_in(play: Play) -> Saved:
    found = play.send(SaveWanted(play.s.trainer.attempt))
    assert isinstance(found, Saved)
    return found


@pytest.fixture
def play() -> Play:
    """A cluster in the middle of range 6, four steps after its last push."""
    found = Play()
    found.begin(ranges=(5, 6, 7))
    assert found.send(RangeWanted(1, 1)) == RangeGiven(5)
    found.step(3)
    assert found.send(RangeWanted(1, 2)) == RangeGiven(6)
    found.step(1)
    return found


def test_what_is_saved(play: Play) -> None:
    """Base, progress since the last freeze, used-up ranges and those ahead, the half-trained one first."""
    found = saved_in(play)
    assert (found.base, found.tokens, found.inner_steps, found.since_push) == (str(GENESIS), 40, 4, 4)
    assert (found.ranges, found.ahead, found.pending, found.settled) == ((5,), (6, 7), False, 0)


def test_resumed_in_the_same_incarnation(play: Play) -> None:
    """The trainer crashed after the checkpoint: nothing is lost but what came after it."""
    found = saved_in(play)
    play.step(2)
    play.do(play.core.on_trainer_gone("killed", play.now))
    play.send(play.attach(launch=2, pid=8))
    play.pull(GENESIS)
    answer = play.send(Resume(2, found))
    assert isinstance(answer, Resumed) and answer.steps == H - 4
    assert play.s.account.carried.tokens == 40 and play.s.account.lost == 20
    play.check_consumed(60)
    assert play.send(RangeWanted(2, 1)) == RangeGiven(6), "the half-trained range first, the used-up one not again"
    assert play.s.ranges.ranges_ahead == (6, 7), "nor later"


def test_resumed_in_a_new_incarnation(play: Play) -> None:
    """The agent was started anew: the checkpoint's ranges are claimed by name."""
    found, other = saved_in(play), Play()
    other.begin(inc=2)
    assert isinstance(other.send(Resume(1, found)), AskAgain)
    asked = other.asked(RangesRequested, Channel.RANGES)
    assert asked.claims == (5, 6, 7) and asked.count == 3
    other.reply(Ranges((5, 6, 7), False), Channel.RANGES)
    assert isinstance(other.send(Resume(1, found)), Resumed)
    assert other.s.account.carried.ranges == (5,)
    assert other.s.account.lost == 0, "what the checkpoint brings was not lost in this incarnation"
    other.check_consumed(40)
    assert other.send(RangeWanted(1, 1)) == RangeGiven(6)


def test_ranges_are_claimed_as_many_at_once_as_a_master_takes(play: Play) -> None:
    """A checkpoint of many short ranges would have ended each job that loads it: the master refuses longer lists."""
    ranges = tuple(range(MAX_RANGES_ASKED + 2))
    found, other = replace(saved_in(play), ranges=ranges[:-2], ahead=ranges[-2:]), Play()
    other.begin(inc=2)
    for claims in (ranges[:-2], ranges[-2:]):
        assert isinstance(other.send(Resume(1, found)), AskAgain)
        assert other.asked(RangesRequested, Channel.RANGES).claims == claims
        other.reply(Ranges(claims, False), Channel.RANGES)
    assert isinstance(other.send(Resume(1, found)), Resumed)
    assert other.s.account.carried.ranges == ranges[:-2] and other.s.ranges.ranges_ahead == ranges[-2:]


def test_resumed_though_the_lease_ran_out_while_it_was_loaded(play: Play) -> None:
    """No pull comes over what it brings: it was told as resumed, and its tokens were lost all the same."""
    found, other = saved_in(play), Play()
    other.begin(inc=2)
    other.answer_heartbeat(ClusterStanding.GONE)
    other.reply(Joined(3, 3, GENESIS, NONE_YET, (5, 6, 7)))
    assert other.s.trainer.must_pull
    assert isinstance(other.send(Resume(1, found)), Resumed)
    other.step(2)
    other.push_until_granted()
    assert other.s.account.frozen.tokens == 60 and other.s.account.lost == 0


def test_ranges_that_others_were_given_heal_it(play: Play) -> None:
    """What was got of them is kept for training; the model is pulled."""
    found, other = saved_in(play), Play()
    other.begin(inc=2)
    other.send(Resume(1, found))
    other.reply(Ranges((7,), False), Channel.RANGES)
    answer = other.send(Resume(1, found))
    assert isinstance(answer, Healed) and "(5, 6)" in answer.reason
    assert other.send(RangeWanted(1, 1)) == RangeGiven(7)


def test_claims_that_are_not_to_be_had_do_not_end_the_data(play: Play) -> None:
    """Named ranges that others have say nothing about those that nobody has: more are asked for."""
    found, other = saved_in(play), Play()
    other.begin(inc=2)
    other.send(Resume(1, found))
    other.reply(Ranges((7,), True), Channel.RANGES)
    assert isinstance(other.send(Resume(1, found)), Healed)
    assert other.send(RangeWanted(1, 1)) == RangeGiven(7)
    assert isinstance(other.send(RangeWanted(1, 2)), AskAgain)
    assert other.asked(RangesRequested, Channel.RANGES).claims == ()


def test_a_trainer_that_dies_while_it_resumes_leaves_nothing_to_the_next(play: Play) -> None:
    """Its claims are answered when it is gone. The next one has no checkpoint, and learns when the data ends."""
    found, other = saved_in(play), Play()
    other.begin(inc=2)
    other.send(Resume(1, found))
    other.do(other.core.on_trainer_gone("killed", other.now))
    other.send(other.attach(launch=2, pid=8))
    other.reply(Ranges((), True), Channel.RANGES)
    other.pull(GENESIS)
    assert isinstance(other.send(RangeWanted(2, 1)), AskAgain)
    assert other.asked(RangesRequested, Channel.RANGES).claims == ()
    other.reply(Ranges((), True), Channel.RANGES)
    assert isinstance(other.send(RangeWanted(2, 1)), RangesEnded)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pending": True}, "while a push was out"),
        ({"settled": 2}, "3 pushes of west were settled or rolled back since it was saved"),
        ({"settled": 8}, "3 pushes of west that it was saved after were rolled back"),
        ({"cluster": "east"}, "east"),
    ],
)
def test_an_overtaken_checkpoint_is_healed(play: Play, change: dict[str, object], why: str) -> None:
    """Saved while a push was out, before a push was settled or rolled back, or by another cluster: the head is
    pulled.
    """
    found, other = replace(saved_in(play), **{"settled": 5, **change}), Play()  # type: ignore[arg-type]
    other.begin(inc=2)
    other.s.membership.settled = 5
    answer = other.send(Resume(1, found))
    assert isinstance(answer, Healed) and why in answer.reason
    other.pull(GENESIS)


def test_not_after_an_inner_step(play: Play) -> None:
    """A trainer that has begun cannot become another one."""
    assert isinstance(play.send(Resume(1, saved_in(play))), ErrorReply)


def test_the_master_counts_what_was_settled_in_all_incarnations() -> None:
    """Joined tells how many pushes of this cluster were settled before this incarnation."""
    play = Play()
    play.send(play.attach())
    play.reply(Joined(3, 2, GENESIS, NONE_YET, (), settled=17))
    play.send(play.attach())
    play.pull(GENESIS)
    assert saved_in(play).settled == 17


def test_what_is_saved_while_a_transfer_is_open(play: Play) -> None:
    """A push that is out has taken the progress: such a checkpoint is healed. A pull that only closes took nothing."""
    verdict = play.push_until_granted()
    assert saved_in(play).pending
    pushed = PushMoved(1, next(play.number), verdict.seq, True, "", 100)
    play.send(pushed)
    play.reply(Committed())
    assert saved_in(play).pending
    play.reply(outcome(OutcomeKind.ACCEPTED))
    play.send(pushed)
    play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    assert not saved_in(play).pending
    play.reply(Acknowledged())
    assert not saved_in(play).pending


def test_a_push_that_waits_for_its_slot_has_taken_nothing(play: Play) -> None:
    """A trainer that trains on because the master is away, or has no slot, may save its work as ever."""
    play.send(play.want_push())
    play.asked(PushRequested)
    play.lose_master(5.0)
    assert not saved_in(play).pending
    play.reply(grant())
    found = saved_in(play)
    assert (found.pending, found.tokens) == (False, 40), "granted, and not frozen yet"


def test_what_is_saved_after_a_lease_ran_out_is_pulled_over(play: Play) -> None:
    """Until the pull of the new incarnation the model holds work whose ranges others may have been given."""
    play.answer_heartbeat(ClusterStanding.GONE)
    play.reply(Joined(3, 2, GENESIS, NONE_YET, ()))
    play.step(2)
    found, other = saved_in(play), Play()
    assert (found.tokens, found.base) == (0, str(GENESIS)), "what it trained is lost"
    other.begin(inc=3)
    answer = other.send(Resume(1, found))
    assert isinstance(answer, Healed) and "before a pull that was to replace its model" in answer.reason


def test_a_checkpoint_waits_until_the_first_pull_is_closed(play: Play) -> None:
    """And until the answer about its ranges is there."""
    found, other = saved_in(play), Play()
    other.send(other.attach())
    other.reply(Joined(3, 2, GENESIS, NONE_YET, ()))
    other.send(other.attach())
    want = PullWanted(1, next(other.number))
    other.send(want)
    other.reply(grant())
    other.send(want)
    other.send(PullMoved(1, next(other.number), 1, True, "", 9))
    assert isinstance(other.send(Resume(1, found)), AskAgain) and Channel.RANGES not in other.asks
    other.reply(Acknowledged())
    for _ in range(2):
        assert isinstance(other.send(Resume(1, found)), AskAgain)
    assert other.asked(RangesRequested, Channel.RANGES).seq == 1
