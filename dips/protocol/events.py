"""What happened: every input of the Coordinator, in the past tense, frozen.

`req` names the question that a Reply must answer; it means nothing else. Requests of clusters and slaves carry the
same fields as their messages in `protos/dips/v1`, so that one table-driven converter (wire/messages.py) serves all.
"""

from __future__ import annotations

from math import inf

from dips.dataclass import dataclass
from dips.errors import DipsError
from dips.ids import PullId, PushId, VersionId
from dips.protocol.data import BegunRange
from dips.protocol.options import TunedOption

# The messages between master, slaves and clusters. A peer says at Join and Register which number it speaks; one from
# before the numbers says 0. Raised by every change after which an older peer would be misunderstood.
PROTOCOL = 1
LOCAL_CALLER = "local (insecure)"  # who asks where there are no certificates

# ---- from slaves ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """What a slave's mirror holds, and why it holds no more."""

    held: tuple[VersionId, ...]  # copied whole, oldest round first
    reason: str = ""  # why the last try failed; "" while all goes well
    unknown: bool = False  # this process could not list it yet, so `held` says nothing


@dataclass(frozen=True, slots=True)
class SlaveRegistered:
    """A slave names itself and what it holds; repeated until the answer is Hold."""

    req: int
    slave: str
    nonce: str  # of the process: a retried Register gets the same incarnation
    run: str
    address: str  # host:port of its control server
    lanes: tuple[str, ...]  # host:port of each data lane
    term_seen: int
    memory: VersionId | None  # θ, m in memory
    prepared: VersionId | None  # θ′, m′ in memory beside them
    complete: tuple[VersionId, ...]  # verified snapshots on its disk, `prepared` ones too
    slots: int
    reason: str  # why it is not holding what was ordered ("" if nothing failed)
    key: str = ""  # public, of the data lanes; empty: they are plain
    protocol: int = PROTOCOL
    mirror: MirrorReport | None = None  # None: its directory has no mirror
    manifest_digest: str = ""  # of the manifest that it knows; "": none
    rival_heard_s: float = inf  # since the name's present incarnation was heard: the Judge fills it in
    unseeded: bool = False  # its layers of v0@r0 are not on its disk
    former_nonce: str = ""  # of the process that held its directory before; "": none that is known


@dataclass(frozen=True, slots=True)
class MirrorReported:
    """What a slave's mirror holds has changed, or how the mirror does; heartbeats repeat it."""

    slave: str
    sinc: int
    report: MirrorReport


@dataclass(frozen=True, slots=True)
class PushStaged:
    """All ranges of a push lie on this slave, checked; reported once, and in every heartbeat until Measure or Drop."""

    slave: str
    sinc: int
    push: PushId
    nbytes: int


@dataclass(frozen=True, slots=True)
class PushRefused:
    """A slave dropped a push on its own account: ranges overlap or leave gaps, or it stalled."""

    slave: str
    sinc: int
    push: PushId
    reason: str


@dataclass(frozen=True, slots=True)
class OrderAnswered:
    """A slave carried out an order."""

    slave: str
    sinc: int
    number: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class OrderFailed:
    """A slave refused an order with this error; UnresponsiveSlave: it did not answer before the deadline."""

    slave: str
    sinc: int
    number: int
    error: type[DipsError]
    reason: str

    @property
    def refusal(self) -> str:
        return f"{self.error.__name__}: {self.reason}"


# ---- from clusters -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClusterJoined:
    req: int
    cluster: str
    nonce: str
    run: str
    manifest_digest: str
    config_digest: str
    protocol: int = PROTOCOL
    former: int = 0  # the incarnation that this agent was last, or that its directory remembers; 0: none
    take_over: bool = False  # an operator said that an incarnation that lives is to be fenced
    frozen_digest: str = ""  # of a sample of the parameters that are not trained; "": there are none, or not known
    rival_heard_s: float = 0.0  # since the name's present incarnation was heard: the Judge fills it in


@dataclass(frozen=True, slots=True)
class ManifestOffered:
    """After ManifestWanted: to hear where the models differ. The master compares beside its loop; no step's event."""

    cluster: str
    digest: str
    packed: bytes  # JSON: wire/packed_manifest.py


