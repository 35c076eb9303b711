"""Events: every input of the Coordinator, named in the past tense, frozen.

`req` names the question that a Reply answers; it has no other meaning. Requests of clusters and slaves have the same
fields as their messages in `protos/dips/v1`, so that one table-driven converter (wire/messages.py) serves all.
"""

from __future__ import annotations

from math import inf

from dips.dataclass import dataclass
from dips.errors import DipsError
from dips.ids import PullId, PushId, VersionId
from dips.protocol.data import BegunRange
from dips.protocol.options import TunedOption
from dips.protocol.releases import OLDEST_PROTOCOL, PROTOCOL, added

LOCAL_CALLER = "local (insecure)"  # the caller where there are no certificates

# ---- from slaves ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """The versions that a slave's mirror holds, and why it holds no more."""

    held: tuple[VersionId, ...]  # completely copied, oldest round first
    reason: str = ""  # why the last try failed; "" while all goes well
    unknown: bool = False  # this process could not list it yet, so `held` says nothing


@dataclass(frozen=True, slots=True)
class SlaveRegistered:
    """A slave named itself and what it holds; repeated until the answer is Hold."""

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
    key: str = ""  # public key of the data lanes; empty: they are not encrypted
    protocol: int = OLDEST_PROTOCOL  # the oldest that it speaks; a peer from before the numbers sends 0
    mirror: MirrorReport | None = None  # None: its directory has no mirror
    manifest_digest: str = ""  # of the manifest that it knows; "": none
    rival_heard_s: float = inf  # since the name's present incarnation was heard: the Judge fills it in
    unseeded: bool = False  # its layers of v0@r0 are not on its disk
    former_nonce: str = ""  # of the process that held its directory before; "": none that is known
    unread: tuple[VersionId, ...] = ()  # older snapshots on its disk, which it has not verified
    newest_protocol: int = added(2, 0, PROTOCOL)  # that it speaks; 0: `protocol` is the only one


@dataclass(frozen=True, slots=True)
class MirrorReported:
    """The contents or the health of a slave's mirror changed; heartbeats repeat it."""

    slave: str
    sinc: int
    report: MirrorReport


@dataclass(frozen=True, slots=True)
class PushStaged:
    """All of a push is on this slave, verified; reported once, and in every heartbeat until Measure or DropPush."""

    slave: str
    sinc: int
    push: PushId
    nbytes: int


@dataclass(frozen=True, slots=True)
class PushRefused:
    """A slave dropped a push by itself: its ranges overlap or leave gaps, or it stalled."""

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
    protocol: int = OLDEST_PROTOCOL  # as in SlaveRegistered
    former: int = 0  # the last incarnation of this agent, or the one that its directory remembers; 0: none
    take_over: bool = False  # an operator allowed it to fence a live incarnation
    frozen_digest: str = ""  # of a sample of the frozen parameters; "": there are none, or unknown
    rival_heard_s: float = 0.0  # since the name's present incarnation was heard: the Judge fills it in
    newest_protocol: int = added(2, 0, PROTOCOL)  # as in SlaveRegistered


@dataclass(frozen=True, slots=True)
class ManifestOffered:
    """A cluster sent its manifest after ManifestWanted, so that the answer can name the differences. Not an event of
    Coordinator.step: the master compares outside its event loop.
    """

    cluster: str
    digest: str
    packed: bytes  # JSON: wire/packed_manifest.py


@dataclass(frozen=True, slots=True)
class PushRequested:
    req: int
    push: PushId
    base: VersionId
    ranks: int  # speaking ranks, each of which says HELLO to every slave
    tokens: int = 0  # tokens that it would bring if it were frozen now
    step_s: float = 0.0  # time of an inner step; 0 while unknown
    keys: tuple[str, ...] = ()  # public key of each rank; not needed where lanes are not encrypted
    idle_s: float = 0.0  # expected time open but not moving: until training ranks look at it, and between fragments


@dataclass(frozen=True, slots=True)
class PushFinished:
    """The ranks have DONE from every slave; the cluster asks for a place in the window."""

    req: int
    push: PushId
    tokens: int  # consumed since the last settled freeze
    inner_steps: int
    ranges: tuple[int, ...]  # data ranges finished since the last settled freeze
    loss: float  # mean over its inner steps; NaN: none was given
    begun: BegunRange | None = None  # the next range, as far as it was trained by then


@dataclass(frozen=True, slots=True)
class PushAborted:
    """The cluster gave up a push that is not committed."""

    req: int
    push: PushId
    reason: str
    diverged: bool = False  # its ranks found its parameters not finite before they sent anything


