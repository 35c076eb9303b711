"""How each record is stored in the ledger's tables, and how a row is read back.

Written inside one transaction of ledger.py; read by ledger_state.py and ledger_history.py.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache
from math import nan
from typing import Any

from dips.ids import GENESIS, PushId, VersionId
from dips.outer_step import NO_STEP, Factors, OuterStep
from dips.protocol.data import BegunRange
from dips.protocol.enums import OutcomeKind
from dips.protocol.options import Targets
from dips.protocol.records import (
    ClusterDiverged,
    ClusterEnded,
    ClusterQuarantined,
    ClusterReadmitted,
    FoldRow,
    IncarnationGiven,
    LedgerRestored,
    OperatorActed,
    OptionsTuned,
    OutcomeRow,
    PenaltyRow,
    RangesLeased,
    Rebalanced,
    Record,
    RolledBack,
    RoundEnded,
    RoundReserved,
    RunExtended,
    RunFinished,
    RunRow,
    VersionCommitted,
    VersionDurable,
    VersionRecovered,
    VersionResult,
    VersionsRetired,
)


def write_run(db: sqlite3.Connection, row: RunRow, wall: Callable[[], float]) -> None:
    """Write what `dips init` decided, and version 0."""
    _insert_row(db, "run", (1, row.run, row.config_digest, row.manifest))
    for place, (slave, layers) in enumerate(row.placement):
        _insert_row(db, "placement", (place, slave, json.dumps(layers)))
    for layer, (digest, norm) in enumerate(zip(row.genesis, row.genesis_norms, strict=True)):
        _insert_row(db, "genesis", (layer, digest, norm))
    _insert_row(db, "versions", (0, 0, GENESIS.version, GENESIS.round, True, 0, *_spell_step(NO_STEP, 0.0, False)))
    if row.targets is not None:
        _write_targets(db, row.targets, "", 0.0, wall())


def write_record(db: sqlite3.Connection, record: Record, wall: float) -> None:
    """Add one record's rows; `wall` is Unix seconds."""
    _WRITERS[type(record)](db, record, wall)


def _write_incarnation(db: sqlite3.Connection, r: IncarnationGiven, _wall: float) -> None:
    _insert_row(db, "incarnations", (r.role, r.name, r.inc, r.nonce))


def _round_reserved(db: sqlite3.Connection, r: RoundReserved, wall: float) -> None:
    _insert_row(db, "rounds", (r.round, r.at, wall))


def _version_committed(db: sqlite3.Connection, r: VersionCommitted, wall: float) -> None:
    """The commit point of an outer step, with everything that it settles."""
    number, tokens = r.version.round, sum(fold.tokens for fold in r.folds)
    parent = (r.parent.version, r.parent.round)
    step = _spell_step(r.step, r.delta_norm, r.clipped)
    _insert_row(db, "versions", (number, r.version.version, *parent, r.durable, tokens, *step))
    _write_factors(db, number, THE_STEP, r.step.scales if len(r.step.scales) > 1 else ())
    _insert_row(db, "round_ends", (number, "applied", "", r.at, wall))
    for place, f in enumerate(r.folds):
        name = (number, place, f.push.cluster, f.push.inc, f.push.seq, f.base.version, f.base.round)
        _insert_row(
            db,
            "folds",
            (*name, f.tokens, f.inner_steps, f.weight, f.norm, f.score, f.loss, spell_ints(f.ranges), f.anchored),
        )
        _write_factors(db, number, place, f.layer_weights)
    for slave, digest in r.digests:
        _insert_row(db, "digests", (number, slave, digest))
    _write_outcomes(db, number, r.outcomes)
    _write_penalty(db, number, r.penalty)
    h = r.history
    told = tuple(json.dumps(numbers) for numbers in (h.scores, h.delta_norms, h.layer_norms, h.digests))
    db.execute("INSERT OR REPLACE INTO score_history VALUES (1, ?, ?, ?, ?)", told)


def _spell_step(s: OuterStep, delta_norm: float, clipped: bool) -> tuple[Any, ...]:
    scale = s.scales[0] if len(s.scales) == 1 else None
    return (scale, s.lr, s.a, delta_norm, clipped, s.b, s.c, s.e, s.returned)


def _write_factors(db: sqlite3.Connection, number: int, place: int, factors: Factors) -> None:
    if factors:
        _insert_row(db, "layer_factors", (number, place, json.dumps(factors)))


def _version_durable(db: sqlite3.Connection, r: VersionDurable, wall: float) -> None:
    _insert_row(db, "durable", (r.version.round, r.at, wall))
    for slave, digest in r.digests:
        _insert_row(db, "digests", (r.version.round, slave, digest))