@dataclass(frozen=True, slots=True)
class PushRequested:
    req: int
    push: PushId
    base: VersionId
    ranks: int  # speaking ranks, each of which says HELLO to every slave
    tokens: int = 0  # that it would bring if it were frozen now
    step_s: float = 0.0  # time of an inner step; 0 while unknown
    keys: tuple[str, ...] = ()  # public, of each rank; slaves whose lanes are plain need none
    idle_s: float = 0.0  # open but not moving: until ranks that train on look at it, and between fragments


@dataclass(frozen=True, slots=True)
class PushFinished:
    """The ranks have DONE from every slave; asks for a place in the window."""

    req: int
    push: PushId
    tokens: int  # consumed since the last settled freeze
    inner_steps: int
    ranges: tuple[int, ...]  # data ranges used up since the last settled freeze
    loss: float  # mean of its inner steps; NaN: none was given
    begun: BegunRange | None = None  # the range after those, as far as it was trained by then


@dataclass(frozen=True, slots=True)
class PushAborted:
    """The cluster gives up a push that is not committed."""

    req: int
    push: PushId
    reason: str
    diverged: bool = False  # its parameters were not finite, which its ranks saw before anything travelled


@dataclass(frozen=True, slots=True)
class RoundAwaited:
    req: int
    push: PushId


@dataclass(frozen=True, slots=True)
class PullRequested:
    req: int
    pull: PullId
    ranks: int
    version: VersionId | None = None  # an older one that the disks keep; None: the head
    keys: tuple[str, ...] = ()  # public, of each rank, as in PushRequested


@dataclass(frozen=True, slots=True)
class PullFinished:
    """The ranks agreed: `installed` on all, or on none."""

    req: int
    pull: PullId
    installed: bool


@dataclass(frozen=True, slots=True)
class ProbeAsked:
    """A cluster is about to measure the way to the lanes, and shows this key there."""

    req: int
    cluster: str
    key: str


@dataclass(frozen=True, slots=True)
class RangesRequested:
    """Asks for data ranges; `seq` rises with each question, so a repetition gets the same ranges.

    `claims` names the ranges of a checkpoint that is taken up again: those of them that are free are leased.
    """

    req: int
    cluster: str
    inc: int
    seq: int
    count: int
    claims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterLeft:
    """Goes gracefully; `tokens_consumed` by this incarnation in all: what no push brought in will never be pushed."""

    req: int
    cluster: str
    inc: int
    tokens_consumed: int
    reason: str = ""  # why; empty: it is done


# ---- from an operator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadmissionAsked:
    """Lift this cluster's quarantine."""

    req: int
    cluster: str


@dataclass(frozen=True, slots=True)
class TargetChange:
    """One of the fields of Targets, and its new value."""

    key: str
    value: float


@dataclass(frozen=True, slots=True)
class ExtensionAsked:
    """Change how far the run goes; what is not named stays."""

    req: int
    changes: tuple[TargetChange, ...]


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take this slave out of service when nothing is open on it."""

    req: int
    slave: str


@dataclass(frozen=True, slots=True)
class TuningAsked:
    """Change options while the run goes on; what is not named stays."""

    req: int
    changes: tuple[TunedOption, ...]


@dataclass(frozen=True, slots=True)
class QuarantineAsked:
    """Gate what this cluster pushes until it is readmitted."""

    req: int
    cluster: str
    reason: str


@dataclass(frozen=True, slots=True)
class SeedAsked:
    """Let this process bring v0@r0 to the slaves that lack it; repeated until they have it."""

    req: int
    seeder: str  # nonce of the process
    genesis: tuple[str, ...]  # of the model that it would bring
    given_up: int = 0  # seq of the push that broke at its end; 0: none
    keys: tuple[str, ...] = ()  # public, of its only rank, as in PushRequested


@dataclass(frozen=True, slots=True)
class RollbackAsked:
    """Make this older version the head again; repeated until it is."""

    req: int
    version: VersionId


OperatorRequest = (
    ReadmissionAsked | ExtensionAsked | DrainAsked | TuningAsked | QuarantineAsked | SeedAsked | RollbackAsked
)


@dataclass(frozen=True, slots=True)
class OperatorAsked:
    """Somebody asked something of an operator: the ledger keeps who, and what came of it."""

    req: int  # the request's own means nothing
    caller: str  # a certificate's name, or LOCAL_CALLER
    wall: float  # Unix seconds at the shell
    request: OperatorRequest


@dataclass(frozen=True, slots=True)
class OperatorReported:
    """The shell refused an operator's call, or changed something by itself: the ledger keeps it."""

    caller: str
    action: str
    arguments: str
    outcome: str
    refused: bool
    wall: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class RunProposed:
    """The model that a run without a ledger is to begin with, as `dips init` would measure it; never a step's event."""

    packed: bytes  # the manifest's JSON: wire/packed_manifest.py
    digest: str  # of the JSON
    genesis: tuple[str, ...]  # xxh3-128 of each layer, in hexadecimal
    genesis_norms: tuple[float, ...]


