"""Rank 0's reports of inner steps to the agent: tokens, loss and time of each; warnings about likely mistakes."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections import deque
from typing import Any, NamedTuple, SupportsInt

from dips.client.ipc.messages import LossReported, Stepped, TokensCounted
from dips.client.parallel.devices import DeferredScalar, is_deferred
from dips.client.rank.agent_client import AgentClient, JobCollectives
from dips.client.rank.outer_steps import OuterState
from dips.errors import LocalProtocolError
from dips.protocol.data import BegunRange

# ---- losses ---------------------------------------------------------------------------------------------------------
# The losses of a job whose rank 0 computes none: in a pipeline only the last stage has a loss.
#
# Every rank adds up its losses between two polls of the agent; at a poll the ranks gather the sums, and rank 0 reports
# those of the first rank that has any. Rank 0's own losses are reported with each step already.


class LossChannel:
    """One rank's losses since the last poll."""

    def __init__(self, collectives: JobCollectives) -> None:
        self._collectives = collectives
        self._reset_sum()

    def _reset_sum(self) -> None:
        self._sum, self._count, self._finite = 0.0, 0, True

    def add_loss(self, loss: float | None, finite: bool) -> None:
        """Count one inner step; `loss` is None if the script passed none, or one that is not finite."""
        self._finite &= finite
        if loss is not None:
            self._sum, self._count = self._sum + loss, self._count + 1

    def gather_losses(self) -> tuple[float, int, bool] | None:
        """Return sum, count and finiteness of the losses of the first rank that has any; None if that is rank 0, or
        none has.

        Collective; resets the sums on every rank.
        """
        gathered = self._collectives.all_gather(json.dumps([self._sum, self._count, self._finite]).encode())
        self._reset_sum()
        for rank, (total, count, finite) in enumerate(map(json.loads, gathered)):
            if count or not finite:
                return (total, count, finite) if rank else None
        return None


def finite_or_none(loss: Any) -> float | None:
    """Return the loss as a float; None if it is missing or not finite, which the penalty's gate handles."""
    number = loss.detach() if hasattr(loss, "detach") else loss  # torch warns if it requires a gradient
    value = math.nan if number is None else float(number)
    return value if math.isfinite(value) else None


# ---- step tokens ----------------------------------------------------------------------------------------------------
# Tokens of inner steps: counted for the whole cluster, or by each rank for itself and summed over the ranks.
#
# A script passes one of two numbers to every step, the same kind on all ranks: `tokens`, of which rank 0's counts for
# the cluster, or `local_tokens`, of this rank's own part of the batch. Counts of other ranks, and counts that an
# accelerator still computes, are unknown when a step is reported: they are summed locally and reported at the next
# poll.


ONE_OF_THEM = (
    "OuterLoop.step: expected tokens or local_tokens, and the same of them in every step on all ranks: local_tokens of "
    "this rank's own part of the batch (0 where another rank computes the same part), or tokens of all ranks together"
)
PER_RANK = (
    "OuterLoop.step: the ranks passed {tokens} tokens, and rank 0's number counts for the whole cluster: pass "
    "local_tokens instead, or the tokens of all ranks together, the same number on each"
)


class StepTokens:
    """One rank's count of tokens."""

    def __init__(self, state: OuterState, collectives: JobCollectives, agent_client: AgentClient) -> None:
        self._state, self._collectives, self._agent_client = state, collectives, agent_client
        self._local: bool | None = None  # whether the script passes local_tokens; None before the first step
        self._compared = False
        self._passed = self._known = (
            0  # tokens since the last `settle_tokens`: passed on the host, returned to the caller
        )
        self._late: Any = None  # sum of tokens passed on an accelerator; None: none

    def count_step(self, tokens: SupportsInt | None, local_tokens: SupportsInt | None) -> int:
        """Count one step; return the tokens known at once, which are reported with the step."""
        local = tokens is None
        if local == (local_tokens is None) or self._local not in (None, local):
            raise LocalProtocolError(ONE_OF_THEM)
        self._local = local
        given: Any = local_tokens if local else tokens
        if is_deferred(given):  # reading it would wait for the accelerator
            late = given.detach().reshape(())
            self._late = late.clone() if self._late is None else self._late + late
            return 0
        number = read_count("local_tokens" if local else "tokens", given)
        self._passed += number
        self._known += number
        return number

    def settle_tokens(self) -> int:
        """Report the tokens that no step could report; return their number for the cluster. Collective.

        Raises LocalProtocolError, the same on all ranks, if the ranks do not pass the same kind of number.
        """
        if self._local is None:
            return 0
        if self._late is not None:
            self._passed, self._late = self._passed + read_count("tokens", self._late.item()), None
        if not self._compared:
            self._compare_ranks()
            self._compared = True
        (counted,) = self._collectives.all_sum([self._passed]) if self._local else [self._passed]
        rest = counted - self._known
        self._passed = self._known = 0
        if rest:
            self._agent_client.notify_agent(TokensCounted(self._state.attempt, rest))  # rank 0 sends
        return rest

    def _compare_ranks(self) -> None:
        """Compare the numbers passed by the ranks, once. A rank that passes 0 tokens leaves the count to rank 0."""
        own = json.dumps([self._local, self._passed]).encode()
        by_rank = [json.loads(told) for told in self._collectives.all_gather(own)]
        if len({local for local, _ in by_rank}) > 1:
            raise LocalProtocolError(ONE_OF_THEM)
        tokens = [passed for _, passed in by_rank]
        if not self._local and self._collectives.rank == 0 and len({told for told in tokens if told}) > 1:
            shown = ", ".join(str(told) for told in tokens[:4]) + (" …" if len(tokens) > 4 else "")
            warnings.warn(PER_RANK.format(tokens=shown), stacklevel=5)


