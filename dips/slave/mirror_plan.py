"""What a slave's mirror does next: list, copy the newest version that the master wants there, delete what it does not.

Pure: `now` is an argument, a shell does the jobs (snapshot_mirror.py, the simulation's), one at a time. There is no
queue: a newer wish replaces the one before. What must stay true: nothing is deleted before the newest is whole, and
nothing that the master names. A failure is told as a reason, and tried again with backoff; nobody waits for it. What
lies there is listed anew before that try, since it may be another disk by then.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from dips.dataclass import dataclass
from dips.ids import VersionId
from dips.protocol.events import MirrorReport
from dips.transport.backoff import Backoff

STALL_S = 60.0  # a job that moves nothing for so long is told as failing: a network mount hangs, and raises nothing


class MirrorJobKind(Enum):
    """LIST what lies there; COPY one version; DELETE versions."""

    LIST = "list"
    COPY = "copy"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class MirrorJob:
    kind: MirrorJobKind
    versions: tuple[VersionId, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What came back from a mirror, and why no more did; "": it lacks nothing."""

    versions: tuple[VersionId, ...]
    reason: str = ""


class MirrorPlan:
    """One slave's mirror, as far as this process knows it."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._held: tuple[VersionId, ...] | None = None  # None: not listed yet
        self._outdated: tuple[VersionId, ...] = ()
        self._list_due = True
        self._wanted: tuple[VersionId, ...] = ()
        self._reason = ""
        self._listing_failed = False  # that is what the reason is of
        self._again_at = 0.0
        self._busy = False
        self._moved_at = 0.0  # while busy: when something last moved

    def report(self, now: float) -> MirrorReport:
        """What heartbeats say of it."""
        stalled = self._busy and now - self._moved_at >= STALL_S
        reason = f"nothing has moved for {STALL_S:g} s" if stalled else self._reason
        return MirrorReport(self._held or (), reason, unknown=self._held is None)

    def on_moved(self, now: float) -> None:
        """The present job moved some bytes."""
        self._moved_at = now

    def want(self, versions: tuple[VersionId, ...]) -> None:
        """The master says what the mirror is to hold, the last of them next; empty: nothing yet."""
        self._wanted = versions

    def next_deadline(self, now: float) -> float:
        """When `next_job` has something to do; inf while it has not."""
        return max(self._again_at, now) if not self._busy and self._find_job() is not None else inf

    def next_job(self, now: float) -> MirrorJob | None:
        """Begin a job, if there is one and it is time; exactly one of `on_listed`, `on_done`, `on_failed` follows."""
        if self.next_deadline(now) > now:
            return None
        self._busy, self._moved_at = True, now
        return self._find_job()

    def _find_job(self) -> MirrorJob | None:
        if self._held is None or self._list_due:
            return MirrorJob(MirrorJobKind.LIST)
        if not self._wanted:
            return None
        if self._wanted[-1] not in self._held:
            return MirrorJob(MirrorJobKind.COPY, self._wanted[-1:])
        superfluous = tuple(v for v in (*self._held, *self._outdated) if v not in self._wanted)
        return MirrorJob(MirrorJobKind.DELETE, superfluous) if superfluous else None

    def on_listed(self, held: tuple[VersionId, ...], outdated: tuple[VersionId, ...] = ()) -> None:
        """These lie there whole; also said before the slave registers, so that the master knows from the beginning.

        outdated  of these the layers of before a rebalance lie there, or rot: of no use, whatever their names say
        """
        self._held, self._outdated, self._list_due = _by_round(held), outdated, False
        if self._listing_failed or self._find_job() is None:
            self._end()
        self._busy = False  # and what else has failed is tried again: its reason stands until it succeeds

    def list_again(self) -> None:
        """What was listed may be outdated: this slave has learned which layers are its own."""
        self._list_due = True

    def on_done(self, job: MirrorJob) -> None:
        """A version was copied, or versions were deleted."""
        self._end()
        held = self._held or ()
        self._outdated = tuple(v for v in self._outdated if v not in job.versions)
        if job.kind is MirrorJobKind.COPY:
            self._held = _by_round((*held, *job.versions))
        else:
            self._held = tuple(v for v in held if v not in job.versions)

    def on_failed(self, reason: str, now: float) -> None:
        """The mirror is full, gone or slow beyond patience; what lies there is listed anew before the next try."""
        self._listing_failed = self._held is None or self._list_due
        self._busy, self._list_due = False, True
        self._reason = reason
        self._again_at = now + self._backoff.next_pause_s()

    def _end(self) -> None:
        self._busy, self._reason, self._again_at = False, "", 0.0
        self._backoff.reset()


def _by_round(versions: tuple[VersionId, ...]) -> tuple[VersionId, ...]:
    return tuple(sorted(set(versions), key=lambda v: v.round))
