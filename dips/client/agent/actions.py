"""The vocabulary of the agent's mind: who it is, the phases of a talk, and the deeds that it orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dips.protocol.enums import Activity


class SyncPhase(StrEnum):
    """Where the talk with the master stands."""

    UNJOINED = "unjoined"
    JOINING = "joining"
    RESTING = "resting"
    ASKING_PUSH = "asking for a push"
    PUSHING = "pushing"
    FINISHING = "finishing a push"
    AWAITING = "awaiting the outcome"
    ABORTING = "aborting a push"
    ASKING_PULL = "asking for a pull"
    PULLING = "pulling"
    CLOSING = "closing a pull"
    UNSURE = "unsure whether this life is over"


# What a person sees in status and heartbeats; phases that are not here do not hold up the trainer.
ACTIVITY: Mapping[SyncPhase, Activity] = {
    SyncPhase.JOINING: Activity.IDLE,
    SyncPhase.ASKING_PUSH: Activity.PUSH,
    SyncPhase.PUSHING: Activity.PUSH,
    SyncPhase.FINISHING: Activity.PUSH,
    SyncPhase.AWAITING: Activity.WINDOW,
    SyncPhase.ASKING_PULL: Activity.PULL,
    SyncPhase.PULLING: Activity.PULL,
    SyncPhase.CLOSING: Activity.PULL,
}


# Why a trainer that waits in a phase stands still (tally.CAUSES).
STANDSTILL: Mapping[SyncPhase, str] = {
    SyncPhase.UNJOINED: "join",
    SyncPhase.JOINING: "join",
    SyncPhase.RESTING: "join",
    SyncPhase.UNSURE: "join",
    SyncPhase.ASKING_PUSH: "slot",
    SyncPhase.PUSHING: "push",
    SyncPhase.FINISHING: "push",
    SyncPhase.ABORTING: "push",
    SyncPhase.AWAITING: "window",
    SyncPhase.ASKING_PULL: "pull",
    SyncPhase.PULLING: "pull",
    SyncPhase.CLOSING: "pull",
}


# Marks at which an agent leaves behind what its life has consumed (remembered.py), besides each beat. At the end of a
# push: what may be settled from now on is in it, so that what the next agent tells as missing is never too little.
KEPT_AT = frozenset({"joined", "push_end"})


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """Who this cluster is, and what it must agree on with the run."""

    run: str
    cluster: str
    config_digest: str


@dataclass(frozen=True, slots=True)
class AskMaster:
    """Ask the master `event` after `delay_s`; a later question of the same channel takes the place of an older one."""

    channel: str  # "talk" | "ranges"
    number: int  # to be handed back with the answer
    event: object
    delay_s: float


@dataclass(frozen=True, slots=True)
class RecordMark:
    """Tell the timeline and the log."""

    kind: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Beat now: the answer is needed."""


@dataclass(frozen=True, slots=True)
class StopTrainer:
    """End the trainer and leave with `code`: going on cannot help."""

    code: int
    reason: str


Action = AskMaster | RecordMark | SendHeartbeat | StopTrainer