def _rolled_back(db: sqlite3.Connection, r: RolledBack, wall: float) -> None:
    head = (r.head.version, r.head.round)
    place = db.execute("INSERT INTO rollbacks VALUES (NULL, ?, ?, ?, ?, ?)", (*head, r.reason, r.at, wall)).lastrowid
    for version in r.undone:
        _insert_row(db, "undone", (version.round, place))


def _round_ended(db: sqlite3.Connection, r: RoundEnded, wall: float) -> None:
    _insert_row(db, "round_ends", (r.round, r.kind, r.reason, r.at, wall))
    _write_outcomes(db, r.round, r.outcomes)
    _write_penalty(db, r.round, r.penalty)


def _ranges_leased(db: sqlite3.Connection, r: RangesLeased, _wall: float) -> None:
    _insert_row(db, "leases", (None, r.cluster, r.inc, r.seq, spell_ints(r.ranges)))


def _cluster_ended(db: sqlite3.Connection, r: ClusterEnded, wall: float) -> None:
    _insert_row(db, "incarnations_ended", (r.cluster, r.inc, r.reason, r.tokens_lost, r.at, wall))
    if r.open_seq:
        _insert_row(db, "left_open", (r.cluster, r.inc, r.open_seq, r.open_tokens))


def _write_statistics(db: sqlite3.Connection, r: ClusterReadmitted | ClusterDiverged, _wall: float) -> None:
    _write_penalty(db, r.round, (r.penalty,))


def _versions_retired(db: sqlite3.Connection, r: VersionsRetired, _wall: float) -> None:
    for version in r.versions:
        _insert_row(db, "retired", (version.round,))


def _rebalanced(db: sqlite3.Connection, r: Rebalanced, wall: float) -> None:
    (last_round,) = db.execute("SELECT coalesce(max(round), 0) FROM rounds").fetchone()
    row = (r.version.round, last_round, wall)
    rebalance = db.execute("INSERT INTO rebalances VALUES (NULL, ?, ?, ?)", row).lastrowid
    digests = dict(r.digests)
    for place, (slave, layers) in enumerate(r.placement):
        _insert_row(db, "rebalanced", (rebalance, place, slave, json.dumps(layers), digests.get(slave)))


def _run_finished(db: sqlite3.Connection, r: RunFinished, wall: float) -> None:
    row = (1, r.version.version, r.version.round, r.reason, r.at, wall)
    db.execute("INSERT OR REPLACE INTO finished VALUES (?, ?, ?, ?, ?, ?)", row)  # the one before was undone


def _run_extended(db: sqlite3.Connection, r: RunExtended, wall: float) -> None:
    """A run that was finished is so no more; this row says where it was."""
    db.execute("DELETE FROM finished")
    _write_targets(db, r.targets, str(r.resumed) if r.resumed else "", r.at, wall)


def _write_targets(db: sqlite3.Connection, t: Targets, resumed: str, at: float, wall: float) -> None:
    (last_round,) = db.execute("SELECT coalesce(max(round), 0) FROM rounds").fetchone()
    _insert_row(db, "targets", (None, t.tokens, t.versions, t.wall_s, t.epochs, resumed, last_round, at, wall))


def _write_tuning(db: sqlite3.Connection, r: OptionsTuned, wall: float) -> None:
    for change in r.changes:
        value = None if change.off else change.value
        _insert_row(db, "tunings", (None, change.key, value, _last_round(db), r.at, wall))


def _write_quarantine(db: sqlite3.Connection, r: ClusterQuarantined, wall: float) -> None:
    _insert_row(db, "quarantines", (None, r.cluster, r.reason, _last_round(db), r.at, wall))


def _write_audit(db: sqlite3.Connection, r: OperatorActed, wall: float) -> None:
    asked = (None, r.wall, r.caller, r.action, r.arguments)
    _insert_row(db, "audit", (*asked, r.outcome, r.refused, r.passed_over, wall))


def _last_round(db: sqlite3.Connection) -> int:
    (last_round,) = db.execute("SELECT coalesce(max(round), 0) FROM rounds").fetchone()
    return int(last_round)


def _write_restore(db: sqlite3.Connection, r: LedgerRestored, wall: float) -> None:
    _insert_row(db, "restores", (None, r.source, r.unknown_from, r.known_again, r.incarnations_above, wall))


def _write_recovery(db: sqlite3.Connection, r: VersionRecovered, wall: float) -> None:
    _insert_row(db, "recoveries", (r.version.round, r.source, json.dumps(r.layers), wall))


def _write_result(db: sqlite3.Connection, r: VersionResult, wall: float) -> None:
    row = (r.version.round, r.ok, r.reason, json.dumps(dict(r.numbers)), r.seconds, wall)
    db.execute("INSERT OR REPLACE INTO version_results VALUES (?, ?, ?, ?, ?, ?)", row)  # of a master that died since


