"""What is to be done: every output of the Coordinator, in the imperative, frozen.

Effects of one step leave in their order. Nothing behind a Record leaves before that record is durable.
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

# ---- orders to slaves ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenPush:
    """Reserve a slot; legal above the cluster's tombstone."""

    push: PushId
    ranks: int  # that speak
    deadline_s: float
    codec: Codec = Codec.FP32  # what its chunks carry
    base: VersionId | None = None  # what the slot holds before the first difference; None for fp32
    first: int = 0  # rank r is worker first + r: no other push that moves has one of its numbers
    keys: tuple[str, ...] = ()  # public, of each rank; empty: the lanes are plain
    seed: bool = False  # it brings v0@r0: legal for a slave that holds no version


@dataclass(frozen=True, slots=True)
class Reorder:
    """Ask the ranks of an open push in another order: another push has joined; legal any time, harmless repeated."""

    push: PushId
    places: tuple[int, ...]  # of each rank in this slave's line, over all pushes; the smallest is asked first


@dataclass(frozen=True, slots=True)
class DropPush:
    """Free the slot and set the tombstone."""

    push: PushId
    reason: str


@dataclass(frozen=True, slots=True)
class KeepSeed:
    """Hold the staged push of a seed against the digests of v0@r0 and write it to the disk."""

    push: PushId


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
    layer_weights: Factors = ()  # of the slave's layers, buffers excepted, if not that; one number: of all of them


@dataclass(frozen=True, slots=True)
class Apply:
    round: int
    version: VersionId
    step: OuterStep  # with the scales of the slave's layers, or one of all of them
    reserve: bool = True  # the snapshot's room on the disk, before anything is computed


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the snapshot of what is prepared (`durability: commit`), or of what is served."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Commit:
    """Flip to `version`, whose ledger row exists, and open these pulls on it."""

    version: VersionId
    pulls: tuple[PullId, ...]
    keys: tuple[RankKeys, ...] = ()  # of the ranks of each pull; empty: the lanes are plain


@dataclass(frozen=True, slots=True)
class RankKeys:
    """Public keys of the ranks of one transfer, rank by rank."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop acc, θ′, m′ and the folded pushes of a round that has no row; keep unfolded and moving pushes."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenPull:
    pull: PullId
    version: VersionId
    keys: tuple[str, ...] = ()  # public, of each rank; empty: the lanes are plain


@dataclass(frozen=True, slots=True)
class ClosePull:
    pull: PullId


@dataclass(frozen=True, slots=True)
class Retire:
    """Delete these snapshots; never named while one of the newest two that are complete on all slaves."""

    versions: tuple[VersionId, ...]


@dataclass(frozen=True, slots=True)
class AdmitProbe:
    """Answer PROBEs of who shows this key, for a while: it is about to measure the way to the lanes."""

    cluster: str  # in whose name it was asked; one probe key each
    key: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer, so that a slave that was unresponsive shows that orders reach it again."""


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


# ---- what a slave that registers is to do next ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """You hold the head: serve."""


