"""A push or pull whose fragments move an interval of inner steps apart, seen by everybody else as one slow transfer.

    push    every interval the next fragment is looked at, frozen and offered to the slaves
    pull    every interval the next fragment is asked for; what has arrived on all ranks is merged

While training is paused (`wait`) nothing is gained by staggering: all that is left moves at once. Ranks count the same
inner steps, so they agree on what is due without a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dips.client.rank.background_transfer import ThreadedTransfer, TransferResult, do_nothing
from dips.client.rank.fragments import FragmentGate
from dips.ids import VersionId


def open_freely(_: int) -> str:
    """Nothing stands against it."""
    return ""


@dataclass(frozen=True, slots=True)
class Stagger:
    """When the fragments of one transfer move, and what is done with them."""

    gate: FragmentGate
    interval: int  # inner steps between two fragments
    count_steps: Callable[[], int]  # inner steps taken
    prepare_fragment: Callable[[int], str] = open_freely  # before it moves; returns why the transfer must end, or ""
    on_arrived: Callable[[int], Any] = do_nothing  # so many fragments are here on all ranks, from the first on
    is_torn: Callable[[], bool] = bool  # what has arrived is in the model already


class StaggeredTransfer(ThreadedTransfer):
    """Opens its fragments one after the other; every method is collective but `cancel`."""

    def __init__(self, *args: Any, stagger: Stagger) -> None:
        """As ThreadedTransfer."""
        super().__init__(*args)
        self._stagger, self._began = stagger, stagger.count_steps()

    def wait(self, poll_s: float) -> TransferResult:
        gate, result = self._stagger.gate, None
        while result is None and gate.open < gate.count:
            result = self._open_next()
        return result or super().wait(poll_s)

    def poll(self) -> TransferResult | None:
        result = super().poll()
        while result is None and self.steps_until_due == 0:
            result = self._open_next()
        return result

    @property
    def steps_until_due(self) -> int | None:
        gate, taken = self._stagger.gate, self._stagger.count_steps() - self._began
        return max(0, gate.open * self._stagger.interval - taken) if gate.open < gate.count else None

    def _open_next(self) -> TransferResult | None:
        """Let the next fragment move; return the transfer's result if it must end instead."""
        stagger = self._stagger
        if reason := stagger.prepare_fragment(stagger.gate.open):
            self.cancel()
            return TransferResult(False, reason, self._total(), diverged=True)
        stagger.gate.open_next()
        return None

    def _own_count(self) -> int:
        return self._stagger.gate.arrived

    def _on_least_count(self, count: int) -> None:
        self._stagger.on_arrived(count)

    def _agree_on_result(self, wait_s: float) -> TransferResult | None:
        result = super()._agree_on_result(wait_s)
        return result if result is None or result.ok else replace(result, torn=self._stagger.is_torn())


@dataclass(slots=True)
class StaggeredMerge:
    """How far a pull is whose fragments are merged as they arrive."""

    version: VersionId
    gate: FragmentGate
    merged: int = 0  # fragments that are in the model, or wait for all to be installed
    finite: bool = True  # what was trained beside it; otherwise the version is installed as it is

    def open_all(self) -> None:
        """Training is of no use until all of it is here."""
        while self.gate.open < self.gate.count:
            self.gate.open_next()
