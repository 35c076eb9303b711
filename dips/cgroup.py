"""What this process may have of its machine: its control group's memory and CPU limits, of version 2 or 1.

A daemon in a container sees the whole machine's memory and CPUs, and is killed, or stopped for most of each period, at
the limits of its control group. A limit counts at every level above the process, so the smallest one on the way up
holds. Where the hierarchy on the way is not visible (a container without its own namespace) the mount's root is the
container's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from dips.dataclass import dataclass

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # bytes; version 1 spells "no limit" as 2^63 less a page
MOST_LEVELS = 64  # of a hierarchy

MEMORY_FILES = ("memory.max", "memory.high")  # above the second one is slowed down until it is hardly alive
V1_MEMORY, V1_QUOTA, V1_PERIOD = "memory.limit_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us"


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """None: no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None  # processors' worth of time


def available_memory() -> int:
    """Bytes that this process may have: the machine's, or its control group's if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_limits().memory_bytes
    return machine if limit is None else min(machine, limit)


def available_cpus() -> int:
    """Threads that may run at once: the CPUs that this process may use, and its control group's share, rounded down so
    that heartbeats are not stopped with the kernels at the end of each period."""
    allowed, share = len(os.sched_getaffinity(0)), read_limits().cpus
    return allowed if share is None else max(1, min(allowed, int(share)))


def read_limits(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> GroupLimits:
    """The smallest limits on the way from this process's groups to the root; none where there are no groups."""
    groups = parse_membership(_read_text(membership))
    memory, cpus = list[int | None](), list[float | None]()
    if (path := groups.get("")) is not None:
        for level in _levels(mount, path):
            memory += [parse_bytes(_read_text(level / name)) for name in MEMORY_FILES]
            cpus.append(parse_share(_read_text(level / "cpu.max")))
    for controller in ("memory", "cpu"):
        if (path := groups.get(controller)) is None:
            continue
        for root in _v1_mounts(mount, controller):
            for level in _levels(root, path):
                memory.append(parse_bytes(_read_text(level / V1_MEMORY)))
                cpus.append(parse_share(f"{_read_text(level / V1_QUOTA)} {_read_text(level / V1_PERIOD)}"))
    return GroupLimits(min(filter(None, memory), default=None), min(filter(None, cpus), default=None))


def parse_membership(text: str) -> Mapping[str, str]:
    """/proc/self/cgroup: controller → path; version 2's one hierarchy has the controller ""."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and path.startswith("/"):
            for controller in controllers.split(",") if number != "0" else ("",):
                groups[controller] = path
    return groups


def parse_bytes(text: str) -> int | None:
    """`max`, or a number, of which the largest mean that there is no limit."""
    text = text.strip()
    return int(text) if text.isdigit() and 0 < int(text) < UNLIMITED else None


def parse_share(text: str) -> float | None:
    """`200000 100000`, quota and period in µs; a quota of `max` or -1 is no limit."""
    match text.split():
        case [quota, period] if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            return int(quota) / int(period)
    return None


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """The group's directory and all above it, up to the mount's root."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")][:MOST_LEVELS]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _v1_mounts(mount: Path, controller: str) -> Iterator[Path]:
    """`cpu` is mounted beside others: as `cpu`, `cpu,cpuacct` or `cpuacct,cpu`."""
    names = (controller,) if controller == "memory" else ("cpu", "cpu,cpuacct", "cpuacct,cpu")
    return (mount / name for name in names if (mount / name).is_dir())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # another version's file, or a level that is not visible here
        return ""