@dataclass(frozen=True, slots=True)
class LoadVersion:
    """Load `version` from your snapshot (v0@r0: from the initial model) and register again."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class CommitVersion:
    """What you prepared exists: flip to it and register again."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class AbortVersion:
    """What you prepared never came to be: drop it and register again."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class RegisterLater:
    """Nothing can be ordered now; the reason says why. Register again after `retry_after_s`."""

    retry_after_s: float
    reason: str
    look_for: tuple[VersionId, ...] = ()  # bring these back from the mirror before: others have nothing newer in common


SlaveOrder = Hold | LoadVersion | CommitVersion | AbortVersion | RegisterLater


# ---- answers to clusters and slaves --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    term: int
    sinc: int
    order: SlaveOrder
    head: VersionId
    layers: tuple[int, ...]  # indices into the manifest
    genesis: tuple[str, ...]  # xxh3-128 of each of those layers at v0@r0, in hexadecimal
    manifest: str  # JSON; empty if the slave knows it
    place: int = 0  # of this slave among all of the run: by it, ranks and slaves take turns
    slaves: int = 1  # of the run


@dataclass(frozen=True, slots=True)
class Joined:
    term: int
    inc: int
    head: VersionId
    progress: Progress
    ranges: tuple[int, ...]  # still leased to this cluster, in order
    accounted: int = 0  # tokens of the incarnation before: accepted, gated, written off, or with its last push
    settled: int = 0  # pushes of this cluster, accepted or gated, in all its incarnations; with one in a window
    begun: tuple[BegunRange, ...] = ()  # those of `ranges` that are settled in part


@dataclass(frozen=True, slots=True)
class ManifestWanted:
    """The cluster's model is not the run's: join again with the manifest itself, and hear where they differ."""

    digest: str  # of the run's


@dataclass(frozen=True, slots=True)
class Progress:
    """Accepted tokens over the run's: what drives every cluster's learning-rate schedule."""

    tokens: int
    tokens_target: int  # 0 if the run has no token target
    finished: VersionId | None  # the last version of a finished run


@dataclass(frozen=True, slots=True)
class SlaveAddress:
    name: str
    sinc: int
    lanes: tuple[str, ...]
    layers: tuple[int, ...]
    key: str = ""  # public, of its lanes; empty: they are plain


@dataclass(frozen=True, slots=True)
class Grant:
    """A push may move, or a pull of `version` is pinned everywhere."""

    version: VersionId  # pull: what is pinned; push: the head now (information only)
    slaves: tuple[SlaveAddress, ...]
    deadline_s: float
    codec: Codec = Codec.FP32  # push: what it carries, as in OpenPush; of pulls the slaves decide
    base: VersionId | None = None  # push in a lossy codec: what its differences are to
    first: int = 0  # rank r is worker first + r: so many ranks of other transfers walk before its own


@dataclass(frozen=True, slots=True)
class Pending:
    """Not yet; ask again. The reason says what is waited for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Not now: train on, ask again after `retry_after_s` at an inner-step boundary."""

    retry_after_s: float
    reason: str
    place: int = 0  # in the queue for a slot, the first is 1; 0: it does not wait in it
    waiting: int = 0  # clusters in that queue


@dataclass(frozen=True, slots=True)
class Dropped:
    """This push or pull is over and changed nothing; its progress goes to the next one, with the next seq."""

    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """This push has a place in a window; it survives its cluster, and dies with its round."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of a push's round; `pull` is the grant of the pull that bears the push's seq, if it is open."""

    kind: OutcomeKind
    version: VersionId | None  # accepted: the version that contains it; gated: the head
    reason: str
    pull: Grant | None
    progress: Progress
    update_s: float = 0.0  # from the close of its window to the flip; the rest of the wait was window. For people


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over; pull `version` if you want the final model."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Ranges:
    """Data ranges leased to the cluster; `exhausted` if none is left, in other leases neither.

    None, and not exhausted: it gets no more before ranges that it holds are settled.
    """

    ranges: tuple[int, ...]
    exhausted: bool
    begun: tuple[BegunRange, ...] = ()  # those of them that are settled in part


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The request was carried out, or there was nothing to do."""


@dataclass(frozen=True, slots=True)
class Extended:
    """The run has these targets now; it had been finished at `resumed`, and goes on."""

    targets: Targets
    resumed: VersionId | None


@dataclass(frozen=True, slots=True)
class Tuned:
    """Everything that was ever tuned, as it holds now."""

    changes: tuple[TunedOption, ...]


@dataclass(frozen=True, slots=True)
class SeedGranted:
    """These slaves take v0@r0 as the push of this name."""

    push: PushId
    grant: Grant


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is answered with an error; `raise error(message)` at the asker."""

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
    | Failed
)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer question `req`."""

    req: int
    result: Result


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the log and the timeline; `kind` is a stable word, `fields` are what a person wants beside it."""

    kind: str
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """Leave: a later master exists, or the ledger is older than what a slave has seen."""

    code: int
    reason: str


Effect = Order | Record | Reply | Note | Exit
