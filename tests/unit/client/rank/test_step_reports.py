"""What the agent hears of inner steps whose losses arrive late: all of them, in order, none waited for in `step`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dips.client.ipc.messages import LossReported, Notice, Stepped
from dips.client.rank import steps
from dips.client.rank.steps import MOST_WAITING, OuterState, StepReports


class LateLoss:
    """A loss on an accelerator."""

    def __init__(self, value: float) -> None:
        self.value, self.ready, self.waited = value, False, False

    def read(self) -> float:
        self.waited |= not self.ready
        return self.value


class ReportAgent:
    def __init__(self) -> None:
        self.heard: list[Stepped] = []
        self.losses: list[Notice] = []

    def report_step(self, step: Stepped, ended_s: float) -> None:
        self.heard.append(step)

    def notify_agent(self, notice: Notice) -> None:
        self.losses.append(notice)


class ReportRank:
    def __init__(self, rank: int, others: tuple[list[object], ...]) -> None:
        self.rank, self._others = rank, [json.dumps(sums).encode() for sums in others]

    def all_gather(self, message: bytes) -> list[bytes]:
        return [*self._others[: self.rank], message, *self._others[self.rank :]]


def make(
    monkeypatch: pytest.MonkeyPatch, rank: int = 0, *, others: tuple[list[object], ...] | None = None
) -> tuple[StepReports, ReportAgent]:
    """`others`: sums of the losses that the other stages of a pipeline have gathered; None: no pipeline."""
    monkeypatch.setattr(steps, "is_deferred", lambda loss: isinstance(loss, LateLoss))
    monkeypatch.setattr(steps, "DeferredScalar", lambda loss: loss)
    agent = ReportAgent()
    collectives: Any = ReportRank(rank, others or ())
    reports = StepReports(OuterState(1, 0.0), collectives, agent, pipelined=others is not None)  # type: ignore[arg-type]
    return reports, agent


def test_a_loss_is_reported_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own step's tokens, in order, and nobody has waited."""
    reports, agent = make(monkeypatch)
    losses = [LateLoss(float(n)) for n in range(3)]
    for number, loss in enumerate(losses):
        reports.report_step(10 + number, loss)
    assert agent.heard == []
    losses[1].ready = True
    reports.report_step(13, LateLoss(3.0))
    assert agent.heard == [], "the first is still on its way"
    losses[0].ready = True
    reports.report_step(14, LateLoss(4.0))
    assert [(s.tokens, s.loss) for s in agent.heard] == [(10, 0.0), (11, 1.0)]
    assert not any(loss.waited for loss in losses)


def test_nothing_is_left_when_the_agent_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counts are those of the script then; a NaN is told as such."""
    reports, agent = make(monkeypatch)
    reports.report_step(10, LateLoss(float("nan")))
    reports.flush_reports()
    reports.flush_reports()
    assert agent.heard == [Stepped(1, 10, None, finite=False)]


def test_a_float_comes_after_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that passes now one, now the other."""
    reports, agent = make(monkeypatch)
    reports.report_step(10, LateLoss(1.0))
    reports.report_step(11, 2.0)
    reports.report_step(12, None)
    assert [(s.tokens, s.loss) for s in agent.heard] == [(10, 1.0), (11, 2.0), (12, None)]


def test_few_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that runs far ahead of its device waits for the oldest."""
    reports, agent = make(monkeypatch)
    losses = [LateLoss(float(n)) for n in range(MOST_WAITING + 3)]
    for loss in losses:
        reports.report_step(1, loss)
    assert len(agent.heard) == 3 and losses[2].waited and not losses[3].waited


def test_other_ranks_read_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's is shown."""
    reports, agent = make(monkeypatch, rank=1)
    loss = LateLoss(1.0)
    reports.report_step(10, loss)
    reports.flush_reports()
    assert agent.heard == [] and not loss.waited


@pytest.mark.parametrize(
    ("last_stage", "told"), [([6.0, 3, True], [LossReported(1, 6.0, 3)]), ([0.0, 0, True], [])], ids=["has", "has none"]
)
def test_a_pipelines_losses_are_those_of_its_last_stage(
    monkeypatch: pytest.MonkeyPatch, last_stage: list[object], told: list[LossReported]
) -> None:
    """Reported by rank 0, which has none, when the ranks meet; a job that is no pipeline does not meet for it."""
    reports, agent = make(monkeypatch, others=(last_stage,))
    reports.report_step(10, None)
    reports.report_pipeline_losses()
    assert agent.losses == told and [step.loss for step in agent.heard] == [None]
    reports, agent = make(monkeypatch)
    reports.report_pipeline_losses()
    assert agent.losses == []


def test_a_later_stage_adds_up_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all its steps until the ranks meet; it reports no step."""
    reports, agent = make(monkeypatch, rank=1, others=([0.0, 0, True],))
    for loss in (1.0, 2.0, float("nan")):
        reports.report_step(10, loss)
    reports.report_pipeline_losses()
    assert agent.losses == [LossReported(1, 3.0, 2, finite=False)] and agent.heard == []
