"""The simulated mirror of a slave's directory, and the shell that keeps it: the work that snapshot_mirror.py does with
a thread and a store is done here in simulated time. MirrorPlan decides what is copied next, as in the daemon.

A mirror survives every disk; it is slow, or gone, at times. A copy interrupted by a crash leaves no complete snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random
from typing import Protocol

from dips.errors import FailedMirror
from dips.ids import VersionId
from dips.protocol.events import MirrorReport
from dips.sim.disk import SimDisk, Snapshot
from dips.sim.heap import Heap, Timer
from dips.slave.mirror_plan import MirrorJob, MirrorJobKind, MirrorPlan, Restored
from dips.transport.backoff import Backoff

COPY_S = 0.4  # duration of a snapshot's copy, at most double
BACKOFF_S = (0.5, 4.0)


class Later(Protocol):
    """Plans an action of this incarnation, done only if it still runs."""

    def __call__(self, delay_s: float, what: str, action: Callable[[], None]) -> Timer: ...


class SimMirror:
    """The content of the mirror; belongs to no machine."""

    def __init__(self, disk: SimDisk, rng: Random) -> None:
        self.disk, self.rng = disk, rng
        self.files: dict[VersionId, Snapshot] = {}
        self.copied_at: dict[VersionId, float] = {}  # when each version was copied
        self.gone = False
        self.slowness = 1.0

    def rot_newest(self) -> VersionId | None:
        """Flip a bit of the newest copy but not of the original on the disk; return its version, None if there
        is none.
        """
        whole = [version for version, copy in self.files.items() if copy.good]
        if not whole:
            return None
        newest = max(whole)
        self.files[newest] = replace(self.files[newest], rotten=True)
        return newest

    def repair_mirror(self) -> None:
        """Make the mirror available and fast."""
        self.gone, self.slowness = False, 1.0


class MirrorShell:
    """Keeps the mirror of one incarnation of a slave."""

    def __init__(self, mirror: SimMirror, later: Later, heap: Heap) -> None:
        self._mirror, self._later, self._heap = mirror, later, heap
        self._plan = MirrorPlan(Backoff(*BACKOFF_S, mirror.rng))
        self._timer: Timer | None = None
        self._rotten: dict[VersionId, Snapshot] = {}  # copies that this process has read and found rotten

    def report(self) -> MirrorReport:
        """Return the mirror's part of a heartbeat."""
        return self._plan.report(self._heap.now)

    def want(self, versions: tuple[VersionId, ...]) -> None:
        """Set the versions that the mirror should hold, as the master orders."""
        self._plan.want(versions)
        self._look()

    def restore(self, on_disk: tuple[VersionId, ...], look_for: tuple[VersionId, ...]) -> Restored:
        """Restore versions newer than the disk's, or requested ones. Raises FailedMirror if the mirror is gone."""
        disk, mirror = self._mirror.disk, self._mirror
        if mirror.gone:
            self._plan.on_failed("the mirror is gone", self._heap.now)
            raise FailedMirror("the mirror is gone")
        newest = max((v.round for v in on_disk), default=0)
        newer = [v for v in self._list_whole() if v not in on_disk and (v.round > newest or v in look_for)]
        whole = tuple(v for v in newer if mirror.files[v].good)
        for version in whole:
            disk.bring_back(version, mirror.files[version])
        self._rotten |= {v: mirror.files[v] for v in newer if v not in whole}
        if len(whole) < len(newer):
            self._list_whole()  # so that copies just found rotten are not reported as complete
        self._look()
        return Restored(whole, "a copy in its mirror is rotten" if len(whole) < len(newer) else "")

    def _list_whole(self) -> tuple[VersionId, ...]:
        """Return the versions that are complete by their manifests, except for copies found rotten."""
        files = self._mirror.files
        outdated = tuple(v for v in files if self._rotten.get(v) is files[v])
        whole = tuple(v for v in files if v not in outdated)
        self._plan.on_listed(whole, outdated)
        return whole

    def _look(self) -> None:
        """Begin the next job if one is due, else plan the next check."""
        now = self._heap.now
        job = self._plan.next_job(now)
        if job is not None:
            work_s = COPY_S * self._mirror.slowness * (1.0 + self._mirror.rng.random())
            self._later(work_s if job.kind is MirrorJobKind.COPY else 0.0, "a mirror works", lambda: self._end(job))
            return
        due = self._plan.next_deadline(now)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._later(due - now, "a mirror's deadline", self._look) if due < inf else None

    def _end(self, job: MirrorJob) -> None:
        mirror, problem = self._mirror, ""
        if mirror.gone:
            problem = "the mirror is gone"
        elif job.kind is MirrorJobKind.LIST:
            self._list_whole()
        elif job.kind is MirrorJobKind.DELETE:
            for version in job.versions:
                del mirror.files[version]
            self._plan.on_done(job)
        else:
            snapshot = mirror.disk.files.get(job.versions[0])
            if snapshot is None or not snapshot.good:
                problem = f"{job.versions[0]} is not whole on this disk"
            else:
                mirror.files[job.versions[0]] = replace(
                    snapshot
                )  # a separate file, so that rot on the disk does not affect it
                mirror.copied_at[job.versions[0]] = self._heap.now
                self._plan.on_done(job)
        if problem:
            self._plan.on_failed(problem, self._heap.now)
        self._look()
