"""A cluster's training progress: what is not settled yet, the use of its time, and when its next push is due."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import field
from math import nan
from statistics import median

from dips.dataclass import dataclass
from dips.protocol.data import BegunRange
from dips.protocol.enums import OutcomeKind
from dips.protocol.heartbeats import OWN_PACE
from dips.telemetry.metrics import Histogram

# ---- account --------------------------------------------------------------------------------------------------------
# The account of a cluster's training progress that is not yet settled: tokens, inner steps, loss and data ranges
# (docs/rationale.md#16, #37).
#
# Every token consumed in one incarnation of the cluster is in exactly one of: carried (the next push takes it), frozen
# (in the push under way), accepted, gated, lost. Progress is cut at the freeze of a push and settled by its Outcome; a
# dropped or skipped push returns its progress, the death of the trainer that made it loses it. No messages, no clock.


@dataclass(frozen=True, slots=True)
class Portion:
    """Progress between two cuts; `loss` is the mean of the reported losses, NaN if none was."""

    tokens: int = 0
    inner_steps: int = 0
    ranges: tuple[int, ...] = ()
    loss_sum: float = 0.0
    losses: int = 0
    begun: BegunRange | None = None  # the partly trained range after `ranges`; None: there is none

    @property
    def loss(self) -> float:
        return self.loss_sum / self.losses if self.losses else nan

    def __add__(self, other: Portion) -> Portion:
        ranges, begun = self.ranges + other.ranges, other.begun or self.begun
        return Portion(
            self.tokens + other.tokens,
            self.inner_steps + other.inner_steps,
            ranges,
            self.loss_sum + other.loss_sum,
            self.losses + other.losses,
            None if begun and begun.number in ranges else begun,
        )


NOTHING = Portion()


@dataclass(frozen=True, slots=True)
class PastIncarnation:
    """An earlier incarnation of the cluster, and the tokens that it consumed."""

    inc: int = 0
    consumed: int = 0


NO_INCARNATION = PastIncarnation()


@dataclass
class Account:
    """The progress of one incarnation of a cluster."""

    carried: Portion = NOTHING
    frozen: Portion = NOTHING
    accepted: int = 0
    gated: int = 0
    lost: int = 0

    @property
    def unsettled_tokens(self) -> int:
        """Tokens that a push may still contribute."""
        return self.carried.tokens + self.frozen.tokens

    @property
    def consumed_tokens(self) -> int:
        return self.unsettled_tokens + self.accepted + self.gated + self.lost

    def record_step(self, tokens: int, loss: float | None, steps: int = 1, losses: int = 1) -> None:
        """Count inner steps; `loss` is the mean of `losses` of them."""
        known = losses if loss is not None else 0
        self.carried += Portion(tokens, steps, (), (loss or 0.0) * known, known)

    def add_tokens(self, tokens: int) -> None:
        """Add tokens of inner steps that were counted without them."""
        self.carried += Portion(tokens)

    def add_losses(self, loss_sum: float, losses: int) -> None:
        """Add losses of inner steps that were counted without one."""
        self.carried += Portion(loss_sum=loss_sum, losses=losses)

    def use_up(self, used: int) -> None:
        """Count a data range as trained by the carried progress."""
        self.carried += Portion(ranges=(used,))

    def begin_range(self, begun: BegunRange) -> None:
        """Count a part of a data range as trained by the carried progress."""
        self.carried += Portion(begun=begun)

    def freeze_portion(self) -> Portion:
        """Move the carried progress to the push that is being frozen; return the frozen progress."""
        self.frozen, self.carried = self.frozen + self.carried, NOTHING
        return self.frozen

    def settle_outcome(self, kind: OutcomeKind) -> Portion:
        """Book the frozen progress of an accepted or gated push as settled, and return it."""
        if kind is OutcomeKind.ACCEPTED:
            self.accepted += self.frozen.tokens
        else:
            self.gated += self.frozen.tokens
        settled, self.frozen = self.frozen, NOTHING
        return settled

    def give_back(self) -> None:
        """Return the frozen progress of a dropped or skipped push to the carried, for the next push."""
        self.carried, self.frozen = self.frozen + self.carried, NOTHING

    def lose_carried(self) -> tuple[int, ...]:
        """Book the carried progress as lost after the trainer died; return the ranges to train again."""
        portion, self.carried = self.carried, NOTHING
        self.lost += portion.tokens
        return portion.ranges

    def lose_frozen(self) -> tuple[int, ...]:
        """Book the frozen progress as lost: the push was dropped and its trainer is dead. Return the ranges to train
        again.
        """
        portion, self.frozen = self.frozen, NOTHING
        self.lost += portion.tokens
        return portion.ranges


@dataclass
class RangeQueue:
    """The data ranges leased to this incarnation of the cluster and not used up, and those given to the trainer."""

    waiting: deque[int] = field(default_factory=deque)
    exhausted: bool = False  # the master had no range left to lease, and none to be returned, when it last answered
    asks_again: bool = False  # a push was settled since: the master is asked even so
    held_back: int = 0  # the trainer's question (see `asked`) for which the master has none until ours are settled
    served: list[int] = field(default_factory=list)  # given and not used up, in order; several if a step spans ranges
    given: int | None = None  # the answer to the trainer's last question; None: not answered yet
    asked: int = 0  # number of the trainer's last question, from 1
    begun: dict[int, BegunRange] = field(default_factory=dict)  # partly settled ranges by number

    @property
    def ranges_ahead(self) -> tuple[int, ...]:
        """The ranges that are leased and not used up, in order; the first may be partly trained."""
        return (*self.served, *self.waiting)

    def add_leased(self, ranges: Collection[int], exhausted: bool, begun: Iterable[BegunRange] = ()) -> None:
        self.waiting.extend(ranges)
        self.exhausted, self.asks_again = exhausted, False
        for number in ranges:
            self.begun.pop(number, None)
        self.begun.update((part.number, part) for part in begun)

    def hold_back(self) -> None:
        """Note that the master has no range until ours are settled; the trainer's next question asks it again."""
        self.held_back = self.asked

    @property
    def is_held_back(self) -> bool:
        return 0 < self.asked == self.held_back

    def begin_question(self, count: int) -> None:
        """Note that the trainer asks for its `count`-th range."""
        self.asked, self.given = count, None

    def finish_ranges(self, left: Iterable[int] = ()) -> list[int]:
        """Remove and return the served ranges that the trainer has used up, all except `left`."""
        kept = {*left}
        used = [r for r in self.served if r not in kept]
        self.served = [r for r in self.served if r in kept]
        return used

    def serve_range(self) -> int | None:
        """Return the range for the trainer's last question, the same for each repetition; None if there is none yet."""
        if self.given is None and self.waiting:
            self.given = self.waiting.popleft()
            self.served.append(self.given)
        return self.given

    def settle_part(self, used: Iterable[int], begun: BegunRange | None) -> None:
        """Record the settled progress of an accepted or gated push, so that no trainer repeats it.

        The outcome may be of a version that was rolled back since: used-up ranges that are ahead are leased anew.
        """
        for number in {*used} - {*self.ranges_ahead}:
            self.begun.pop(number, None)
        if begun is not None:
            self.begun[begun.number] = begun

    def resume_ranges(self, used: Iterable[int], ahead: tuple[int, ...]) -> None:
        """Resume from a checkpoint: serve its ranges first, in its order; used-up ranges are not served again."""
        held, self.served, self.given = {*self.ranges_ahead}, [], None
        self.waiting = deque([*ahead, *sorted(held - {*ahead} - {*used})])

    def take_back(self, ranges: Iterable[int]) -> None:
        """Queue the served and the carried ranges of a dead trainer again, in order, for the next one."""
        self.asked = 0
        self.recall_ranges()
        self.take_back_unserved(ranges)

    def recall_ranges(self) -> None:
        """Queue the served ranges again, for this trainer or the next one."""
        unused, self.served, self.given = self.served, [], None
        self.take_back_unserved(unused)

    def take_back_unserved(self, ranges: Iterable[int]) -> None:
        """Queue the ranges of a dead trainer's dropped push again."""
        self.waiting = deque(sorted({*ranges, *self.waiting}))


