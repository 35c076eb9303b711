"""A section of `slaves` in the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

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
    advertise: str | None = None  # host by which master and clusters reach it; null: as in `listen` and `lanes`
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

    def reached_at(self, address: str) -> str:
        """Return the address that others use for one that this slave listens on."""
        if self.advertise is None:
            return address
        host = f"[{self.advertise}]" if ":" in self.advertise else self.advertise
        return f"{host}:{host_port(address)[1]}"

    def data_lanes(self, cores: int) -> tuple[str, ...]:
        """Return the address of each lane on a host with `cores` cores."""
        if isinstance(self.lanes, tuple):
            return self.lanes
        host = self.listen.rpartition(":")[0]
        count = self.lanes or min(max(cores // CORES_PER_LANE, 1), AUTO_LANES)
        return (f"{host}:0",) * count