_WRITERS: dict[type[Record], Callable[[sqlite3.Connection, Any, float], None]] = {
    IncarnationGiven: _write_incarnation,
    RoundReserved: _round_reserved,
    VersionCommitted: _version_committed,
    VersionDurable: _version_durable,
    RolledBack: _rolled_back,
    RoundEnded: _round_ended,
    RangesLeased: _ranges_leased,
    ClusterEnded: _cluster_ended,
    ClusterReadmitted: _write_statistics,
    ClusterDiverged: _write_statistics,
    VersionsRetired: _versions_retired,
    Rebalanced: _rebalanced,
    RunFinished: _run_finished,
    RunExtended: _run_extended,
    OptionsTuned: _write_tuning,
    ClusterQuarantined: _write_quarantine,
    OperatorActed: _write_audit,
    LedgerRestored: _write_restore,
    VersionRecovered: _write_recovery,
    VersionResult: _write_result,
}


def _write_outcomes(db: sqlite3.Connection, number: int, rows: Sequence[OutcomeRow]) -> None:
    for o in rows:
        push = (o.push.cluster, o.push.inc, o.push.seq)
        settled = (o.kind, o.reason, o.tokens, o.inner_steps, o.norm, o.score, spell_ints(o.ranges))
        begun = json.dumps(astuple(o.begun) if o.begun else ())
        _insert_row(db, "outcomes", (None, number, *push, *settled, begun))


def _write_penalty(db: sqlite3.Connection, number: int, rows: Sequence[PenaltyRow]) -> None:
    for p in rows:
        norms, counts = (p.mu, p.sigma, p.last_norm), (p.warm_left, p.gated_in_a_row, p.quarantined, p.accepted)
        others = (p.loss, p.loss_shift, p.suspicion, json.dumps([astuple(layer) for layer in p.layers]))
        first = (None, number, p.cluster, p.n, *norms, *counts, p.reference, p.steps, p.broken)
        _insert_row(db, "penalty", (*first, *others))


def _insert_row(db: sqlite3.Connection, table: str, values: Sequence[Any]) -> None:
    db.execute(_spell_insert(table, len(values)), values)


@cache
def _spell_insert(table: str, columns: int) -> str:
    return f"INSERT INTO {table} VALUES ({','.join('?' * columns)})"


# ---- reading back --------------------------------------------------------------------------------------------------

OUTCOME_COLUMNS = (
    "o.cluster, o.inc, o.seq, o.kind, o.reason, o.tokens, o.inner_steps, o.norm, o.score, o.ranges, o.begun"
)


STEP_COLUMNS = "v.scale, v.lr, v.a, v.b, v.c, v.e, v.returned"
THE_STEP = -1  # its place in layer_factors


def read_step(row: Sequence[float | None], scales: Factors) -> OuterStep:
    """Of STEP_COLUMNS, and what layer_factors has of it."""
    scale, *numbers = map(read_real, row)
    return OuterStep(scales or (scale,), *numbers)


def read_factors(db: sqlite3.Connection, first: int, last: int) -> dict[tuple[int, int], Factors]:
    """What layers have of their own in these rounds, by round and place."""
    rows = db.execute("SELECT round, place, factors FROM layer_factors WHERE round BETWEEN ? AND ?", (first, last))
    return {(number, place): tuple(json.loads(factors)) for number, place, factors in rows}


def read_fold(row: Any, layer_weights: Factors = ()) -> FoldRow:
    _, _, cluster, inc, seq, base_version, base_round, tokens, inner_steps, *told = row
    weight, norm, score, loss, ranges, anchored = told
    reals = (read_real(weight), read_real(norm), read_real(score))
    push, base = PushId(cluster, inc, seq), VersionId(base_version, base_round)
    return FoldRow(push, base, tokens, inner_steps, *reals, loss, read_ints(ranges), layer_weights, bool(anchored))


def read_outcome(row: Any) -> OutcomeRow:
    cluster, inc, seq, kind, reason, tokens, inner_steps, norm, score, ranges, begun = row
    push = PushId(cluster, inc, seq)
    reals = (read_real(norm), read_real(score))
    used = (read_ints(ranges), read_begun(begun))
    return OutcomeRow(push, OutcomeKind(kind), reason, tokens, inner_steps, *reals, *used)


def read_begun(text: str) -> BegunRange | None:
    numbers = read_ints(text)
    return BegunRange(*numbers) if numbers else None


def read_real(value: float | None) -> float:
    """SQLite keeps NaN as NULL."""
    return nan if value is None else value


def spell_ints(numbers: Sequence[int]) -> str:
    """A list in JSON, at a third of what the encoder takes for it."""
    return f"[{', '.join(map(str, numbers))}]"


def read_ints(text: str) -> tuple[int, ...]:
    return tuple(json.loads(text))
