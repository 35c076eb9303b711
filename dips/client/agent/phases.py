"""The phases of a cluster's outer step, with the activity shown and the cause of a trainer's standstill in each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from dips.protocol.enums import Activity


class SyncPhase(StrEnum):
    """The phase of the present push or pull."""

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
    UNSURE = "unsure whether this incarnation is over"


# The activity that heartbeats report and `dips status` shows; in other phases the trainer does not wait.
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

# The cause (tally.CAUSES) under which a wait in each phase is counted.
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
