"""A rank's inner steps, reported to the agent, and its part in outer steps, which the agent orders."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, SupportsInt

from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    LossReported,
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushResult,
    PushWanted,
    Stepped,
    TokensCounted,
    TrainOn,
)
from dips.client.parallel.devices import DeferredScalar, is_deferred, widen_scalar
from dips.client.rank.agent_client import AgentClient, JobCollectives
from dips.client.rank.shard_transfer import (
    BackgroundTransfer,
    ShardTransfer,
    TransferRequest,
    TransferResult,
    do_nothing,
)
from dips.client.rank.transfer import TransferIdentity
from dips.config import ClusterFile
from dips.errors import LocalProtocolError
from dips.ids import VersionId
from dips.protocol.data import BegunRange

# ---- state ----------------------------------------------------------------------------------------------------------


OuterRequest = PushWanted | PushMoved | PullWanted | PullMoved


@dataclass(slots=True)
class OuterState:
    """The cluster's standing in the run, as all its ranks know it."""

    attempt: int  # number of the trainer's attempt, given by the agent
    progress: float  # accepted tokens over the run's target
    version: VersionId | None = None  # the last installed version; None until the first pull
    result: PushResult | None = None  # of the newest settled push
    finished: bool = False  # whether the run is finished
    diverged: bool = False  # the model is not finite, until a version is installed
    torn: bool = False  # the model mixes two versions: a pull failed after its first fragment was merged
    steps_until_poll: int = 0  # inner steps until the ranks ask the agent again
    last_request: int = 0  # number of the last request
    left: tuple[int, ...] | None = None  # data ranges with samples left after the next inner step; None: not reported
    begun: BegunRange | None = None  # the first of them, if a part of it will be trained by then
    recalls: int = 0  # how often the agent took ranges back from this trainer
    given_up: str = ""  # why the push that the script demanded was given up; "": it was not, or the script was told

    def next_request(self) -> int:
        """Return the number of the next request; the agent answers a repeated number as before."""
        self.last_request += 1
        return self.last_request


WARMUP_STEPS = 100  # inner steps; AdamW's moments are empty after a join into a run under way


@dataclass(slots=True)
class InnerState:
    """The inner steps of this trainer."""

    steps: int = 0  # taken since the OuterLoop was created, plus those of the loaded checkpoint
    warming_up: bool = False  # the optimizer was empty: the cluster joined a running run, or its state was dropped
    warm_from: int = 0  # `steps` when the warm-up began

    def begin_warmup(self) -> None:
        """Begin the warm-up of the learning rate, since the optimizer is empty."""
        self.warming_up, self.warm_from = True, self.steps

    @property
    def lr_scale(self) -> float:
        """The factor of the inner learning rate, which rises to 1 over the warm-up."""
        return min(1.0, (self.steps - self.warm_from + 1) / WARMUP_STEPS) if self.warming_up else 1.0


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """A transfer in progress, and the agent's order for it."""

    order: PushNow | PullNow
    transfer: BackgroundTransfer


# ---- outer steps ----------------------------------------------------------------------------------------------------
# The agent answers a request with an order to push or to pull, or to train on. When a transfer is over, its result is
# the next request, until the answer is to train on:
#
#     request ── ask ──▶ PushNow, PullNow ── begin ──▶ OpenTransfer ── wait or poll ──▶ complete: the next request
#                   └──▶ TrainOn, Over
#
# Training either pauses until the end (`run_outer_step`), or continues and the ranks poll the transfer regularly (under
# `overlap: full`; docs/rationale.md#36). Every method is collective: decisions are the same on all ranks.


