"""Observers of a simulated world: an Observer overrides the hooks that it needs; by default every hook does nothing.

Each part of the world declares the hooks that it calls (agent.py, master.py, network.py, slave.py); here they are
combined with those of the world itself. An observer may read everything; an observer that changes the world (a plan of
failures) does so through `World.call_later`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from dips.sim.agent import ClusterObserver
from dips.sim.master import MasterObserver
from dips.sim.network import NetworkObserver
from dips.sim.seeder import SeederObserver
from dips.sim.slave import SlaveObserver


class Observer(ClusterObserver, MasterObserver, SlaveObserver, NetworkObserver, SeederObserver):
    """All hooks of a world."""

    def after_event(self) -> None:
        """Called after an event: the machines in `World.looked_at` may have changed."""

    def time_passed(self) -> None:
        """Called every few events, for checks that only time can break."""

    def at_rest(self) -> None:
        """Called when the run is over."""


HOOKS = tuple(name for name in dir(Observer) if not name.startswith("_"))
GIVEN = {hook: len(signature(getattr(Observer, hook)).parameters) - 1 for hook in HOOKS}  # arguments without self


class Monitor(Observer):
    """Calls the hooks of all observers; a hook that none overrides costs one empty call."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add_observers(self, observers: Sequence[Observer]) -> None:
        self._observers += observers
        for hook in HOOKS:
            default = getattr(Observer, hook)
            called = [getattr(o, hook) for o in self._observers if getattr(type(o), hook) is not default]
            if called:
                setattr(self, hook, called[0] if len(called) == 1 else _call_each(called, GIVEN[hook]))


def _call_each(called: list[Callable[..., None]], given: int) -> Callable[..., None]:
    """Return a function that calls all of them with the `given` arguments; for up to two without building a tuple."""

    def call_plain() -> None:
        for observe in called:
            observe()

    def call_with_one(detail: Any) -> None:
        for observe in called:
            observe(detail)

    def call_with_two(first: Any, second: Any) -> None:
        for observe in called:
            observe(first, second)

    def call_with_all(*details: Any) -> None:
        for observe in called:
            observe(*details)

    calls = (call_plain, call_with_one, call_with_two)
    return calls[given] if given < len(calls) else call_with_all
