"""The cluster file, `cluster.yaml`, of one training cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dips.config.reading import check_names, check_transport, load_file, require_loopback
from dips.config.section import STALL_HEARTBEATS, HttpKey, HttpTokenKey, LogLevel, Section, TlsKey
from dips.config.shared import Shared
from dips.errors import ConfigError
from dips.protocol.enums import DivergencePolicy
from dips.protocol.options import SECONDS

MOST_FRAGMENTS = 256  # models rarely have more layers
DEFAULT_STEPS = 64  # H, §5.1


class PaceSection(Section):
    """The pace of a cluster's pushes: exactly one of the three."""

    steps: Annotated[int, Field(ge=1)] | None = None  # after every H inner steps
    seconds: Annotated[float, Field(gt=0)] | None = None  # after this time (A-EDiT; its authors use 600)
    aligned: Annotated[int, Field(ge=1)] | None = None  # together with the other clusters; H if it were alone

    @model_validator(mode="before")
    @classmethod
    def _convert_empty(cls, raw: Any) -> Any:
        return {"aligned": DEFAULT_STEPS} if raw == {} else raw

    @model_validator(mode="after")
    def _require_one(self) -> PaceSection:
        named = [key for key in ("steps", "seconds", "aligned") if getattr(self, key) is not None]
        if len(named) != 1:
            raise ValueError(f"expected one of steps, seconds, aligned, got {' and '.join(named) or 'none'}")
        return self


class ClusterFile(HttpKey, HttpTokenKey, TlsKey):
    """`cluster.yaml`: one training cluster."""

    shared: Shared
    cluster: str
    master: str  # host:port
    pace: PaceSection = PaceSection(aligned=DEFAULT_STEPS)
    overlap: Literal["none", "full"] = "none"  # full: train during push, window and pull; takes more host memory
    # Groups of layers that are pushed and merged at different inner steps, under the same rounds: the link's peak rate
    # is divided by this. Needs overlap: full and install: whole.
    fragments: Annotated[int, Field(ge=1, le=MOST_FRAGMENTS)] = 1
    # A model that is not finite is never pushed; the run's newest version replaces it. reset: the optimizer's state is
    # dropped as well, and training goes on. restart: the job ends and is started again, which loads its checkpoint.
    # stop: the job ends.
    on_divergence: DivergencePolicy = DivergencePolicy.RESET
    # A rank that misses a collective for this long ends the job; torch takes no `.inf`.
    collective_s: Annotated[float, Field(gt=0, le=SECONDS[1])] = 600.0
    # host:port at which ranks of other hosts find the agent; `$MASTER_ADDR:29410` takes the host from that variable.
    # The variable DIPS_AGENT overrides it. null: ranks are on the agent's host, and no port is open. Messages there are
    # signed and contain neither parameters nor secrets, so the address need not be loopback.
    agent: str | None = None
    token: Path | None = None  # file with the job's token, for ranks that the agent did not start; or DIPS_AGENT_TOKEN
    directory: Path = Path(".")  # timeline, socket, tokens told; the log goes to standard error
    # A command that the agent runs before each start of the training command, with the same variables and directory,
    # for example to plan anew for the devices that are there. If it fails, or takes longer than `collective_s`, the
    # training command counts as crashed. null: nothing
    before_start: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    max_restarts: Annotated[int, Field(ge=0)] = 10  # of the trainer, by the agent, within a day
    # whole: a pulled version is complete in host memory (4 B per parameter of a rank's shard) before it is installed.
    # lazy: whole in host memory as well; each layer is copied into the model just before the next forward reads it.
    install: Literal["whole", "lazy"] = "whole"
    # Host of this agent through which ranks without a route reach the slaves; null: they connect directly. Off loopback
    # the run needs certificates, so that lanes are encrypted: the relay forwards bytes unchanged.
    relay: str | None = None
    log_level: LogLevel = "info"  # of the agent; may change while it runs; --log-level overrides it

    @property
    def stall_s(self) -> float:
        """The time after which a stream whose slave owes a byte is begun anew."""
        return STALL_HEARTBEATS * self.shared.heartbeat_s

    @property
    def poll_s(self) -> float:
        """The longest time for which a collective of the training job waits for a process outside the cluster."""
        return self.shared.heartbeat_s


def load_cluster(path: Path) -> ClusterFile:
    """Read a cluster file. Raises ConfigError naming file and key."""
    config = load_file(path, ClusterFile)
    check_names(path, [(config.shared.run, "run"), (config.cluster, "cluster")])
    control = [("master", config.master), *([("http", config.http)] if config.http else [])]
    check_transport(path, bool(config.tls), control)
    if config.relay and not config.tls:  # refused before accelerators are held
        require_loopback(path, "relay", config.relay, config.relay)
    if config.http_token is not None and config.http is None:
        raise ConfigError(f"{path}: http_token: nothing is served without `http: HOST:PORT`")
    if config.fragments > 1 and (config.overlap, config.install) != ("full", "whole"):
        raise ConfigError(
            f"{path}: fragments: {config.fragments} needs overlap: full and install: whole, got overlap: "
            f"{config.overlap} and install: {config.install}: fragments are moved and merged beside training"
        )
    return config
