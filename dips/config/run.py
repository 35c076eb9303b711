"""The run file, `dips.yaml`: read by master and slaves; `dips init` makes the run from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dips.config.reading import check_names, check_transport, load_file
from dips.config.section import HttpKey, HttpTokenKey, LogLevel, Section, TlsKey, host_port
from dips.config.shared import Shared
from dips.errors import ConfigError
from dips.protocol.enums import DurabilityMode, PersistFailurePolicy, RequeuePolicy, WindowRule
from dips.protocol.options import MOST_ROLLBACK, Options, TimingOptions

# ---- master ----------------------------------------------------------------------------------------------------------

ORDER_HEARTBEATS = 5  # deadline of orders that move no model, in heartbeats: as long as a lease
HANG_HEARTBEATS = 60  # without an inner step: building and compiling a model takes minutes; then five of its own steps
LEAST_TRANSFER_HEARTBEATS = 15  # least deadline of a transfer: a broken stream needs time to reconnect


class OnVersionSection(Section):
    """A command that the master runs for every n-th version, in a separate process
    (master/hooks.py).
    """

    every: Annotated[int, Field(ge=1)]  # versions
    command: Annotated[
        tuple[str, ...], Field(min_length=1)
    ]  # run in the run file's directory, with DIPS_MODEL and DIPS_VERSION


class TrackSection(Section):
    """Trackers that show the run's losses, versions and gates, each in a separate process."""

    tensorboard: Path | None = None  # directory of the event files; null: none
    wandb: str | None = None  # project of Weights & Biases, with WANDB_MODE and WANDB_API_KEY; null: none

    @model_validator(mode="after")
    def _require_place(self) -> TrackSection:
        if self.tensorboard is None and not self.wandb:
            raise ValueError("expected tensorboard: DIRECTORY or wandb: PROJECT, or both; or track: null")
        return self


class TimingSection(Section):
    """How long a round takes commits. All other deadlines are multiples of `shared.heartbeat_s`, or constants that
    `dips set` changes.
    """

    window_s: float | None = None  # longer where clusters of equal pace miss each other; None: as TimingOptions has it
    window: WindowRule = WindowRule.FIXED  # adaptive where clusters push as they please

    @model_validator(mode="after")
    def _require_bounds(self) -> TimingSection:
        self.make_options(TimingOptions.heartbeat_s)
        return self

    def make_options(self, heartbeat_s: float) -> TimingOptions:
        """Return all deadlines, including the multiples of heartbeats."""
        return TimingOptions(
            **self.model_dump(),
            heartbeat_s=heartbeat_s,
            hang_s=HANG_HEARTBEATS * heartbeat_s,
            order_s=ORDER_HEARTBEATS * heartbeat_s,
            least_transfer_s=LEAST_TRANSFER_HEARTBEATS * heartbeat_s,
            busy_retry_s=heartbeat_s,
        )


class MasterSection(HttpKey):
    """The section of the master."""

    listen: str = "127.0.0.1:7800"  # host:port of the control server
    directory: Path  # ledger, journal, logs, timeline
    timing: TimingSection = TimingSection()
    keep_every: Annotated[int, Field(ge=0)] = 0  # every n-th older version is kept; 0: none
    keep_most: Annotated[int, Field(ge=0)] = 0  # at most the newest n of these are kept; 0: all, until disks are full
    most_rollback: Annotated[int, Field(ge=0)] = MOST_ROLLBACK  # outer steps undone without `dips rollback`
    on_version: OnVersionSection | None = None  # run for every n-th version; null: nothing
    track: TrackSection | None = None  # TensorBoard and W&B; null: neither
    durability: DurabilityMode = DurabilityMode.COMMIT  # async: a crash may cost the outer steps not yet on every disk
    on_persist_failure: PersistFailurePolicy = PersistFailurePolicy.DEGRADE  # after two failed snapshots in a row
    mirror: str | None = None  # URL to which the ledger is copied, before its contents are announced; null: none
    requeue: RequeuePolicy = RequeuePolicy.NONE  # whether data of rolled-back versions is trained again

    @model_validator(mode="after")
    def _require_kept(self) -> MasterSection:
        if self.on_version and (not self.keep_every or self.on_version.every % self.keep_every):
            raise ValueError(
                f"keep_every: expected {self.on_version.every}, or what divides it, since on_version needs every "
                f"{self.on_version.every}th version's snapshot until its process has begun; got {self.keep_every}"
            )
        return self


# ---- slave -----------------------------------------------------------------------------------------------------------

MOST_LANES = 16
CORES_PER_LANE = 2  # for its I/O thread and its stage; with fewer cores a second lane only adds wake-ups
AUTO_LANES = 4  # most lanes chosen by cores: with more, memory is the limit, not threads


