"""Records: the ledger's rows that the Coordinator writes, and the state from which a master starts.

The VersionCommitted row is the commit point of an outer step. Everything that it settles is in that one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable

from dips.dataclass import dataclass
from dips.ids import PushId, VersionId
from dips.outer_step import Factors, OuterStep
from dips.protocol.data import BegunRange, Intervals
from dips.protocol.enums import OutcomeKind, Role, RoundResult
from dips.protocol.options import Targets, TunedOption
from dips.protocol.placement import Placement
from dips.protocol.releases import PROTOCOL, added


@dataclass(frozen=True, slots=True)
class IncarnationGiven:
    role: Role
    name: str
    inc: int
    nonce: str
    frozen_digest: str = added(2, "")  # of a cluster's frozen parameters, as in ClusterJoined


@dataclass(frozen=True, slots=True)
class RoundReserved:
    round: int
    at: float


@dataclass(frozen=True, slots=True)
class FoldRow:
    """One accepted push, in the order of folding."""

    push: PushId
    base: VersionId
    tokens: int  # counted tokens: see rules.py
    inner_steps: int
    weight: float  # T_j / T_first, by which buffers are averaged
    norm: float  # G_j
    score: float  # E_j; 0 in a warm-up or when exempt
    loss: float | None  # mean of its inner steps; None: none was given
    ranges: tuple[int, ...]
    layer_weights: Factors = ()  # of each layer, as folded, if not `weight`; one holds for all


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    push: PushId
    kind: OutcomeKind
    reason: str
    tokens: int
    inner_steps: int
    norm: float
    score: float
    ranges: tuple[int, ...]
    begun: BegunRange | None = None  # the range after those, trained in part


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Statistics of one layer's norms over a cluster's pushes, for the gate `edit`."""

    n: int = 0
    mu: float = 0.0
    sigma: float = 0.0
    left_out_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class PenaltyRow:
    """A cluster's penalty statistics after the round; see penalty.py."""

    cluster: str
    n: int
    mu: float
    sigma: float
    last_norm: float
    warm_left: int
    gated_in_a_row: int
    quarantined: bool
    accepted: int
    reference: float = 0.0  # of the hard cap: a mean of accepted norms that rises slowly and survives new warm-ups
    steps: float = 0.0  # mean inner steps of accepted pushes, computed the same way
    broken: bool = False  # quarantined for a push that was not finite, until an operator readmits the cluster
    loss: float | None = None  # last reported, while the gate `loss` is on
    loss_shift: float = 0.0  # usual share by which it is above the others' median
    suspicion: float = 0.0  # how much its direction was out of line lately: see penalty_rows.accuse
    layers: tuple[LayerStatistics, ...] = ()  # in manifest order, while the gate `edit` is on
    losses: int = 0  # number of losses from which `loss_shift` was learned
    loss_rises: bool = False  # whether its last loss was far above the usual distance
    cosine: float = 0.0  # usual cosine with the sum of enough others, while the gate `direction` is on
    cosines: int = 0  # number of cosines from which it was learned
    tokens: tuple[int, ...] = ()  # counted tokens of its last accepted pushes, oldest first: see rules.py


@dataclass(frozen=True, slots=True)
class ScoreHistory:
    """The largest accepted score outside warm-ups (0: none) and ‖δ‖ of each of the last rounds, oldest first."""

    scores: tuple[float, ...]
    delta_norms: tuple[float, ...]
    digests: tuple[int, ...] = ()  # of the last accepted pushes and their versions, while the gate `replay` is on


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    """The commit point: the version exists if and only if this row does."""

    version: VersionId
    parent: VersionId
    durable: bool
    folds: tuple[FoldRow, ...]
    outcomes: tuple[OutcomeRow, ...]
    step: OuterStep  # as applied
    delta_norm: float  # ‖δ‖ of the merged pseudo-gradient, before clipping
    clipped: bool
    digests: tuple[tuple[str, str], ...]  # (slave, digest of its snapshot's manifest)
    penalty: tuple[PenaltyRow, ...]
    history: ScoreHistory
    at: float


