"""Fast inner steps become one message, slow ones none later than they are taken."""

from __future__ import annotations

from math import inf

import pytest

from dips.client.ipc.messages import Stepped
from dips.client.rank.agent_client import FLUSH_S, LATEST_S, StepBatch
from dips.protocol.data import BegunRange


def begun_batch() -> StepBatch:
    """Its first step has been sent, at 0 s."""
    batch = StepBatch()
    assert batch.add_step(Stepped(1, 1, None), 0.0), "nothing is known of its time, it goes out at once"
    assert batch.take_steps(0.0) == Stepped(1, 1, None, losses=0)
    return batch


def test_fast_steps_are_one_message_of_bounded_age() -> None:
    """Tokens and losses are added up; the newest step says how far the data ranges are."""
    batch, taken, at = begun_batch(), 0, 0.0
    while True:
        taken, at = taken + 1, at + 0.001
        assert not batch.is_apart(at)
        loss = None if taken % 2 else float(taken)
        if batch.add_step(Stepped(1, 10, loss, taken != 3, (taken,), BegunRange(taken, 1, 2)), at):
            break
    assert FLUSH_S <= at < FLUSH_S + 0.001
    sent = batch.take_steps(at + 0.25)
    assert sent is not None and (sent.steps, sent.tokens, sent.finite) == (taken, 10 * taken, False)
    assert (sent.loss, sent.losses) == (sum(range(2, taken + 1, 2)) / (taken // 2), taken // 2)
    assert (sent.left, sent.begun) == ((taken,), BegunRange(taken, 1, 2))
    assert (sent.span_s, sent.ago_s) == (pytest.approx(0.001 * (taken - 1)), pytest.approx(0.25))
    assert batch.take_steps(at + 1) is None, "nothing twice"


def test_a_slow_step_goes_out_at_once_and_alone() -> None:
    """With those before it, its time would be taken for theirs."""
    assert begun_batch().add_step(Stepped(1, 1, None), FLUSH_S)
    batch = begun_batch()
    assert not batch.add_step(Stepped(1, 2, 2.0), 0.001)
    assert batch.is_apart(0.001 + FLUSH_S)
    assert batch.take_steps(0.001 + FLUSH_S) == Stepped(1, 2, 2.0, ago_s=FLUSH_S)
    for second in (1.0, 2.0, 2.0 + FLUSH_S):
        assert batch.add_step(Stepped(1, 3, 1.0), second)
        assert batch.take_steps(second) == Stepped(1, 3, 1.0)


def test_a_slow_step_that_is_reported_late_waits_no_longer() -> None:
    """Its loss came from an accelerator, a step later."""
    batch = begun_batch()
    for second in (1.0, 2.0):
        assert batch.add_step(Stepped(1, 3, 1.0), second)
        assert batch.take_steps(second + 1.0) == Stepped(1, 3, 1.0, ago_s=1.0)


def test_what_a_pausing_script_holds_is_due_soon() -> None:
    batch = begun_batch()
    assert batch.due_s() == inf, "nothing is held"
    assert not batch.add_step(Stepped(1, 1, None), 0.1)
    assert batch.due_s() == 0.1 + LATEST_S
    assert not batch.add_step(Stepped(1, 1, None), 0.15)
    assert batch.due_s() == 0.1 + LATEST_S, "the oldest decides"
    batch.take_steps(0.15)
    assert batch.due_s() == inf
