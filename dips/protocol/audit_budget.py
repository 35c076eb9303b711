"""How many rows of the ledger's audit those requests may have that changed nothing: see audit.py."""

from __future__ import annotations

from dips.dataclass import dataclass

IDLE_ROWS = 50  # requests that changed nothing and have a row at once
IDLE_ROW_S = 30.0  # and one more in so long: at most 3,000 a day, some 600 kB of a ledger


@dataclass
class AuditBudget:
    """A bucket that fills with time."""

    at: float
    left: float = float(IDLE_ROWS)
    passed_over: int = 0  # requests since the last row: there was no room for them

    def take_row(self, now: float) -> bool:
        """Whether one more may have a row."""
        self.left = min(float(IDLE_ROWS), self.left + max(0.0, now - self.at) / IDLE_ROW_S)
        self.at = now
        if self.left < 1.0:
            self.passed_over += 1
            return False
        self.left -= 1.0
        return True

    def take_passed_over(self) -> int:
        """How many had no row since this was asked last."""
        passed_over, self.passed_over = self.passed_over, 0
        return passed_over