@dataclass(frozen=True, slots=True)
class VersionDurable:
    """A version that was committed with `durable` false is now complete on every disk."""

    version: VersionId
    digests: tuple[tuple[str, str], ...]  # (slave, digest of its snapshot's manifest)
    at: float


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The head is an older version of the lineage; later versions are undone, and their names are not used again (row
    19).
    """

    head: VersionId
    undone: tuple[VersionId, ...]  # oldest first
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round that made no version."""

    round: int
    kind: RoundResult  # SKIPPED or UNCHANGED
    reason: str
    outcomes: tuple[OutcomeRow, ...]
    penalty: tuple[PenaltyRow, ...]  # empty for skipped
    at: float


@dataclass(frozen=True, slots=True)
class RangesLeased:
    cluster: str
    inc: int
    seq: int
    ranges: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClusterEnded:
    """The end of a cluster's incarnation: its unsettled ranges are free again, its unsettled tokens are lost.

    If the incarnation had committed a push (`open_seq`, `open_tokens`) that is still in a round, the round's row
    settles it. If the round leaves no row, because it is skipped before it has a number or ends with its master,
    the push's tokens are lost as well.
    """

    cluster: str
    inc: int
    reason: str
    tokens_lost: int
    at: float
    open_seq: int = 0  # 0: none was committed
    open_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ClusterReadmitted:
    """An operator lifted a quarantine: the cluster's new statistics."""

    penalty: PenaltyRow
    round: int  # the last reserved round
    at: float


@dataclass(frozen=True, slots=True)
class ClusterDiverged:
    """A cluster gave up a push that was not finite: its new statistics."""

    penalty: PenaltyRow
    round: int  # the last reserved round
    at: float


@dataclass(frozen=True, slots=True)
class VersionsRetired:
    """Snapshots that may be deleted; the row is written before any is deleted."""

    versions: tuple[VersionId, ...]


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """The commit point of `dips rebalance`: from `version` on, the layers are on these slaves."""

    version: VersionId
    placement: Placement
    digests: tuple[tuple[str, str], ...]  # (slave, digest of its snapshot's manifest); none for v0@r0


@dataclass(frozen=True, slots=True)
class RunFinished:
    version: VersionId
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RunExtended:
    """An operator changed how far the run goes; a run that was finished at `resumed` goes on."""

    targets: Targets
    resumed: VersionId | None
    at: float


@dataclass(frozen=True, slots=True)
class OptionsTuned:
    """An operator changed these options; options that are not named stay."""

    changes: tuple[TunedOption, ...]
    at: float


@dataclass(frozen=True, slots=True)
class ClusterQuarantined:
    """An operator excludes a cluster from the outer step; with an empty reason the exclusion ends."""

    cluster: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class OperatorActed:
    """An operator's request: the caller, the request and its outcome; operator.py bounds the texts."""

    caller: str
    action: str
    arguments: str
    outcome: str
    refused: bool
    wall: float  # Unix seconds at the shell that received the request
    passed_over: int = 0  # earlier requests that changed nothing and for which the budget had no row


@dataclass(frozen=True, slots=True)
class LedgerRestored:
    """A copy replaced a lost ledger, or an operator raised the counters of an old one.

    Names that were given after the copy was made, and are in no row, must not be given again.
    """

    source: str
    unknown_from: int  # first round that may have been used since the copy was made
    known_again: int  # first round after those; equal to `unknown_from` if there are none
    incarnations_above: int  # new incarnations are numbered above this


@dataclass(frozen=True, slots=True)
class VersionRecovered:
    """The version of the preceding VersionCommitted was made from a file by an operator (`dips recover`)."""

    version: VersionId
    source: str
    layers: tuple[str, ...]  # layers whose momentum was lost: 0


@dataclass(frozen=True, slots=True)
class VersionResult:
    """The result of the process that the master ran for a version (`master.on_version`); no decision depends on it."""

    version: VersionId
    ok: bool
    reason: str  # why not
    numbers: tuple[tuple[str, float], ...]  # finite
    seconds: float


@dataclass(frozen=True, slots=True)
class ProtocolRaised:
    """From here on the run speaks this protocol (`dips finalise`), and its ledger has the tables of it."""

    protocol: int
    at: float


