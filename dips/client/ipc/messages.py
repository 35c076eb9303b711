"""The messages between the agent and rank 0 of its training job, and their encoding: a 4-byte big-endian length, then a
msgpack map.
"""

from __future__ import annotations

import struct
from typing import Any, get_args

import msgspec

from dips.dataclass import dataclass
from dips.errors import LocalProtocolError, RemoteProtocolError
from dips.protocol.data import BegunRange
from dips.protocol.effects import Grant, ManifestWanted
from dips.protocol.enums import DivergencePolicy

# ---- messages -------------------------------------------------------------------------------------------------------
# Rank 0 asks; the agent answers at once, or after at most `poll_s` with AskAgain: then the question is repeated. A
# notice has no answer. Messages carry their attempt (given in Attached): those of an older one change nothing.


@dataclass(frozen=True, slots=True)
class PushResult:
    """The result of a push of this cluster."""

    inc: int
    seq: int
    kind: str  # accepted, gated, skipped or dropped
    reason: str


@dataclass(frozen=True, slots=True)
class PlayedStage:
    """How one stage of a planned pipeline played a step: seconds, mean of its ranks, which add up to the step."""

    seconds: dict[str, float]  # by computation
    idle: dict[str, float]  # by what was waited for
    peak_bytes: dict[str, int]  # by category, on the rank with the most


# ---- questions of rank 0 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """Announces that an attempt has begun; the first message on a connection."""

    launch: int  # DIPS_ATTEMPT: number of the agent's launch of the training command; 0: others started it
    restart: int  # torchrun's count of restarts on rank 0's host
    process: str  # unique name of this OuterLoop among all processes that the job has or had
    manifest_digest: str
    push_ranks: int  # ranks that hold something to push
    pull_ranks: int  # ranks that hold something to pull
    # Keys of the cluster file by which both go; it may have changed since the agent read it: the ranks' count.
    overlap: bool
    fragments: int
    on_divergence: DivergencePolicy
    keys: tuple[str, ...] = ()  # public keys of the ranks that move bytes, for the lanes
    frozen_digest: str = ""  # digest of a sample of the frozen parameters; "": there are none, or it is unknown


@dataclass(frozen=True, slots=True)
class ManifestSent:
    """Carries the model's manifest, after ManifestWanted; answered as Attach is."""

    process: str  # as in Attach
    packed: bytes  # see packed_manifest.py; empty: it is too large to be sent


@dataclass(frozen=True, slots=True)
class PushWanted:
    """Asks whether a push is due; `demanded`: the training script asks for one."""

    attempt: int
    number: int
    demanded: bool = False
    at_once: bool = False  # answer now, with AskAgain if need be: the ranks train meanwhile


@dataclass(frozen=True, slots=True)
class PushMoved:
    """Reports the end of a push: all ranks received DONE from every slave (`ok`), or one did not."""

    attempt: int
    number: int
    seq: int
    ok: bool
    reason: str
    nbytes: int
    at_once: bool = False  # answer now, with AskAgain if need be: the ranks train meanwhile
    diverged: bool = False  # the model is not finite on some rank: nothing was sent


@dataclass(frozen=True, slots=True)
class PullWanted:
    """Asks for a pull of the head: a trainer that begins has no parameters of the run."""

    attempt: int
    number: int
    at_once: bool = False  # answer now, with AskAgain if need be: the ranks train meanwhile


@dataclass(frozen=True, slots=True)
class PullMoved:
    """Reports the end of a pull: installed on all ranks, or on none."""

    attempt: int
    number: int
    seq: int
    installed: bool
    reason: str
    nbytes: int
    torn: bool = False  # some layers are merged and others are not: the model is useless until another pull
    at_once: bool = False  # answer now, with AskAgain if need be: the ranks train meanwhile
    merged: bool = False  # the training since the last freeze was kept


