"""The words between the agent and rank 0 of its trainer, and how they lie on the line between them.

Rank 0 asks and the agent answers, at once or after at most `poll_s` with Wait; then rank 0 asks the same question, with
the same number, again. A notice has no answer. Every message names its attempt (one life of the trainer, given by the
agent in Welcome), so that what an older life says changes nothing.

On the line: a 4-byte big-endian length, then a msgpack map of the message's fields with its class name as `kind`.
Knows no socket and no clock.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from dips.errors import LocalProtocolError, RemoteProtocolError
from dips.protocol.effects import Grant

MOST_BYTES = 1 << 20  # of one message; the largest is Attach, with the manifest of the model
LENGTH = struct.Struct(">I")

# ---- questions of rank 0 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """A trainer has begun; the first word on a connection."""

    life: int  # DIPS_ATTEMPT: which start of the trainer by the agent; 0: somebody else started it
    restart: int  # torchrun's own count of restarts, on rank 0's host
    process: str  # a name that no other process of the job has or had
    manifest: str  # JSON
    push_ranks: int  # ranks that hold something to push
    pull_ranks: int  # ranks that hold something to pull


@dataclass(frozen=True, slots=True)
class PushWanted:
    """The ranks look whether a push is due; `demanded`: the training script says that it is."""

    attempt: int
    number: int
    demanded: bool = False
    at_once: bool = False  # answer now, with Wait if need be: the ranks train meanwhile


@dataclass(frozen=True, slots=True)
class PushMoved:
    """All ranks heard DONE from every slave, or one of them did not."""

    attempt: int
    number: int
    seq: int
    ok: bool
    reason: str
    nbytes: int
    at_once: bool = False  # answer now, with Wait if need be: the ranks train meanwhile


@dataclass(frozen=True, slots=True)
class PullWanted:
    """The head is wanted: a trainer that begins has no parameters of the run."""

    attempt: int
    number: int
    at_once: bool = False  # answer now, with Wait if need be: the ranks train meanwhile


@dataclass(frozen=True, slots=True)
class PullMoved:
    """The ranks agreed: installed on all, or on none."""

    attempt: int
    number: int
    seq: int
    installed: bool
    reason: str
    nbytes: int
    torn: bool = False  # some layers are installed and others are not: the model is good for nothing but another pull
    at_once: bool = False  # answer now, with Wait if need be: the ranks train meanwhile
    merged: bool = False  # what was trained since the last push was frozen was kept


@dataclass(frozen=True, slots=True)
class RangeWanted:
    """The next data range is wanted; `count` rises by one with each, and says that the one before is used up."""

    attempt: int
    count: int


@dataclass(frozen=True, slots=True)
class Saved:
    """What the agent gives to a checkpoint of its cluster; answers SaveWanted."""

    cluster: str
    base: str  # v@r that the trainer works on
    settled: int  # pushes of this cluster that were accepted or gated, in all its lives
    pending: bool  # a push or pull was out
    tokens: int  # since the last push was frozen
    inner_steps: int
    ranges: tuple[int, ...]  # used up since then
    loss_sum: float
    losses: int
    ahead: tuple[int, ...]  # leased and not used up, in order; the first may be half trained
    since_push: int  # inner steps, for the pace


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
class Bye:
    """The trainer is done with the outer loop."""

    attempt: int


# ---- notices of rank 0 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stepped:
    """One inner step is done."""

    attempt: int
    tokens: int  # of the whole cluster, in this step
    loss: float | None  # None: not said, or not finite
    finite: bool = True


@dataclass(frozen=True, slots=True)
class LossHeard:
    """What another rank said of the losses since the last look: rank 0 of a pipeline computes none."""

    attempt: int
    loss_sum: float
    losses: int  # inner steps whose loss was said and finite
    finite: bool = True


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far rank 0 is with the present transfer; answered Heard, or Halt if it leads nowhere any more."""

    attempt: int
    nbytes: int
    total: int


# ---- answers of the agent --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Not yet; the reason says what is waited for. A trainer that trains meanwhile asks again after `steps`."""

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
    accepted: int = 0  # seq of the last push of this life whose Outcome was that: it settles what lossy pushes owe


@dataclass(frozen=True, slots=True)
class PullNow:
    """Receive `grant.version`, and install it on all ranks or on none.

    `merge`: what was trained since the last push was frozen is kept: θ_local ← θ_version + (θ_local − θ_pushed); unless
    that is not finite on some rank, which PullMoved says.
    """

    inc: int
    seq: int
    grant: Grant
    progress: float
    accepted: int = 0  # as in PushNow
    merge: bool = False


@dataclass(frozen=True, slots=True)
class TrainOn:
    """Take `steps` inner steps, then look again."""

    reason: str
    steps: int
    progress: float


@dataclass(frozen=True, slots=True)
class Over:
    """The run is finished."""

    reason: str
    progress: float


@dataclass(frozen=True, slots=True)
class RangeGiven:
    range: int


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
class Heard:
    """Noted."""


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
    | PushWanted
    | PushMoved
    | PullWanted
    | PullMoved
    | TransferProgress
    | RangeWanted
    | SaveWanted
    | Resume
    | Bye
)
Notice = Stepped | LossHeard
Answer = (
    AskAgain
    | Attached
    | PushNow
    | PullNow
    | TrainOn
    | Over
    | RangeGiven
    | RangesEnded
    | Saved
    | Resumed
    | Healed
    | Heard
    | Halt
    | ErrorReply
)
Message = Question | Notice | Answer

MESSAGES: dict[str, type[Message]] = {
    cls.__name__: cls for cls in (*get_args(Question), *get_args(Notice), *get_args(Answer))
}


def encode(message: Message) -> bytes:
    """Spell a message, with its length in front; raise LocalProtocolError if it is too long."""
    body: bytes = msgpack.packb({"kind": type(message).__name__, **dataclasses.asdict(message)})
    if len(body) > MOST_BYTES:
        raise LocalProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes, at most {MOST_BYTES} can travel to or from the agent"
        )
    return LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Read the length in front of a message; raise RemoteProtocolError if it claims too much."""
    length: int = LENGTH.unpack(head)[0]
    if length > MOST_BYTES:
        raise RemoteProtocolError(f"a local message claims {length} bytes, at most {MOST_BYTES} were expected")
    return length


def decode(body: bytes) -> Message:
    """Read a message's body; raise RemoteProtocolError on anything that `encode` did not write."""
    try:
        fields = msgpack.unpackb(body)
        kind = fields.pop("kind")
        message: Message = _build(MESSAGES[kind], fields)
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"not a local message: {error!r} in {body[:80]!r}") from error
    return message


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _build(cls: Any, fields: Any) -> Any:
    hints = _hints(cls)
    if set(fields) != set(hints):
        raise ValueError(f"{cls.__name__} has {sorted(hints)}, got {sorted(fields)}")
    return cls(**{name: _read(hint, fields[name]) for name, hint in hints.items()})


def _read(hint: Any, value: Any) -> Any:
    """Turn what msgpack gives into what the annotation names; raise TypeError if it is something else."""
    if get_origin(hint) in (Union, UnionType):
        options = [h for h in get_args(hint) if h is not NoneType]
        return None if value is None else _read(options[0], value)
    if get_origin(hint) is tuple:
        return tuple(_read(get_args(hint)[0], item) for item in value)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value)
    if issubclass(hint, StrEnum):
        return hint(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"expected {hint.__name__}, got {value!r}")
    return value
