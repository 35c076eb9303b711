"""The memory that a slave needs and that it may use, compared before any is allocated by the slave and by `dips
rebalance`.
"""

from __future__ import annotations

from dips.cgroup import available_memory
from dips.codecs import Codec
from dips.config import SlaveSection
from dips.outer.pool import MemorySum
from dips.outer.updates import bytes_per_parameter

TRANSIT_BYTES = 256 << 20  # asked for and not yet staged, over all streams: in flight on four lanes of 10 Gbit/s
COPIES_BYTES = 128 << 20  # of chunks that are sealed, or cut from updates, and not yet sent: twice a stream's credit


def memory_of(section: SlaveSection, numel: int, pull_codec: Codec) -> MemorySum:
    """Return the memory of a slave with this many parameters, as a sum of its parts."""
    updates = bytes_per_parameter(pull_codec, section.pinned)
    return MemorySum(numel, section.slots, section.pinned, TRANSIT_BYTES + COPIES_BYTES, updates)


def available_bytes(section: SlaveSection) -> int:
    """Return the memory that the slave may use: `memory_bytes` of the run file, at most what is available."""
    return available_memory() if section.memory_bytes is None else min(section.memory_bytes, available_memory())