@dataclass(frozen=True, slots=True)
class RangeWanted:
    """Asks for the next data range; `count` rises by one with each range, and uses up the former ranges.

    `left`: ranges that are not used up, since they have samples left; None: the script does not report them.
    """

    attempt: int
    count: int
    left: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """The agent's part of a cluster's checkpoint; answers SaveWanted."""

    cluster: str
    base: str  # v@r that is being trained on
    settled: int  # pushes of this cluster that were accepted or gated, in all its incarnations
    pending: bool  # a push or pull was in flight, or a pull was to replace the model: it cannot be resumed
    tokens: int  # since the last push was frozen
    inner_steps: int
    ranges: tuple[int, ...]  # used up since the last push was frozen
    loss_sum: float
    losses: int
    ahead: tuple[int, ...]  # leased and not used up, in order; the first may be partly trained
    since_push: int  # inner steps since the last push, for the pace
    begun: tuple[BegunRange, ...] = ()  # the first ahead as trained, then settled parts of `ranges` and of it


@dataclass(frozen=True, slots=True)
class SaveWanted:
    """Asks for the agent's part of a checkpoint that the training script saves."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Asks to resume from a checkpoint that the training script has loaded."""

    attempt: int
    saved: Saved


@dataclass(frozen=True, slots=True)
class Detach:
    """Announces that the trainer closes the outer loop."""

    attempt: int


# ---- notices of rank 0 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stepped:
    """Reports one inner step, or several fast ones (rank/agent_client.py)."""

    attempt: int
    tokens: int  # of the whole cluster in these steps, as far as rank 0 knows; TokensCounted reports the rest
    loss: float | None  # mean of the losses that were passed and finite; None: there is none
    finite: bool = True  # whether all passed losses were finite
    left: tuple[int, ...] | None = None  # as in RangeWanted, after these steps
    begun: BegunRange | None = None  # the first of `left`, if a part of it is trained
    steps: int = 1
    losses: int = 1  # number of losses in the mean
    span_s: float = 0.0  # from the end of the first step to the end of the last
    ago_s: float = 0.0  # from the end of the last step to the sending of this message


@dataclass(frozen=True, slots=True)
class TokensCounted:
    """Reports tokens of steps since the last poll that were unknown when the steps were reported, as other ranks'
    tokens.
    """

    attempt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LossReported:
    """Reports losses of another rank since the last poll: rank 0 of a pipeline computes none."""

    attempt: int
    loss_sum: float
    losses: int  # inner steps whose loss was passed and finite
    finite: bool = True


@dataclass(frozen=True, slots=True)
class Remarked:
    """Reports a remark on the script for the operator, with its remedy."""

    attempt: int
    text: str


@dataclass(frozen=True, slots=True)
class PipelineReported:
    """Reports how the last step of a planned pipeline inside the cluster was played; every few seconds at most."""

    attempt: int
    gear: int  # pieces of each micro-batch of the plan
    step_s: float
    idle: float  # share of it in which a device computed nothing, mean of all ranks
    stages: tuple[PlayedStage, ...]


@dataclass(frozen=True, slots=True)
class InsideChanged:
    """Reports a change inside the cluster, and why: of a planned pipeline, or of a mesh's replicas."""

    attempt: int
    what: str  # "gear", "plan"; "sync" of replicas, "rollback" of layers, "replaced": a replica that was not finite
    why: str
    restarts: bool = False  # the ranks end now, for which the training command is started again: it is no crash


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """Reports rank 0's progress in the present transfer; answered by Noted, or by Halt if the transfer is void."""

    attempt: int
    nbytes: int
    total: int
    idle_s: float = 0.0  # seconds since rank 0 has moved all its bytes


# ---- answers of the agent --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskAgain:
    """No answer yet; `reason` says what is waited for. A trainer that trains meanwhile asks again after `steps`."""

    reason: str
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Attached:
    attempt: int
    progress: float  # accepted tokens over the run's; 0 if the run has no token target


@dataclass(frozen=True, slots=True)
class PushNow:
    """Orders the ranks to freeze the model and move their pieces."""

    inc: int
    seq: int
    grant: Grant
    accepted: int = 0  # seq of this incarnation's last accepted push, which settles the error feedback
    interval: int = 0  # inner steps between two fragments


