"""A push from its question to its outcome, with rank 0 on one side and the master on the other."""

from __future__ import annotations

from math import isnan

import pytest

from dips.client.agent.account import PastIncarnation
from dips.client.agent.push_pull import DEMANDED_S
from dips.client.agent.state import AskMaster, Channel, SaveIncarnation, SyncPhase
from dips.client.ipc.messages import (
    AskAgain,
    Attached,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushResult,
    PushWanted,
    RangeGiven,
    RangeWanted,
    TrainOn,
)
from dips.dataclass import replace
from dips.errors import StalePush, StaleVersion
from dips.protocol.effects import Acknowledged, Committed, Dropped, Finished, Joined, Refused, Result
from dips.protocol.enums import ClusterStanding, DivergencePolicy, OutcomeKind
from dips.protocol.events import PullFinished, PullRequested, PushAborted, PushFinished, PushRequested
from tests.unit.client.agent.play import NONE_YET, V1, H, Play, grant, outcome

KEY = "k".ljust(40, "0")


@pytest.fixture
def play() -> Play:
    return Play()


@pytest.fixture
def paced() -> Play:
    """A push is due after each inner step."""
    return Play(pace_steps=1)


def test_whole_round(play: Play) -> None:
    """A push is asked, moved, committed, accepted; its pull is installed; the tokens are settled once."""
    play.begin()
    play.step(4)
    moved = play.push_until_committed()
    play.reply(outcome(OutcomeKind.ACCEPTED))
    verdict = play.send(moved)
    assert isinstance(verdict, PullNow) and verdict.grant.version == V1 and verdict.progress == 0.04
    told = play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    assert told == TrainOn("trains on v1@r1", H, 0.04, PushResult(1, 2, "accepted", ""))
    assert play.s.trainer.base == V1
    assert (play.s.account.accepted, play.s.account.unsettled_tokens) == (40, 0)
    kinds = [kind for kind, _ in play.marks]
    wanted = ["push_begin", "push_end", "window_begin", "window_end", "outcome", "pull_begin", "pull_end"]
    assert [k for k in kinds if k in wanted][-7:] == wanted


def test_a_push_without_a_loss_says_so(play: Play) -> None:
    """A script that gives no loss is not one whose loss is 0."""
    play.begin()
    play.s.account.record_step(10, None)
    assert isnan(play.s.account.carried.loss)


def test_a_push_carries_what_was_earned_up_to_its_freeze(play: Play) -> None:
    """FinishPush carries tokens, inner steps, mean loss and used-up ranges since the last settled freeze."""
    play.begin(ranges=(5, 6))
    assert play.send(RangeWanted(1, 1)) == RangeGiven(5)
    play.step(3)
    assert play.send(RangeWanted(1, 2)) == RangeGiven(6)
    play.step(1)
    play.push_until_granted()
    play.send(PushMoved(1, next(play.number), 2, True, "", 1))
    asked = play.asked(PushFinished)
    assert (asked.tokens, asked.inner_steps, asked.ranges, asked.loss) == (40, 4, (5,), 2.0)


@pytest.mark.parametrize("answer", [outcome(OutcomeKind.SKIPPED, None, pull=False), Dropped("its round died")])
def test_a_round_that_breaks_gives_the_progress_back(answer: Result) -> None:
    """Skipped or dropped: the cluster trains on, and the next push carries both portions."""
    play = Play(pace_steps=2)
    play.demands = False
    play.begin()
    play.step(2)
    moved = play.push_until_committed()
    play.reply(answer)
    told = play.send(moved)
    assert isinstance(told, TrainOn) and told.steps == 2 and not told.given_up
    play.step(2)
    verdict = play.push_until_granted()
    play.send(PushMoved(1, next(play.number), verdict.seq, True, "", 1))
    assert play.asked(PushFinished).tokens == 40
    play.check_consumed(40)


