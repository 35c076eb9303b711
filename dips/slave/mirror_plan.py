"""The next job of a slave's mirror: list, copy the newest version that the master wants there, delete those it does not
want.

Pure: `now` is an argument, and a shell does the jobs (snapshot_mirror.py, the simulation's), one at a time. There is no
queue: a newer request replaces the former one. What must stay true: a whole version is deleted only beside one that the
master names, and never one that it names, nor a later one that has come since. The newest version is copied first;
after a copy that failed what may go is deleted first, since there may be no room. A failure is reported with its reason
and tried again with backoff; no other work waits for it. The contents are listed anew before that try, since it may be
another disk by then.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from dips.dataclass import dataclass
from dips.ids import VersionId
from dips.protocol.events import MirrorReport
from dips.transport.backoff import Backoff

STALL_S = 60.0  # a job that moves nothing for so long is reported as failing: a network mount hangs without an error


class MirrorJobKind(Enum):
    """LIST the mirror's contents; COPY one version; DELETE versions."""

    LIST = "list"
    COPY = "copy"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class MirrorJob:
    kind: MirrorJobKind
    versions: tuple[VersionId, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """The versions restored from a mirror, and why others were not; "" if it lacks none."""

    versions: tuple[VersionId, ...]
    reason: str = ""


class MirrorPlan:
    """The state of one slave's mirror, as far as this process knows it."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._held: tuple[VersionId, ...] | None = None  # None: not listed yet
        self._outdated: tuple[VersionId, ...] = ()
        self._list_due = True
        self._wanted: tuple[VersionId, ...] = ()
        self._found: tuple[VersionId, ...] = ()  # that lay there before the master named any
        self._reason = ""
        self._listing_failed = False  # whether the reason is of a failed listing
        self._again_at = 0.0
        self._job: MirrorJob | None = None  # the present one
        self._makes_room = False  # whether a copy has failed, and nothing was deleted since
        self.moved_at = 0.0  # when bytes last moved, or a job began

    def report(self, now: float) -> MirrorReport:
        """Return the report for heartbeats."""
        reason = f"nothing has moved for {STALL_S:g} s" if self.stalls(now) else self._reason
        return MirrorReport(self._held or (), reason, unknown=self._held is None)

    def stalls(self, now: float) -> bool:
        """Return whether the present job has moved nothing for STALL_S."""
        return self._job is not None and now - self.moved_at >= STALL_S

    def on_moved(self, now: float) -> None:
        """Record that the present job, or a restore, moved some bytes."""
        self.moved_at = now

    def want(self, versions: tuple[VersionId, ...]) -> None:
        """Set the versions that the mirror should hold, the last of them next; empty: nothing yet."""
        self._wanted = versions

    def next_deadline(self, now: float) -> float:
        """Return when `next_job` has something to do; inf while it has not."""
        return max(self._again_at, now) if self._job is None and self._find_job() is not None else inf

    def next_job(self, now: float) -> MirrorJob | None:
        """Begin a job, if there is one and it is due; exactly one of `on_listed`, `on_done`, `on_failed` follows."""
        if self.next_deadline(now) > now:
            return None
        self._job, self.moved_at = self._find_job(), now
        return self._job

    def _find_job(self) -> MirrorJob | None:
        if self._list_due:
            return MirrorJob(MirrorJobKind.LIST)
        if not self._wanted:
            return None
        held = self._held or ()
        lacks = self._wanted[-1] not in held
        whole = held if any(version in held for version in self._wanted) else ()
        # What is newer is another process's, if this one was cut off and has a successor that it does not know of; or
        # of a run of this name that was thrown away, whose names come again: that lay there from the beginning.
        newest = max(version.round for version in self._wanted)
        over = (v for v in (*whole, *self._outdated) if v.round < newest or v in self._found)
        superfluous = tuple(v for v in over if v not in self._wanted)
        if superfluous and (self._makes_room or not lacks):
            return MirrorJob(MirrorJobKind.DELETE, superfluous)
        return MirrorJob(MirrorJobKind.COPY, self._wanted[-1:]) if lacks else None

    def on_listed(self, held: tuple[VersionId, ...], outdated: tuple[VersionId, ...] = ()) -> None:
        """Record the complete copies; also called before the slave registers, so that the master knows them from the
        beginning.

        outdated  versions whose copies are of no use: with layers from before a rebalance, or damaged
        """
        self._held, self._outdated, self._list_due = _by_round(held), outdated, False
        if not self._wanted:
            self._found = (*held, *outdated)
        if self._listing_failed or self._find_job() is None:
            self._end()
        self._job = None  # other jobs that failed are tried again: their reason stands until one succeeds

    def list_again(self) -> None:
        """List the mirror again, since this slave has learned which layers are its own."""
        self._list_due = True

    def on_done(self, job: MirrorJob) -> None:
        """Record that a version was copied, or versions were deleted."""
        self._end()
        self._makes_room = False
        held = self._held or ()
        self._outdated = tuple(v for v in self._outdated if v not in job.versions)
        self._found = tuple(v for v in self._found if v not in job.versions)
        if job.kind is MirrorJobKind.COPY:
            self._held = _by_round((*held, *job.versions))
        else:
            self._held = tuple(v for v in held if v not in job.versions)

    def on_failed(self, reason: str, now: float) -> None:
        """Record that the mirror is full, gone or too slow; its contents are listed anew before the next try."""
        self._listing_failed = self._list_due
        if self._job is not None and self._job.kind is not MirrorJobKind.LIST:
            self._makes_room = self._job.kind is MirrorJobKind.COPY
        self._job, self._list_due = None, True
        self._reason = reason
        self._again_at = now + self._backoff.next_pause_s()

    def _end(self) -> None:
        self._job, self._reason, self._again_at = None, "", 0.0
        self._backoff.reset()


def _by_round(versions: tuple[VersionId, ...]) -> tuple[VersionId, ...]:
    return tuple(sorted(set(versions), key=lambda v: v.round))