Record = (
    IncarnationGiven
    | RoundReserved
    | VersionCommitted
    | VersionDurable
    | RolledBack
    | RoundEnded
    | RangesLeased
    | ClusterEnded
    | ClusterReadmitted
    | ClusterDiverged
    | VersionsRetired
    | Rebalanced
    | RunFinished
    | RunExtended
    | OptionsTuned
    | ClusterQuarantined
    | OperatorActed
    | LedgerRestored
    | VersionRecovered
    | VersionResult
    | ProtocolRaised
)


# ---- what a master starts from -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunRow:
    """Written once by `dips init`; `dips rebalance` replaces the placement, `dips set` the targets."""

    run: str
    config_digest: str
    manifest: str  # JSON
    placement: Placement
    genesis: tuple[str, ...]  # xxh3-128 of each layer's bytes at v0@r0
    genesis_norms: tuple[float, ...]  # ‖θ₀‖ of each layer
    removed: tuple[tuple[str, VersionId], ...] = ()  # former slaves, until the rebalance at this version
    targets: Targets | None = None  # as last changed by `dips set`; None: as in the run file
    protocol: int = added(2, 1, PROTOCOL)  # that the run speaks; raised by `dips finalise`


@dataclass(frozen=True, slots=True)
class VersionRow:
    version: VersionId
    parent: VersionId
    durable: bool
    tokens: int  # accepted by this version
    retired: bool
    shares: tuple[tuple[str, int, tuple[int, ...]], ...] = ()  # (cluster, tokens, data ranges) of each push in it


@dataclass(frozen=True, slots=True)
class PeerRow:
    """The newest incarnation of a cluster or slave; `ended` if it is over."""

    name: str
    inc: int
    nonce: str
    ended: bool
    tokens_settled: int = 0  # of a cluster's newest incarnation: accepted or gated
    tokens_accounted: int = 0  # of a cluster's newest ended incarnation: accepted, gated or lost
    frozen_digest: str = added(2, "")


@dataclass(frozen=True, slots=True)
class ClusterTotals:
    """The outcomes of one cluster in all rounds so far: numbers of pushes and of tokens."""

    cluster: str
    accepted: int = 0
    gated: int = 0
    skipped: int = 0
    tokens_accepted: int = 0
    tokens_gated: int = 0
    tokens_lost: int = 0
    undone: int = 0  # accepted by versions that were rolled back
    tokens_undone: int = 0
    lost: int = added(2, 0)  # committed by incarnations that ended before any round had settled them


def lies_in(number: int, spans: Iterable[tuple[int, int]]) -> bool:
    """Return whether a round lies in one of these spans [from, to), as those of `LedgerState.unknown_rounds`."""
    return any(low <= number < high for low, high in spans)


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The knowledge of a new master; `next_round` is above every reserved round."""

    row: RunRow
    term: int
    next_round: int
    versions: tuple[VersionRow, ...]  # the lineage of the head, oldest first, v0@r0 included
    clusters: tuple[PeerRow, ...]
    slaves: tuple[PeerRow, ...]
    outcomes: tuple[
        tuple[OutcomeRow, VersionId | None], ...
    ]  # the newest of each cluster, with its version if accepted
    penalty: tuple[PenaltyRow, ...]
    history: ScoreHistory
    leased: tuple[
        tuple[str, int, int, tuple[int, ...]], ...
    ]  # (cluster, inc, seq, ranges of that lease not yet settled), in order
    settled: Intervals  # ranges trained in the lineage, or gated
    finished: VersionId | None  # None again if that version was undone
    totals: tuple[ClusterTotals, ...] = ()
    rounds: tuple[tuple[str, int], ...] = ()  # ("applied" | "unchanged" | "skipped", number of rounds)
    undone: tuple[VersionRow, ...] = ()  # versions outside the lineage, by round
    undone_ranges: tuple[int, ...] = ()  # trained only by those versions, and not leased, ascending
    begun: tuple[BegunRange, ...] = ()  # ranges that are settled in part, ascending
    unknown_rounds: tuple[tuple[int, int], ...] = ()  # [from, to) of restored ledgers: used after the copy was made
    incarnations_above: int = 0  # of a restored ledger
    tuned: tuple[TunedOption, ...] = ()  # with the present values, in the order in which they were first tuned
    quarantined: tuple[tuple[str, str], ...] = ()  # (cluster, reason) by an operator
    parts: tuple[tuple[int, BegunRange], ...] = added(2, ())  # what a rollback may ask for: see RangeBook, in order
