"""All enums that decisions depend on, and the tables of legal moves of their states (docs/architecture.md#states)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from dips.errors import LocalProtocolError

# ---- enums ----------------------------------------------------------------------------------------------------------
# All enums that decisions depend on; states and their legal moves stand below.
#
# On the wire, in the ledger and in the journal a member is written as its value; a value from outside is converted
# where it is read, or refused there.


# ---- the model -----------------------------------------------------------------------------------------------------


class LayerUnit(StrEnum):
    """`shared.layers`: which parameters form one layer of the manifest."""

    BLOCK = "block"  # a numbered block, `layers.3`, with all modules in it
    MODULE = "module"  # a module, `layers.3.attention.wq`


# ---- rounds and pushes ---------------------------------------------------------------------------------------------


class WindowRule(StrEnum):
    """`timing.window`: when a window is longer than `window_s`; see round.py."""

    FIXED = "fixed"  # never
    ADAPTIVE = "adaptive"  # while clusters are due soon, by the times of their earlier pushes


class OutcomeKind(StrEnum):
    """The outcome of one push in its round."""

    ACCEPTED = "accepted"
    GATED = "gated"
    SKIPPED = "skipped"


class RoundResult(StrEnum):
    """The end of a round."""

    APPLIED = "applied"  # it made a version
    UNCHANGED = "unchanged"  # all of its pushes were gated
    SKIPPED = "skipped"  # it broke; progress goes back to the clusters


class FanoutKind(StrEnum):
    """The step that follows when all slaves have answered an order: see coordinator.CONTINUATIONS."""

    OPEN_PUSH = "open_push"
    OPEN_PULL = "open_pull"
    MEASURE = "measure"
    FOLD = "fold"
    APPLY = "apply"
    PERSIST = "persist"
    PERSIST_LATE = "persist_late"  # the head's snapshot, written after its commit
    COMMIT = "commit"
    PING = "ping"
    OPEN_SEED = "open_seed"
    KEEP_SEED = "keep_seed"
    STANDALONE = "standalone"  # nothing follows


SEED_ORDERS = frozenset({FanoutKind.OPEN_SEED, FanoutKind.KEEP_SEED})


class DurabilityState(StrEnum):
    """State of the run's snapshots."""

    DURABLE = "durable"
    DEGRADED = "degraded"  # versions are announced before they have a snapshot
    STOPPED = "stopped"  # no more rounds


# ---- peers ---------------------------------------------------------------------------------------------------------


class Role(StrEnum):
    CLUSTER = "cluster"
    SLAVE = "slave"


class ClusterStanding(StrEnum):
    """Standing of a cluster's incarnation at this master."""

    LIVE = "live"
    GONE = "gone"  # its lease ran out: join again
    FENCED = "fenced"  # a newer incarnation exists: exit


class ClusterCause(StrEnum):
    """The cause of a cluster's state, as a word for programs; the state's `reason` says the same in a sentence."""

    JOINED = "joined"
    RECALLED = "recalled"  # from the ledger, by a master that has just started
    PULLS = "pulls"
    AWAITS_PULL = "awaits_pull"  # its push is settled; the cluster must ask for its pull
    TRAINS = "trains"
    FOLLOWS = "follows"  # it only pulls, and has all of the version that its reason names
    ASKS_PUSH = "asks_push"
    AWAITS_SLOT = "awaits_slot"
    OPENS_PUSH = "opens_push"
    PUSHES = "pushes"
    COMMITTED = "committed"
    GATED = "gated"
    SKIPPED = "skipped"
    PUSH_DROPPED = "push_dropped"
    PULL_ENDED = "pull_ended"  # the pull ended before its version was installed
    STALLED = "stalled"  # its trainer died or hangs
    LEFT = "left"  # it ended its work as planned
    ENDED = "ended"  # its incarnation ended before this master started
    GAVE_UP = "gave_up"  # it left and named a reason
    SILENT = "silent"
    FENCED = "fenced"
    EXPELLED = "expelled"


