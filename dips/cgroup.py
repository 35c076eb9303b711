"""The memory and CPU limits of this process's control group, of version 2 or 1.

A daemon in a container sees the whole machine's memory and CPUs, but is killed, or throttled in each period, at
the limits of its control group. A limit applies at every level above the process, so the smallest one on the way up
counts. If the levels in between are not visible (a container without its own namespace) the mount's root is the
container's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from dips.dataclass import dataclass

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # bytes; version 1 writes "no limit" as 2^63 minus a page
MOST_LEVELS = 64  # levels of a hierarchy that are read

MEMORY_FILES = ("memory.max", "memory.high")  # above the second limit a process is slowed down severely
V1_MEMORY, V1_QUOTA, V1_PERIOD = "memory.limit_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us"


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The limits of a control group; None: no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None  # CPU time in units of one processor


def available_memory() -> int:
    """Return the bytes that this process may use: the machine's, or its control group's limit if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_limits().memory_bytes
    return machine if limit is None else min(machine, limit)


def available_cpus() -> int:
    """Return how many threads may run at once: the CPUs that this process may use, or its control group's share if
    less.

    The share is rounded down, so that heartbeats are not throttled with the kernels at the end of each period.
    """
    allowed, share = len(os.sched_getaffinity(0)), read_limits().cpus
    return allowed if share is None else max(1, min(allowed, int(share)))


def read_limits(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> GroupLimits:
    """Return the smallest limits from this process's groups up to the root; no limits without groups."""
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
    """Parse /proc/self/cgroup into controller → path; version 2's hierarchy has the controller ""."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path.startswith("/"):
            for controller in controllers.split(",") if number != "0" else ("",):
                groups[controller] = path
    return groups


def parse_bytes(text: str) -> int | None:
    """Parse a memory limit; None for `max` and for the largest numbers, which mean no limit."""
    text = text.strip()
    return int(text) if text.isdigit() and 0 < int(text) < UNLIMITED else None


def parse_share(text: str) -> float | None:
    """Parse quota and period in µs, as in `200000 100000`; None for a quota of `max` or -1."""
    match text.split():
        case [quota, period] if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            return int(quota) / int(period)
    return None


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """Yield the group's directory and all above it, up to the mount's root."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")][:MOST_LEVELS]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _v1_mounts(mount: Path, controller: str) -> Iterator[Path]:
    """Return the mounts of a controller; `cpu` may be mounted as `cpu`, `cpu,cpuacct` or `cpuacct,cpu`."""
    names = (controller,) if controller == "memory" else ("cpu", "cpu,cpuacct", "cpuacct,cpu")
    return (mount / name for name in names if (mount / name).is_dir())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a file of another version, or a level that is not visible here
        return ""
