"""The messages between the agent and rank 0 of its training job.

Rank 0 asks; the agent answers at once, or after at most `poll_s` with AskAgain: then the same is asked again. A notice
has no answer. Messages name their attempt (given in Attached): those of an older one change nothing. See encoding.py.
"""

from __future__ import annotations

from dips.dataclass import dataclass
from dips.protocol.data import BegunRange
from dips.protocol.effects import Grant, ManifestWanted


@dataclass(frozen=True, slots=True)
class PushResult:
    """What became of a push of this cluster."""

    inc: int
    seq: int
    kind: str  # accepted, gated, skipped or dropped
    reason: str


# ---- questions of rank 0 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """An attempt has begun; the first message on a connection."""

    launch: int  # DIPS_ATTEMPT: which start of the training command by the agent; 0: others started it
    restart: int  # torchrun's own count of restarts, on rank 0's host
    process: str  # a name that no other process of the job has or had, nor another OuterLoop of the same
    manifest_digest: str
    push_ranks: int  # ranks that hold something to push
    pull_ranks: int  # ranks that hold something to pull
    keys: tuple[str, ...] = ()  # public, of each rank that moves bytes: what it shows on the lanes
    frozen_digest: str = ""  # of a sample of what is not trained; "": there is nothing, or it is not known


@dataclass(frozen=True, slots=True)
class ManifestSent:
    """The model's manifest itself, after ManifestWanted; answered as Attach is."""

    process: str  # as in Attach
    packed: bytes  # packed_manifest.py; empty: it is too large to travel


@dataclass(frozen=True, slots=True)
class PushWanted:
    """The ranks look whether a push is due; `demanded`: the training script asks for one."""

    attempt: int
    number: int
    demanded: bool = False
    at_once: bool = False  # answer now, with AskAgain if need be: the ranks train meanwhile


@dataclass(frozen=True, slots=True)
class PushMoved:
    """All ranks received DONE from every slave, or one of them did not."""

    attempt: int
    number: int
    seq: int
    ok: bool
    reason: str
    nbytes: int
    at_once: bool = False  # answer now, with AskAgain if need be: the ranks train meanwhile
    diverged: bool = False  # the model is not finite on some rank: nothing travelled


@dataclass(frozen=True, slots=True)
class PullWanted:
    """The head is wanted: a trainer that begins has no parameters of the run."""

    attempt: int
    number: int
    at_once: bool = False  # answer now, with AskAgain if need be: the ranks train meanwhile


@dataclass(frozen=True, slots=True)
class PullMoved:
    """The ranks agreed: installed on all, or on none."""

    attempt: int
    number: int
    seq: int
    installed: bool
    reason: str
    nbytes: int
    torn: bool = False  # some layers are merged and others are not: the model is good for nothing but another pull
    at_once: bool = False  # answer now, with AskAgain if need be: the ranks train meanwhile
    merged: bool = False  # what was trained since the last push was frozen was kept


@dataclass(frozen=True, slots=True)
class RangeWanted:
    """The next data range is wanted; `count` rises by one with each, by which the ones before are used up.

    `left`: but for these, of which samples are still to be trained; None: this script does not say.
    """

    attempt: int
    count: int
    left: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What the agent gives to a checkpoint of its cluster; answers SaveWanted."""

    cluster: str
    base: str  # v@r that the trainer works on
    settled: int  # pushes of this cluster that were accepted or gated, in all its incarnations
    pending: bool  # a push or pull was out
    tokens: int  # since the last push was frozen
    inner_steps: int
    ranges: tuple[int, ...]  # used up since then
    loss_sum: float
    losses: int
    ahead: tuple[int, ...]  # leased and not used up, in order; the first may be half trained
    since_push: int  # inner steps, for the pace
    begun: tuple[BegunRange, ...] = ()  # those of `ahead` that its parameters were trained on in part


@dataclass(frozen=True, slots=True)
class SaveWanted:
    """The training script saves a checkpoint."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The training script has loaded a checkpoint."""

    attempt: int
    saved: Saved


@dataclass(frozen=True, slots=True)
class Detach:
    """The trainer is done with the outer loop."""

    attempt: int


