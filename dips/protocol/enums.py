"""Every closed set of words that a decision may depend on, once; states and their legal moves stand in moves.py.

On the wire, in the ledger and in the journal each is its value; what arrives from outside becomes a member where it is
read, or is refused there.
"""

from __future__ import annotations

from enum import StrEnum

# ---- the model -----------------------------------------------------------------------------------------------------


class LayerUnit(StrEnum):
    """`shared.layers`: what one layer of the manifest holds the parameters of."""

    BLOCK = "block"  # a numbered block, `layers.3`, with all modules in it
    MODULE = "module"  # a module, `layers.3.attention.wq`


# ---- rounds and pushes ---------------------------------------------------------------------------------------------


class WindowRule(StrEnum):
    """`timing.window`: what makes a window longer than `window_s`; see window.py."""

    FIXED = "fixed"  # nothing
    ADAPTIVE = "adaptive"  # clusters that are due soon, by what was seen of their pushes


class OutcomeKind(StrEnum):
    """The outcome of one push in its round."""

    ACCEPTED = "accepted"
    GATED = "gated"
    SKIPPED = "skipped"


class RoundResult(StrEnum):
    """How a round ended."""

    APPLIED = "applied"  # it made a version
    UNCHANGED = "unchanged"  # all of its pushes were gated
    SKIPPED = "skipped"  # it broke; progress goes back to the clusters


class FanoutKind(StrEnum):
    """What follows when all slaves have answered an order: see coordinator.CONTINUATIONS."""

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


class DurabilityState(StrEnum):
    """How the run stands with its disks."""

    DURABLE = "durable"
    DEGRADED = "degraded"  # versions are announced without a snapshot
    STOPPED = "stopped"  # no more rounds


# ---- peers ---------------------------------------------------------------------------------------------------------


class Role(StrEnum):
    CLUSTER = "cluster"
    SLAVE = "slave"


class ClusterStanding(StrEnum):
    """What an incarnation of a cluster is to this master."""

    LIVE = "live"
    GONE = "gone"  # its lease ran out: join again
    FENCED = "fenced"  # a newer incarnation exists: exit


class ClusterCause(StrEnum):
    """Why a cluster is in its state: set beside the reason, which says the same to a person in words."""

    JOINED = "joined"
    RECALLED = "recalled"  # from the ledger, by a master that has just started
    PULLS = "pulls"
    AWAITS_PULL = "awaits_pull"  # its push is settled, and it is to ask for its pull
    TRAINS = "trains"
    ASKS_PUSH = "asks_push"
    AWAITS_SLOT = "awaits_slot"
    OPENS_PUSH = "opens_push"
    PUSHES = "pushes"
    COMMITTED = "committed"
    GATED = "gated"
    SKIPPED = "skipped"
    PUSH_DROPPED = "push_dropped"
    PULL_ENDED = "pull_ended"  # before it was installed
    STALLED = "stalled"  # its trainer died or hangs
    LEFT = "left"  # it is done
    ENDED = "ended"  # before this master started
    GAVE_UP = "gave_up"  # it left and said why
    SILENT = "silent"
    FENCED = "fenced"
    EXPELLED = "expelled"


class SlaveCause(StrEnum):
    """Why a slave is in its state, likewise."""

    UNREGISTERED = "unregistered"
    SERVES = "serves"
    LOADS = "loads"  # it was ordered to load, commit or abort a version
    AWAITS = "awaits"  # something must happen before it can be told what to do
    LACKS_HEAD = "lacks_head"  # what the head needs is not on its disk
    OFFERS = "offers"  # it is asked which versions it holds
    DRAINED = "drained"
    REGISTERS = "registers"  # as a new process, or again
    SILENT = "silent"
    UNRESPONSIVE = "unresponsive"
    REFUSED = "refused"  # it refused an order that it must be able to carry out


class Severity(StrEnum):
    """How much something asks of an operator."""

    GOOD = "good"
    PLAIN = "plain"
    ATTENTION = "attention"
    BROKEN = "broken"  # no version can be made


class RemarkSubject(StrEnum):
    """What a remark of a cluster's agent is about."""

    CRASH = "crash"  # the training command crashed and is started again
    STEPS = "steps"  # it takes no inner steps
    TOKENS = "tokens"  # it counts none
    GATED = "gated"
    RANGES = "ranges"  # it waits for data ranges
    SCRIPT = "script"  # the training script said something
    CERTIFICATE = "certificate"  # a renewed one is not used
    END = "end"  # it ended without one accepted push


class TrainerState(StrEnum):
    """A cluster's trainer, by its heartbeat."""

    STARTING = "starting"
    TRAINING = "training"
    DEAD = "dead"


class Activity(StrEnum):
    """What a trainer is busy with, as a person sees it."""

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
    """What follows after two failed snapshots in a row."""

    DEGRADE = "degrade"  # go on, not durable
    STOP = "stop"  # no more rounds


class RequeuePolicy(StrEnum):
    """What becomes of the data ranges of versions that were rolled back."""

    NONE = "none"  # clusters still carry that work
    UNDONE = "undone"  # they are leased again


class DivergencePolicy(StrEnum):
    """What becomes of a training job whose model is not finite any more."""

    RESET = "reset"  # it pulls the head and drops its optimizer's state
    RESTART = "restart"  # it is started again, and loads its last checkpoint
    STOP = "stop"  # it ends


class MergeRule(StrEnum):
    """How the pushes of a round become one pseudo-gradient."""

    MEAN = "mean"
    RDA = "rda"  # directions and lengths averaged apart
    EDIT = "edit"  # softmax(−G/√steps)
    EDIT_PAPER = "edit-paper"  # softmax(−G)


class WeightRule(StrEnum):
    """What a push weighs among those of its round."""

    TOKENS = "tokens"
    UNIFORM = "uniform"


class StepRule(StrEnum):
    """The numbers by which a round steps."""

    NESTEROV = "nesterov"
    SGD = "sgd"
    SHARE = "share"


class Difference(StrEnum):
    """In what a cluster has always been unlike the others: flagged, and no gate's concern (gates/)."""

    LOSS = "loss"  # it is usually far above theirs
    DIRECTION = "direction"  # its pushes have less in common with theirs than these have with each other


class GateName(StrEnum):
    """What `penalty.gates` lists: see gates/."""

    DIPS = "dips"
    DIPS_PAPER = "dips-paper"
    EDIT = "edit"
    DIRECTION = "direction"
    LOSS = "loss"
    REPLAY = "replay"
