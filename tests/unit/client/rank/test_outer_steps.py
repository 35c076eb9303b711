"""Outer steps under a scripted agent: what a rank asks, does and reports, with training paused and beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    Noted,
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushWanted,
    TrainOn,
)
from dips.client.rank.shard_transfer import BackgroundTransfer, TransferResult
from dips.client.rank.steps import OuterState, OuterSteps
from dips.config import ClusterFile, Shared
from dips.errors import LocalProtocolError
from dips.ids import GENESIS, VersionId
from dips.protocol.effects import Grant

V1 = VersionId(1, 1)
GRANT = Grant(V1, (), 60.0)
WELL, FAILED = TransferResult(True, "", 12), TransferResult(False, "ps1 is gone", 12)
TORN = replace(FAILED, torn=True)
PULL, PUSH = PullNow(1, 7, GRANT, 0.5), PushNow(1, 7, replace(GRANT, version=GENESIS))


class AgentScript:
    """Gives the scripted answers, one after the other, and keeps what it was asked."""

    def __init__(self, *answers: Answer) -> None:
        self._answers, self.asked = list(answers), []

    def ask_agent(self, question: Any) -> Answer:
        self.asked.append(question)
        return self._answers.pop(0)

    def ask_until_answered(self, question: Any) -> Answer:
        while isinstance(answer := self.ask_agent(question), AskAgain):
            pass
        return answer

    def report_progress(self, *_: int) -> str:
        return ""


class Scripted(BackgroundTransfer):
    """A transfer with a given result, which it has from the poll on that `polls` counts down to."""

    due: int | None = None

    @property
    def steps_until_due(self) -> int | None:
        return self.due

    def __init__(self, result: TransferResult, polls: int) -> None:
        self._result, self._polls, self.cancelled = result, polls, False

    def wait(self, poll_s: float) -> TransferResult:
        return self._result

    def poll(self) -> TransferResult | None:
        self._polls -= 1
        return self._result if self._polls < 0 else None

    def cancel(self) -> None:
        self.cancelled = True


class Transfers:
    """Notes what is begun and installed; its transfers have the scripted results."""

    rank, keys = 0, None

    def __init__(self, *results: TransferResult, polls: int = 0, merges: bool = True) -> None:
        self._results, self._polls, self._merges = list(results), polls, merges
        self.calls: list[str] = []
        self.begun: list[Scripted] = []

    def _begin(self, what: str) -> Scripted:
        self.calls.append(what)
        self.begun.append(Scripted(self._results.pop(0), self._polls))
        return self.begun[-1]

    def begin_push(self, request: Any, keep: bool, interval: int) -> Scripted:
        return self._begin("push, kept" if keep else "push")

    def begin_pull(self, request: Any, merge: bool, interval: int) -> Scripted:
        return self._begin("pull")

    def install_version(self, version: VersionId) -> None:
        self.calls.append(f"install {version}")

    def merge_version(self, version: VersionId) -> bool:
        self.calls.append(f"merge {version}")
        return self._merges

    def finish_install(self) -> None:
        self.calls.append("finish")


def make(agent: AgentScript, transfers: Transfers, overlap: str = "none") -> SimpleNamespace:
    config = ClusterFile(
        shared=Shared(run="r"), cluster="c", master="127.0.0.1:1", directory=Path("/d"), tls=False, overlap=overlap
    )
    state, healed = OuterState(attempt=3, progress=0.0, version=GENESIS), list[VersionId | None]()
    heal = lambda: healed.append(state.version)  # noqa: E731
    steps = OuterSteps(config, state, agent, transfers, heal)  # type: ignore[arg-type]
    return SimpleNamespace(state=state, steps=steps, agent=agent, transfers=transfers, healed=healed)


def kinds(agent: AgentScript) -> list[type]:
    return [type(question) for question in agent.asked]


def test_a_push_and_the_pull_after_it() -> None:
    """Each result is the next request; progress and pace come with the answer to train on."""
    m = make(AgentScript(PUSH, AskAgain("the window"), PULL, TrainOn("", 64, 0.6)), Transfers(WELL, WELL))
    m.steps.poll_outer_step(demanded=False)
    assert kinds(m.agent) == [PushWanted, PushMoved, PushMoved, PullMoved]
    assert [question.number for question in m.agent.asked] == [1, 2, 2, 3], "asked again it has the same number"
    assert m.agent.asked[-1] == PullMoved(3, 3, 7, True, "", 12, merged=False)
    assert m.transfers.calls == ["push", "pull", f"install {V1}"]
    assert (m.state.version, m.state.progress, m.state.steps_until_poll) == (V1, 0.6, 64)


def test_a_pull_that_failed_is_installed_nowhere() -> None:
    """Version and progress stay what they were, and the reason is reported."""
    m = make(AgentScript(PULL, TrainOn("", 1, 0.0)), Transfers(FAILED))
    m.steps.pull_newest()
    assert m.agent.asked[-1] == PullMoved(3, 2, 7, False, "ps1 is gone", 12, torn=False)
    assert (m.state.version, m.state.progress, m.transfers.calls) == (GENESIS, 0.0, ["pull", "finish"])


def test_a_torn_model_stays_torn_until_a_pull_succeeds() -> None:
    """A further pull that fails, even before its first layer, mends nothing; one that succeeds replaces all."""
    m = make(AgentScript(PULL, PULL, PULL, TrainOn("", 1, 0.0)), Transfers(TORN, FAILED, WELL))
    m.steps.pull_newest()
    assert [question.torn for question in m.agent.asked[1:]] == [True, True, False]
    assert m.state.torn is False


def test_a_torn_model_is_known_when_training_would_go_on() -> None:
    """The agent gave up pulling: the flag is what keeps the next step from training on two versions."""
    m = make(AgentScript(PULL, Over("", 1.0)), Transfers(TORN))
    m.steps.pull_newest()
    assert m.state.torn and m.state.finished


@pytest.mark.parametrize(
    ("diverged", "merge", "merges", "heals"),
    [
        (False, False, False, False),
        (True, False, False, True),
        (False, True, True, False),
        (False, True, False, True),
        (True, True, True, True),
    ],
)
def test_optimizers_are_reset_when_a_version_replaced_what_was_not_finite(
    diverged: bool, merge: bool, merges: bool, heals: bool
) -> None:
    """A model that a push found so, or one that a version could not be merged into; once, with the version in place."""
    order = replace(PULL, merge=merge)
    m = make(AgentScript(order, TrainOn("", 1, 0.5), order, TrainOn("", 1, 0.5)), Transfers(WELL, WELL, merges=merges))
    m.state.diverged = diverged
    m.steps.pull_newest()
    assert m.healed == [V1] * heals and not m.state.diverged
    if not merge:
        m.steps.pull_newest()
        assert len(m.healed) == heals


def test_the_end_of_a_run_completes_a_lazy_install() -> None:
    """No further forward will, and the script saves the final model."""
    m = make(AgentScript(Over("the target is reached", 1.0)), Transfers())
    m.steps.poll_outer_step(demanded=False)
    assert m.transfers.calls == ["finish"] and m.state.finished


def test_training_goes_on_beside_a_push() -> None:
    """Under overlap: a poll waits neither for the transfer nor for the agent; it asks without waiting."""
    agent = AgentScript(
        AskAgain("slots", 2), PUSH, AskAgain("the window", 3), replace(PULL, merge=True), TrainOn("", 9, 0.6)
    )
    m = make(agent, Transfers(WELL, WELL, polls=1), overlap="full")
    seen = []
    for _ in range(6):
        m.steps.poll_outer_step(demanded=False)
        seen.append((m.state.steps_until_poll, m.steps.in_flight))
    assert seen == [(2, True), (2, True), (2, True), (3, True), (3, True), (3, True)]
    assert m.transfers.calls == ["push, kept", "pull"]
    m.steps.poll_outer_step(demanded=False)
    assert (m.state.steps_until_poll, m.steps.in_flight, m.state.version) == (9, False, V1)
    assert m.transfers.calls[2:] == [f"merge {V1}"] and m.agent.asked[-1].merged
    assert all(question.at_once for question in agent.asked)


def test_the_ranks_look_when_a_fragment_is_due() -> None:
    """At that very step, however seldom they look otherwise; if it is due already, at the next."""
    agent = AgentScript(AskAgain("slots", 8), PUSH, AskAgain("the window", 8))
    m = make(agent, Transfers(WELL, polls=4), overlap="full")
    m.steps.poll_outer_step(demanded=False)
    m.state.steps_until_poll = 0
    m.steps.poll_outer_step(demanded=False)
    assert m.state.steps_until_poll == 8, "not at each step of the push that has just begun"
    for due, looks in ((5, 5), (0, 1), (99, 8), (None, 8)):
        m.transfers.begun[0].due = due
        m.steps.poll_outer_step(demanded=False)
        assert m.state.steps_until_poll == looks


def test_a_merge_that_broke_half_way_is_mended_before_the_next_step() -> None:
    """What would be trained on two versions is lost with the whole pull that follows: the ranks wait for it."""
    agent = AgentScript(replace(PULL, merge=True), PULL, TrainOn("", 9, 0.6))
    m = make(agent, Transfers(TORN, WELL, polls=0), overlap="full")
    m.steps.poll_outer_step(demanded=False)
    assert m.steps.in_flight and not m.state.torn
    m.steps.poll_outer_step(demanded=False)
    assert (m.steps.in_flight, m.state.torn, m.state.version, m.state.steps_until_poll) == (False, False, V1, 9)
    assert m.transfers.calls == ["pull", "pull", f"install {V1}"]
    assert agent.asked[1].torn and not agent.asked[1].installed


def test_a_version_that_is_not_merged_is_pulled_with_training_paused() -> None:
    """Inner steps beside it would be lost."""
    m = make(AgentScript(PULL, TrainOn("", 9, 0.6)), Transfers(WELL, polls=5), overlap="full")
    m.steps.poll_outer_step(demanded=False)
    assert (m.steps.in_flight, m.state.version, m.state.steps_until_poll) == (False, V1, 9)


@pytest.mark.parametrize(
    ("answers", "polls", "asked"),
    [
        ((PUSH, TrainOn("", 9, 0.6)), 5, [PushWanted, PushMoved]),
        ((AskAgain("slots"), TrainOn("", 9, 0.6)), 0, [PushWanted, PushWanted]),
    ],
    ids=["a transfer", "a request"],
)
def test_settling_waits_for_what_is_in_flight(answers: tuple[Answer, ...], polls: int, asked: list[type]) -> None:
    """A transfer is waited for, an unanswered request is asked until it is answered."""
    m = make(AgentScript(*answers), Transfers(WELL, polls=polls), overlap="full")
    m.steps.poll_outer_step(demanded=False)
    assert m.steps.in_flight
    m.steps.settle_transfers()
    assert not m.steps.in_flight and kinds(m.agent) == asked
    assert not m.agent.asked[-1].at_once, "this time the agent may wait"
    m.steps.settle_transfers()
    assert kinds(m.agent) == asked


def test_a_push_that_was_given_up_is_told_though_another_follows_at_once() -> None:
    """Two calls of `push` under `overlap: full`: the second settles the first, and then asks for itself."""
    given_up = TrainOn("no slot", 9, 0.6, given_up=True)
    m = make(AgentScript(AskAgain("no slot"), given_up, TrainOn("", 9, 0.6)), Transfers(), overlap="full")
    m.steps.poll_outer_step(demanded=True)
    m.steps.settle_transfers()
    m.steps.poll_outer_step(demanded=True)
    assert m.state.given_up == "no slot"
    assert [question.demanded for question in m.agent.asked] == [True] * 3


def test_cancelling_ends_the_transfer_in_flight() -> None:
    """A rank that leaves does not wait for its push."""
    m = make(AgentScript(PUSH), Transfers(WELL, polls=5), overlap="full")
    m.steps.cancel_transfers()
    m.steps.poll_outer_step(demanded=True)
    m.steps.cancel_transfers()
    assert m.transfers.begun[0].cancelled
    assert m.agent.asked[0].demanded


@pytest.mark.parametrize("call", [OuterSteps.pull_newest, lambda steps: steps.poll_outer_step(False)])
def test_an_answer_that_orders_nothing_is_refused(call: Callable[[OuterSteps], None]) -> None:
    """A bug of ours, named with what came."""
    with pytest.raises(LocalProtocolError, match=r"expected an order from the agent, got Noted\(\)"):
        call(make(AgentScript(Noted()), Transfers()).steps)


def test_the_newest_version_is_asked_for_by_name() -> None:
    """A trainer that begins wants the head, not a push."""
    m = make(AgentScript(PULL, TrainOn("", 9, 0.0)), Transfers(WELL))
    m.steps.pull_newest()
    assert kinds(m.agent) == [PullWanted, PullMoved]
    assert m.transfers.calls == ["pull", f"install {V1}", "finish"]
