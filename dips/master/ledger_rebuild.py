"""Builds a ledger of a copy and what was written since, and raises what must not be given again.

While a mirror kept up, nothing was ever told that is not in it. It may have lagged, and a mirror that was gone could
not note that. So names that may have been given since are never given again: the term rises, rounds and incarnations
leave a gap; clusters and slaves that live keep the incarnations that the ledger knows. Slaves are the witnesses: one
that holds a version of a round in the gap makes the master refuse to serve, and name `dips-master recover`
(docs/rationale.md#2, #4).
"""

from __future__ import annotations

from collections.abc import Sequence

from dips.dataclass import dataclass
from dips.master.ledger import Ledger
from dips.protocol.enums import RoundResult
from dips.protocol.records import LedgerRestored, LedgerState, Record, RoundEnded, RoundReserved

SPARE = 1_000  # numbers left out above the highest that was found: skipped rounds leave no trace on disks
REASON = "the ledger was restored from its mirror"


@dataclass(frozen=True, slots=True)
class MirroredTransaction:
    """What one transaction wrote, and when."""

    records: tuple[Record, ...]
    wall: float


@dataclass(frozen=True, slots=True)
class MirroredLedger:
    """What a mirror holds of a ledger: a base, and the transactions since."""

    term: int
    base: bytes
    transactions: tuple[MirroredTransaction, ...]


def rebuild(ledger: Ledger, term: int, transactions: Sequence[MirroredTransaction]) -> tuple[LedgerState, list[Record]]:
    """Bring a base up to the last mirrored transaction, and leave gaps above it; return its state before, and these."""
    for transaction in transactions:
        ledger.write_records(transaction.records, transaction.wall)
    state = ledger.read_state()
    raised = _gap_records(state)
    ledger.write_records(raised)
    ledger.start_term(above=max(term, state.term) + SPARE)
    return state, raised


def _gap_records(state: LedgerState) -> list[Record]:
    """Rounds and incarnations leave a gap above what the copy knows."""
    low, high = state.next_round, state.next_round + SPARE
    incarnations = [peer.inc for peer in (*state.slaves, *state.clusters)]
    above = max((*incarnations, state.incarnations_above)) + SPARE
    ended = RoundEnded(high, RoundResult.SKIPPED, REASON, (), (), 0.0)
    return [LedgerRestored(REASON, low, high, above), RoundReserved(high, 0.0), ended]