# ---- tally ----------------------------------------------------------------------------------------------------------
# A cluster's time by cause (Figure 17 of Di-PS) and its training rate. No clock, no messages.


# Inner steps, and the causes of waiting; only under the first do accelerators train.
CAUSES = (
    "inner",  # between two calls of the outer loop
    "slot",  # for a slot on all slaves
    "push",  # for its own bytes to move, and to be committed
    "window",  # for the round's other pushes
    "update",  # for the outer step, its snapshots and the flip
    "pull",  # for the new version to arrive and to be installed
    "data",  # for a data range
    "join",  # for the master to take it into the run
    "start",  # for the trainer to import, build and attach
    "failure",  # for a trainer that died to come back
    "ended",  # after its own goodbye
)
WAITS = ("slot", "push", "window", "update", "pull", "data", "join")  # causes with a histogram of single waits


class Tally:
    """The seconds by cause and the tokens over time of one agent."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.tokens = 0
        self.moved = {"push": 0, "pull": 0}  # bytes of completed transfers
        self._cause = "start"
        self._since: float | None = None  # until when time is counted; None: no event yet
        self._waited = 0.0  # seconds in the present window
        self._spell = 0.0  # seconds since the cause last changed
        self.waits = {cause: Histogram() for cause in WAITS}
        self._told = dict.fromkeys(CAUSES, 0.0)  # the last answer of `seconds_by_cause`

    @property
    def cause(self) -> str:
        return self._cause

    def switch_cause(self, cause: str, now: float) -> None:
        """Count time from `now` on under `cause`."""
        if self._since is not None:
            passed = now - self._since
            self.seconds[self._cause] += passed
            self._waited += passed if self._cause == "window" else 0.0
            self._spell += passed
        if cause != self._cause:
            if self._cause in self.waits:
                self.waits[self._cause].observe_value(self._spell)
            self._spell = 0.0
        if cause != "window":
            self._waited = 0.0
        self._cause, self._since = cause, now

    def count_update(self, update_s: float) -> None:
        """Move `update_s` of the present wait from the window to the update."""
        share = min(max(update_s, 0.0), self._waited)
        self.seconds["window"] -= share
        self.seconds["update"] += share
        self.waits["update"].observe_value(share)
        self._spell -= share if self._cause == "window" else 0.0
        self._waited = 0.0

    def seconds_by_cause(self, now: float) -> dict[str, float]:
        """Return the seconds by cause until `now`, none less than before: Prometheus takes a counter that falls for one
        that began anew at 0. What was told as a window and is an update makes up the next window's first seconds.
        """
        passed = now - self._since if self._since is not None else 0.0
        found = {**self.seconds, self._cause: self.seconds[self._cause] + passed}
        self._told = {cause: max(seconds, self._told[cause]) for cause, seconds in found.items()}
        return self._told


# ---- pace -----------------------------------------------------------------------------------------------------------
# The trainer's ranks count inner steps and must agree without a message at each step. So each answer says after how
# many steps to ask again: at once when a push is due, else when most of the rest has passed, so that a late step or a
# moved meeting costs one question and no disagreement. Pure: no messages, no master.


SOON_S = 0.5  # an overlapping trainer asks for its grant again after this time
SOON_TIMES = 8  # plan at most this many times the steps measured so far
STEPS_KEPT = 33  # inner steps whose median duration is the speed
LOOK_S = 3.0  # aligned ranks ask at least this often: each heartbeat may set or move the meeting
LOOK_SHARE = 0.75  # share of the remaining steps after which the ranks ask again
NEAR = 0.5  # in steps: the step boundary nearest to the due time is taken
MOST_TIMES = 8  # after this many times its own H an aligned cluster pushes, with or without a meeting
BELIEVED_S = 30.0  # least validity of the master's meeting time; then the cluster uses its own H


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
        self._believed_s = BELIEVED_S

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

    def set_meeting(self, push_in_s: float, now: float, believed_s: float = 0.0) -> None:
        """Set the time until an aligned push should begin, as the master plans it; OWN_PACE: the cluster uses its own
        H. It is believed for `believed_s` and at least BELIEVED_S: several heartbeats, however rare they are.
        """
        self._set_at, self._believed_s = now, max(BELIEVED_S, believed_s)
        self._due = None if push_in_s == OWN_PACE else now + push_in_s

    def look_in(self, now: float) -> int:
        """Return the inner steps after which the ranks should ask again; 0: a push is due."""
        if self._seconds is not None:
            return self._steps_until(self._since + self._seconds, now)
        if self._aligned is None:
            return max(0, (self._steps or 0) - self.since_push)
        if self._due is None or now - self._set_at > self._believed_s:
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
