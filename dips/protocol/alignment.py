"""When clusters of aligned pace push: all at about the same time, each after as many steps as its speed allows.

The common windows stand on a grid: the moment when the last one opened, and every `period` after it. A cluster is given
the seconds that are left until its push should begin, so H follows from its speed: slow clusters take few inner steps,
fast ones many, and none waits. The period is the median time that the clusters' own H would take, and follows slowly.
Pushes that share the slots begin one after the other, so that the last of them is in when the window opens.

What must stay true: a window that did not open leaves the grid as it is; a cluster that just misses a window still
goes to it; one that would come with too few steps goes to the next; one that is silent is forgotten. Durations travel,
clocks do not. Pure: heartbeats and `now` come in.

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

LEAST_SHARE = 1 / 8  # of the H that a cluster would take by itself: with fewer steps a push is not worth its bytes
MOST_CHANGE = 1.25  # of the period, from one window to the next: one odd measurement must not move all
LATE_SHARE = 0.25  # of the period: who is later than that goes to the next window
LEAST_STEP_S = 1e-6  # no inner step is faster: a smaller number was not measured
NEVER_S = 1e9  # thirty years: an absurd speed must not give numbers that the other end of the wire refuses
MOST_AT_ONCE = 64  # members whose pushes are planned anew when one of them changes; those of more, once in PLAN_S
PLAN_S = 1.0
STEERED_HEARTBEATS = 2  # a window needs so many: by one a cluster tells its speed, by one it learns when it is due
WORKED_SHARE = 0.5  # of the period: who has worked less since its last push was in this window
MOST_PERIODS = 2  # of work since its last push: who has missed so many windows waits for none


@dataclass(frozen=True, slots=True)
class WindowTiming:
    """What the Coordinator knows about windows."""

    opened_at: float | None  # when the last window opened, on the master's clock
    slots: int  # pushes that may move at once; 0 while no slave is registered
    model_bytes: int  # that a push moves


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
        """How long its push is open; the time in which it moves is left out while its bandwidth is unknown."""
        moving_s = timing.model_bytes / self.bytes_per_s if self.bytes_per_s >= LEAST_BYTES_PER_S else 0.0
        return min(moving_s + self.idle_s, NEVER_S)


class Alignment:
    """The grid of windows, and which clusters keep to it."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._anchor: float | None = None  # a time on the grid
        self._opened_at: float | None = None  # the window from which the grid was taken
        self.period_s = 0.0  # 0: no speed is known yet
        self._leads = dict[str, float]()  # as last planned
        self._planned_for: WindowTiming | None = None
        self._changed = False  # a member or its link, since then
        self._plan_again_at = -inf

    def record_heartbeat(self, heartbeat: ClusterHeartbeat) -> None:
        """Take note of a cluster's speed; one that does not align, or whose speed is unknown, is no member."""
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
        """It is gone, or stands still: the grid does not depend on it."""
        if self._members.pop(cluster, None) is not None:
            self._changed = True

    def skip_gap(self, gap_s: float) -> None:
        """The master did not run for `gap_s`: the grid stays where the clusters, who kept working, are."""
        if self._anchor is not None and self.period_s > 0:
            self._anchor += self.period_s * (gap_s // self.period_s)

    def push_in_s(self, cluster: str, timing: WindowTiming, now: float) -> float:
        """Seconds until the cluster's push should begin, 0 if it is due; OWN_PACE if it keeps its own pace."""
        member = self._members.get(cluster)
        if member is None:
            return OWN_PACE
        self._follow_windows(timing, now)
        assert self._anchor is not None
        if member.since_push * member.step_s >= MOST_PERIODS * self.period_s:
            return 0.0  # windows of others move the grid before its push can begin, again and again
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
        """Describe the cluster's pace, for people; empty if it keeps its own."""
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
        """Why clusters do not meet, for people; empty if they can."""
        if len(self._members) < 2 or not 0 < self.period_s < STEERED_HEARTBEATS * heartbeat_s:
            return ""
        return (
            f"windows every {self.period_s:.2g} s are too short to be steered by heartbeats every {heartbeat_s:g} s: "
            "clusters meet by chance: take a larger H (pace.aligned in cluster.yaml), or a smaller heartbeat_s"
        )

    def _follow_windows(self, timing: WindowTiming, now: float) -> None:
        """Move the grid to the last window, and the period a little towards what the members want."""
        opened = timing.opened_at is not None and timing.opened_at != self._opened_at
        if self._anchor is not None and not opened:
            return  # asked at every heartbeat of every member, and changed only by a window
        wanted = median(m.period_s for m in self._members.values())
        if self._anchor is None:
            self.period_s, self._anchor = wanted, now + wanted
        if opened:
            self._anchor = self._opened_at = timing.opened_at
            self.period_s = min(max(wanted, self.period_s / MOST_CHANGE), self.period_s * MOST_CHANGE)

    def _lead_s(self, cluster: str, timing: WindowTiming, now: float) -> float:
        """How long before the window its push begins: its own duration, and of those that follow it in its slot."""
        may_plan = len(self._members) <= MOST_AT_ONCE or now >= self._plan_again_at
        if (self._changed and may_plan) or timing != self._planned_for:
            self._changed, self._planned_for, self._plan_again_at = False, timing, now + PLAN_S
            self._leads = plan_leads({name: m.duration_s(timing) for name, m in self._members.items()}, timing.slots)
        lead_s = self._leads.get(cluster)
        return self._members[cluster].duration_s(timing) if lead_s is None else lead_s


def plan_leads(durations: Mapping[str, float], slots: int) -> dict[str, float]:
    """How long before the window each push begins: from behind, the longest first, each in the slot that is free."""
    leads = dict[str, float]()
    longest_first = sorted(durations, key=lambda name: (-durations[name], name))
    ends = [(0.0, slot) for slot in range(max(1, min(slots, len(durations))))]  # seconds before the window
    for name in longest_first:
        end, slot = ends[0]
        leads[name] = end + durations[name]
        heapreplace(ends, (leads[name], slot))
    return leads
