"""Rebuilds a ledger from a copy and the transactions since, and raises its counters.

While a mirror keeps up, nothing is acknowledged that is not in it. It may have lagged, or have been gone without a
trace of that. So names that may have been given since are not given again: the term rises, rounds and incarnations
leave a gap; live clusters and slaves keep the incarnations in the ledger. Slaves are the witnesses: one that holds a
version of a round in the gap makes the master refuse to serve, and recommend `dips-master recover`
(docs/rationale.md#2, #4).
"""

from __future__ import annotations

from collections.abc import Sequence

from dips.dataclass import dataclass
from dips.master.ledger import Ledger
from dips.protocol.enums import RoundResult
from dips.protocol.records import LedgerRestored, LedgerState, Record, RoundEnded, RoundReserved

SPARE = 1_000  # numbers skipped above the highest that was found: skipped rounds leave no trace on disks
REASON = "the ledger was restored from its mirror"


@dataclass(frozen=True, slots=True)
class MirroredTransaction:
    """The records of one transaction, and their time."""

    records: tuple[Record, ...]
    wall: float


@dataclass(frozen=True, slots=True)
class MirroredLedger:
    """The contents of a ledger's mirror: a base, and the transactions since."""

    term: int
    base: bytes
    transactions: tuple[MirroredTransaction, ...]


def rebuild(ledger: Ledger, term: int, transactions: Sequence[MirroredTransaction]) -> tuple[LedgerState, list[Record]]:
    """Apply all mirrored transactions to a base and leave gaps above; return the state before the gaps, and their
    records.
    """
    for transaction in transactions:
        ledger.write_records(transaction.records, transaction.wall)
    state = ledger.read_state()
    raised = _gap_records(state)
    ledger.write_records(raised)
    ledger.start_term(above=max(term, state.term) + SPARE)
    return state, raised


def _gap_records(state: LedgerState) -> list[Record]:
    """Return the records that leave a gap in rounds and incarnations above those that the copy has."""
    low, high = state.next_round, state.next_round + SPARE
    incarnations = [peer.inc for peer in (*state.slaves, *state.clusters)]
    above = max((*incarnations, state.incarnations_above)) + SPARE
    ended = RoundEnded(high, RoundResult.SKIPPED, REASON, (), (), 0.0)
    return [LedgerRestored(REASON, low, high, above), RoundReserved(high, 0.0), ended]
