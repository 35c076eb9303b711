"""Effects: every output of the Coordinator, named in the imperative, frozen.

Effects of one step leave in their order. No effect behind a Record leaves before that record is durable.
"""

from __future__ import annotations

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.errors import DipsError
from dips.ids import PullId, PushId, VersionId
from dips.outer_step import Factors, OuterStep
from dips.protocol.data import BegunRange
from dips.protocol.enums import OutcomeKind
from dips.protocol.options import Targets, TunedOption
from dips.protocol.records import Record
from dips.protocol.releases import added

# ---- orders to slaves ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenPush:
    """Reserve a slot for a push; legal above the cluster's tombstone."""

    push: PushId
    ranks: int  # speaking ranks
    deadline_s: float
    codec: Codec = Codec.FP32  # encoding of its chunks
    base: VersionId | None = None  # the version that fills the slot before the first difference arrives; None for fp32
    first: int = 0  # rank r is worker first + r; no other moving push has the same worker numbers
    keys: tuple[str, ...] = ()  # public key of each rank; empty: the lanes are not encrypted
    seed: bool = False  # the push brings a model: legal for a slave that holds no version


@dataclass(frozen=True, slots=True)
class Reorder:
    """Ask the ranks of an open push in another order, since another push has joined; legal any time. Idempotent."""

    push: PushId
    places: tuple[int, ...]  # place of each rank in this slave's line, over all pushes; the smallest is asked first


@dataclass(frozen=True, slots=True)
class DropPush:
    """Free the slot of a push and set the tombstone."""

    push: PushId
    reason: str


@dataclass(frozen=True, slots=True)
class KeepSeed:
    """Compare the staged push of a seed with the digests and write it to the disk: as v0@r0, or as `version`, with m of
    the newest snapshot.
    """

    push: PushId
    version: VersionId | None = added(2, None)  # None: v0@r0, whose digests the slave knows
    digests: tuple[str, ...] = added(2, ())  # of θ of each of the slave's layers


@dataclass(frozen=True, slots=True)
class Measure:
    round: int
    push: PushId
    version: VersionId


@dataclass(frozen=True, slots=True)
class Fold:
    round: int
    push: PushId
    weight: float  # T_j / T_first; 1.0 for the first, whose buffer becomes acc
    layer_weights: Factors = ()  # of each of the slave's layers but buffers, if not `weight`; one holds for all


@dataclass(frozen=True, slots=True)
class Apply:
    round: int
    version: VersionId
    step: OuterStep  # with the scale of each of the slave's layers, or one for all
    reserve: bool = True  # reserve disk space for the snapshot before computing


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the snapshot of the prepared version (`durability: commit`) or of the served one."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Commit:
    """Flip to `version`, whose ledger row exists, and open these pulls on it."""

    version: VersionId
    pulls: tuple[PullId, ...]
    keys: tuple[RankKeys, ...] = ()  # keys of the ranks of each pull; empty: the lanes are not encrypted


@dataclass(frozen=True, slots=True)
class RankKeys:
    """Public keys of the ranks of one transfer, in the order of ranks."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop acc, θ′, m′ and the folded pushes of a round without a row; keep unfolded and moving pushes."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenPull:
    pull: PullId
    version: VersionId
    keys: tuple[str, ...] = ()  # public key of each rank; empty: the lanes are not encrypted
    momentum: bool = added(2, False)  # serve m of the version's snapshot, not θ; answered by Pinned


@dataclass(frozen=True, slots=True)
class ClosePull:
    pull: PullId


@dataclass(frozen=True, slots=True)
class Retire:
    """Delete these snapshots; never one of the newest two that are complete on all slaves."""

    versions: tuple[VersionId, ...]


@dataclass(frozen=True, slots=True)
class AdmitProbe:
    """Answer PROBEs with this key for a while: a cluster is about to measure the path to the lanes."""

    cluster: str  # the cluster that asked; one probe key each
    key: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer, to show that orders reach a slave again that was unresponsive."""


OrderBody = (
    OpenPush
    | Reorder
    | DropPush
    | KeepSeed
    | Measure
    | Fold
    | Apply
    | Persist
    | Commit
    | Abort
    | OpenPull
    | ClosePull
    | Retire
    | AdmitProbe
    | Ping
)


