"""What a rank needs of host memory beside the model, as a written sum."""

from __future__ import annotations

from dataclasses import dataclass, fields

BYTES = 4  # of an fp32 element
PROCESS_BYTES = 60_000_000  # libzmq, threads and the chunks that are asked for and not yet in place, measured


@dataclass(frozen=True, slots=True)
class HostSum:
    """Bytes of one rank, before it uses any of them."""

    shard: int  # what is frozen or pulled
    kept: int = 0  # what was pushed, for the merge: overlap: full
    owed: int = 0  # base and remainder of a lossy codec
    rounded: int = 0  # what parameters of 16 bits without masters cannot hold
    transit: int = 0  # blocks under way to and from other ranks of the cluster
    process: int = PROCESS_BYTES

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def describe_sum(self) -> str:
        """Write the sum as a person checks it."""
        parts = [f"{getattr(self, part.name) / 1e6:.1f} MB {part.name}" for part in fields(self)]
        return f"{' + '.join(part for part in parts if not part.startswith('0.0 '))} = {self.total_bytes / 1e6:.1f} MB"
