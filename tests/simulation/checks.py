"""The base of all invariants: an observer of a world that changes nothing in it and raises when something is wrong."""

from __future__ import annotations

from dips.sim.observer import Observer
from dips.sim.world import World


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, what: str) -> None:
        super().__init__(f"[{invariant.number}] {type(invariant).__name__}: {what}")
        self.number = invariant.number


class Invariant(Observer):
    """One thing that must always be true; the number stands in reports and beside each sabotage."""

    number = 0

    def __init__(self, world: World) -> None:
        self.world = world

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)

    def fail(self, what: str) -> None:
        """Call it directly where `what` is costly to write and asked after every event."""
        raise Violation(self, what)