class SlaveSection(HttpKey):
    """The section of one slave."""

    name: str
    master: str  # host:port
    listen: str = "127.0.0.1:0"  # control server; port 0 takes a free one
    # Data lanes: host:port of each, or the number of free ports on the host of `listen`; 0: by cores.
    lanes: Annotated[tuple[str, ...], Field(min_length=1)] | Annotated[int, Field(ge=0, le=MOST_LANES)] = 0
    # The host by which master and clusters reach it; null: as in `listen` and `lanes`. Where ports are translated, too:
    # host:port of the control server, then of each lane.
    advertise: str | tuple[str, ...] | None = None
    directory: Path  # snapshots; one slave each, locked as long as it runs
    initial_model: Path | None = None  # `initial/` of `dips init`, read for v0@r0; null: `dips seed` sends it
    mirror: str | None = None  # URL to which snapshots are copied: another disk, NFS, s3://…; null: none
    slots: Annotated[int, Field(ge=1)] = 2  # pushes that may move at once
    pinned: Annotated[int, Field(ge=0)] = 1  # older versions kept in memory for slow readers
    memory_bytes: Annotated[int, Field(gt=0)] | None = None  # limit of its memory; null: the machine's
    supervisor: Literal["external", "exec"] = (
        "external"  # external: systemd, Kubernetes or you start it; exec: the master
    )

    @property
    def lock(self) -> Path:
        """The lock file that the slave's process holds while it runs, with its pid in it."""
        return self.directory / ".lock"

    @model_validator(mode="after")
    def _check_advertise(self) -> SlaveSection:
        if isinstance(self.advertise, tuple):
            lanes = self.lanes if isinstance(self.lanes, int) else len(self.lanes)
            if lanes == 0 or len(self.advertise) != 1 + lanes:
                raise ValueError(
                    "advertise: expected a host, or host:port of `listen` and of each lane, "
                    f"with as many in `lanes`; got {len(self.advertise)} addresses for {lanes or 'any number of'} lanes"
                )
            for address in self.advertise:
                host_port(address)
        return self

    def reached_at(self, listened: Sequence[str]) -> tuple[str, ...]:
        """Return the addresses that others use for those that this slave listens on: of control server and lanes."""
        if self.advertise is None:
            return tuple(listened)
        if isinstance(self.advertise, tuple):
            return self.advertise
        host = f"[{self.advertise}]" if ":" in self.advertise else self.advertise
        return tuple(f"{host}:{host_port(address)[1]}" for address in listened)

    def data_lanes(self, cores: int) -> tuple[str, ...]:
        """Return the address of each lane on a host with `cores` cores."""
        if isinstance(self.lanes, tuple):
            return self.lanes
        host = self.listen.rpartition(":")[0]
        count = self.lanes or min(max(cores // CORES_PER_LANE, 1), AUTO_LANES)
        return (f"{host}:0",) * count


class RunFile(HttpTokenKey, TlsKey):
    """A run file, `dips.yaml`: one run, its master and its slaves."""

    shared: Shared
    master: MasterSection
    slaves: tuple[SlaveSection, ...] = Field(min_length=1)
    clusters: tuple[str, ...] | None = None  # that may join; null: all with a certificate of the run
    log_level: LogLevel = "info"  # of master and slaves; may change while they run; --log-level overrides it

    @model_validator(mode="after")
    def _require_bounds(self) -> RunFile:
        self.timing_options()
        return self

    def make_options(self) -> Options:
        """Return the Coordinator's options."""
        s, m = self.shared, self.master
        return Options(
            s.outer, s.penalty.make_options(), s.stop, s.data, self.timing_options(),
            codec=s.codec, durability=m.durability, on_persist_failure=m.on_persist_failure, requeue=m.requeue,
            keep_every=m.keep_every, keep_most=m.keep_most, most_rollback=m.most_rollback,
        )  # fmt: skip

    def timing_options(self) -> TimingOptions:
        """Return the master's deadlines and leases."""
        return self.master.timing.make_options(self.shared.heartbeat_s)

    def slave_section(self, name: str) -> SlaveSection:
        """Return one slave's section. Raises ConfigError naming those that exist."""
        for section in self.slaves:
            if section.name == name:
                return section
        raise ConfigError(f"no slave {name!r} in this run file; it names {', '.join(s.name for s in self.slaves)}")


def load_run(path: Path) -> RunFile:
    """Read a run file. Raises ConfigError naming file and key."""
    config = load_file(path, RunFile)
    names = [s.name for s in config.slaves]
    kinds = (("slave", names), ("cluster", config.clusters or ()))
    check_names(path, [(config.shared.run, "run"), *((name, kind) for kind, of in kinds for name in of)])
    if config.http_token is not None and not any(section.http for section in (config.master, *config.slaves)):
        raise ConfigError(f"{path}: http_token: nothing is served without `http: HOST:PORT`")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: slaves: the name {name!r} stands {names.count(name)} times, expected once")
    control = [("master.listen", config.master.listen)]
    control += [("master.http", config.master.http)] if config.master.http else []
    for s in config.slaves:
        control += [
            (f"slaves.{s.name}.{key}", address) for key, address in (("master", s.master), ("listen", s.listen))
        ]
        lanes = [("lanes", lane) for lane in (s.lanes if isinstance(s.lanes, tuple) else ())]
        lanes += [("advertise", address) for address in s.reached_at(["x:0"])] if s.advertise else []
        control += [(f"slaves.{s.name}.{key}", address) for key, address in lanes]
        control += [(f"slaves.{s.name}.http", s.http)] if s.http else []
    check_transport(path, bool(config.tls), control)
    return config