class SlaveCause(StrEnum):
    """The cause of a slave's state, as a word for programs; the state's `reason` says the same in a sentence."""

    UNREGISTERED = "unregistered"
    SERVES = "serves"
    LOADS = "loads"  # it was ordered to load, commit or abort a version
    AWAITS = "awaits"  # it must register again, after the event that `reason` names
    LACKS_HEAD = "lacks_head"  # the head's snapshot is not on its disk
    OFFERS = "offers"  # the master asks which versions it holds, before a rollback
    DRAINED = "drained"
    REGISTERS = "registers"  # as a new process, or again
    SILENT = "silent"
    UNRESPONSIVE = "unresponsive"
    REFUSED = "refused"  # it refused to commit a version for which it was prepared


class Severity(StrEnum):
    """How urgently a state needs an operator."""

    GOOD = "good"
    PLAIN = "plain"
    ATTENTION = "attention"
    BROKEN = "broken"  # no version can be made


class RemarkSubject(StrEnum):
    """The subject of a remark, which a cluster's agent sends in its heartbeats."""

    CRASH = "crash"  # the training command crashed and is started again
    STEPS = "steps"  # the trainer takes no inner steps
    TOKENS = "tokens"  # the trainer reports no tokens
    GATED = "gated"
    RANGES = "ranges"  # the cluster waits for data ranges
    SCRIPT = "script"  # a notice of the training script
    INSIDE = "inside"  # a planned pipeline changed its gear or plan, or a sync of replicas corrected them
    CERTIFICATE = "certificate"  # a renewed certificate cannot be used
    END = "end"  # the training command ended without an accepted push


class TrainerState(StrEnum):
    """State of a cluster's trainer, from its heartbeat."""

    STARTING = "starting"
    TRAINING = "training"
    DEAD = "dead"


class Activity(StrEnum):
    """Present activity of a trainer, for people."""

    INNER = "inner"
    PUSH = "push"
    WINDOW = "window"
    PULL = "pull"
    IDLE = "idle"


# ---- options -------------------------------------------------------------------------------------------------------


class DurabilityMode(StrEnum):
    COMMIT = "commit"  # a version is on every disk before it exists
    ASYNC = "async"  # it is written while the next is made


class PersistFailurePolicy(StrEnum):
    """`on_persist_failure`: what to do after two failed snapshots in a row."""

    DEGRADE = "degrade"  # go on, not durable
    STOP = "stop"  # no more rounds


class RequeuePolicy(StrEnum):
    """`data.requeue`: what to do with the data ranges of versions that were rolled back."""

    NONE = "none"  # clusters still carry that work
    UNDONE = "undone"  # they are leased again


class DivergencePolicy(StrEnum):
    """The action for a training job whose model is no longer finite."""

    RESET = "reset"  # it pulls the head and drops its optimizer's state
    RESTART = "restart"  # it is started again, and loads its last checkpoint
    STOP = "stop"  # it ends


class MergeRule(StrEnum):
    """`outer.merge`: how the pushes of a round become one pseudo-gradient."""

    MEAN = "mean"
    RDA = "rda"  # directions and lengths averaged apart
    RDA_PAPER = "rda-paper"  # so, with weights tokens²/steps
    EDIT = "edit"  # softmax(−G/√steps)
    EDIT_PAPER = "edit-paper"  # softmax(−G)


class WeightRule(StrEnum):
    """`outer.weights`: the weight of a push among those of its round."""

    TOKENS = "tokens"
    UNIFORM = "uniform"


class StepRule(StrEnum):
    """`outer.step`: the coefficients of the outer step."""

    NESTEROV = "nesterov"
    SGD = "sgd"
    SHARE = "share"


class Difference(StrEnum):
    """Lasting differences of a cluster from the others; shown, and not gated (gates/)."""

    LOSS = "loss"  # its loss is usually far above the others'
    DIRECTION = "direction"  # its pushes have less in common with the others' than those have with each other


class GateName(StrEnum):
    """Names of the gates in `penalty.gates`: see gates/."""

    DIPS = "dips"
    DIPS_PAPER = "dips-paper"
    EDIT = "edit"
    DIRECTION = "direction"
    LOSS = "loss"
    REPLAY = "replay"


# ---- moves ----------------------------------------------------------------------------------------------------------


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
