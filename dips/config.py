"""Gathers every option: reads YAML, refuses unknown keys, hashes what all must agree on.

Two files. The *run file* (`dips.yaml`) belongs to the operator: master and slaves read it, `dips init` makes the run
from it. The *cluster file* (`cluster.yaml`) belongs to one training cluster. Both hold the section `shared`, inline or
as the path of a third file: what all must agree on, compared by digest at Join.
"""

from __future__ import annotations

import hashlib
import json
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dips.errors import ConfigError
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from dips.ids import check_name
from dips.protocol.enums import (
    AskOrder,
    DivergencePolicy,
    DurabilityMode,
    PersistFailurePolicy,
    PullCodec,
    PushCodec,
    RequeuePolicy,
)
from dips.protocol.options import (
    DataOptions,
    Options,
    OuterOptions,
    PenaltyOptions,
    StopOptions,
    TimingOptions,
)

Port = Annotated[int, Field(ge=0, le=65535)]
MIB = 1 << 20
MOST_LANES = 16
MOST_PATTERNS = 64  # of buffers' names: each is compared with every parameter's
CORES_PER_LANE = 2  # its I/O thread and its stage; on fewer a second lane only adds wake-ups
MOST_FRAGMENTS = 256  # of a cluster: a model has seldom more layers
TRANSFER_RANKS = 256  # of a cluster that move bytes, unless its file says another number
AUTO_LANES = 4  # by cores no more: beyond them memory is the limit, not threads


