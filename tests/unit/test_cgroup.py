"""Limits of control groups, as the kernels and runtimes spell them: version 2, version 1, nested, hidden, none."""

from __future__ import annotations

from pathlib import Path

import pytest

from dips import cgroup
from dips.cgroup import GroupLimits, parse_bytes, parse_membership, parse_share, read_limits

POD = "/kubepods.slice/kubepods-burstable.slice/pod1/abc"
V1 = "12:cpu,cpuacct:/docker/abc\n6:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/system.slice\n"


def write(mount: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = mount / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("member", "files", "limits"),
    [
        ("0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"}, GroupLimits()),
        ("0::/\n", {"memory.max": "4294967296\n", "cpu.max": "250000 100000\n"}, GroupLimits(4 << 30, 2.5)),
        ("0::/\n", {"memory.max": "4294967296\n", "memory.high": "3221225472\n"}, GroupLimits(3 << 30)),
        (
            f"0::{POD}\n",  # the pod's limits, above the container's own
            {
                f"{POD}/memory.max": "max\n",
                f"{POD}/../memory.max": "1073741824\n",
                f"{POD}/cpu.max": "200000 100000\n",
                f"{POD}/../cpu.max": "50000 100000\n",
            },
            GroupLimits(1 << 30, 0.5),
        ),
        (f"0::{POD}\n", {"memory.max": "1073741824\n"}, GroupLimits(1 << 30)),  # its path is the host's: not visible
        (
            V1,
            {
                "memory/docker/abc/memory.limit_in_bytes": "2147483648\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "150000\n",
                "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            GroupLimits(2 << 30, 1.5),
        ),
        (V1, {"memory/memory.limit_in_bytes": "1073741824\n"}, GroupLimits(1 << 30)),  # version 1 in a container
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, GroupLimits()),
        ("", {}, GroupLimits()),
        ("0::/../../x\n", {"memory.max": "nonsense\n", "cpu.max": "1\n"}, GroupLimits()),
    ],
    ids=["none", "v2", "high", "nested", "hidden", "v1", "v1-container", "v1-none", "no-groups", "nonsense"],
)
def test_limits(tmp_path: Path, member: str, files: dict[str, str], limits: GroupLimits) -> None:
    mount, membership = tmp_path / "mount", tmp_path / "cgroup"
    mount.mkdir()
    membership.write_text(member)
    if files:
        (mount / POD.lstrip("/")).mkdir(parents=True, exist_ok=True)
    write(mount, files)
    assert read_limits(membership, mount) == limits


def test_words() -> None:
    assert parse_membership("0::/a\n3:cpu,cpuacct:/b\nbroken\n") == {"": "/a", "cpu": "/b", "cpuacct": "/b"}
    assert [parse_bytes(text) for text in ("max", "-1", "0", "7\n", "")] == [None, None, None, 7, None]
    assert [parse_share(text) for text in ("max 100", "-1 100", "100", "50 100", "5 0")] == [
        None,
        None,
        None,
        0.5,
        None,
    ]


@pytest.mark.parametrize(("share", "cpus"), [(None, 8), (2.9, 2), (0.5, 1), (64.0, 8)])
def test_threads_stay_within_the_share(monkeypatch: pytest.MonkeyPatch, share: float | None, cpus: int) -> None:
    monkeypatch.setattr(cgroup.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cgroup, "read_limits", lambda: GroupLimits(cpus=share))
    assert cgroup.available_cpus() == cpus


def test_memory_is_the_smaller_of_machine_and_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "read_limits", lambda: GroupLimits(memory_bytes=1 << 20))
    assert cgroup.available_memory() == 1 << 20
    monkeypatch.setattr(cgroup, "read_limits", lambda: GroupLimits(memory_bytes=1 << 59))
    assert 0 < cgroup.available_memory() < 1 << 59
