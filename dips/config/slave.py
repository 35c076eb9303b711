"""A section of `slaves` in the run file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dips.config.section import HttpKey, host_port

MOST_LANES = 16
CORES_PER_LANE = 2  # for its I/O thread and its stage; with fewer cores a second lane only adds wake-ups
AUTO_LANES = 4  # most lanes chosen by cores: with more, memory is the limit, not threads


class SlaveSection(HttpKey):
    """The section of one slave."""

    name: str
    master: str  # host:port
    listen: str = "127.0.0.1:0"  # control server; port 0 takes a free one
    # Data lanes: host:port of each, or the number of free ports on the host of `listen`; 0: by cores.
    lanes: tuple[str, ...] | Annotated[int, Field(ge=0, le=MOST_LANES)] = 0
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
