"""The agent under `overlap: full`: the trainer trains on while push and pull move (docs/rationale.md#36)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.client.agent.membership import build_heartbeat
from dips.client.ipc.messages import (
    AskAgain,
    PullMoved,
    PullNow,
    PushMoved,
    PushNow,
    PushWanted,
    RangeGiven,
    RangeWanted,
    TrainOn,
    TransferProgress,
)
from dips.ids import GENESIS
from dips.protocol.effects import Acknowledged, Committed, Finished, Outcome, Progress, Refused
from dips.protocol.enums import DivergencePolicy, OutcomeKind
from dips.protocol.events import PullFinished, PushFinished, PushRequested
from tests.unit.client.agent.play import V1, H, Play, grant, outcome


@pytest.fixture
def play() -> Play:
    found = Play(overlap=True)
    found.begin()
    return found


def want(play: Play) -> PushWanted:
    return PushWanted(play.s.trainer.attempt, next(play.number), at_once=True)


def pushed(play: Play, steps: int) -> tuple[PushNow, PushMoved]:
    """Train until a push is due, and until it is granted; `steps` more are taken before it has moved."""
    play.step(H)
    asked = want(play)
    assert isinstance(play.send(asked), AskAgain), "the trainer is answered at once and trains on"
    play.asked(PushRequested)
    play.step(2)  # while the slots are reserved
    play.reply(grant())
    play.step(1)  # granted, and not yet known
    verdict = play.send(asked)
    assert isinstance(verdict, PushNow)
    play.step(steps)
    return verdict, PushMoved(play.s.trainer.attempt, next(play.number), verdict.seq, True, "", 100, at_once=True)


def test_progress_is_cut_where_the_ranks_freeze(play: Play) -> None:
    """Steps up to the freeze go with the push, later ones with the next."""
    _, moved = pushed(play, steps=5)
    assert isinstance(play.send(moved), AskAgain)
    asked = play.asked(PushFinished)
    assert (asked.inner_steps, asked.tokens) == (H + 3, (H + 3) * 10)
    assert play.s.account.carried.inner_steps == 5


@pytest.mark.parametrize("kind", [OutcomeKind.ACCEPTED, OutcomeKind.GATED])
def test_what_was_trained_meanwhile_is_merged_and_carried(play: Play, kind: OutcomeKind) -> None:
    """Accepted and gated: the pull is merged, and the tokens since the freeze are the next push's."""
    _, moved = pushed(play, steps=5)
    play.send(moved)
    play.reply(Committed())
    assert isinstance(play.send(moved), AskAgain)
    play.step(7)
    play.reply(outcome(kind))
    verdict = play.send(moved)
    assert isinstance(verdict, PullNow) and verdict.merge
    play.step(4)
    answer = play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9, at_once=True, merged=True))
    assert play.s.trainer.base == V1
    assert play.s.account.carried.inner_steps == 16
    assert isinstance(answer, TrainOn) and answer.steps == H - 16, "the pace began anew at the freeze"
    play.check_consumed((H + 3 + 16) * 10)
    assert play.asked(PullFinished).installed


def test_a_skipped_round_discards_the_frozen_copy(play: Play) -> None:
    """The base stays, everything is carried by the next push."""
    _, moved = pushed(play, steps=5)
    play.send(moved)
    play.reply(Committed())
    play.reply(outcome(OutcomeKind.SKIPPED, None, pull=False))
    answer = play.send(moved)
    assert isinstance(answer, TrainOn)
    assert play.s.account.carried.inner_steps == H + 8
    play.check_consumed((H + 8) * 10)


def test_no_second_push_while_one_is_out(play: Play) -> None:
    """An Outcome that is late is waited for; the trainer is not held up by it."""
    _, moved = pushed(play, steps=2 * H)
    play.send(moved)
    play.reply(Committed())
    for _ in range(3):
        play.step(H)
        assert isinstance(play.send(moved), AskAgain)
    assert play.s.account.carried.inner_steps == 5 * H