def test_gated_settles_and_pulls(play: Play) -> None:
    """A gated push's tokens never come back, and its cluster pulls like the others."""
    play.begin()
    play.step(2)
    moved = play.push_until_committed()
    play.reply(outcome(OutcomeKind.GATED))
    assert isinstance(play.send(moved), PullNow)
    assert (play.s.account.gated, play.s.account.unsettled_tokens) == (20, 0)


def test_ranks_that_began_since_the_push_ask_for_a_pull_of_their_own(play: Play) -> None:
    """The slaves opened the pull after the round for the keys of the ranks that pushed, which are gone."""
    play.begin()
    play.push_until_committed()
    assert isinstance(play.send(replace(play.attach(launch=2, pid=8), keys=(KEY,))), Attached)
    want = PullWanted(play.s.trainer.attempt, next(play.number))
    play.send(want)
    play.reply(outcome(OutcomeKind.ACCEPTED))
    assert not play.asked(PullFinished).installed
    play.reply(Acknowledged())
    play.send(want)
    assert play.asked(PullRequested).keys == (KEY,)
    play.reply(grant(V1))
    assert isinstance(play.send(want), PullNow)


@pytest.mark.parametrize(
    ("kind", "settles"), [(OutcomeKind.ACCEPTED, True), (OutcomeKind.GATED, False), (OutcomeKind.SKIPPED, False)]
)
def test_the_next_transfer_names_the_last_accepted_push(play: Play, kind: OutcomeKind, settles: bool) -> None:
    """Before a host buffer is overwritten every rank knows whether what it froze is in a version (error feedback)."""
    play.begin()
    moved = play.push_until_committed()
    seq = moved.seq
    play.reply(outcome(kind, None if kind is OutcomeKind.SKIPPED else V1, pull=kind is not OutcomeKind.SKIPPED))
    told = play.send(moved)
    verdict = told if isinstance(told, PullNow) else play.push_until_granted()
    assert verdict.accepted == (seq if settles else 0)


def test_an_outcome_that_the_trainer_did_not_wait_for_comes_with_its_next_push(paced: Play) -> None:
    """It trained on while the master was away; what it froze lies in the host buffer until the next freeze."""
    play = paced
    play.begin()
    play.step()
    play.demands = False
    moved = play.push_until_committed()
    play.lose_master(1.0)
    play.now = 20.0
    play.lose_master(play.now)
    assert isinstance(play.send(moved), TrainOn)
    play.reply(outcome(OutcomeKind.ACCEPTED))
    play.asked(PullFinished)
    play.reply(Acknowledged())
    play.step()
    assert play.push_until_granted().accepted == moved.seq


def test_busy_trains_on_and_asks_again_at_a_later_boundary(paced: Play) -> None:
    """Refused: train on; until the time is over every question is answered at once, without the master."""
    paced.begin()
    paced.step()
    want = paced.look_for_push()
    paced.send(want)
    paced.reply(Refused(2.0, "all 2 slots are in use"))
    assert paced.send(want) == TrainOn("all 2 slots are in use", 1, 0.0)
    before = paced.asks[Channel.SYNC].number
    assert paced.send(paced.look_for_push()) == TrainOn("all 2 slots are in use", 1, 0.0)
    assert paced.asks[Channel.SYNC].number == before
    paced.now = 2.0
    assert isinstance(paced.send(paced.look_for_push()), AskAgain)
    assert paced.asked(PushRequested).push.seq == 3


def test_who_waits_for_a_slot_says_what_it_waits_for(paced: Play) -> None:
    """It asks with what its push would bring and how long its steps take; a new place is marked, and once."""
    paced.begin()
    for place in (3, 3, 2):
        paced.now += 2.0
        paced.step()
        want = paced.look_for_push()
        paced.send(want)
        asked = paced.asked(PushRequested)
        assert asked.tokens == paced.s.account.carried.tokens > 0
        assert asked.step_s == paced.s.pace.step_s
        paced.reply(Refused(2.0, f"waits for a slot: {place} of 5", place, 5))
        assert paced.send(want).reason == f"waits for a slot: {place} of 5"
    assert asked.step_s == pytest.approx(2.0)
    assert [fields["place"] for kind, fields in paced.marks if kind == "waits_for_slot"] == [3, 2]


