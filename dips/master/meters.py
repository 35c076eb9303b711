"""Numbers of a run for display: durations of pushes and rounds, and the newest version by its row in the ledger."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from dips.dataclass import replace
from dips.protocol.records import Record, VersionCommitted, VersionDurable
from dips.protocol.view import NewestView
from dips.telemetry.metrics import Histogram
from dips.view.points import RoundHistory, mean_loss

# ---- newest ---------------------------------------------------------------------------------------------------------


def find_newest(rounds: Iterable[RoundHistory]) -> NewestView:
    """Return the newest version by rounds of the ledger, oldest first."""
    newest = NewestView()
    for r in rounds:
        if r.version is not None and r.undone is None:
            clusters = len({fold.push.cluster for fold in r.folds})
            newest = NewestView(r.ended, r.ended if r.durable else newest.durable, clusters, mean_loss(r.folds))
    return newest


def follow_newest(newest: NewestView, records: Sequence[Record], wall: float) -> NewestView:
    """Return the newest version after these records were written, at the Unix time `wall`."""
    for record in records:
        if isinstance(record, VersionCommitted):
            clusters = len({fold.push.cluster for fold in record.folds})
            newest = NewestView(wall, wall if record.durable else newest.durable, clusters, mean_loss(record.folds))
        elif isinstance(record, VersionDurable):
            newest = replace(newest, durable=newest.committed)
    return newest


# ---- meters ---------------------------------------------------------------------------------------------------------
# Durations of pushes and of the phases of rounds, measured from the Coordinator's notes. For display only.
#
# round_opened ─ window ─ round_applying ─ apply ─ round_persisting ─ persist ─ version_committed


MOST_PUSHES = 4096  # granted and not yet committed; beyond this, the oldest is forgotten
# Note → the phases that it ends, and the one that it begins. With `durability: async` no round persists.
PHASES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "round_opened": ((), "window"),
    "round_applying": (("window",), "apply"),
    "round_persisting": (("apply",), "persist"),
    "version_committed": (("apply", "persist"), ""),
    "round_unchanged": ((), ""),
    "round_skipped": ((), ""),
}


class RoundMeters:
    """Histograms of one term."""

    def __init__(self) -> None:
        self.phases = {begins: Histogram() for _, begins in PHASES.values() if begins}
        self.push = Histogram()
        self._phase, self._since = "", 0.0
        self._granted: OrderedDict[str, float] = OrderedDict()

    def on_note(self, kind: str, fields: Mapping[str, str], now: float) -> None:
        """Process a note; must be called with every note, in order."""
        if kind in PHASES:
            ends, begins = PHASES[kind]
            if self._phase in ends:
                self.phases[self._phase].observe_value(now - self._since)
            self._phase, self._since = begins, now
        elif kind == "push_granted":
            self._granted[fields["push"]] = now
            if len(self._granted) > MOST_PUSHES:
                self._granted.popitem(last=False)
        elif kind in ("push_committed", "push_dropped"):
            granted = self._granted.pop(fields["push"], None)
            if granted is not None and kind == "push_committed":
                self.push.observe_value(now - granted)
