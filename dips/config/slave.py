"""A section of `slaves` in the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dips.config.addresses import host_port
from dips.config.http import HttpKeys

MOST_LANES = 16
CORES_PER_LANE = 2  # its I/O thread and its stage; on fewer a second lane only adds wake-ups
AUTO_LANES = 4  # by cores no more: beyond them memory is the limit, not threads


class SlaveSection(HttpKeys):
    """One holder of layers."""

    name: str
    master: str  # host:port
    listen: str = "127.0.0.1:0"  # control server; port 0 takes a free one
    # Data lanes: host:port of each, or how many free ports on the host of `listen`; 0: by cores.
    lanes: tuple[str, ...] | Annotated[int, Field(ge=0, le=MOST_LANES)] = 0
    advertise: str | None = None  # host by which master and clusters reach it; null: as `listen` and `lanes` spell it
    directory: Path  # snapshots; one slave each, locked as long as it runs
    initial_model: Path | None = None  # safetensors of `dips init`, read for v0@r0; null: `dips seed` brings it
    mirror: str | None = None  # URL where snapshots are copied to: another disk, NFS, s3://…; null: nowhere
    slots: Annotated[int, Field(ge=1)] = 2  # pushes that may move at once
    pinned: Annotated[int, Field(ge=0)] = 1  # older versions kept in memory for slow readers
    memory_bytes: Annotated[int, Field(gt=0)] | None = None  # what it may take; null: what its machine has
    stall_s: Annotated[float, Field(gt=0)] = 30.0  # a rank that owes or refuses bytes for so long has stalled
    threads: Annotated[int, Field(ge=0)] = 0  # kernels; 0: all cores
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
        if isinstance(self.lanes, tuple):
            return self.lanes
        host = self.listen.rpartition(":")[0]
        count = self.lanes or min(max(cores // CORES_PER_LANE, 1), AUTO_LANES)
        return (f"{host}:0",) * count
