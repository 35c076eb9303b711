"""What the trainer reports of its steps, and where its time goes."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from dips.client.agent import metrics
from dips.client.agent.state import list_remarks
from dips.client.ipc.messages import (
    InsideChanged,
    LossReported,
    PipelineReported,
    PlayedStage,
    PullMoved,
    PushMoved,
    Stepped,
    TokensCounted,
)
from dips.protocol.effects import Committed, Joined
from dips.protocol.enums import ClusterStanding, OutcomeKind, RemarkSubject
from dips.protocol.events import PushFinished, RoundAwaited
from dips.protocol.heartbeats import Remark
from tests.unit.client.agent.play import NONE_YET, V1, Play, outcome


@pytest.fixture
def play() -> Play:
    return Play()


def test_time_is_counted_by_cause(play: Play) -> None:
    """Slot, push, window, update and pull are counted apart; a trainer that died is the cluster's own failure."""
    play.begin()
    begun = play.now
    play.step(4)
    play.now += 10
    verdict = play.push_until_granted()  # at once
    play.now += 3
    moved = PushMoved(play.s.trainer.attempt, next(play.number), verdict.seq, True, "", 100)
    play.send(moved)
    play.reply(Committed())
    play.asked(RoundAwaited)
    play.now += 5
    play.reply(replace(outcome(OutcomeKind.ACCEPTED), update_s=2.0))
    verdict = play.send(moved)
    play.now += 4
    play.send(PullMoved(1, next(play.number), verdict.seq, True, "", 9))
    play.now += 7
    play.do(play.core.on_trainer_gone("killed", play.now))
    play.now += 6
    spent = play.s.tally.seconds_by_cause(play.now)
    counted = {cause: seconds for cause, seconds in spent.items() if seconds and cause not in ("start", "join")}
    assert counted == {"inner": 17, "push": 3, "window": 3, "update": 2, "pull": 4, "failure": 6}
    assert sum(counted.values()) == play.now - begun
    assert play.s.tally.moved == {"push": 100, "pull": 100 + 9}


def test_a_pipelines_loss_comes_from_another_rank(play: Play) -> None:
    """Rank 0 tells steps without one; what it got at the last look is the loss of the push that follows."""
    play.begin()
    for _ in range(2):
        play.send(Stepped(1, 10, None))
    assert play.send(LossReported(1, 5.0, 2)) is None
    assert play.s.trainer.loss == 2.5
    verdict = play.push_until_granted()
    play.send(PushMoved(1, next(play.number), verdict.seq, True, "", 100))
    finished = play.asked(PushFinished)
    assert (finished.loss, finished.tokens, finished.inner_steps) == (2.5, 20, 2)
    assert play.send(LossReported(1, 0.0, 0, finite=False)) is None
    assert [kind for kind, _ in play.marks].count("loss_not_finite") == 1


def test_a_pipeline_is_shown(play: Play) -> None:
    """How each stage played its last step on the timeline and in metrics; each change with its reason as a remark, too;
    counts stay when a new attempt begins, the step is then unknown.
    """
    play.begin()
    stages = [
        PlayedStage({"forward": 0.5}, {"border": 0.0}, {"gathered": 64}),
        PlayedStage({"forward": 0.25}, {"border": 0.125, "end": 0.125}, {}),
    ]
    play.send(PipelineReported(1, 2, 0.5, 0.25, tuple(stages)))
    assert play.marks[-1] == (
        "pipeline", {"gear": 2, "step_s": 0.5, "idle": 0.25, "stages": [asdict(stage) for stage in stages]}
    )  # fmt: skip
    for why in ("gear 1 to 2: a link", "gear 2 to 4: a link"):
        play.send(InsideChanged(1, "gear", why))
        assert play.marks[-1] == ("remark", {"subject": RemarkSubject.INSIDE, "text": why})
    play.send(InsideChanged(1, "plan", "new plan: a link"))
    assert scrape(play)["dips_agent_pipeline_gear"] == {(): 2}
    assert scrape(play)["dips_agent_pipeline_step_seconds"] == {(): 0.5}
    assert scrape(play)["dips_agent_pipeline_idle"] == {(): 0.25}
    assert scrape(play)["dips_agent_pipeline_action_seconds"] == {("0", "forward"): 0.5, ("1", "forward"): 0.25}
    idle = {("0", "border"): 0.0, ("1", "border"): 0.125, ("1", "end"): 0.125}
    assert scrape(play)["dips_agent_pipeline_idle_seconds"] == idle
    assert scrape(play)["dips_agent_pipeline_peak_bytes"] == {("0", "gathered"): 64}
    assert scrape(play)["dips_agent_inside_changes"] == {("gear",): 2, ("plan",): 1}
    assert list_remarks(play.s) == (Remark(RemarkSubject.SCRIPT, "new plan: a link"),)
    play.send(play.attach(launch=2, pid=8))
    assert list_remarks(play.s) == () and scrape(play)["dips_agent_pipeline_gear"] == {}
    assert scrape(play)["dips_agent_inside_changes"] == {("gear",): 2, ("plan",): 1}


