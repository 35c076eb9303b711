"""What a slave's memory is held against before any of it is taken, by the slave and by `dips rebalance`."""

from __future__ import annotations

import os
from pathlib import Path

from dips.config import SlaveSection
from dips.outer.pool import MemorySum
from dips.outer.updates import bytes_per_parameter

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_of(section: SlaveSection, numel: int, pull_codec: str) -> MemorySum:
    """What a slave of so many parameters takes."""
    updates = bytes_per_parameter(pull_codec, section.pinned)
    return MemorySum(numel, section.slots, section.pinned, section.transit_bytes, updates)


def available_bytes(section: SlaveSection) -> int:
    """What the slave may take on this machine: `memory_bytes`, if the run file says it, and what there is."""
    return machine_bytes() if section.memory_bytes is None else min(section.memory_bytes, machine_bytes())


def machine_bytes() -> int:
    """Memory that this process may have: the machine's, or its control group's if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:  # no control group, so no limit of its own
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine
