"""When this cluster pushes: after so many steps, after so many seconds, or together with others, as the master plans.

The trainer's ranks count inner steps and must agree without a message at each of them. So each answer says after how
many steps to look again: at once when a push is due, else when most of what is left is over, so that a late step or a
moved meeting costs one look and no disagreement. Pure; knows neither messages nor the master.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from dips.protocol.heartbeats import OWN_PACE

SOON_S = 0.5  # a trainer that overlaps looks for a grant so soon
SOON_TIMES = 8  # the steps seen: as far ahead as they are believed
STEPS_KEPT = 33  # inner steps whose median is the speed
LOOK_S = 3.0  # at least so often do aligned ranks look: the meeting may be set, or moved, by every heartbeat
LOOK_SHARE = 0.75  # of the steps that are left: then the ranks look again
NEAR = 0.5  # of a step: the boundary nearest to the moment is taken
MOST_TIMES = 8  # the own H of an aligned cluster: it pushes then, meeting or not
BELIEVED_S = 30.0  # what the master has set holds so long; then the cluster keeps its own H


class Pace:
    """Counts inner steps since the last push, and how many are left; `now` is the agent's monotonic clock."""

    def __init__(self, *, steps: int | None = None, seconds: float | None = None, aligned: int | None = None) -> None:
        """Exactly one of the three: `pace` of the cluster file."""
        self._steps, self._seconds, self._aligned = steps, seconds, aligned
        self.since_push = 0
        self._since = 0.0  # when the last push was settled
        self._last: float | None = None  # end of the last inner step, if the trainer has not stood still since
        self._took: deque[float] = deque(maxlen=STEPS_KEPT)
        self._step_s: float | None = 0.0  # their median, once somebody has asked for it
        self._round = 0  # steps of the last round; 0: there was none
        self.first_step_s = 0.0  # of all, from the trainer's beginning: an estimate until there is a better one
        self._due: float | None = None  # of the meeting
        self._set_at = 0.0  # when it was set

    @property
    def aligned_steps(self) -> int:
        """H that an aligned cluster would take by itself; 0 for every other pace."""
        return self._aligned or 0

    @property
    def step_s(self) -> float:
        """Median time of an inner step; 0 while unknown."""
        if self._step_s is None:
            self._step_s = median(self._took)
        return self._step_s

    @property
    def round_steps(self) -> int:
        """Inner steps between two pushes, as far as that is known; 0: it is not.

        Of an aligned cluster no more than its own H: a round that waited long for a slot must not make the next longer.
        """
        if self._seconds is not None:
            return int(self._seconds / self.step_s) if self.step_s > 0 else 0
        own = self._steps or self._aligned or 0
        return min(own, self._round) if self._aligned and self._round else own

    @property
    def steps_until_ask(self) -> int:
        """Inner steps after which a trainer that trains on while it waits should ask again.

        A few times as many as were seen at most: a trainer's first steps may be far faster than those that follow.
        """
        if self.step_s <= 0:
            return 1
        return max(1, min(int(SOON_S / self.step_s), SOON_TIMES * len(self._took)))

    def record_step(self, ended: float, steps: int = 1, span_s: float = 0.0) -> None:
        """So many inner steps are done; the first of them ended `span_s` before the last, which ended at `ended`."""
        before = self._since if self._last is None else self._last
        first = max(before, ended - max(0.0, span_s))
        ended = max(first, ended)
        self.since_push += steps
        self.first_step_s = self.first_step_s or first - self._since
        if self._last is not None:
            self._took.append(first - self._last)
        if steps > 1:  # their mean stands for each
            self._took.extend([(ended - first) / (steps - 1)] * min(steps - 1, STEPS_KEPT))
        if self._took:
            self._step_s = None
        self._last = ended

    def pause_timing(self) -> None:
        """The trainer waited for a transfer or a window: the next step's time is no measure of its speed."""
        self._last = None

    def begin_step(self, now: float) -> None:
        """The trainer waits no longer: its next step begins now, and can be measured."""
        self._last = now

    def restart_count(self, now: float) -> None:
        """A push is over, whatever came of it, or a trainer begins: count anew."""
        self._round = self.since_push or self._round
        self.since_push, self._since, self._due = 0, now, None
        self.pause_timing()

    def resume_count(self, since_push: int) -> None:
        """Resume from a checkpoint: so many steps were taken since the last push."""
        self.since_push = since_push

    def set_meeting(self, push_in_s: float, now: float) -> None:
        """The master has set when an aligned push should begin; OWN_PACE: by the own H."""
        self._set_at = now
        self._due = None if push_in_s == OWN_PACE else now + push_in_s

    def look_in(self, now: float) -> int:
        """Inner steps until the ranks should look again; 0: a push is due."""
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
            return 1  # a push without a step is nothing
        left = (due - now) / self.step_s if self.step_s > 0 else 1.0 if due > now else 0.0
        return 0 if left < NEAR else self._part_of(left)

    def _by_itself(self, steps: int) -> int:
        """The own H, as long as no meeting is known."""
        left = max(0, steps - self.since_push)
        return self._part_of(left) if left else 0

    def _part_of(self, left: float) -> int:
        soon = LOOK_S / self.step_s if self.step_s > 0 else 1.0
        return max(1, int(min(left * LOOK_SHARE, soon)))