def test_a_busy_slave_is_asked_again_at_the_next_boundary(play: Play) -> None:
    play.step(H)
    asked = want(play)
    play.send(asked)
    play.reply(Refused(2.0, "all 2 slots are in use"))
    answer = play.send(asked)
    assert isinstance(answer, TrainOn) and answer.steps == 1


def test_a_master_that_is_away_holds_nobody_up(play: Play) -> None:
    """The open push stays open: when the master is back, its Outcome is merged as ever."""
    _, moved = pushed(play, steps=1)
    play.send(moved)
    play.reply(Committed())
    play.lose_master(0.0)
    play.lose_master(1000.0)
    assert isinstance(play.send(moved), AskAgain)
    play.reply(outcome(OutcomeKind.ACCEPTED))
    verdict = play.send(moved)
    assert isinstance(verdict, PullNow) and verdict.merge


def test_ranks_that_stand_for_a_committed_push_do_not_wait_for_an_absent_master(play: Play) -> None:
    """`outer.push()`, or the end of the data, settles the push in flight first: the trainer waits for its outcome as
    one that never overlaps (docs/architecture.md#invariant-12).
    """
    _, moved = pushed(play, steps=1)
    play.send(moved)
    play.reply(Committed())
    play.lose_master(0.0)
    play.now = 10.0
    play.lose_master(10.0)
    assert isinstance(play.send(moved), AskAgain), "they train meanwhile"
    standing = replace(moved, at_once=False)
    assert isinstance(play.send(standing), AskAgain)
    play.lose_master(10.0)
    assert isinstance(play.send(standing), TrainOn)
    play.reply(outcome(OutcomeKind.ACCEPTED))
    assert not play.asked(PullFinished).installed and play.s.account.accepted == (H + 3) * 10


def test_ranks_that_stand_for_a_slot_do_not_wait_long(play: Play) -> None:
    """They asked, trained on, and then stood for the answer: their second is over, and the grant is taken later."""
    play.step(H)
    asked = want(play)
    play.send(asked)
    play.now += 60.0
    assert isinstance(play.send(asked), AskAgain), "they train meanwhile"
    assert isinstance(play.send(replace(asked, at_once=False)), TrainOn)
    play.reply(grant())
    assert isinstance(play.send(want(play)), PushNow)


def test_the_final_version_is_installed_not_merged(play: Play) -> None:
    """A run that is over leaves the same theta on every cluster."""
    _, moved = pushed(play, steps=1)
    play.send(moved)
    play.reply(Committed())
    play.reply(Outcome(OutcomeKind.ACCEPTED, V1, "", grant(V1), Progress(1000, 1000, V1)))
    verdict = play.send(moved)
    assert isinstance(verdict, PullNow) and not verdict.merge


def test_a_trainer_that_dies_meanwhile_loses_what_it_carried(play: Play) -> None:
    """What is frozen and committed counts; what came after the freeze dies with the trainer."""
    _, moved = pushed(play, steps=6)
    play.send(moved)
    play.reply(Committed())
    play.do(play.core.on_trainer_gone("killed", play.now))
    play.reply(outcome(OutcomeKind.ACCEPTED))
    assert play.s.account.accepted == (H + 3) * 10
    assert play.s.account.lost == 60
    play.asked(PullFinished)
    play.reply(Acknowledged())
    play.check_consumed((H + 9) * 10)


def test_a_finished_run_is_said_at_the_next_look(play: Play) -> None:
    play.step(H)
    asked = want(play)
    play.send(asked)
    play.reply(Finished(V1))
    assert isinstance(play.send(asked), AskAgain), "the final version is pulled first"


