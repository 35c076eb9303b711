"""What a cluster's training has earned and not yet settled: tokens, inner steps, loss and data ranges
(docs/rationale.md#16, #37).

Every token consumed in one incarnation of the cluster is in exactly one of: carried (the next push takes it), frozen
(in the push under way), accepted, gated, lost. Progress is cut at the freeze of a push and settled by its Outcome; a
dropped or skipped push gives it back, the death of the trainer that earned it loses it. Knows no messages and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import field
from math import nan

from dips.dataclass import dataclass
from dips.protocol.data import BegunRange
from dips.protocol.enums import OutcomeKind


@dataclass(frozen=True, slots=True)
class Portion:
    """Progress between two cuts; `loss` is the mean of the reported losses, NaN if none was."""

    tokens: int = 0
    inner_steps: int = 0
    ranges: tuple[int, ...] = ()
    loss_sum: float = 0.0
    losses: int = 0
    begun: BegunRange | None = None  # the range after those, as far as it is trained

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
    """An incarnation of the cluster, and the tokens that it has consumed."""

    inc: int = 0
    consumed: int = 0


NO_INCARNATION = PastIncarnation()


@dataclass
class Account:
    """Progress of one incarnation of a cluster."""

    carried: Portion = NOTHING
    frozen: Portion = NOTHING
    accepted: int = 0
    gated: int = 0
    lost: int = 0

    @property
    def unsettled_tokens(self) -> int:
        """Tokens that a push may still bring in."""
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
        """Count a data range as trained by what is carried."""
        self.carried += Portion(ranges=(used,))

    def begin_range(self, begun: BegunRange) -> None:
        """Count a part of a data range as trained by what is carried."""
        self.carried += Portion(begun=begun)

    def freeze_portion(self) -> Portion:
        """Cut: what was carried goes with the push."""
        self.frozen, self.carried = self.frozen + self.carried, NOTHING
        return self.frozen

    def settle_outcome(self, kind: OutcomeKind) -> Portion:
        """The push was accepted or gated: its portion, which is returned, never comes back."""
        if kind is OutcomeKind.ACCEPTED:
            self.accepted += self.frozen.tokens
        else:
            self.gated += self.frozen.tokens
        settled, self.frozen = self.frozen, NOTHING
        return settled

    def give_back(self) -> None:
        """The push came to nothing: the next one takes its portion."""
        self.carried, self.frozen = self.frozen + self.carried, NOTHING

    def lose_carried(self) -> tuple[int, ...]:
        """The trainer died; return the ranges that must be trained anew."""
        portion, self.carried = self.carried, NOTHING
        self.lost += portion.tokens
        return portion.ranges

    def lose_frozen(self) -> tuple[int, ...]:
        """The push came to nothing and its trainer is dead; return the ranges that must be trained anew."""
        portion, self.frozen = self.frozen, NOTHING
        self.lost += portion.tokens
        return portion.ranges


@dataclass
class RangeQueue:
    """Data ranges leased to this incarnation of the cluster and not used up, and those that the trainer was given."""

    waiting: deque[int] = field(default_factory=deque)
    exhausted: bool = False  # the master has none left to lease, and none will come back
    held_back: int = 0  # count of the trainer's question to which it had no more before ours are settled
    served: list[int] = field(default_factory=list)  # in order; more than one if what is left of one goes with the next
    given: int | None = None  # to the present trainer's last question
    asked: int = 0  # count of that question
    begun: dict[int, BegunRange] = field(default_factory=dict)  # settled in part

    @property
    def ranges_ahead(self) -> tuple[int, ...]:
        """Leased and not used up, in order; the first may be half trained."""
        return (*self.served, *self.waiting)

    def add_leased(self, ranges: Iterable[int], exhausted: bool, begun: Iterable[BegunRange] = ()) -> None:
        self.waiting.extend(ranges)
        self.exhausted = exhausted
        self.begun.update((part.number, part) for part in begun)

    def hold_back(self) -> None:
        """The master has no more for us before what we hold is settled; the trainer's next question asks it again."""
        self.held_back = self.asked

    @property
    def is_held_back(self) -> bool:
        return 0 < self.asked == self.held_back

    def begin_question(self, count: int) -> None:
        """The trainer asks for its `count`-th range."""
        self.asked, self.given = count, None

    def finish_ranges(self, left: Iterable[int] = ()) -> list[int]:
        """The trainer has used up what it was given, but for `left`: return that."""
        kept = {*left}
        used = [r for r in self.served if r not in kept]
        self.served = [r for r in self.served if r in kept]
        return used

    def serve_range(self) -> int | None:
        """The range for the trainer's last question, the same however often it is asked; None if none is here."""
        if self.given is None and self.waiting:
            self.given = self.waiting.popleft()
            self.served.append(self.given)
        return self.given

    def settle_part(self, used: Iterable[int], begun: BegunRange | None) -> None:
        """A push was accepted or gated: what it brought is not trained again, whoever goes on."""
        for number in used:
            self.begun.pop(number, None)
        if begun is not None:
            self.begun[begun.number] = begun

    def resume_ranges(self, used: Iterable[int], ahead: tuple[int, ...]) -> None:
        """Resume from a checkpoint: its ranges come first, in its order; what was used up is not served again."""
        held, self.served, self.given = {*self.ranges_ahead}, [], None
        self.waiting = deque([*ahead, *sorted(held - {*ahead} - {*used})])

    def take_back(self, ranges: Iterable[int]) -> None:
        """The trainer died: what it had and what it carried is served again, in order, to the next one."""
        self.asked = 0
        self.recall_ranges()
        self.take_back_unserved(ranges)

    def recall_ranges(self) -> None:
        """What the trainer was given is served again, to it or to the next one."""
        unused, self.served, self.given = self.served, [], None
        self.take_back_unserved(unused)

    def take_back_unserved(self, ranges: Iterable[int]) -> None:
        """A dead trainer's push came to nothing: its ranges are served again."""
        self.waiting = deque(sorted({*ranges, *self.waiting}))