@dataclass(frozen=True, slots=True)
class RoundAwaited:
    req: int
    push: PushId


@dataclass(frozen=True, slots=True)
class PullRequested:
    req: int
    pull: PullId
    ranks: int
    version: VersionId | None = None  # an older version that the disks keep; None: the head
    keys: tuple[str, ...] = ()  # public, of each rank, as in PushRequested
    wall: float = 0.0  # seconds since 1970, for the audit: the shell fills it in
    momentum: bool = added(2, False)  # m of the version's snapshots, not θ; the grant has the digests of both


@dataclass(frozen=True, slots=True)
class PullFinished:
    """The ranks agreed: the pull is `installed` on all of them, or on none."""

    req: int
    pull: PullId
    installed: bool


@dataclass(frozen=True, slots=True)
class ProbeAsked:
    """A cluster is about to measure the path to the lanes, where it shows this key."""

    req: int
    cluster: str
    key: str


@dataclass(frozen=True, slots=True)
class RangesRequested:
    """A cluster asked for data ranges; `seq` rises with each request, so a repetition gets the same ranges.

    `claims` names the ranges of a checkpoint that is resumed: those of them that are free are leased.
    """

    req: int
    cluster: str
    inc: int
    seq: int
    count: int
    claims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterLeft:
    """A cluster left; tokens it consumed and did not push are lost."""

    req: int
    cluster: str
    inc: int
    tokens_consumed: int
    reason: str = ""  # why; empty: it is finished


# ---- from an operator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadmissionAsked:
    """An operator lifted this cluster's quarantine."""

    req: int
    cluster: str


@dataclass(frozen=True, slots=True)
class TargetChange:
    """A new value for one of the fields of Targets."""

    key: str
    value: float


@dataclass(frozen=True, slots=True)
class ExtensionAsked:
    """An operator changed how far the run goes; targets that are not named stay."""

    req: int
    changes: tuple[TargetChange, ...]


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator takes this slave out of service as soon as nothing is open on it."""

    req: int
    slave: str


@dataclass(frozen=True, slots=True)
class DrainAllAsked:
    """An operator takes all slaves that serve out of service together, for one outage."""

    req: int


@dataclass(frozen=True, slots=True)
class TuningAsked:
    """An operator changed options of the running run; options that are not named stay."""

    req: int
    changes: tuple[TunedOption, ...]


@dataclass(frozen=True, slots=True)
class QuarantineAsked:
    """An operator wants all pushes of this cluster gated until it is readmitted."""

    req: int
    cluster: str
    reason: str


@dataclass(frozen=True, slots=True)
class SeedAsked:
    """A process offered to send v0@r0 to the slaves that lack it; repeated until they have it."""

    req: int
    seeder: str  # nonce of the process
    genesis: tuple[str, ...]  # digests of the layers of its model
    given_up: int = 0  # seq of its push that failed at the end; 0: none
    keys: tuple[str, ...] = ()  # public, of its only rank, as in PushRequested


@dataclass(frozen=True, slots=True)
class RecoverAsked:
    """A process offered to send θ of a saved model, since a slave has lost the head; repeated until the version that it
    makes is the head.
    """

    req: int
    seeder: str  # nonce of the process
    digests: tuple[str, ...]  # of θ of each layer
    source: str  # the file's name, for the history
    given_up: int = 0  # as in SeedAsked
    keys: tuple[str, ...] = ()
    version: VersionId | None = None  # that its last grant was for


@dataclass(frozen=True, slots=True)
class RollbackAsked:
    """An operator makes this older version the head again; repeated until it is."""

    req: int
    version: VersionId


@dataclass(frozen=True, slots=True)
class FinaliseAsked:
    """An operator makes the run speak this protocol, after which no release from before it can take part."""

    req: int
    protocol: int


@dataclass(frozen=True, slots=True)
class RebalanceAsked:
    """The host of a slave-to-be moves the run's layers to these slaves; repeated until they are theirs."""

    req: int
    slave: str  # whose layers are copied there
    slaves: tuple[str, ...]  # all of the new placement
    version: VersionId | None = None  # that is staged there
    digest: str = ""  # of its manifest; empty: nothing is staged yet


OperatorRequest = (
    ReadmissionAsked
    | ExtensionAsked
    | DrainAsked
    | DrainAllAsked
    | TuningAsked
    | QuarantineAsked
    | SeedAsked
    | RecoverAsked
    | RollbackAsked
    | FinaliseAsked
    | RebalanceAsked
)


