"""The states of rounds, clusters and slaves, and the three tables of legal moves (docs/architecture.md#states)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from dips.errors import LocalProtocolError


class RoundState(StrEnum):
    """States of a round. The ledger row is the edge PERSISTING → IDLE."""

    IDLE = "idle"
    COLLECTING = "collecting"
    APPLYING = "applying"
    PERSISTING = "persisting"


class ClusterState(StrEnum):
    JOINING = "joining"
    PULLING = "pulling"
    TRAINING = "training"
    IDLE = "idle"
    PUSHING = "pushing"
    COMMITTED = "committed"
    GONE = "gone"


class SlaveState(StrEnum):
    AWAITED = "awaited"
    RESTORING = "restoring"
    READY = "ready"
    LOST = "lost"
    DRAINING = "draining"


ROUND_MOVES: Mapping[RoundState, frozenset[RoundState]] = {
    RoundState.IDLE: frozenset({RoundState.COLLECTING}),
    RoundState.COLLECTING: frozenset({RoundState.APPLYING, RoundState.IDLE}),
    RoundState.APPLYING: frozenset({RoundState.PERSISTING, RoundState.IDLE}),
    RoundState.PERSISTING: frozenset({RoundState.IDLE}),
}

C = ClusterState
CLUSTER_MOVES: Mapping[ClusterState, frozenset[ClusterState]] = {
    C.JOINING: frozenset({C.PULLING, C.GONE}),
    C.PULLING: frozenset({C.TRAINING, C.IDLE, C.GONE}),
    C.TRAINING: frozenset({C.IDLE, C.PUSHING, C.PULLING, C.GONE}),
    C.IDLE: frozenset({C.TRAINING, C.PULLING, C.GONE}),
    C.PUSHING: frozenset({C.COMMITTED, C.TRAINING, C.IDLE, C.GONE}),
    C.COMMITTED: frozenset({C.PULLING, C.TRAINING, C.IDLE, C.GONE}),
    C.GONE: frozenset(),
}

S = SlaveState
SLAVE_MOVES: Mapping[SlaveState, frozenset[SlaveState]] = {
    S.AWAITED: frozenset({S.RESTORING, S.READY, S.LOST}),
    S.RESTORING: frozenset({S.READY, S.LOST}),
    S.READY: frozenset({S.LOST, S.DRAINING, S.RESTORING}),
    S.LOST: frozenset({S.READY, S.RESTORING}),
    S.DRAINING: frozenset({S.LOST}),
}

State = TypeVar("State", RoundState, ClusterState, SlaveState)


def check_move(table: Mapping[State, frozenset[State]], old: State, new: State, what: str) -> State:
    """Return `new` if it may follow `old`; raise LocalProtocolError otherwise."""
    if new not in table[old]:
        raise LocalProtocolError(
            f"{what}: {old} may not become {new}; legal: {', '.join(sorted(table[old])) or 'nothing'}"
        )
    return new