def test_what_was_not_merged_is_lost_and_its_ranges_are_served_again() -> None:
    """The ranks' parameters were not finite: they installed the version as it is, and begin anew from it."""
    play = Play(overlap=True)
    play.begin(ranges=(5, 6, 7))
    assert play.send(RangeWanted(1, 1)) == RangeGiven(5)
    _, moved = pushed(play, steps=5)
    assert play.send(RangeWanted(1, 2)) == RangeGiven(6)
    play.send(moved)
    play.reply(Committed())
    play.reply(outcome(OutcomeKind.GATED))
    verdict = play.send(moved)
    assert isinstance(verdict, PullNow) and verdict.merge
    play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9, at_once=True, merged=False))
    assert (play.s.account.carried.inner_steps, play.s.account.lost) == (0, 50)
    assert play.send(RangeWanted(1, 3)) == RangeGiven(5)
    play.check_consumed((H + 8) * 10)


@pytest.mark.parametrize(("fragments", "interval"), [(1, 0), (2, H // 4), (H, 0)])
def test_fragments_of_a_push_and_of_its_pull_take_half_a_round_each(fragments: int, interval: int) -> None:
    """So there are as many rounds as without; fragments that are too many for the pace move at once."""
    play = Play(overlap=True, fragments=fragments)
    play.begin()
    verdict, moved = pushed(play, steps=5)
    assert verdict.interval == interval
    play.send(moved)
    play.reply(Committed())
    play.reply(outcome(OutcomeKind.ACCEPTED))
    pull = play.send(moved)
    assert isinstance(pull, PullNow) and (pull.merge, pull.interval) == (True, interval)


@pytest.mark.parametrize(("overlap", "fragments", "idle_s"), [(False, 1, 0.0), (True, 1, 8.0), (True, 4, 88.0)])
def test_the_master_is_told_how_long_a_push_does_not_move(overlap: bool, fragments: int, idle_s: float) -> None:
    """Inner steps of 4 s: one until the ranks look and freeze, one until they see the end; 7 of 8 between fragments."""
    play = Play(overlap=overlap, fragments=fragments)
    play.begin()
    for _ in range(H):
        play.now += 4.0
        play.step(1)
    asked = want(play)
    play.send(asked)
    assert play.asked(PushRequested).idle_s == pytest.approx(idle_s)
    assert build_heartbeat(play.s).idle_s == pytest.approx(idle_s)


def test_between_two_fragments_a_link_is_idle_and_not_slow() -> None:
    """Heartbeats report the rate while bytes moved: deadlines and min_push_bps are held against it."""
    play = Play(overlap=True, fragments=2)
    play.begin()
    pushed(play, steps=0)
    for seconds, nbytes in ((2.0, 200), (30.0, 200), (2.0, 400)):
        play.now += seconds
        play.send(TransferProgress(1, nbytes, 400))
    assert play.s.sync.meter.bytes_per_s == 100.0


@pytest.mark.parametrize(("idle_s", "rate"), [(0.0, 40.0), (8.0, 200.0), (-5.0, 40.0), (float("nan"), 40.0)])
def test_what_ranks_see_late_was_not_slow(play: Play, idle_s: float, rate: float) -> None:
    """They look at the end of an inner step of 10 s, and tell for how long it had been over; or nonsense."""
    _, moved = pushed(play, steps=0)
    play.now += 10.0
    play.send(TransferProgress(1, 400, 400, idle_s))
    play.send(replace(moved, nbytes=400))
    assert play.s.sync.meter.bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize("before", [False, True])
def test_a_key_that_was_edited_counts_for_both_ends_once_the_ranks_start_anew(before: bool) -> None:
    """The agent lives on: a merge is ordered if the ranks keep what they pushed, and else the version installed, which
    is no sign of a model that diverged.
    """
    play, after = Play(overlap=before), not before
    play.begin()
    play.do(play.core.on_trainer_gone("killed", play.now))
    play.send(replace(play.attach(launch=2, pid=8), overlap=after, on_divergence=DivergencePolicy.STOP))
    play.pull(GENESIS)
    play.step(4)
    order = play.push_until_accepted()
    assert order.merge == after
    assert play.s.settings.on_divergence is DivergencePolicy.STOP