@dataclass(frozen=True, slots=True)
class OperatorAsked:
    """A caller sent an operator's request; the ledger records the caller and the outcome."""

    req: int  # replaces the request's own
    caller: str  # a certificate's name, or LOCAL_CALLER
    wall: float  # Unix seconds at the shell
    request: OperatorRequest


@dataclass(frozen=True, slots=True)
class OperatorReported:
    """The shell refused an operator's call, or changed something by itself; the ledger records it."""

    caller: str
    action: str
    arguments: str
    outcome: str
    refused: bool
    wall: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class RunProposed:
    """A process proposed the initial model of a run without a ledger, measured as by `dips init`. Not an event of
    Coordinator.step.
    """

    packed: bytes  # the manifest's JSON: wire/packed_manifest.py
    digest: str  # of the JSON
    genesis: tuple[str, ...]  # xxh3-128 of each layer, in hexadecimal
    genesis_norms: tuple[float, ...]


# ---- from the judge of liveness (membership.py) and from the runtime -----------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerChanged:
    """A cluster's trainer started (`moving`), hung or died (not moving)."""

    cluster: str
    inc: int
    moving: bool
    reason: str


@dataclass(frozen=True, slots=True)
class BandwidthMeasured:
    """The bandwidth of a cluster's transfers changed, by its heartbeats."""

    cluster: str
    inc: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ProtocolTold:
    """The newest protocol that a cluster speaks, by its heartbeats: a later master did not hear its Join."""

    cluster: str
    inc: int
    newest_protocol: int


@dataclass(frozen=True, slots=True)
class ClusterSilent:
    cluster: str
    inc: int
    silent_s: float
    tokens_consumed: int  # of this incarnation in all, as of its last heartbeat
    tokens_lost: int = 0  # part of them: lost with dead trainers


@dataclass(frozen=True, slots=True)
class ClusterExpelled:
    """A cluster may no longer take part: its certificate is revoked, or the list of clusters does not name it."""

    cluster: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokensReported:
    """The progress of an incarnation, by its heartbeats; reported before the next incarnation begins, and for an open
    push.
    """

    cluster: str
    inc: int
    tokens_consumed: int
    tokens_lost: int = 0  # part of them: lost with dead trainers
    inner_steps: int = 0  # since its agent's start


@dataclass(frozen=True, slots=True)
class TransferAwaited:
    """A cluster's ranks still prepare or move this push or pull, and its trainer works; reported now and then."""

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
    """The master's event loop did not run for `gap_s`, by which every deadline is shifted."""

    gap_s: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """A deadline may have passed."""


# ---- answers of slaves to orders -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """The order is carried out; there is no result."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """m of a snapshot is served: the digests of θ and of m of each of the slave's layers, in manifest order."""

    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of d = θ − θ_j for each of the slave's layers in manifest order; `finite` is False if any element is
    not.
    """

    layer_sq: tuple[float, ...]  # Σd²
    finite: bool
    layer_dot: tuple[float, ...] = ()  # Σd·acc, acc being the sum folded so far; empty or 0 if nothing is folded
    digest: int = 0  # of θ_j, below 2⁵³; the push's digest is the sum over all slaves modulo 2⁵³


@dataclass(frozen=True, slots=True)
class Folded:
    """Σ acc² of each of the slave's layers in manifest order, after the fold; 0 for buffers."""

    acc_sq: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """θ′ and m′ are computed; θ′ is measured like a push, so that pushes can be compared with it."""

    version: VersionId
    layer_sq: tuple[float, ...] = ()  # Σ(θ − θ′)² of each of the slave's layers; empty: unknown
    digest: int = 0  # of θ′; 0: unknown


@dataclass(frozen=True, slots=True)
class Persisted:
    version: VersionId
    digest: str  # of the snapshot's manifest


@dataclass(frozen=True, slots=True)
class ModelKept:
    """A recovered version is on the disk, with m of the slave's newest snapshot."""

    digest: str  # of its manifest
    momentum_of: VersionId | None  # None: there was none, and m is 0


Answer = Done | ModelKept | Measured | Folded | Prepared | Persisted | Pinned

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
    | DrainAllAsked
    | ExtensionAsked
    | TuningAsked
    | QuarantineAsked
    | OperatorAsked
    | OperatorReported
    | ClusterExpelled
    | SeedAsked
    | RecoverAsked
    | RollbackAsked
    | FinaliseAsked
    | TrainerChanged
    | BandwidthMeasured
    | ProtocolTold
    | ClusterSilent
    | TokensReported
    | TransferAwaited
    | SlaveSilent
    | Blind
    | Ticked
)
