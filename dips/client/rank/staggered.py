"""A push or pull whose fragments move an interval of inner steps apart; for master and slaves it is one slow transfer.

    push    every interval the next fragment is checked, frozen and offered to the slaves
    pull    every interval the next fragment is requested; fragments that have arrived on all ranks are merged

While training is paused (`wait`) staggering has no benefit: the remaining fragments move at once. Ranks count the same
inner steps, so they agree on due fragments without a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dips.client.rank.background_transfer import ThreadedTransfer, TransferResult, do_nothing
from dips.client.rank.fragments import FragmentGate
from dips.ids import VersionId


def open_freely(_: int) -> str:
    """Return "": nothing prevents the fragment from moving."""
    return ""


@dataclass(frozen=True, slots=True)
class Stagger:
    """The schedule of one transfer's fragments, and the callbacks for each fragment."""

    gate: FragmentGate
    interval: int  # inner steps between two fragments
    count_steps: Callable[[], int]  # returns the inner steps taken
    prepare_fragment: Callable[[int], str] = (
        open_freely  # called before it moves; returns why to end the transfer, or ""
    )
    on_arrived: Callable[[int], Any] = do_nothing  # called with the number of first fragments on all ranks
    is_torn: Callable[[], bool] = bool  # whether arrived fragments are already in the model


class StaggeredTransfer(ThreadedTransfer):
    """A transfer that opens its fragments one after the other; every method but `cancel` is collective."""

    def __init__(self, *args: Any, stagger: Stagger) -> None:
        """Follow a thread as ThreadedTransfer does."""
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
    """The state of a pull whose fragments are merged as they arrive."""

    version: VersionId
    gate: FragmentGate
    merged: int = 0  # fragments that are merged, or will be installed with all others
    finite: bool = True  # merging gives finite values; if False the version is installed instead

    def open_all(self) -> None:
        """Open all fragments, since training is useless until the whole version has arrived."""
        while self.gate.open < self.gate.count:
            self.gate.open_next()