def test_a_failed_transfer_is_aborted_and_its_progress_carried() -> None:
    """A rank that could not push ends the push for all; the trainer does not wait for the abort."""
    play = Play(pace_steps=2)
    play.demands = False
    play.begin()
    play.step(2)
    verdict = play.push_until_granted()
    told = play.send(PushMoved(1, next(play.number), verdict.seq, False, "UnavailableSlave: gone", 0))
    assert isinstance(told, TrainOn) and told.steps == 2 and not told.given_up
    assert "UnavailableSlave" in play.asked(PushAborted).reason
    play.reply(Acknowledged())
    assert play.s.sync.phase is SyncPhase.RESTING and play.s.account.carried.tokens == 20


def test_stale_push_trains_on(paced: Play) -> None:
    """A seq that the master has closed is dropped; its progress is carried."""
    paced.begin()
    paced.step()
    want = paced.look_for_push()
    paced.send(want)
    paced.do(paced.core.on_error(paced.asks[Channel.SYNC], StalePush("expected a seq above 9"), 1.0))
    assert isinstance(paced.send(want), TrainOn)
    assert paced.s.account.carried.tokens == 10


def test_a_slot_that_is_long_in_coming_holds_nobody_up(paced: Play) -> None:
    """A slave that does not answer costs the asker a second: it trains on, and freezes when the grant is there."""
    paced.begin()
    paced.step(4)
    want = paced.look_for_push()
    assert isinstance(paced.send(want), AskAgain)
    paced.now += 1.0
    told = paced.send(want)
    assert isinstance(told, TrainOn) and told.steps == 1
    paced.step(3)
    assert isinstance(paced.send(paced.look_for_push()), TrainOn), (
        "the question at the master is the same: no second stand"
    )
    paced.reply(grant())
    paced.step(1)
    assert isinstance(paced.send(paced.look_for_push()), PushNow)
    assert paced.s.account.frozen.inner_steps == 8
    paced.send(PushMoved(1, next(paced.number), 2, True, "", 1))
    assert paced.asked(PushFinished).inner_steps == 8


def test_a_grant_that_comes_while_it_trains_is_taken_at_the_next_look(paced: Play) -> None:
    """What is trained until then goes with the push."""
    paced.begin()
    paced.step(1)
    want = paced.look_for_push()
    paced.send(want)
    paced.now += 1.0
    assert isinstance(paced.send(want), TrainOn)
    paced.reply(grant())
    paced.step(5)
    assert isinstance(paced.send(paced.look_for_push()), PushNow)
    assert paced.s.account.frozen.inner_steps == 6 and paced.s.tally.cause == "push", "it waits again"


def test_a_push_dropped_while_it_is_opened_is_asked_for_again_soon(paced: Play) -> None:
    """A slave was lost: the first boundary after a second asks anew, not after another H; none before stands still."""
    paced.begin()
    paced.step(1)
    want = paced.look_for_push()
    paced.send(want)
    paced.reply(Dropped("ps1 was lost"))
    told = TrainOn("ps1 was lost", 1, 0.0, PushResult(1, 2, "dropped", "ps1 was lost"))
    assert paced.send(want) == told
    paced.step(1)
    assert paced.send(paced.look_for_push()) == told
    paced.now += 1.0
    paced.step(1)
    assert paced.push_until_granted().seq == 3
    assert paced.s.account.frozen.inner_steps == 3


def test_what_an_older_push_moved_is_not_taken_for_the_present_one(play: Play) -> None:
    """A report under an old seq commits nothing, and gives nothing back."""
    play.begin()
    play.step(2)
    verdict = play.push_until_granted()
    asked = play.asks[Channel.SYNC]
    for ok in (True, False):
        assert play.send(PushMoved(1, next(play.number), verdict.seq - 1, ok, "", 100)) == verdict
    assert play.s.account.frozen.tokens == 20 and play.asks[Channel.SYNC] is asked


