"""What a rank knows of the outer loop: plain data, the same on all ranks, changed by outer_steps.py."""

from __future__ import annotations

from dataclasses import dataclass

from dips.client.ipc.messages import PullMoved, PullNow, PullWanted, PushMoved, PushNow, PushResult, PushWanted
from dips.client.rank.background_transfer import BackgroundTransfer
from dips.ids import VersionId
from dips.protocol.data import BegunRange

OuterRequest = PushWanted | PushMoved | PullWanted | PullMoved


@dataclass(slots=True)
class OuterState:
    """Where the cluster stands in the run."""

    attempt: int  # of the trainer, given by the agent
    progress: float  # accepted tokens over the run's target
    version: VersionId | None = None  # that was installed last; None until the first pull
    result: PushResult | None = None  # of the newest push that was settled
    finished: bool = False  # the run is
    diverged: bool = False  # the model is not finite, until a version is installed
    torn: bool = False  # the model mixes two versions: a pull failed after its first fragment was merged
    steps_until_poll: int = 0  # inner steps until the ranks ask the agent what is due
    last_request: int = 0  # number of it
    left: tuple[int, ...] | None = None  # data ranges with samples to train, after the next inner step; None: not said
    begun: BegunRange | None = None  # the first of them, if a part of it will be trained then
    recalls: int = 0  # how often the agent took ranges back from this trainer

    def next_request(self) -> int:
        """Number the next request; the agent answers a repeated number as it did before."""
        self.last_request += 1
        return self.last_request


@dataclass(slots=True)
class InnerState:
    """Where this trainer stands in its inner steps."""

    steps: int = 0  # taken since the OuterLoop was made, or since what a checkpoint continues
    warming_up: bool = False  # its optimizer was empty: it joined a run under way, or its state was dropped
    warm_from: int = 0  # `steps` when that was

    def begin_warmup(self) -> None:
        """The optimizer is empty."""
        self.warming_up, self.warm_from = True, self.steps

    def lr_scale(self, warmup_steps: int) -> float:
        """The factor of the inner learning rate: rises to 1 over the warm-up."""
        return min(1.0, (self.steps - self.warm_from + 1) / max(1, warmup_steps)) if self.warming_up else 1.0


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """A transfer that was begun, and the order of the agent that asked for it."""

    order: PushNow | PullNow
    transfer: BackgroundTransfer
