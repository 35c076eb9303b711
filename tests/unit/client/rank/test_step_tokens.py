"""Tokens of inner steps: for the whole cluster, or of each rank and summed; of any type, and none waited for."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from dips.client.ipc.messages import TokensCounted
from dips.client.rank import steps
from dips.client.rank.steps import OuterState, StepTokens
from dips.errors import LocalProtocolError


class CountingRanks:
    """Three ranks, of which this is `rank`; the two others have passed `others` tokens since the last look."""

    def __init__(self, rank: int, others: tuple[int, int], local: bool) -> None:
        self.rank, self.others, self.local, self.gathers = rank, others, local, 0

    def all_gather(self, message: bytes) -> list[bytes]:
        self.gathers += 1
        told = [json.dumps([self.local, n]).encode() for n in self.others]
        return [*told[: self.rank], message, *told[self.rank :]]

    def all_sum(self, numbers: list[int]) -> list[int]:
        return [numbers[0] + sum(self.others)]


class TokenAgent:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def notify_agent(self, notice: Any) -> None:
        self.heard.append(notice)


def make(rank: int = 0, others: tuple[int, int] = (0, 0), local: bool = False) -> tuple[StepTokens, TokenAgent, Any]:
    ranks: Any = CountingRanks(rank, others, local)
    agent: Any = TokenAgent()
    return StepTokens(OuterState(3, 0.0), ranks, agent), agent, ranks


def test_tokens_of_each_rank_are_summed() -> None:
    """Rank 0's are reported with the step, the others' at the next look; each once."""
    tokens, agent, ranks = make(0, (30, 50), local=True)
    assert tokens.settle_tokens() == 0, "before the first step"
    assert tokens.count_step(None, 20) == 20
    assert tokens.settle_tokens() == 80 and agent.heard == [TokensCounted(3, 80)]
    ranks.others = (0, 0)
    assert tokens.settle_tokens() == 0 and len(agent.heard) == 1 and ranks.gathers == 1


def test_a_rank_that_computes_the_same_part_passes_0() -> None:
    """Tensor, context or pipeline parallelism: the part counts once, for the rank that passes it."""
    tokens, agent, _ = make(0, (30, 0), local=True)
    assert tokens.count_step(None, 0) == 0
    assert tokens.settle_tokens() == 30 and agent.heard == [TokensCounted(3, 30)]


def test_another_rank_knows_all_of_them_too() -> None:
    """For its own log."""
    tokens, _, _ = make(2, (30, 50), local=True)
    assert tokens.count_step(None, 20) + tokens.settle_tokens() == 100


def test_ranks_that_count_for_themselves_are_told() -> None:
    """Once, with all numbers and what to pass."""
    tokens, _, ranks = make(0, (90, 100))
    tokens.count_step(100, None)
    with pytest.warns(UserWarning, match=r"passed 100, 90, 100 tokens.*pass local_tokens instead"):
        assert tokens.settle_tokens() == 0
    tokens.settle_tokens()
    assert ranks.gathers == 1


@pytest.mark.parametrize(("others", "local"), [((100, 100), False), ((0, 0), False), ((7, 8), True)])
def test_ranks_that_agree_or_leave_it_to_rank_0_are_not(others: tuple[int, int], local: bool) -> None:
    tokens, _, _ = make(0, others, local)
    tokens.count_step(*((None, 100) if local else (100, None)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens.settle_tokens()


def test_two_kinds_of_number_are_refused() -> None:
    """In one call, in none, in the course of training, or between ranks."""
    for both in ((1, 1), (None, None)):
        with pytest.raises(LocalProtocolError, match="expected tokens or local_tokens"):
            make()[0].count_step(*both)
    tokens, _, _ = make(0, (5, 5), local=True)
    tokens.count_step(1, None)
    with pytest.raises(LocalProtocolError, match="expected tokens or local_tokens"):
        tokens.count_step(None, 1)
    with pytest.raises(LocalProtocolError, match="the same of them"):
        tokens.settle_tokens()


@pytest.mark.parametrize(
    "given", [8, 8.0, np.int64(8), np.prod((2, 4)), np.float32(8), torch.tensor(8), torch.tensor([8.0])]
)
def test_a_number_of_any_type(given: Any) -> None:
    """As a plain int: what travels to the agent is nothing else."""
    assert type(make()[0].count_step(given, None)) is int


@pytest.mark.parametrize("given", [-1, 1.5, float("nan"), "8", [8], torch.ones(2), np.array([1, 2])])
def test_what_is_no_number_of_tokens_is_named(given: Any) -> None:
    """At the call, and not when it is sent."""
    with pytest.raises(LocalProtocolError, match="tokens: expected a whole number, 0 or more, got"):
        make()[0].count_step(given, None)


@pytest.mark.parametrize("local", [False, True])
def test_a_number_on_an_accelerator_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    """(labels != -100).sum() in every step: read once, at the next look, though it is overwritten by then."""
    monkeypatch.setattr(steps, "is_deferred", lambda value: isinstance(value, torch.Tensor))
    read: list[Any] = []
    monkeypatch.setattr(steps, "read_count", lambda name, value: read.append(value) or int(value))
    tokens, agent, _ = make(0, (1, 2) if local else (10, 10), local)
    held = torch.tensor(3)
    for number in (3, 7):
        held.fill_(number)
        assert tokens.count_step(*((None, held) if local else (held, None))) == 0
    assert read == []
    assert tokens.settle_tokens() == (13 if local else 10) and len(read) == 1
    assert agent.heard == [TokensCounted(3, 13 if local else 10)]


@pytest.mark.parametrize(
    ("dtype", "each"), [(torch.int32, 2**30), (torch.uint32, 2**31), (torch.bfloat16, 255), (torch.float64, 2**30 + 1)]
)
def test_numbers_on_an_accelerator_add_up_beyond_their_type(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, each: int
) -> None:
    """A whole cluster's 4 million tokens a step, counted in int32, would be negative within a push of 512 steps."""
    monkeypatch.setattr(steps, "is_deferred", lambda value: isinstance(value, torch.Tensor))
    tokens, agent, _ = make(local=True)
    for _ in range(5):
        tokens.count_step(None, torch.tensor([each], dtype=dtype))
    assert tokens.settle_tokens() == 5 * each and agent.heard == [TokensCounted(3, 5 * each)]