def test_the_incarnation_is_saved_before_a_push_can_be_settled(play: Play) -> None:
    """What the next agent reports as missing is never too little: it is on disk before FinishPush leaves."""
    play.begin()
    play.step(2)
    verdict = play.push_until_granted()
    _, actions = play.core.on_message(PushMoved(1, next(play.number), verdict.seq, True, "", 100), play.now)
    kinds = [type(action) for action in actions]
    assert kinds.index(SaveIncarnation) < kinds.index(AskMaster)
    assert actions[kinds.index(SaveIncarnation)] == SaveIncarnation(PastIncarnation(1, 20))


def test_a_base_that_the_ledger_does_not_know_is_pulled_away(play: Play) -> None:
    """The trainer pulls the head, and what it did since that base is lost, ranges and all: no push brings it."""
    play.begin()
    play.step(3)
    question = play.want_push()
    play.send(question)
    play.asked(PushRequested)
    play.do(play.core.on_error(play.asks[Channel.SYNC], StaleVersion("base v7@r9 has no row in this ledger"), 1.0))
    play.asked(PullRequested)
    assert (play.s.account.unsettled_tokens, play.s.account.lost) == (0, 30)
    play.reply(grant(V1))
    assert isinstance(play.send(question), PullNow)


def test_a_heartbeat_follows_the_freeze(play: Play) -> None:
    """The master commits what heartbeats told: one that tells all of the push is due when the push is frozen."""
    play.begin()
    play.step(2)
    play.push_until_granted()
    assert play.heartbeats[-1].tokens_consumed == 20
    assert play.heartbeats[-1].inner_steps == 2


@pytest.mark.parametrize("answer", [Dropped("ps1 was lost"), Finished(V1)])
def test_a_committed_push_that_comes_to_nothing_after_its_trainers_death(play: Play, answer: Result) -> None:
    """Nobody carries its progress: its tokens are lost, and its range is trained again."""
    play.begin(ranges=(5,))
    play.send(RangeWanted(1, 1))
    play.step(2)
    play.send(RangeWanted(1, 2))
    play.push_until_committed()
    play.do(play.core.on_trainer_gone("killed", play.now))
    play.reply(answer)
    assert (play.s.account.lost, play.s.account.unsettled_tokens) == (20, 0)
    assert play.s.ranges.ranges_ahead == (5,)


def test_a_push_is_not_asked_for_before_it_is_due(play: Play) -> None:
    """Unless it is demanded: the trainer is told how many steps are left, and the master nothing."""
    play.begin()
    play.step(10)
    asked = play.asks[Channel.SYNC]
    told = play.send(PushWanted(1, next(play.number)))
    assert isinstance(told, TrainOn) and told.steps == H - 10 and play.asks[Channel.SYNC] is asked
    play.step(H - 10)
    assert isinstance(play.send(PushWanted(1, next(play.number))), AskAgain)
    play.asked(PushRequested)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_push_that_the_script_demands_waits_for_a_slot(overlap: bool) -> None:
    """At the end of a script no later push brings what was trained last: refused, or dropped while it is opened, it is
    asked for again, and the reason is told meanwhile.
    """
    play = Play(overlap=overlap)
    play.begin()
    play.step(4)
    want = play.want_push()
    assert isinstance(play.send(want), AskAgain)
    for seq, pause_s, refused in ((3, 2.0, Refused(2.0, "all slots are in use", 1, 2)), (4, 1.0, Dropped("no ps1"))):
        play.now += 5.0
        play.reply(refused)
        answer, ask = play.send(want), play.asks[Channel.SYNC]
        assert isinstance(answer, AskAgain) and answer.reason == refused.reason
        assert (play.asked(PushRequested).push.seq, ask.delay_s) == (seq, pause_s)
    play.reply(grant())
    assert isinstance(play.send(want), PushNow) and play.s.account.frozen.inner_steps == 4