# ---- notices of rank 0 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stepped:
    """One inner step is done, or several fast ones are (step_batch.py)."""

    attempt: int
    tokens: int  # of the whole cluster in these steps, as far as rank 0 knows: TokensCounted tells the rest
    loss: float | None  # mean of those that were given and finite; None: there is none
    finite: bool = True  # all that were given
    left: tuple[int, ...] | None = None  # as in RangeWanted, with these steps done
    begun: BegunRange | None = None  # the first of those, if a part of it is trained
    steps: int = 1
    losses: int = 1  # steps of which `loss` is the mean, if it is one
    span_s: float = 0.0  # from the end of the first step to that of the last
    ago_s: float = 0.0  # from the end of the last to the moment when this was sent


@dataclass(frozen=True, slots=True)
class TokensCounted:
    """Tokens of steps that were reported since the last look, which were not known then: other ranks counted them."""

    attempt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LossReported:
    """Losses since the last look, from another rank: rank 0 of a pipeline computes none."""

    attempt: int
    loss_sum: float
    losses: int  # inner steps whose loss was given and finite
    finite: bool = True


@dataclass(frozen=True, slots=True)
class Remarked:
    """Something about the script that a person should know, with its remedy."""

    attempt: int
    text: str


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far rank 0 is with the present transfer; answered Noted, or Halt if it leads nowhere any more."""

    attempt: int
    nbytes: int
    total: int
    idle_s: float = 0.0  # since rank 0 had moved all of its own


# ---- answers of the agent --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Not yet; `reason` is what is waited for. A trainer that trains meanwhile asks again after `steps`."""

    reason: str
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Attached:
    attempt: int
    progress: float  # accepted tokens over the run's; 0 if the run has no token target


@dataclass(frozen=True, slots=True)
class PushNow:
    """Freeze, and move your pieces."""

    inc: int
    seq: int
    grant: Grant
    accepted: int = 0  # seq of this incarnation's last accepted push: it settles what lossy pushes owe
    interval: int = 0  # inner steps between two fragments


@dataclass(frozen=True, slots=True)
class PullNow:
    """Receive `grant.version`, and install it on all ranks or on none.

    `merge`: what was trained since the last push was frozen is kept: θ_local ← θ_version + (θ_local − θ_pushed); unless
    that is not finite on some rank, which PullMoved reports.
    """

    inc: int
    seq: int
    grant: Grant
    progress: float
    accepted: int = 0  # as in PushNow
    merge: bool = False
    result: PushResult | None = None  # of the newest push that was settled
    interval: int = 0  # inner steps between two fragments of a merge


@dataclass(frozen=True, slots=True)
class TrainOn:
    """Take `steps` inner steps, then look again."""

    reason: str
    steps: int
    progress: float
    result: PushResult | None = None  # of the newest push that was settled
    recalls: int = 0  # as in RangeGiven


@dataclass(frozen=True, slots=True)
class Over:
    """The run is finished."""

    reason: str
    progress: float
    result: PushResult | None = None  # of the newest push that was settled


@dataclass(frozen=True, slots=True)
class RangeGiven:
    """The next range; the first samples of it were trained already if it is `begun`.

    `recalls`: how often ranges that this trainer had been given were taken back from it, since work was lost.
    """

    range: int
    begun: BegunRange | None = None
    recalls: int = 0


@dataclass(frozen=True, slots=True)
class RangesEnded:
    reason: str
    finished: bool  # the run is; otherwise the data is used up
    unsettled: bool = False  # push what was trained since the last push, then ask again: no inner step follows


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint is what the run waits for: go on where it stood, and look after `steps`."""

    reason: str
    steps: int


@dataclass(frozen=True, slots=True)
class Healed:
    """The checkpoint is older than what the run knows of this cluster: pull."""

    reason: str


@dataclass(frozen=True, slots=True)
class Noted:
    """The agent took note of it."""


@dataclass(frozen=True, slots=True)
class Halt:
    """End the transfer: the master has dropped it."""

    reason: str


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Raise this: the class's name in dips.errors, and the message."""

    error: str
    message: str


Question = (
    Attach
    | ManifestSent
    | PushWanted
    | PushMoved
    | PullWanted
    | PullMoved
    | TransferProgress
    | RangeWanted
    | SaveWanted
    | Resume
    | Detach
)
Notice = Stepped | TokensCounted | LossReported | Remarked
Answer = (
    AskAgain
    | Attached
    | ManifestWanted
    | PushNow
    | PullNow
    | TrainOn
    | Over
    | RangeGiven
    | RangesEnded
    | Saved
    | Resumed
    | Healed
    | Noted
    | Halt
    | ErrorReply
)
Message = Question | Notice | Answer