def name_subject(body: OrderBody) -> dict[str, str]:
    """Return the push, pull(s), round and version that an order names, each as text: for timelines."""
    named = {key: getattr(body, key, None) for key in ("push", "pull", "round", "version")}
    named["pulls"] = ",".join(map(str, body.pulls)) if isinstance(body, Commit) and body.pulls else None
    return {key: str(value) for key, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Order:
    """Send `body` to a slave; its answer comes back as OrderAnswered or OrderFailed with the same number.

    A number is never used twice in a term; a repeated order keeps its number, and the slave repeats its answer.
    """

    slave: str
    sinc: int
    term: int
    number: int
    body: OrderBody
    deadline_s: float


# ---- what a registering slave is to do next -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """Serve: the slave holds the head."""


@dataclass(frozen=True, slots=True)
class LoadVersion:
    """Load `version` from a snapshot (v0@r0: from the initial model) and register again."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class CommitVersion:
    """Flip to the prepared version, which exists, and register again."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class AbortVersion:
    """Drop the prepared version, which never came to exist, and register again."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class RegisterLater:
    """Register again after `retry_after_s`: no order is possible now, for the given reason."""

    retry_after_s: float
    reason: str
    look_for: tuple[VersionId, ...] = ()  # to read first, or to fetch from the mirror: others have nothing newer


SlaveOrder = Hold | LoadVersion | CommitVersion | AbortVersion | RegisterLater


# ---- answers to clusters and slaves --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    term: int
    sinc: int
    order: SlaveOrder
    head: VersionId
    layers: tuple[int, ...]  # indices into the manifest
    genesis: tuple[str, ...]  # xxh3-128 of each of these layers at v0@r0, in hexadecimal
    manifest: str  # JSON; empty if the slave has it already
    place: int = 0  # this slave's place among all of the run, by which ranks and slaves take turns
    slaves: int = 1  # number of slaves in the run


@dataclass(frozen=True, slots=True)
class Joined:
    term: int
    inc: int
    head: VersionId
    progress: Progress
    ranges: tuple[int, ...]  # still leased to this cluster, in order
    accounted: int = 0  # tokens of the former incarnation: accepted, gated, lost, or in its last push
    settled: int = 0  # pushes of all incarnations, as clusters.py counts them for checkpoints
    begun: tuple[BegunRange, ...] = ()  # ranges that are settled in part, of `ranges`


@dataclass(frozen=True, slots=True)
class ManifestWanted:
    """The cluster's model differs from the run's: send the manifest itself; the answer will name the differences."""

    digest: str  # digest of the run's manifest


@dataclass(frozen=True, slots=True)
class Progress:
    """Accepted tokens and the run's target, from which every cluster computes its learning-rate schedule."""

    tokens: int
    tokens_target: int  # 0 if the run has no token target
    finished: VersionId | None  # the last version of a finished run


@dataclass(frozen=True, slots=True)
class SlaveAddress:
    name: str
    sinc: int
    lanes: tuple[str, ...]
    layers: tuple[int, ...]
    key: str = ""  # public key of its lanes; empty: they are not encrypted
    digests: tuple[str, ...] = added(2, ())  # in the grant of a pull of m: of θ and of m of each layer


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to move a push, or a pull whose `version` is pinned on every slave."""

    version: VersionId  # pull: the pinned version; push: the present head, for information
    slaves: tuple[SlaveAddress, ...]
    deadline_s: float
    codec: Codec = Codec.FP32  # of a push, as in OpenPush; for a pull the slaves decide
    base: VersionId | None = None  # push with a lossy codec: the version that its differences refer to
    first: int = 0  # rank r is worker first + r: its turns come after those of ranks of other transfers


@dataclass(frozen=True, slots=True)
class Pending:
    """Not yet: ask again. The reason names what is waited for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Not now: train on, and ask again after `retry_after_s` at a boundary of inner steps."""

    retry_after_s: float
    reason: str
    place: int = 0  # place in the queue for a slot, from 1; 0: not in the queue
    waiting: int = 0  # clusters in that queue


@dataclass(frozen=True, slots=True)
class Dropped:
    """The push or pull is over and changed nothing; its progress goes into the next one, with the next seq."""

    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The push has a place in a window; it outlives its cluster, and ends with its round."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on a push; `pull` is the grant of the pull with the same seq, if that is open."""

    kind: OutcomeKind
    version: VersionId | None  # accepted: the version that contains it; gated: the head
    reason: str
    pull: Grant | None
    progress: Progress
    update_s: float = 0.0  # from the close of its window to the flip, for people; the rest of the wait was the window


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over; `version` is the final model, which may be pulled."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Ranges:
    """Data ranges leased to the cluster; `exhausted` if none is free and no other cluster holds any.

    No ranges and not exhausted: the cluster gets more only after it has settled some that it holds.
    """

    ranges: tuple[int, ...]
    exhausted: bool
    begun: tuple[BegunRange, ...] = ()  # those of `ranges` that are settled in part


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The request was carried out, or there was nothing to do."""


@dataclass(frozen=True, slots=True)
class Extended:
    """The run's new targets; `resumed` is the version at which it had been finished, None if it was not."""

    targets: Targets
    resumed: VersionId | None


@dataclass(frozen=True, slots=True)
class Tuned:
    """All options that were ever changed by `dips set`, with their present values."""

    changes: tuple[TunedOption, ...]


@dataclass(frozen=True, slots=True)
class SeedGranted:
    """Permission to send v0@r0 to these slaves, as the push of this name."""

    push: PushId
    grant: Grant


@dataclass(frozen=True, slots=True)
class RebalancePlanned:
    """Layers of a version, which the host of a slave-to-be copies."""

    version: VersionId
    layers: tuple[int, ...]
    sinc: int  # the owner's incarnation in the manifest of the copy


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed: raise `error(message)` at the caller."""

    error: type[DipsError]
    message: str


Result = (
    Registered
    | Joined
    | ManifestWanted
    | Grant
    | Pending
    | Refused
    | Dropped
    | Committed
    | Outcome
    | Finished
    | Ranges
    | Acknowledged
    | Extended
    | Tuned
    | SeedGranted
    | RebalancePlanned
    | Failed
)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to the question `req`."""

    req: int
    result: Result


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log and the timeline; `kind` is a stable word, `fields` are details for people."""

    kind: str
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process: a later master exists, or the ledger is older than what a slave has seen."""

    code: int
    reason: str


Effect = Order | Record | Reply | Note | Exit
