"""The pace `aligned`: all clusters push at about the same time, each after as many steps as its speed allows.

The common windows stand on a grid: the moment when the last one opened, and every `period` after it. A cluster is told
how many seconds are left until its push should begin, so H follows from its speed: slow clusters take few inner steps,
fast ones many, and none waits. The period is the median time that the clusters would take for their own H, and changes
slowly once a window has opened. Pushes that share slots begin one after the other, so that the last of them is complete
when the window opens.

What must stay true: a window that did not open, or a master that did not run, leaves the grid as it is; a cluster that
just misses a window still pushes for it; one that would have too few steps pushes for the next one; a silent cluster is
forgotten. Messages carry durations, not times. Pure: heartbeats and `now` are arguments.

Source: docs/architecture.md#pace; in the emulation aligned clusters ended below synchronous DiLoCo's loss at equal
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapreplace
from math import ceil, inf
from statistics import median

from dips.dataclass import dataclass
from dips.protocol.enums import TrainerState
from dips.protocol.heartbeats import LEAST_BYTES_PER_S, OWN_PACE, ClusterHeartbeat

LEAST_SHARE = 1 / 8  # of the H that a cluster would take by itself: a push of fewer steps is not worth its bytes
MOST_CHANGE = 1.25  # factor by which the period changes at most between windows: one odd measurement must not move all
LATE_SHARE = 0.25  # of the period: a cluster that is later than this pushes for the next window
LEAST_STEP_S = 1e-6  # a shorter inner step cannot have been measured
NEVER_S = 1e9  # 30 years, the limit of all durations here: an absurd speed must not yield numbers no message can carry
MOST_AT_ONCE = 64  # with more members, pushes are planned anew only every PLAN_S, not at each change of a member
PLAN_S = 1.0
STEERED_HEARTBEATS = 2  # heartbeats per window: one reports a cluster's speed, one tells it when its push is due
WORKED_SHARE = 0.5  # of the period: a cluster that has worked less since its last push took part in this window
MOST_PERIODS = 2  # of work since its last push, after which a cluster pushes at once: it has missed as many windows


@dataclass(frozen=True, slots=True)
class WindowTiming:
    """The Coordinator's state of windows and slots, as far as the pace depends on it."""

    opened_at: float | None  # when the last window opened, on the master's clock
    slots: int  # pushes that may be open at once; 0 while no slave is registered
    model_bytes: int  # bytes that one push moves


@dataclass(frozen=True, slots=True)
class _Member:
    wanted: int  # H that it would take by itself
    step_s: float
    since_push: int
    bytes_per_s: float
    idle_s: float

    @property
    def period_s(self) -> float:
        return min(self.wanted * self.step_s, NEVER_S)

    def duration_s(self, timing: WindowTiming) -> float:
        """Return how long its push is open; while its bandwidth is unknown, the time of the transfer is left out."""
        moving_s = timing.model_bytes / self.bytes_per_s if self.bytes_per_s >= LEAST_BYTES_PER_S else 0.0
        return min(moving_s + self.idle_s, NEVER_S)