class Section(BaseModel):
    """A mapping of the file: unknown keys are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shared(Section):
    """What every process of the run must agree on; its digest is compared at Join."""

    run: str
    outer: OuterOptions = OuterOptions()
    penalty: PenaltyOptions = PenaltyOptions()
    stop: StopOptions = StopOptions()
    data: DataOptions = DataOptions()
    chunk_bytes: Annotated[int, Field(ge=4096, le=MIB)] = MIB  # larger ZeroMQ messages were 3 to 5 times slower
    codec: PushCodec = PushCodec.FP32  # of pushes; lossy ones cost a rank 8 B more per parameter it pushes
    pull_codec: PullCodec = PullCodec.FP32  # of pulls; lossy ones make each θ of what clusters pull; the ranks' 8 B too
    share_buffers: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=MOST_PATTERNS)] = ()

    @field_validator("data", mode="before")
    @classmethod
    def _own_data(cls, value: Any) -> Any:
        """`data: own` is the word for no ranges: clusters keep their loaders, and nobody tracks what they read."""
        return {"ranges": 0} if value == "own" else value

    @model_validator(mode="after")
    def _require_momentum(self) -> Self:
        if self.pull_codec is not PullCodec.FP32 and not self.outer.momentum:
            raise ValueError(
                "a lossy pull_codec needs outer.momentum above 0: by it comes back what rounding leaves over"
            )
        return self

    @property
    def agreed(self) -> dict[str, Any]:
        """What all must agree on: everything but how far the run goes, which its ledger says (`dips extend`)."""
        return self.model_dump(mode="json", exclude={"stop": True, "data": {"epochs"}})

    @property
    def digest(self) -> str:
        """Hash of the agreed values, not of the file's spelling: `0.7` and a default of 0.7 agree."""
        text = json.dumps(self.agreed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class JournalSection(Section):
    """The master's journal, evidence for `dips-master replay`: at most segments × segment_bytes, and a state each."""

    segment_bytes: Annotated[int, Field(ge=4096)] = 64 * MIB  # 600,000 events: days of ten clusters
    segments: Annotated[int, Field(ge=0)] = 8  # kept, the newest; 0: no journal


class OnVersionSection(Section):
    """What the master has done for every n-th version, in a process of its own (master/on_version.py)."""

    every: Annotated[int, Field(ge=1)]  # versions
    command: tuple[str, ...] = ()  # run in the run file's directory; DIPS_MODEL and DIPS_VERSION say of what
    call: str | None = None  # instead: module:function(model: Path, version: str), which returns numbers by name
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0  # then it is killed with its process group

    @model_validator(mode="after")
    def _require_one(self) -> OnVersionSection:
        if bool(self.command) == (self.call is not None):
            raise ValueError("expected one of command and call")
        if self.call is not None and not all(self.call.partition(":")):
            raise ValueError(f"call: expected MODULE:FUNCTION, got {self.call!r}")
        return self


class TrackSection(Section):
    """Where the master has its losses, versions and gates shown besides, by processes of their own."""

    tensorboard: Path | None = None  # directory of the event files; null: none
    wandb: str | None = None  # project of Weights & Biases; WANDB_MODE and WANDB_API_KEY say how; null: none

    @model_validator(mode="after")
    def _require_place(self) -> TrackSection:
        if self.tensorboard is None and not self.wandb:
            raise ValueError("expected tensorboard: DIRECTORY or wandb: PROJECT, or both; or track: null")
        return self


class MasterSection(Section):
    """The one that decides."""

    listen: str = "127.0.0.1:7800"  # host:port of the control server
    directory: Path  # ledger, journal, logs, timeline
    metrics: str | None = None  # host:port where Prometheus scrapes; null: nowhere
    timing: TimingOptions = TimingOptions()
    journal: JournalSection = JournalSection()
    keep_snapshots: Annotated[int, Field(ge=2)] = 2
    keep_every: Annotated[int, Field(ge=0)] = 0  # of older versions every so many-th stays; 0: none does
    keep_most: Annotated[int, Field(ge=0)] = 0  # of these the newest so many; 0: all, until disks are full
    on_version: OnVersionSection | None = None  # what is done for every n-th version; null: nothing
    track: TrackSection | None = None  # TensorBoard and W&B; null: neither
    durability: DurabilityMode = DurabilityMode.COMMIT  # async: a crash may cost the outer steps not yet on every disk
    on_persist_failure: PersistFailurePolicy = PersistFailurePolicy.DEGRADE  # after two failed snapshots in a row
    mirror: str | None = None  # URL where the ledger is copied to, before anything that it says is told; null: nowhere
    mirror_s: Annotated[float, Field(gt=0)] = 5.0  # a mirror that takes longer is not waited for until it has caught up
    requeue: RequeuePolicy = RequeuePolicy.NONE  # data of versions that were rolled back: trained again only if undone
    order: AskOrder = AskOrder.TURNS  # of asking; random is there to be compared with

    @model_validator(mode="after")
    def _require_kept(self) -> MasterSection:
        if self.on_version and (not self.keep_every or self.on_version.every % self.keep_every):
            raise ValueError(
                f"keep_every: expected {self.on_version.every}, or what divides it, since on_version needs every "
                f"{self.on_version.every}th version's snapshot until its process has begun; got {self.keep_every}"
            )
        return self


class SlaveSection(Section):
    """One holder of layers."""

    name: str
    master: str  # host:port
    listen: str = "127.0.0.1:0"  # control server; port 0 takes a free one
    lanes: tuple[str, ...] = ()  # data lanes, host:port each; empty: lane_count free ports on the host of `listen`
    curve_key: Path | None = None  # ZeroMQ certificate with the lanes' secret key; null: they are plain
    lane_count: Annotated[int, Field(ge=0, le=MOST_LANES)] = 0  # without `lanes`; 0: by cores
    advertise: str | None = None  # host by which master and clusters reach it; null: as `listen` and `lanes` spell it
    directory: Path  # snapshots; one slave each, locked as long as it runs
    initial_model: Path  # safetensors of `dips init`; read once, for v0@r0
    mirror: str | None = None  # URL where snapshots are copied to: another disk, NFS, s3://…; null: nowhere
    slots: Annotated[int, Field(ge=1)] = 2  # pushes that may move at once
    pinned: Annotated[int, Field(ge=0)] = 1  # older versions kept in memory for slow readers
    memory_bytes: Annotated[int, Field(gt=0)] | None = None  # what it may take; null: what its machine has
    transit_bytes: Annotated[int, Field(ge=4 * MIB)] = 256 * MIB  # asked for and not yet staged, over all streams
    concurrent_streams: Annotated[int, Field(ge=1)] = 4  # streams kept busy at once on a lane
    stall_s: Annotated[float, Field(gt=0)] = 30.0  # a rank that owes or refuses bytes for so long has stalled
    threads: Annotated[int, Field(ge=0)] = 0  # kernels; 0: all cores
    metrics: str | None = None  # host:port where Prometheus scrapes; null: nowhere
    supervisor: Literal["external", "exec"] = "external"  # who starts it: systemd, Kubernetes, you; or the master, here

    @property
    def lock(self) -> Path:
        """Held by the slave's process as long as it runs, with its number in it."""
        return self.directory / ".lock"

    def reached_at(self, address: str) -> str:
        """The address that others use for one that this slave listens on."""
        if self.advertise is None:
            return address
        host = f"[{self.advertise}]" if ":" in self.advertise else self.advertise
        return f"{host}:{host_port(address)[1]}"

    def data_lanes(self, cores: int) -> tuple[str, ...]:
        """The address of each lane on a host with so many cores."""
        if self.lanes:
            return self.lanes
        host = self.listen.rpartition(":")[0]
        count = self.lane_count or min(max(cores // CORES_PER_LANE, 1), AUTO_LANES)
        return (f"{host}:0",) * count


class TlsSection(Section):
    """Certificates (`dips certs`); in cert and key `{name}` and `{role}` stand for those of the process that reads."""

    ca: Path
    cert: Path
    key: Path
    crl: Path | None = None

    def files_of(self, name: str, role: PeerRole) -> TlsFiles:
        """The files of one process."""
        return TlsFiles(self.ca, self.cert, self.key, self.crl).of(name, role)


class RunFile(Section):
    """`dips.yaml`: one run, its master and its slaves."""

    shared: Shared
    master: MasterSection
    slaves: tuple[SlaveSection, ...] = Field(min_length=1)
    clusters: tuple[str, ...] | None = None  # that may join; null: all that have a certificate of the run
    tls: TlsSection | None = None
    insecure: bool = False  # plain text instead; only on loopback

    def make_options(self) -> Options:
        """Gather what tunes the Coordinator."""
        s, m = self.shared, self.master
        return Options(
            s.outer, s.penalty, s.stop, s.data, m.timing, m.keep_snapshots, s.codec, m.order,
            durability=m.durability, on_persist_failure=m.on_persist_failure, requeue=m.requeue,
            keep_every=m.keep_every, keep_most=m.keep_most,
        )  # fmt: skip

    def tls_files(self, name: str, role: PeerRole) -> TlsFiles | None:
        """Certificate of the process of this name; None: plain text."""
        return None if self.tls is None else self.tls.files_of(name, role)

    def slave_section(self, name: str) -> SlaveSection:
        """Return one slave's section; raise ConfigError naming those that exist."""
        for section in self.slaves:
            if section.name == name:
                return section
        raise ConfigError(f"no slave {name!r} in this run file; it names {', '.join(s.name for s in self.slaves)}")


DEFAULT_STEPS = 64  # H, §5.1


class PaceSection(Section):
    """When a cluster pushes: exactly one of the three."""

    steps: Annotated[int, Field(ge=1)] | None = None  # after every H inner steps
    seconds: Annotated[float, Field(gt=0)] | None = None  # after so long (A-EDiT; its authors take 600)
    aligned: Annotated[int, Field(ge=1)] | None = None  # together with the other clusters; H that it would take alone

    @model_validator(mode="before")
    @classmethod
    def _convert_paper(cls, raw: Any) -> Any:
        return {"steps": DEFAULT_STEPS} if raw == {} else raw

    @model_validator(mode="after")
    def _require_one(self) -> PaceSection:
        named = [key for key in ("steps", "seconds", "aligned") if getattr(self, key) is not None]
        if len(named) != 1:
            raise ValueError(f"expected one of steps, seconds, aligned, got {' and '.join(named) or 'none'}")
        return self


class ClusterFile(Section):
    """`cluster.yaml`: one training cluster."""

    shared: Shared
    cluster: str
    master: str  # host:port
    pace: PaceSection = PaceSection(steps=DEFAULT_STEPS)
    overlap: Literal["none", "full"] = "none"  # full: train on while push, window and pull go on; more host memory
    # Groups of layers that are pushed and merged at different inner steps, under the same rounds: the link's peak rate
    # is divided by this. Needs overlap: full and install: whole.
    fragments: Annotated[int, Field(ge=1, le=MOST_FRAGMENTS)] = 1
    # How far a merge follows the pulled version: θ ← θ_local + α (θ_new − θ_pushed). Streaming DiLoCo's is 1 − α.
    merge_alpha: Annotated[float, Field(gt=0, le=1)] = 1.0
    # A model that is not finite is never pushed; the run's newest version replaces it. reset: the optimizer's state is
    # dropped as well, and training goes on. restart: the job ends and is started again, which loads its checkpoint.
    # stop: the job ends.
    on_divergence: DivergencePolicy = DivergencePolicy.RESET
    rejoin_warmup_steps: Annotated[int, Field(ge=0)] = 100  # inner steps; AdamW's moments are empty after a join
    collective_s: Annotated[float, Field(gt=0)] = 600.0  # ranks that do not come to a call so long end the job
    socket: Path | None = None  # Unix socket between agent and rank 0; default beside the cluster file's directory
    # host:port at which ranks of other hosts find the agent; `$MASTER_ADDR:29410` takes the host from that variable.
    # The variable DIPS_AGENT comes before it. null: ranks are on the agent's host, and it listens to nobody else. What
    # is said there is signed and is neither parameters nor secrets: it need not be loopback.
    agent: str | None = None
    token: Path | None = None  # file with the job's token, for ranks that the agent did not start; or DIPS_AGENT_TOKEN
    directory: Path = Path(".")  # logs, timeline, socket
    heartbeat_s: Annotated[float, Field(gt=0)] = 2.0
    poll_s: Annotated[float, Field(gt=0)] = 2.0  # no collective waits longer for anybody outside the cluster
    stall_s: Annotated[float, Field(gt=0)] = 30.0  # a stream whose slave owes a byte for so long is begun anew
    retry_s: Annotated[float, Field(gt=0)] = 30.0  # longest pause between two tries to reach the master
    max_restarts: Annotated[int, Field(ge=0)] = 10  # of the trainer, by the agent, within restart_window_s
    restart_window_s: Annotated[float, Field(gt=0)] = 86400.0  # a month on 1,000 devices crashes more than ten times
    # Ranks that move bytes to and from the slaves; in a larger job the others hand theirs to one on their host, so
    # that no slave has more connections than this times its lanes from one cluster.
    max_transfer_ranks: Annotated[int, Field(ge=1)] = TRANSFER_RANKS
    # whole: a pulled version lies in host memory (4 B per parameter of a rank's shard) before any of it is installed.
    # streaming: one layer at a time, for hosts that have no room for that; a broken pull leaves a model that must pull
    # again before it can train, and pushes are read from the model while they travel. Needs the codec fp32.
    # lazy: whole in host memory as well; each layer is copied into the model just before the next forward reads it.
    install: Literal["whole", "streaming", "lazy"] = "whole"
    metrics: str | None = None  # host:port where Prometheus scrapes; null: nowhere
    # Host of this agent at which ranks without a way out reach the slaves; null: they dial them. If it is not loopback
    # the slaves' lanes must be encrypted (`curve_key`): the relay passes on what it is given.
    relay: str | None = None
    tls: TlsSection | None = None
    insecure: bool = False  # plain text instead; only on loopback

    @property
    def tls_files(self) -> TlsFiles | None:
        """The agent's certificate; None: plain text."""
        return None if self.tls is None else self.tls.files_of(self.cluster, PeerRole.CLUSTER)

    @field_validator("install", mode="before")
    @classmethod
    def _refuse_former_name(cls, value: Any) -> Any:
        if value == "forward":
            raise ValueError("`install: forward` was renamed: write `install: lazy`")
        return value


Model = TypeVar("Model", bound=BaseModel)


def load_run(path: Path) -> RunFile:
    """Read a run file; raise ConfigError naming file and key."""
    config = _load_file(path, RunFile)
    _check_names(path, [(config.shared.run, "run"), *((s.name, "slave") for s in config.slaves)])
    names = [s.name for s in config.slaves]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: slaves: the name {name!r} stands {names.count(name)} times, expected once")
    control = [("master.listen", config.master.listen)]
    plain = [("master.metrics", config.master.metrics)] if config.master.metrics else []
    for s in config.slaves:
        if s.lanes and s.lane_count:
            raise ConfigError(f"{path}: slaves.{s.name}: expected lanes or lane_count, got both; leave one out")
        control += [
            (f"slaves.{s.name}.{key}", address) for key, address in (("master", s.master), ("listen", s.listen))
        ]
        lanes = [("lanes", lane) for lane in s.lanes] or [("listen", s.listen)]
        lanes += [("advertise", s.reached_at("x:0"))] if s.advertise else []
        keys = (lanes if s.curve_key is None else []) + ([("metrics", s.metrics)] if s.metrics else [])
        plain += [(f"slaves.{s.name}.{key}", address) for key, address in keys]
    _check_names(path, [(name, "cluster") for name in config.clusters or ()])
    _check_transport(path, config.insecure, config.tls, control, plain)
    return config


def load_cluster(path: Path) -> ClusterFile:
    """Read a cluster file; raise ConfigError naming file and key."""
    config = _load_file(path, ClusterFile)
    _check_names(path, [(config.shared.run, "run"), (config.cluster, "cluster")])
    plain = [("metrics", config.metrics)] if config.metrics else []
    _check_transport(path, config.insecure, config.tls, [("master", config.master)], plain)
    for key in ("codec", "pull_codec") if config.install == "streaming" else ():
        if (word := getattr(config.shared, key)) != "fp32":
            raise ConfigError(f"{path}: install: streaming needs shared.{key} fp32, got {word}")
    if config.install == "streaming" and config.overlap == "full":
        raise ConfigError(
            f"{path}: install: streaming and overlap: full exclude each other: a merge needs a whole version"
        )
    if config.fragments > 1 and (config.overlap, config.install) != ("full", "whole"):
        raise ConfigError(
            f"{path}: fragments: {config.fragments} needs overlap: full and install: whole, got overlap: "
            f"{config.overlap} and install: {config.install}: fragments are moved and merged beside training"
        )
    if config.merge_alpha != 1.0 and config.overlap != "full":
        raise ConfigError(f"{path}: merge_alpha: {config.merge_alpha:g} needs overlap: full: nothing else merges")
    return config


def host_port(address: str) -> tuple[str, int]:
    """Split `host:port` (IPv6 hosts in brackets); raise ConfigError on anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"expected an address like 127.0.0.1:7800, got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """What is sent there stays on this machine; a name that only begins like such an address is not one."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _load_file(path: Path, model: type[Model]) -> Model:
    raw = _read_yaml(path)
    shared = raw.get("shared")
    if isinstance(shared, str):
        raw["shared"] = _read_yaml(path.parent / shared)
    try:
        return model.model_validate(_resolve_paths(raw, path.parent))
    except ConfigError as error:  # from __post_init__ of an options class
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain_invalid(error)}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, got {type(raw).__name__}")
    return raw


_PATH_KEYS = frozenset(
    {"directory", "initial_model", "socket", "curve_key", "token", "mirror", "tensorboard", "ca", "cert", "key", "crl"}
)


def _is_path(key: str, value: Any) -> bool:
    return key in _PATH_KEYS and isinstance(value, str) and "://" not in value


def _resolve_paths(raw: Any, base: Path) -> Any:
    """Make relative paths relative to the file that names them, so that a daemon may start anywhere; URLs stay."""
    if isinstance(raw, dict):
        return {k: str(base / v) if _is_path(k, v) else _resolve_paths(v, base) for k, v in raw.items()}
    return [_resolve_paths(v, base) for v in raw] if isinstance(raw, list) else raw


# Keys of files from before the renames → what they are called now; `install: forward` is refused where it is read.
RENAMED_KEYS = {
    "beat_s": "heartbeat_s",
    "lease_beats": "lease_heartbeats",
    "askers": "concurrent_streams",
    "speakers": "max_transfer_ranks",
    "performer": "supervisor",
}


def _explain_invalid(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            renamed = RENAMED_KEYS.get(str(problem["loc"][-1]))
            hint = f"renamed, write {renamed}" if renamed else "unknown key (misspelt, or of another version?)"
            lines.append(f"{key}: {hint}")
        elif problem["type"] == "missing":
            lines.append(f"{key}: missing, and it has no default")
        else:
            lines.append(f"{key}: {problem['msg']}, got {problem.get('input')!r}")
    return "; ".join(lines)


def _check_names(path: Path, names: list[tuple[str, str]]) -> None:
    for name, what in names:
        try:
            check_name(name, what)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def _check_transport(
    path: Path,
    insecure: bool,
    tls: TlsSection | None,
    control: list[tuple[str, str]],
    plain: list[tuple[str, str]],
) -> None:
    """Plain text leaves the machine never, and stays on it only when that is asked for
    (docs/architecture.md#security). `plain`: addresses at which there is no certificate in any case."""
    if insecure == (tls is not None):
        got = "both" if insecure else "neither"
        raise ConfigError(
            f"{path}: insecure: expected a section `tls` (`dips certs` makes the files) or `insecure: true` for plain "
            f"text on loopback, got {got}"
        )
    for key, address in control + plain:
        try:
            host, _ = host_port(address)
        except ConfigError as error:
            raise ConfigError(f"{path}: {key}: {error}") from error
        if is_loopback(host) or (tls is not None and (key, address) not in plain):
            continue
        why = "`insecure: true`" if insecure else "certificates do not reach it yet; lanes need `curve_key`"
        raise ConfigError(f"{path}: {key}: plain text ({why}) is allowed on loopback only, got {address!r}")