class OuterSteps:
    """Carries out outer steps, and owns the one in flight."""

    def __init__(
        self,
        config: ClusterFile,
        state: OuterState,
        agent_client: AgentClient,
        shard_transfer: ShardTransfer,
        on_healed: Callable[[], None] = do_nothing,
    ) -> None:
        """Create the object; `on_healed` is called when a version has replaced a model that was not finite, to reset
        optimizers.
        """
        self._config, self._state = config, state
        self._agent_client, self._shard_transfer = agent_client, shard_transfer
        self._on_healed = on_healed
        self._overlaps = config.overlap == "full"
        # Under `overlap: full`: a moving transfer, or a request that the agent has not answered; None: neither.
        self._in_flight: OpenTransfer | OuterRequest | None = None
        self._poll_steps = 1  # inner steps between two polls of the transfer in flight
        self.is_demanded = False
        """Whether the script has demanded the outer step in flight."""
        self._on_answer: dict[type[Any], Callable[[Any], OpenTransfer | None]] = {
            PushNow: self._begin_push,
            PullNow: self._begin_pull,
            TrainOn: self._train_on,
            Over: self._end_run,
        }
        self._on_result: dict[type[Any], Callable[[Any, TransferResult], OuterRequest]] = {
            PushNow: self._report_push,
            PullNow: self._install_pulled,
        }

    @property
    def in_flight(self) -> bool:
        """Whether a push or pull is in flight while training continues (`overlap: full`)."""
        return self._in_flight is not None

    def pull_newest(self) -> None:
        """Pull the run's newest version and install it completely."""
        self._run_request(PullWanted(self._state.attempt, self._state.next_request()))
        self._shard_transfer.finish_install()

    def run_outer_step(self, demanded: bool) -> None:
        """Take part in an outer step if one is due or `demanded`; training pauses until it is over."""
        self._run_request(PushWanted(self._state.attempt, self._state.next_request(), demanded))

    def poll_outer_step(self, demanded: bool) -> None:
        """Take part in an outer step if one is due or `demanded`, or continue the one in flight."""
        if self._overlaps:
            self.is_demanded |= demanded
            self._poll_in_flight(demanded)
        else:
            self.run_outer_step(demanded)

    def settle_transfers(self) -> None:
        """Wait until no transfer is in flight."""
        if isinstance(self._in_flight, OpenTransfer):
            self._in_flight = self._wait_transfer(self._in_flight)
        if self._in_flight is not None:
            request, self._in_flight = self._in_flight, None
            self._run_request(request)

    def cancel_transfers(self) -> None:
        """End the transfer in flight on this rank, independently of the others."""
        if isinstance(self._in_flight, OpenTransfer):
            self._in_flight.transfer.cancel()

    # ---- with training paused, and beside it -------------------------------------------------------------------------

    def _run_request(self, request: OuterRequest) -> None:
        """Carry out the agent's orders until it answers to train on."""
        while (begun := self._begin_transfer(self._agent_client.ask_until_answered(request))) is not None:
            request = self._wait_transfer(begun)

    def _wait_transfer(self, begun: OpenTransfer) -> OuterRequest:
        return self._complete_transfer(begun, begun.transfer.wait(self._config.poll_s))

    def _poll_in_flight(self, demanded: bool) -> None:
        """Continue the transfer in flight, or ask the agent whether one is due; wait for neither."""
        if isinstance(self._in_flight, OpenTransfer):
            result = self._in_flight.transfer.poll()
            if result is None:
                self._look_later(self._in_flight)
                return
            self._in_flight = self._complete_transfer(self._in_flight, result)
            if self._state.torn:  # the model mixes two versions: training now would be lost with the next pull
                self.settle_transfers()
                return
        if self._in_flight is None:
            self._in_flight = PushWanted(self._state.attempt, self._state.next_request(), demanded)
        answer = self._agent_client.ask_agent(replace(self._in_flight, at_once=True))
        if isinstance(answer, AskAgain):
            self._state.steps_until_poll = self._poll_steps = answer.steps
            return
        self._in_flight = None
        begun = self._begin_transfer(answer)
        if begun is None:
            return
        if isinstance(begun.order, PullNow) and not begun.order.merge:  # an inner step before the install would be lost
            self._run_request(self._wait_transfer(begun))
        else:
            self._in_flight = begun
            self._look_later(begun)

    def _look_later(self, moving: OpenTransfer) -> None:
        due = moving.transfer.steps_until_due
        self._state.steps_until_poll = self._poll_steps if due is None else max(1, min(due, self._poll_steps))

    # ---- by the agent's answer ---------------------------------------------------------------------------------------

    def _begin_transfer(self, answer: Answer) -> OpenTransfer | None:
        """Begin the transfer that the agent ordered; None if training goes on or the run is over."""
        on_answer = self._on_answer.get(type(answer))
        if on_answer is None:
            raise LocalProtocolError(f"expected an order from the agent, got {answer!r}")
        return on_answer(answer)

    def _begin_push(self, order: PushNow) -> OpenTransfer:
        request = self._request_for(order)
        return OpenTransfer(order, self._shard_transfer.begin_push(request, self._overlaps, order.interval))

    def _begin_pull(self, order: PullNow) -> OpenTransfer:
        request = self._request_for(order)
        return OpenTransfer(order, self._shard_transfer.begin_pull(request, order.merge, order.interval))

    def _train_on(self, answer: TrainOn) -> None:
        self._state.progress, self._state.steps_until_poll = answer.progress, answer.steps
        self._state.result = answer.result
        self._state.recalls = answer.recalls
        self._state.given_up = answer.reason if answer.given_up else self._state.given_up
        self.is_demanded = False

    def _end_run(self, answer: Over) -> None:
        self.is_demanded = False
        self._shard_transfer.finish_install()  # no further forward will do it
        self._state.progress, self._state.finished, self._state.result = answer.progress, True, answer.result

    def _request_for(self, order: PushNow | PullNow) -> TransferRequest:
        config = self._config
        transfer = self._shard_transfer
        identity = TransferIdentity(
            config.shared.run, config.cluster, order.inc, order.seq, transfer.rank, transfer.keys
        )
        report_progress = partial(self._agent_client.report_progress, self._state.attempt)
        return TransferRequest(order.grant, identity, report_progress, order.accepted)

    # ---- by the order that was carried out ---------------------------------------------------------------------------

    def _complete_transfer(self, begun: OpenTransfer, result: TransferResult) -> OuterRequest:
        """Install a pulled version on all ranks, and return the request that reports the result."""
        return self._on_result[type(begun.order)](begun.order, result)

    def _report_push(self, order: PushNow, result: TransferResult) -> PushMoved:
        state = self._state
        state.diverged = result.diverged
        return PushMoved(
            state.attempt, state.next_request(), order.seq, result.ok, result.reason, result.nbytes,
            diverged=result.diverged,
        )  # fmt: skip

    def _install_pulled(self, order: PullNow, result: TransferResult) -> PullMoved:
        state, version, merged = self._state, order.grant.version, False
        # A torn model stays torn unless it was pulled completely.
        state.torn = result.torn or (state.torn and not result.ok)
        if result.ok:
            if order.merge:
                merged = self._shard_transfer.merge_version(version)
            else:
                self._shard_transfer.install_version(version)
            state.version, state.progress, state.result = version, order.progress, order.result
            if state.diverged or (order.merge and not merged):
                state.diverged = False
                self._on_healed()
        return PullMoved(
            state.attempt, state.next_request(), order.seq, result.ok, result.reason, result.nbytes, state.torn,
            merged=merged,
        )  # fmt: skip


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
            late = widen_scalar(given)
            self._late = late if self._late is None else self._late + late
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
            shown = ", ".join(str(told) for told in tokens[:4]) + (" …" if tokens[4:] else "")
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
