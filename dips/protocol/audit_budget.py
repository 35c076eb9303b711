"""The budget of audit rows for requests that changed nothing: see audit.py."""

from __future__ import annotations

from dips.dataclass import dataclass

IDLE_ROWS = 50  # burst: rows of requests that changed nothing
IDLE_ROW_S = 30.0  # one more row per this time: at most 3,000 a day, some 600 kB of a ledger


@dataclass
class AuditBudget:
    """A token bucket: `left` rows, refilled with time."""

    at: float
    left: float = float(IDLE_ROWS)
    passed_over: int = 0  # requests since the last row for which there was no room

    def take_row(self, now: float) -> bool:
        """Take one row from the budget; return False, and count the request as passed over, if none is left."""
        self.left = min(float(IDLE_ROWS), self.left + max(0.0, now - self.at) / IDLE_ROW_S)
        self.at = now
        if self.left < 1.0:
            self.passed_over += 1
            return False
        self.left -= 1.0
        return True

    def take_passed_over(self) -> int:
        """Return the number of requests without a row since the last call, and reset it."""
        passed_over, self.passed_over = self.passed_over, 0
        return passed_over
