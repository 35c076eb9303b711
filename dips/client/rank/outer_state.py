"""A rank's state of the outer loop: plain data, the same on all ranks, changed by outer_steps.py."""

from __future__ import annotations

from dataclasses import dataclass

from dips.client.ipc.messages import PullMoved, PullNow, PullWanted, PushMoved, PushNow, PushResult, PushWanted
from dips.client.rank.shard_transfer import BackgroundTransfer
from dips.ids import VersionId
from dips.protocol.data import BegunRange

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