@dataclass(frozen=True, slots=True)
class PullNow:
    """Orders the ranks to pull `grant.version`, and to install it on all ranks or on none.

    `merge`: keep the training since the last freeze, θ_local ← θ_version + (θ_local − θ_pushed), unless that is not
    finite on some rank, which PullMoved reports.
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
    """Orders the ranks to take `steps` inner steps and ask again."""

    reason: str
    steps: int
    progress: float
    result: PushResult | None = None  # of the newest push that was settled
    recalls: int = 0  # as in RangeGiven
    given_up: bool = False  # the push that the script demanded has not begun or failed, and is no longer waited for


@dataclass(frozen=True, slots=True)
class Over:
    """Says that the run is finished."""

    reason: str
    progress: float
    result: PushResult | None = None  # of the newest push that was settled


@dataclass(frozen=True, slots=True)
class RangeGiven:
    """Gives the next range; its first samples were trained already if `begun` is set.

    `recalls`: how often ranges were recalled from this trainer because work was lost.
    """

    range: int
    begun: BegunRange | None = None
    recalls: int = 0


@dataclass(frozen=True, slots=True)
class RangesEnded:
    reason: str
    finished: bool  # whether the run is finished; otherwise the data is used up
    unsettled: bool = False  # push the progress since the last push, then ask again without an inner step


@dataclass(frozen=True, slots=True)
class Resumed:
    """Accepts a checkpoint: continue from it, and ask again after `steps`."""

    reason: str
    steps: int


@dataclass(frozen=True, slots=True)
class Healed:
    """Refuses a checkpoint that is older than the run's knowledge of this cluster: pull instead."""

    reason: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Acknowledges a message."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Orders the ranks to end the transfer: the master has dropped it."""

    reason: str


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error to be raised: the name of its class in dips.errors, and the message."""

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
Notice = Stepped | TokensCounted | LossReported | Remarked | PipelineReported | InsideChanged
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


# ---- encoding -------------------------------------------------------------------------------------------------------
# The encoding of messages between agent and rank 0: a 4-byte big-endian length, then kind and fields in msgpack.
#
# The kind is the name of the message's class, the fields are a map. A message has one encoding: what is read is encoded
# again and compared, so that a field that is missing, unknown or given twice is refused, in nested classes too. This
# file has no socket and no clock.


MOST_BYTES = 1 << 20  # in one message; the largest is ManifestSent, sent if the model is not the run's
LENGTH = struct.Struct(">I")

MESSAGES: dict[str, type[Message]] = {
    cls.__name__: cls for cls in (*get_args(Question), *get_args(Notice), *get_args(Answer))
}
_DECODERS = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in MESSAGES.items()}
_HEAD = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_encode: Any = msgspec.msgpack.Encoder().encode


def encode_message(message: Message) -> bytes:
    """Encode a message with its length in front. Raises LocalProtocolError if it is too long, or a field has a wrong
    type.
    """
    kind = type(message).__name__
    try:
        exact = _DECODERS[kind].decode(_encode(message))  # an int in a field of floats becomes a float
    except (KeyError, TypeError, ValueError) as error:
        raise LocalProtocolError(
            f"expected a message of messages.py with its types, got {message!r}: {error}"
        ) from error
    body: bytes = _encode((kind, exact))
    if len(body) > MOST_BYTES:
        raise LocalProtocolError(
            f"{kind} takes {len(body)} bytes, at most {MOST_BYTES} can travel to or from the agent"
        )
    return LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Decode the length in front of a message. Raises RemoteProtocolError if it exceeds the limit."""
    length: int = LENGTH.unpack(head)[0]
    if length > MOST_BYTES:
        raise RemoteProtocolError(f"a local message claims {length} bytes, at most {MOST_BYTES} were expected")
    return length


def decode_message(body: bytes) -> Message:
    """Decode a message's body. Raises RemoteProtocolError for anything that `encode_message` did not write."""
    try:
        kind, fields = _HEAD.decode(body)
        message = _DECODERS[kind].decode(fields)
        if _encode((kind, message)) != body:
            raise ValueError(f"expected each field of {kind} once and no other; do agent and ranks run the same Di-PS?")
    except (KeyError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not a local message: {error!r} in {body[:80]!r}") from error
    return message
