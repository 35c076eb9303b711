"""A job whose model is not finite: what the agent loses, pulls, reports and answers, by `on_divergence`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.client.agent.push_pull import DEMANDED_S, MOST_RESETS
from dips.client.agent.state import SyncPhase
from dips.client.ipc.messages import AskAgain, ErrorReply, PullMoved, PullNow, PushMoved
from dips.errors import Diverged, treatment_of
from dips.protocol.effects import Acknowledged, Committed
from dips.protocol.enums import DivergencePolicy, OutcomeKind
from dips.protocol.events import PullRequested, PushAborted
from tests.unit.client.agent.play import V1, Play, grant, outcome

NAN = "w is not finite on rank 1"


def diverge(play: Play, policy: DivergencePolicy, beside: int = 0) -> tuple[PushMoved, object]:
    play.core.state.settings = replace(play.core.state.settings, on_divergence=policy)
    play.begin()
    play.step(3)
    moved = PushMoved(1, 99, play.push_until_granted().seq, False, NAN, 0, diverged=True)
    if beside:
        play.step(beside)
    return moved, play.send(moved)


def end_pull(play: Play, question: PushMoved) -> None:
    order = play.send(question)
    assert isinstance(order, PullNow)
    play.send(PullMoved(1, next(play.number), order.seq, True, "", 100))
    play.reply(Acknowledged())


@pytest.mark.parametrize("beside", [0, 2])
def test_a_diverged_model_is_replaced_by_the_head(beside: int) -> None:
    """What it trained, also beside the push, is lost; the push is aborted as diverged, the ranks wait for the pull."""
    play = Play()
    moved, answer = diverge(play, DivergencePolicy.RESET, beside)
    assert isinstance(answer, AskAgain)
    aborted = play.asked(PushAborted)
    assert aborted.diverged and NAN in aborted.reason
    assert play.s.account.lost == 30 + 10 * beside and play.s.account.unsettled_tokens == 0
    play.reply(Acknowledged())
    play.asked(PullRequested)
    play.reply(grant(V1))
    order = play.send(moved)
    assert isinstance(order, PullNow) and not order.merge


def test_a_diverged_model_is_replaced_however_long_the_master_is_away() -> None:
    """The script demanded the push and has waited for DEMANDED_S: it must not train on with that model."""
    play = Play()
    moved, _ = diverge(play, DivergencePolicy.RESET)
    for play.now in (5.0, DEMANDED_S + 5.0):
        play.lose_master(play.now)
        assert isinstance(play.send(moved), AskAgain)


@pytest.mark.parametrize("finite_between", [False, True])
def test_a_model_that_diverges_from_each_pull_ends_its_job(finite_between: bool) -> None:
    """NaN from the first step: the accelerators are given back after some resets. One finite push ends a row."""
    play = Play()
    play.begin()
    for number in range(MOST_RESETS + 1):
        assert not play.stops
        play.step(3)
        if finite_between and number == MOST_RESETS:
            pushed = play.push_until_committed()
            play.reply(outcome(OutcomeKind.GATED))
            end_pull(play, pushed)
            play.step(3)
        seq = play.push_until_granted().seq
        moved = PushMoved(1, next(play.number), seq, False, NAN, 0, diverged=True)
        answer = play.send(moved)
        play.reply(Acknowledged())
        if isinstance(answer, AskAgain):
            play.reply(grant(V1))
            end_pull(play, moved)
    if finite_between:
        assert not play.stops
    else:
        assert isinstance(answer, ErrorReply) and answer.error == "Diverged" and "6 times in a row" in answer.message
        assert [stop.code for stop in play.stops] == [treatment_of(Diverged()).exit_code]


@pytest.mark.parametrize(("policy", "stops"), [(DivergencePolicy.RESTART, 0), (DivergencePolicy.STOP, 1)])
def test_a_job_that_is_not_to_be_mended_ends(policy: DivergencePolicy, stops: int) -> None:
    """The ranks raise; with `stop` the agent ends, too, instead of starting them again."""
    play = Play()
    moved, answer = diverge(play, policy)
    assert isinstance(answer, ErrorReply) and answer.error == "Diverged" and NAN in answer.message
    assert play.send(moved) == answer and len(play.stops) == stops


def test_a_merge_that_was_not_finite_counts_as_diverged() -> None:
    """What was trained beside the pull was replaced: recorded, and not carried."""
    play = Play(overlap=True)
    play.begin()
    play.step(64)
    moved = play.push_until_committed()
    play.step(2)
    play.reply(outcome(OutcomeKind.ACCEPTED))
    order = play.send(moved)
    assert isinstance(order, PullNow) and order.merge
    play.send(PullMoved(1, next(play.number), order.seq, True, "", 100, merged=False))
    assert [kind for kind, _ in play.marks].count("diverged") == 1
    assert play.s.account.carried.tokens == 0 and play.s.sync.phase is SyncPhase.CLOSING


def test_a_push_that_came_through_is_no_divergence() -> None:
    play = Play()
    play.begin()
    play.step()
    play.push_until_committed()
    play.reply(Committed())
    assert "diverged" not in dict(play.marks)
