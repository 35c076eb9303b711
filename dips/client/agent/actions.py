"""What the core orders its shell to do: each action is a small frozen fact, returned in the order of execution."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from dips.client.agent.account import PastIncarnation
from dips.dataclass import dataclass
from dips.errors import DipsError
from dips.protocol.heartbeats import ClusterHeartbeat


class Channel(StrEnum):
    """At most one question is out in each; a later one takes the place of an older one."""

    SYNC = "sync"
    RANGES = "ranges"


@dataclass(frozen=True, slots=True)
class AskMaster:
    """Ask the master `event` once, after `delay_s`; give up what was asked, or is to be asked, in the same channel.

    The reply goes to `on_reply`, a failure to `on_error`; asking again is the core's business.
    """

    channel: Channel
    number: int  # the same for each repetition of a question
    event: object
    delay_s: float


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Send this now; its answer goes to `on_heartbeat_reply`, a failure to `on_heartbeat_error`."""

    heartbeat: ClusterHeartbeat
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SaveIncarnation:
    """Write down what the next agent must know if this one dies, before anything that follows is done."""

    past: PastIncarnation


@dataclass(frozen=True, slots=True)
class RecordMark:
    """Write to the timeline and the log."""

    kind: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StopTrainer:
    """End the trainer and leave with `code`: going on cannot help."""

    code: int
    reason: str
    error: type[DipsError] | None = None  # None: our bug


Action = AskMaster | SendHeartbeat | SaveIncarnation | RecordMark | StopTrainer
Actions = list[Action]

# At these marks the incarnation is saved, besides each heartbeat. At the end of a push: what may be settled from now on
# is in it, so that what the next agent reports as missing is never too little.
SAVED_AT = frozenset({"joined", "push_end"})