class Alignment:
    """The grid of windows, and the clusters that keep to it."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._anchor: float | None = None  # a time on the grid
        self._opened_at: float | None = None  # the window from which the grid was taken
        self._look_again_at = -inf  # for another period, before the first window
        self.period_s = 0.0  # 0: no speed is known yet
        self._leads = dict[str, float]()  # as last planned
        self._planned_for: WindowTiming | None = None
        self._changed = False  # a member or its link, since then
        self._plan_again_at = -inf

    def record_heartbeat(self, heartbeat: ClusterHeartbeat) -> None:
        """Record a cluster's speed; a cluster that does not align, or whose speed is unknown, is removed from the
        members.
        """
        trains = heartbeat.trainer is TrainerState.TRAINING
        if trains and heartbeat.aligned_steps > 0 and heartbeat.step_s >= LEAST_STEP_S:
            before = self._members.get(heartbeat.cluster)
            member = self._members[heartbeat.cluster] = _Member(
                heartbeat.aligned_steps, heartbeat.step_s, heartbeat.since_push, heartbeat.bytes_per_s, heartbeat.idle_s
            )
            if before is None or (before.bytes_per_s, before.idle_s) != (member.bytes_per_s, member.idle_s):
                self._changed = True
        else:
            self.forget_cluster(heartbeat.cluster)

    def forget_cluster(self, cluster: str) -> None:
        """Remove a cluster that has left or whose trainer stands still; the grid is not changed."""
        if self._members.pop(cluster, None) is not None:
            self._changed = True

    def push_in_s(self, cluster: str, timing: WindowTiming, now: float) -> float:
        """Seconds until the cluster's push should begin, 0 if it is due; OWN_PACE if it keeps its own pace."""
        member = self._members.get(cluster)
        if member is None:
            return OWN_PACE
        self._follow_windows(timing, now)
        assert self._anchor is not None
        if member.since_push * member.step_s >= MOST_PERIODS * self.period_s:
            return 0.0  # otherwise each window that others open would move the grid before this cluster's push begins
        least = max(1, ceil(member.wanted * LEAST_SHARE))
        if member.since_push < least:
            earliest = now + (least - member.since_push) * member.step_s
        elif member.since_push * member.step_s >= WORKED_SHARE * self.period_s:
            earliest = now - LATE_SHARE * self.period_s
        else:
            earliest = now
        begin = self._anchor - self._lead_s(cluster, timing, now)
        periods = max(0, ceil((earliest - begin) / self.period_s))
        return min(NEVER_S, max(0.0, begin + periods * self.period_s - now))

    def explain_pace(self, cluster: str, timing: WindowTiming, now: float) -> str:
        """Describe the cluster's pace in a sentence for people; empty if it keeps its own pace."""
        left = self.push_in_s(cluster, timing, now)
        if left == OWN_PACE:
            return ""
        member = self._members[cluster]
        steps = member.since_push + round(left / member.step_s)
        return (
            f"aligned: H {steps} (by itself {member.wanted}) at {member.step_s:.3g} s a step, "
            f"pushes in {left:.1f} s, a window every {self.period_s:.1f} s"
        )

    def warn_pace(self, heartbeat_s: float) -> str:
        """Return a warning for people that clusters cannot meet at this heartbeat interval; empty if they can."""
        if len(self._members) < 2 or not 0 < self.period_s < STEERED_HEARTBEATS * heartbeat_s:
            return ""
        return (
            f"windows every {self.period_s:.2g} s are too short to be steered by heartbeats every {heartbeat_s:g} s: "
            "clusters meet by chance: take a larger H (pace.aligned in cluster.yaml), or a smaller heartbeat_s"
        )

    def _follow_windows(self, timing: WindowTiming, now: float) -> None:
        """Move the grid to the last window, and the period a little towards what the members want.

        Before the first window the period is what they want: a trainer's first steps may take a hundred times as long
        as later ones.
        """
        opened = timing.opened_at != self._opened_at
        if not opened and now < self._look_again_at:
            return  # called at every heartbeat of every member
        wanted = median(m.period_s for m in self._members.values())
        if self._anchor is None:
            self.period_s, self._anchor = wanted, now + wanted
        if opened:
            self._anchor, self._opened_at, self._look_again_at = timing.opened_at, timing.opened_at, inf
            self.period_s = min(max(wanted, self.period_s / MOST_CHANGE), self.period_s * MOST_CHANGE)
        else:
            self._anchor, self._look_again_at = self._anchor + wanted - self.period_s, now + PLAN_S
            self.period_s = wanted

    def _lead_s(self, cluster: str, timing: WindowTiming, now: float) -> float:
        """Return how long before the window the cluster's push begins: its own duration, and those of later pushes in
        its slot.
        """
        may_plan = len(self._members) <= MOST_AT_ONCE or now >= self._plan_again_at
        if (self._changed and may_plan) or timing != self._planned_for:
            self._changed, self._planned_for, self._plan_again_at = False, timing, now + PLAN_S
            self._leads = plan_leads({name: m.duration_s(timing) for name, m in self._members.items()}, timing.slots)
        lead_s = self._leads.get(cluster)
        return self._members[cluster].duration_s(timing) if lead_s is None else lead_s


def plan_leads(durations: Mapping[str, float], slots: int) -> dict[str, float]:
    """Return how long before the window each push begins; assigned backwards, the longest first, each to the next free
    slot.
    """
    leads = dict[str, float]()
    longest_first = sorted(durations, key=lambda name: (-durations[name], name))
    ends = [(0.0, slot) for slot in range(max(1, min(slots, len(durations))))]  # seconds before the window
    for name in longest_first:
        end, slot = ends[0]
        leads[name] = end + durations[name]
        heapreplace(ends, (leads[name], slot))
    return leads
