"""The pace of a cluster's pushes: after a number of steps, after a number of seconds, or aligned with others by the
master.

The trainer's ranks count inner steps and must agree without a message at each step. So each answer says after how many
steps to ask again: at once when a push is due, else when most of the rest has passed, so that a late step or a moved
meeting costs one question and no disagreement. Pure: no messages, no master.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from dips.protocol.heartbeats import OWN_PACE

SOON_S = 0.5  # an overlapping trainer asks for its grant again after this time
SOON_TIMES = 8  # plan at most this many times the steps measured so far
STEPS_KEPT = 33  # inner steps whose median duration is the speed
LOOK_S = 3.0  # aligned ranks ask at least this often: each heartbeat may set or move the meeting
LOOK_SHARE = 0.75  # share of the remaining steps after which the ranks ask again
NEAR = 0.5  # in steps: the step boundary nearest to the due time is taken
MOST_TIMES = 8  # after this many times its own H an aligned cluster pushes, with or without a meeting
BELIEVED_S = 30.0  # validity of the master's meeting time; then the cluster uses its own H


class Pace:
    """Counts inner steps since the last push and those left until the next; `now` is the agent's monotonic clock."""

    def __init__(self, *, steps: int | None = None, seconds: float | None = None, aligned: int | None = None) -> None:
        """Set the pace: exactly one of the three, from `pace` of the cluster file."""
        self._steps, self._seconds, self._aligned = steps, seconds, aligned
        self.since_push = 0
        self._since = 0.0  # when the last push was settled
        self._last: float | None = None  # end of the last inner step; None: the trainer has waited since
        self._took: deque[float] = deque(maxlen=STEPS_KEPT)
        self._step_s: float | None = 0.0  # cached median of `_took`; None: to be computed
        self._round = 0  # inner steps of the last round; 0: there was none
        self.first_step_s = 0.0  # trainer's start to the end of its first step: estimate until better known
        self._due: float | None = None  # time of the meeting; None: there is none
        self._set_at = 0.0  # when the meeting was set

    @property
    def aligned_steps(self) -> int:
        """The H that an aligned cluster would use by itself; 0 for any other pace."""
        return self._aligned or 0

    @property
    def step_s(self) -> float:
        """Median time of an inner step; 0 while unknown."""
        if self._step_s is None:
            self._step_s = median(self._took)
        return self._step_s

    @property
    def round_steps(self) -> int:
        """Inner steps between two pushes, as far as known; 0: unknown.

        For an aligned cluster at most its own H: a round that waited long for a slot must not lengthen the next one.
        """
        if self._seconds is not None:
            return int(self._seconds / self.step_s) if self.step_s > 0 else 0
        own = self._steps or self._aligned or 0
        return min(own, self._round) if self._aligned and self._round else own

    @property
    def steps_until_ask(self) -> int:
        """Inner steps after which a trainer that trains on while it waits should ask again.

        At most SOON_TIMES the steps measured: a trainer's first steps may be much faster than later ones.
        """
        if self.step_s <= 0:
            return 1
        return max(1, min(int(SOON_S / self.step_s), SOON_TIMES * len(self._took)))

    def record_step(self, ended: float, steps: int = 1, span_s: float = 0.0) -> None:
        """Count inner steps: the first of `steps` ended `span_s` before the last, which ended at `ended`."""
        before = self._since if self._last is None else self._last
        first = max(before, ended - max(0.0, span_s))
        ended = max(first, ended)
        self.since_push += steps
        self.first_step_s = self.first_step_s or first - self._since
        if self._last is not None:
            self._took.append(first - self._last)
        if steps > 1:  # each of the others counts with their mean
            self._took.extend([(ended - first) / (steps - 1)] * min(steps - 1, STEPS_KEPT))
        if self._took:
            self._step_s = None
        self._last = ended

    def pause_timing(self) -> None:
        """Exclude the next step from the measurement: the trainer waited for a transfer or a window."""
        self._last = None

    def begin_step(self, now: float) -> None:
        """Start measuring the next step now, after a wait."""
        self._last = now

    def restart_count(self, now: float) -> None:
        """Start counting anew, after a push has ended in any way or when a trainer begins."""
        self._round = self.since_push or self._round
        self.since_push, self._since, self._due = 0, now, None
        self.pause_timing()

    def resume_count(self, since_push: int) -> None:
        """Resume from a checkpoint that was saved `since_push` steps after the last push."""
        self.since_push = since_push

    def set_meeting(self, push_in_s: float, now: float) -> None:
        """Set the time until an aligned push should begin, as the master plans it; OWN_PACE: the cluster uses its own
        H.
        """
        self._set_at = now
        self._due = None if push_in_s == OWN_PACE else now + push_in_s

    def look_in(self, now: float) -> int:
        """Return the inner steps after which the ranks should ask again; 0: a push is due."""
        if self._seconds is not None:
            return self._steps_until(self._since + self._seconds, now)
        if self._aligned is None:
            return max(0, (self._steps or 0) - self.since_push)
        if self._due is None or now - self._set_at > BELIEVED_S:
            return self._by_itself(self._aligned)
        if self.since_push >= self._aligned * MOST_TIMES:
            return 0
        return self._steps_until(self._due, now)

    def _steps_until(self, due: float, now: float) -> int:
        if self.since_push == 0:
            return 1  # a push without a step would be empty
        left = (due - now) / self.step_s if self.step_s > 0 else 1.0 if due > now else 0.0
        return 0 if left < NEAR else self._part_of(left)

    def _by_itself(self, steps: int) -> int:
        """Return the steps until the next question by the cluster's own H, while no meeting is known."""
        left = max(0, steps - self.since_push)
        return self._part_of(left) if left else 0

    def _part_of(self, left: float) -> int:
        soon = LOOK_S / self.step_s if self.step_s > 0 else 1.0
        return max(1, int(min(left * LOOK_SHARE, soon)))
