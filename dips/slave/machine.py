"""What a slave's memory is held against before any of it is taken, by the slave and by `dips rebalance`."""

from __future__ import annotations

from dips.cgroup import available_memory
from dips.codecs import Codec
from dips.config import SlaveSection
from dips.outer.pool import MemorySum
from dips.outer.updates import bytes_per_parameter

TRANSIT_BYTES = 256 << 20  # asked for and not yet staged, over all streams: what four lanes of 10 Gbit/s have under way


def memory_of(section: SlaveSection, numel: int, pull_codec: Codec) -> MemorySum:
    """What a slave of so many parameters takes."""
    updates = bytes_per_parameter(pull_codec, section.pinned)
    return MemorySum(numel, section.slots, section.pinned, TRANSIT_BYTES, updates)


def available_bytes(section: SlaveSection) -> int:
    """What the slave may take on this machine: `memory_bytes`, if the run file says it, and what there is."""
    return available_memory() if section.memory_bytes is None else min(section.memory_bytes, available_memory())
