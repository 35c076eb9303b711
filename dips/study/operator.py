"""The operator of an emulated run: readmits clusters that pushed values that are not finite, once their fault is over.

Real operators do the same by `dips cluster readmit` after the repair.
"""

from __future__ import annotations

from collections.abc import Callable

from dips.protocol.events import OperatorAsked, ReadmissionAsked
from dips.protocol.records import ClusterDiverged, ClusterReadmitted, PenaltyRow, Record, RoundEnded, VersionCommitted
from dips.sim.observer import Observer
from dips.sim.world import World

LOOKS_S = 60.0  # virtual time between two checks
CALLER = "study.operator"


class MendingOperator(Observer):
    """Readmits each broken cluster whose fault is over; other quarantines end with the first good push."""

    def __init__(self, world: World, is_mended: Callable[[str], bool]) -> None:
        self._world, self._is_mended = world, is_mended
        self._broken: set[str] = set()
        self.readmitted = 0
        self._plan_look()

    def record_written(self, record: Record) -> None:
        if isinstance(record, ClusterReadmitted):
            self.readmitted += 1
        for row in _rows_of(record):
            (self._broken.add if row.broken else self._broken.discard)(row.cluster)

    def _plan_look(self) -> None:
        self._world.call_later(LOOKS_S, "the operator looks", self._look)

    def _look(self) -> None:
        process = self._world.master.process
        for cluster in sorted(self._broken):
            if process is not None and self._is_mended(cluster):
                asked = ReadmissionAsked(0, cluster)
                process.on_message(OperatorAsked(0, CALLER, self._world.heap.now, asked), lambda _: None)
        self._plan_look()


def _rows_of(record: Record) -> tuple[PenaltyRow, ...]:
    """Return the statistics that a record changes."""
    if isinstance(record, VersionCommitted | RoundEnded):
        return record.penalty
    return (record.penalty,) if isinstance(record, ClusterDiverged | ClusterReadmitted) else ()