def test_a_push_that_is_demanded_soon_after_a_refusal_waits_too(paced: Play) -> None:
    """The pace's push was refused: the demanded one is asked for when that pause is over."""
    paced.begin()
    paced.step()
    paced.send(paced.look_for_push())
    paced.reply(Refused(2.0, "all 2 slots are in use"))
    paced.now += 0.5
    answer = paced.send(paced.want_push())
    assert isinstance(answer, AskAgain) and answer.reason == "all 2 slots are in use"
    assert paced.asked(PushRequested).push.seq == 3 and paced.asks[Channel.SYNC].delay_s == 1.5


def test_a_push_that_is_demanded_stands_anew(paced: Play) -> None:
    """The pace's question is still open at the master: its second is used up, that of the script's has its own time."""
    paced.begin()
    paced.step()
    want = paced.look_for_push()
    paced.send(want)
    paced.now += 50.0
    assert isinstance(paced.send(want), TrainOn)
    demanded, asked = paced.want_push(), paced.asks[Channel.SYNC]
    assert isinstance(paced.send(demanded), AskAgain) and paced.asks[Channel.SYNC] is asked
    paced.now += DEMANDED_S - 1.0
    assert isinstance(paced.send(demanded), AskAgain)


@pytest.mark.parametrize("case", ["refused", "refused late", "no answer", "no answer to the last pull's end"])
def test_a_push_that_the_script_demands_is_given_up_in_the_end(play: Play, case: str) -> None:
    """After DEMANDED_S, with the reason; by the pace the trainer trains on as ever."""
    play.begin()
    if case == "no answer to the last pull's end":
        pull = play.push_until_accepted()
        play.send(PullMoved(1, next(play.number), pull.seq, True, "", 9))
        play.lose_master(play.now)
    play.step(4)
    want = play.want_push()
    assert isinstance(play.send(want), AskAgain)
    if case == "refused":
        play.reply(Refused(2.0, "no slot"))
    elif case != "refused late":
        play.lose_master(play.now)
    play.now += DEMANDED_S - 1.0
    assert isinstance(play.send(want), AskAgain)
    play.now += 1.0
    if case == "refused late":
        play.reply(Refused(2.0, "no slot"))
    told = play.send(want)
    assert isinstance(told, TrainOn) and told.given_up
    assert (told.reason, told.steps) == ("no slot" if "refused" in case else "no answer", 1)
    told = play.send(play.look_for_push())
    assert isinstance(told, TrainOn) and not told.given_up
    assert play.s.account.carried.inner_steps == 4, "the next push brings it"


FAILURES = ["it broke", "its round was skipped", "it was dropped"]


def push_in_vain(play: Play, how: str) -> PushMoved:
    """A push fails; return the ranks' question, which is still open."""
    if how == "it broke":
        moved = report_move(play, ok=False)
        play.reply(Acknowledged())
        return moved
    moved = play.push_until_committed()
    skipped = outcome(OutcomeKind.SKIPPED, None, pull=False)
    play.reply(skipped if how == "its round was skipped" else Dropped("ps1 was lost"))
    return moved


def report_move(play: Play, ok: bool) -> PushMoved:
    """Push, and return the ranks' report, which the master is told of."""
    order = play.push_until_granted()
    moved = PushMoved(1, next(play.number), order.seq, ok, "" if ok else "ps1 is gone", 9)
    play.send(moved)
    play.asked(PushFinished if ok else PushAborted)
    return moved


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", FAILURES)
def test_a_push_that_the_script_demands_is_tried_again(how: str, overlap: bool) -> None:
    """As one that gets no slot: at the end of a script no later push brings what was trained last."""
    play = Play(overlap=overlap)
    play.begin()
    play.step(4)
    moved = push_in_vain(play, how)
    assert isinstance(play.send(moved), AskAgain)
    assert (play.asked(PushRequested).push.seq, play.asks[Channel.SYNC].delay_s) == (3, 1.0)
    play.reply(grant())
    again = play.send(moved)
    assert isinstance(again, PushNow) and play.s.account.frozen.inner_steps == 4
    moved = PushMoved(1, next(play.number), again.seq, True, "", 9)
    play.send(moved)
    play.reply(Committed())
    play.reply(outcome(OutcomeKind.ACCEPTED))
    pull = play.send(moved)
    assert isinstance(pull, PullNow)
    play.send(PullMoved(1, next(play.number), pull.seq, True, "", 9, merged=overlap))
    play.reply(Acknowledged())
    told = play.send(play.look_for_push())
    assert isinstance(told, TrainOn) and not told.given_up and play.s.account.accepted == 40