def test_a_sync_of_replicas_is_routine(play: Play) -> None:
    """In the timeline and counted; what it corrected is a remark, until the next sync."""
    play.begin()
    play.send(InsideChanged(1, "sync", "sync 1"))
    assert play.marks[-1] == ("mesh_sync", {"text": "sync 1"}) and list_remarks(play.s) == ()
    play.send(InsideChanged(1, "rollback", "sync 1 rolls 2 of 3 layers back"))
    assert list_remarks(play.s) == (Remark(RemarkSubject.SCRIPT, "sync 1 rolls 2 of 3 layers back"),)
    play.send(InsideChanged(1, "sync", "sync 2"))
    assert list_remarks(play.s) == ()
    assert scrape(play)["dips_agent_inside_changes"] == {("sync",): 2, ("rollback",): 1}


def scrape(play: Play) -> dict[str, dict[tuple[str, ...], float]]:
    """Metrics by name and values of their labels."""
    found = metrics.collect(metrics.read_metrics(play.s, play.now))
    return {f.name: {tuple(s.labels.values()): s.value for s in f.samples} for f in found}


def test_steps_that_are_told_together_count_like_each(play: Play) -> None:
    """Steps, tokens, losses of those that gave one, and when they ended."""
    play.begin()
    play.now += 10
    play.send(Stepped(1, 30, 1.5, steps=3, losses=2, span_s=2.0, ago_s=4.0))
    play.send(Stepped(1, 10, 4.5))
    carried = play.s.account.carried
    assert (carried.tokens, carried.inner_steps, carried.loss_sum, carried.losses) == (40, 4, 7.5, 3)
    assert (play.s.trainer.inner_steps, play.s.pace.since_push) == (4, 4)
    assert list(play.s.pace._took) == [1.0, 1.0, 4.0]
    play.send(Stepped(1, 10, 1.0, steps=-5, losses=9, ago_s=-7.0))
    assert (play.s.trainer.inner_steps, play.s.account.carried.losses) == (5, 4)


def test_tokens_that_are_counted_after_their_step(play: Play) -> None:
    """They go with the push that follows; under an incarnation whose work will be overwritten they are lost."""
    play.begin()
    play.send(Stepped(1, 0, None))
    assert play.send(TokensCounted(1, 30)) is None
    assert (play.s.account.carried.tokens, play.s.trainer.tokens, play.s.tally.tokens) == (30, 30, 30)
    play.answer_heartbeat(ClusterStanding.GONE)
    play.reply(Joined(3, 2, V1, NONE_YET, (), accounted=30))
    play.send(TokensCounted(1, 5))
    assert (play.s.account.carried.tokens, play.s.account.lost) == (0, 5)


def test_inner_steps_are_on_the_timeline_twice_a_second(play: Play) -> None:
    """However short they are; the last of them comes with the next mark."""
    play.begin()
    for play.now in (10.0, 10.1, 10.4, 10.5, 10.6):
        play.step()
    assert [fields["inner_steps"] for kind, fields in play.marks if kind == "inner"] == [1, 4]


def test_a_loss_that_is_not_finite_is_recorded_once_for_each_push(play: Play) -> None:
    """Of the steps since the last freeze: the next push begins anew."""
    play.begin()
    for _ in range(2):
        play.send(Stepped(1, 10, None, False))
    assert [kind for kind, _ in play.marks].count("loss_not_finite") == 1
    play.push_until_granted()
    play.send(Stepped(1, 10, None, False))
    assert [kind for kind, _ in play.marks].count("loss_not_finite") == 2