def read_count(name: str, given: Any) -> int:
    """Return a number of tokens as an int: of Python, numpy or torch, also a whole float."""
    try:
        number = int(given)
        whole = bool(number == given) and number >= 0
    except (TypeError, ValueError, OverflowError, RuntimeError):
        whole = False
    if not whole:
        raise LocalProtocolError(f"OuterLoop.step: {name}: expected a whole number, 0 or more, got {given!r}")
    return number


# ---- step checks ----------------------------------------------------------------------------------------------------
# Warnings, once each, about likely mistakes in a training script that cause no error but harm the run.


STEPS_SEEN = 16  # calls of `step` before they are compared with the optimizer's steps

PER_MICRO_BATCH = (
    "OuterLoop.step was called {calls} times in {steps} optimizer steps: call it once after each optimizer.step(), "
    "with the tokens of all its micro-batches"
)


class StepChecks:
    """Checks one rank's calls of `step`; rank 0 warns."""

    def __init__(self, collectives: JobCollectives) -> None:
        self._collectives = collectives
        self._calls = 0

    def on_step(self, optimizer_steps: int) -> None:
        """Count one call; `optimizer_steps` since the loop was created, 0 if unknown."""
        self._calls += 1
        if self._calls == STEPS_SEEN and 0 < 2 * optimizer_steps <= self._calls:
            self._warn(PER_MICRO_BATCH.format(calls=self._calls, steps=optimizer_steps))

    def _warn(self, text: str) -> None:
        if self._collectives.rank == 0:
            warnings.warn(text, stacklevel=4)


# ---- step reports ---------------------------------------------------------------------------------------------------
# Rank 0's reports of inner steps to the agent: tokens, loss, and time of each.
#
# A loss that an accelerator still computes is not waited for: its step is reported, in order, at a later step, when the
# loss has arrived. No step is left unreported when the agent is asked a question whose answer depends on its counts.


MOST_WAITING = 32  # inner steps waiting for their loss: the agent sees the progress at most this many steps late


class _Taken(NamedTuple):
    """An inner step with its state at the time."""

    tokens: int
    left: tuple[int, ...] | None  # data ranges with samples left, as in Stepped
    begun: BegunRange | None
    ended_s: float  # on the monotonic clock


class StepReports:
    """One rank's reports; `pipelined`: ranks other than 0 compute the loss."""

    def __init__(
        self, state: OuterState, collectives: JobCollectives, agent_client: AgentClient, *, pipelined: bool
    ) -> None:
        self._state, self._agent_client, self._is_first = state, agent_client, collectives.rank == 0
        self._losses = LossChannel(collectives) if pipelined else None
        self._waiting: deque[tuple[_Taken, DeferredScalar]] = deque()

    def report_step(self, tokens: int, loss: Any) -> None:
        """Report one inner step, at once or when its loss has arrived. Not collective."""
        if not self._is_first and self._losses is None:  # this rank reports nothing
            return
        step = _Taken(int(tokens), self._state.left, self._state.begun, time.monotonic())
        if is_deferred(loss):
            self._waiting.append((step, DeferredScalar(loss)))
            while self._waiting and (self._waiting[0][1].ready or len(self._waiting) > MOST_WAITING):
                self._report_oldest()
        else:
            self.flush_reports()
            self._report_loss(step, loss)

    def flush_reports(self) -> None:
        """Report every step until now; waits for their losses."""
        while self._waiting:
            self._report_oldest()

    def report_pipeline_losses(self) -> None:
        """In a pipeline, report the losses that another rank has computed since the last call. Collective."""
        if self._losses is None:
            return
        gathered = self._losses.gather_losses()
        if gathered is not None:
            self._agent_client.notify_agent(LossReported(self._state.attempt, *gathered))

    def _report_oldest(self) -> None:
        step, loss = self._waiting.popleft()
        self._report_loss(step, loss.read())

    def _report_loss(self, step: _Taken, loss: Any) -> None:
        shown = finite_or_none(loss)
        finite = loss is None or shown is not None
        if self._losses:
            self._losses.add_loss(shown, finite)
        if self._is_first:
            stepped = Stepped(self._state.attempt, step.tokens, shown, finite, step.left, step.begun)
            self._agent_client.report_step(stepped, step.ended_s)
