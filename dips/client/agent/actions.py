"""The actions that the agent's core orders its shell to do: small frozen values, returned in the order of execution."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from dips.client.agent.account import PastIncarnation
from dips.dataclass import dataclass
from dips.errors import DipsError
from dips.protocol.heartbeats import ClusterHeartbeat


class Channel(StrEnum):
    """A channel of questions to the master: each has at most one open question, and a new one replaces it."""

    SYNC = "sync"
    RANGES = "ranges"


@dataclass(frozen=True, slots=True)
class AskMaster:
    """Send `event` to the master once, after `delay_s`; cancel the open or planned question of the same channel.

    The reply goes to `on_reply`, a failure to `on_error`; the core decides whether to ask again.
    """

    channel: Channel
    number: int  # the same for each repetition of a question
    event: object
    delay_s: float


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Send this heartbeat now; the answer goes to `on_heartbeat_reply`, a failure to `on_heartbeat_error`."""

    heartbeat: ClusterHeartbeat
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SaveIncarnation:
    """Save the state that the next agent needs if this one dies, before any later action is done."""

    past: PastIncarnation


@dataclass(frozen=True, slots=True)
class RecordMark:
    """Write a mark to the timeline and the log."""

    kind: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StopTrainer:
    """Stop the trainer and exit with `code`, since continuing cannot help."""

    code: int
    reason: str
    error: type[DipsError] | None = None  # None: our bug


Action = AskMaster | SendHeartbeat | SaveIncarnation | RecordMark | StopTrainer
Actions = list[Action]

# The incarnation is saved at these marks, besides each heartbeat. At the end of a push this includes the progress that
# may be settled from now on, so that the next agent never reports too few tokens as missing.
SAVED_AT = frozenset({"joined", "push_end"})
