"""A rank's part in outer steps: carries out the agent's orders to push and pull, and installs pulled versions.

The agent answers a request with an order to push or to pull, or to train on. When a transfer is over, its
result is the next request, until the answer is to train on:

    request ── ask ──▶ PushNow, PullNow ── begin ──▶ OpenTransfer ── wait or poll ──▶ complete: the next request
                  └──▶ TrainOn, Over

Training either pauses until the end (`run_outer_step`), or continues and the ranks poll the transfer regularly (under
`overlap: full`; docs/rationale.md#36). Every method is collective: decisions are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushMoved,
    PushNow,
    PushResult,
    PushWanted,
    TrainOn,
)
from dips.client.rank.agent_client import AgentClient
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
# A rank's state of the outer loop: plain data, the same on all ranks, changed by outer_steps.py.


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

    def next_request(self) -> int:
        """Return the number of the next request; the agent answers a repeated number as before."""
        self.last_request += 1
        return self.last_request


@dataclass(slots=True)
class InnerState:
    """The inner steps of this trainer."""

    steps: int = 0  # taken since the OuterLoop was created, plus those of the loaded checkpoint
    warming_up: bool = False  # the optimizer was empty: the cluster joined a running run, or its state was dropped
    warm_from: int = 0  # `steps` when the warm-up began

    def begin_warmup(self) -> None:
        """Begin the warm-up of the learning rate, since the optimizer is empty."""
        self.warming_up, self.warm_from = True, self.steps

    def lr_scale(self, warmup_steps: int) -> float:
        """Return the factor of the inner learning rate, which rises to 1 over the warm-up."""
        return min(1.0, (self.steps - self.warm_from + 1) / max(1, warmup_steps)) if self.warming_up else 1.0


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """A transfer in progress, and the agent's order for it."""

    order: PushNow | PullNow
    transfer: BackgroundTransfer


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

    def _end_run(self, answer: Over) -> None:
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