# ---- from the judge of liveness (membership.py) and from the runtime -----------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerChanged:
    """The trainer of a cluster started (`moving`), hung or died (not moving)."""

    cluster: str
    inc: int
    moving: bool
    reason: str


@dataclass(frozen=True, slots=True)
class BandwidthMeasured:
    """A cluster's transfers move so many bytes/s, by its heartbeats; reported when it has changed."""

    cluster: str
    inc: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ClusterSilent:
    cluster: str
    inc: int
    silent_s: float
    tokens_consumed: int  # by this incarnation in all, as of its last heartbeat
    tokens_lost: int = 0  # of those, lost with dead trainers


@dataclass(frozen=True, slots=True)
class ClusterExpelled:
    """The shell found that a cluster may take part no more: its certificate is revoked, or no list names it."""

    cluster: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokensReported:
    """What an incarnation has done, by its heartbeats: reported before the next one begins, and for an open push."""

    cluster: str
    inc: int
    tokens_consumed: int
    tokens_lost: int = 0  # of those, lost with dead trainers
    inner_steps: int = 0  # since its agent's start


@dataclass(frozen=True, slots=True)
class TransferAwaited:
    """A cluster says, now and then, that its ranks come to this push or pull or move it, and its trainer is well."""

    cluster: str
    inc: int
    seq: int


@dataclass(frozen=True, slots=True)
class SlaveSilent:
    slave: str
    sinc: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class Blind:
    """The master's loop did not run for `gap_s`: every deadline moves by it."""

    gap_s: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """A deadline may have passed."""


# ---- answers of slaves to orders -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """The order is carried out; there is no result."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of each of the slave's layers in manifest order, for d = θ − θ_j; `finite` is False if any element is not."""

    layer_sq: tuple[float, ...]  # Σd²
    finite: bool
    layer_dot: tuple[float, ...] = ()  # Σd·acc, acc being what is folded so far; empty or 0: nothing is
    digest: int = 0  # of θ_j, below 2⁵³; those of all slaves add up modulo that to the push's


@dataclass(frozen=True, slots=True)
class Folded:
    """Σ acc² of each of the slave's layers in manifest order, after the fold; 0 of buffers."""

    acc_sq: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """As a push that is θ′ would be measured, so that others can be held against it."""

    version: VersionId
    layer_sq: tuple[float, ...] = ()  # Σ(θ − θ′)² of each of the slave's layers; empty: unknown
    digest: int = 0  # of θ′; 0: unknown


@dataclass(frozen=True, slots=True)
class Persisted:
    version: VersionId
    digest: str  # of the snapshot's manifest


Answer = Done | Measured | Folded | Prepared | Persisted

Event = (
    SlaveRegistered
    | MirrorReported
    | PushStaged
    | PushRefused
    | OrderAnswered
    | OrderFailed
    | ClusterJoined
    | PushRequested
    | PushFinished
    | PushAborted
    | RoundAwaited
    | PullRequested
    | PullFinished
    | ProbeAsked
    | RangesRequested
    | ClusterLeft
    | ReadmissionAsked
    | DrainAsked
    | ExtensionAsked
    | TuningAsked
    | QuarantineAsked
    | OperatorAsked
    | OperatorReported
    | ClusterExpelled
    | SeedAsked
    | RollbackAsked
    | TrainerChanged
    | BandwidthMeasured
    | ClusterSilent
    | TokensReported
    | TransferAwaited
    | SlaveSilent
    | Blind
    | Ticked
)
