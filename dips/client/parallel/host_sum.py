"""The host memory that a rank needs beside the model, as a written sum."""

from __future__ import annotations

from dataclasses import dataclass, fields

BYTES = 4  # per fp32 element
PROCESS_BYTES = 60_000_000  # libzmq, threads and requested chunks that are not yet in place, measured


@dataclass(frozen=True, slots=True)
class HostSum:
    """The bytes that one rank needs, by purpose."""

    shard: int  # the frozen or pulled parameters
    kept: int = 0  # the pushed shard, kept for the merge under overlap: full
    owed: int = 0  # base and error feedback of a lossy codec
    rounded: int = 0  # rounding errors of 16-bit parameters without masters
    transit: int = 0  # blocks in transit to and from other ranks of the cluster
    process: int = PROCESS_BYTES

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def describe_sum(self) -> str:
        """Format the sum with its parts, so that a person can check it."""
        parts = [f"{getattr(self, part.name) / 1e6:.1f} MB {part.name}" for part in fields(self)]
        return f"{' + '.join(part for part in parts if not part.startswith('0.0 '))} = {self.total_bytes / 1e6:.1f} MB"