@pytest.mark.parametrize("how", [*FAILURES, "the master is away", "the master is away after it broke"])
def test_a_push_that_the_script_demands_and_that_fails_is_given_up_in_the_end(play: Play, how: str) -> None:
    """With the reason, when its time is over: the script is told that what it trained last did not get out."""
    play.begin()
    play.step(4)
    play.now = 5.0
    moved = push_in_vain(play, how) if how in FAILURES else report_move(play, ok=how == "the master is away")
    for play.now in (10.0, DEMANDED_S):
        play.lose_master(play.now)
        assert isinstance(play.send(moved), AskAgain)
    play.now += 5.0
    play.lose_master(play.now)
    told = play.send(moved)
    assert isinstance(told, TrainOn) and told.given_up and told.reason


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("why", ["its lease ended", "its base is unknown", "its model diverged"])
def test_a_demanded_push_whose_work_a_pull_overwrites_is_told(overlap: bool, why: str) -> None:
    """No push brings that work any more: the script is told, once. The next push that it demands is as any other."""
    play = Play(overlap=overlap, on_divergence=DivergencePolicy.RESET)
    play.begin()
    play.step(4)
    if why == "its model diverged":
        order = play.push_until_granted()
        question = PushMoved(1, next(play.number), order.seq, False, "NaN", 0, diverged=True)
        play.send(question)
        play.reply(Acknowledged())
    else:
        question = play.want_push()
        play.send(question)
        if why == "its lease ended":
            play.answer_heartbeat(ClusterStanding.GONE)
            play.reply(Joined(3, 2, V1, NONE_YET, ()))
        else:
            play.do(play.core.on_error(play.asks[Channel.SYNC], StaleVersion("v0@r0 is unknown"), play.now))
    play.reply(grant(V1))
    pull = play.send(question)
    assert isinstance(pull, PullNow) and not pull.merge
    told = play.send(PullMoved(1, next(play.number), pull.seq, True, "", 9))
    assert isinstance(told, TrainOn) and told.given_up
    assert told.reason == "v1@r1 was pulled over what it had trained"
    play.reply(Acknowledged())
    told = play.send(play.look_for_push())
    assert isinstance(told, TrainOn) and not told.given_up
    play.step()
    play.push_until_accepted()


def test_the_steps_before_a_push_are_on_the_timeline(play: Play) -> None:
    """At the moment of its grant, and at the trainer's end: the plot of steps has no hole there."""
    play.begin()
    play.step(3)
    play.push_until_granted()
    assert [fields["inner_steps"] for kind, fields in play.marks if kind == "inner"][-1] == 3
    play.step(2)
    play.do(play.core.on_trainer_gone("killed", play.now))
    assert [fields["inner_steps"] for kind, fields in play.marks if kind == "inner"][-1] == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_the_wait_for_a_slot_is_no_part_of_a_step(overlap: bool) -> None:
    """A trainer that stood still does not look slow; one that trained on meanwhile is measured without a gap."""
    play = Play(overlap=overlap, pace_steps=1)
    play.begin()
    for play.now in (1.0, 2.0):
        play.step()
    want = replace(play.look_for_push(), at_once=overlap)
    play.send(want)
    play.now = 2.5 if overlap else 32.0
    if not overlap:
        assert isinstance(play.send(want), TrainOn), "it was waited for long enough"
        play.now = 32.5
    play.reply(Refused(2.0, "all 2 slots are in use"))
    play.now = 3.0 if overlap else 33.0
    play.step()
    play.now += 1.0
    play.step()
    assert list(play.s.pace._took) == ([1.0, 1.0, 1.0] if overlap else [1.0, 1.0])
