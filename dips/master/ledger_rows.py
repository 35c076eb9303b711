"""The ledger's rows of each kind of record, written and read back.

Written inside one transaction of ledger.py; read by ledger_state.py and ledger_history.py.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import astuple
from math import nan
from typing import Any

from dips.ids import GENESIS, PushId, VersionId
from dips.master.ledger_chain import ChainedRows
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


def write_run(rows: ChainedRows, row: RunRow, wall: Callable[[], float]) -> None:
    """Write the rows of `dips init`, and version 0."""
    rows.insert_row("run", (1, row.run, row.config_digest, row.manifest))
    for place, (slave, layers) in enumerate(row.placement):
        rows.insert_row("placement", (place, slave, json.dumps(layers)))
    for layer, (digest, norm) in enumerate(zip(row.genesis, row.genesis_norms, strict=True)):
        rows.insert_row("genesis", (layer, digest, norm))
    rows.insert_row("versions", (0, 0, GENESIS.version, GENESIS.round, True, 0, *_spell_step(NO_STEP, 0.0, False)))
    if row.targets is not None:
        _write_targets(rows, row.targets, "", 0.0, wall())


def write_record(rows: ChainedRows, record: Record, wall: float) -> None:
    """Insert one record's rows; `wall` is Unix seconds."""
    _WRITERS[type(record)](rows, record, wall)


def _write_incarnation(rows: ChainedRows, r: IncarnationGiven, _wall: float) -> None:
    rows.insert_row("incarnations", (r.role, r.name, r.inc, r.nonce))


def _round_reserved(rows: ChainedRows, r: RoundReserved, wall: float) -> None:
    rows.insert_row("rounds", (r.round, r.at, wall))


def _version_committed(rows: ChainedRows, r: VersionCommitted, wall: float) -> None:
    """Insert the rows of the commit point of an outer step, with everything that it settles."""
    number, tokens = r.version.round, sum(fold.tokens for fold in r.folds)
    parent = (r.parent.version, r.parent.round)
    step = _spell_step(r.step, r.delta_norm, r.clipped)
    rows.insert_row("versions", (number, r.version.version, *parent, r.durable, tokens, *step))
    _write_factors(rows, number, THE_STEP, r.step.scales if len(r.step.scales) > 1 else ())
    rows.insert_row("round_ends", (number, "applied", "", r.at, wall))
    for place, f in enumerate(r.folds):
        name = (number, place, f.push.cluster, f.push.inc, f.push.seq, f.base.version, f.base.round)
        told = (f.tokens, f.inner_steps, f.weight, f.norm, f.score, f.loss, spell_ints(f.ranges))
        rows.insert_row("folds", (*name, *told))
        _write_factors(rows, number, place, f.layer_weights)
    for slave, digest in r.digests:
        rows.insert_row("digests", (number, slave, digest))
    _write_outcomes(rows, number, r.outcomes)
    _write_penalty(rows, number, r.penalty)
    h = r.history
    lists = tuple(json.dumps(numbers) for numbers in (h.scores, h.delta_norms, h.digests))
    rows.replace_row("score_history", (1, *lists))


def _spell_step(s: OuterStep, delta_norm: float, clipped: bool) -> tuple[Any, ...]:
    scale = s.scales[0] if len(s.scales) == 1 else None
    return (scale, s.lr, s.a, delta_norm, clipped, s.b, s.c, s.e, s.returned)


def _write_factors(rows: ChainedRows, number: int, place: int, factors: Factors) -> None:
    if factors:
        rows.insert_row("layer_factors", (number, place, json.dumps(factors)))


def _version_durable(rows: ChainedRows, r: VersionDurable, wall: float) -> None:
    rows.insert_row("durable", (r.version.round, r.at, wall))
    for slave, digest in r.digests:
        rows.insert_row("digests", (r.version.round, slave, digest))


def _rolled_back(rows: ChainedRows, r: RolledBack, wall: float) -> None:
    head = (r.head.version, r.head.round)
    place = rows.insert_row("rollbacks", (None, *head, r.reason, r.at, wall))
    for version in r.undone:
        rows.insert_row("undone", (version.round, place))


def _round_ended(rows: ChainedRows, r: RoundEnded, wall: float) -> None:
    rows.insert_row("round_ends", (r.round, r.kind, r.reason, r.at, wall))
    _write_outcomes(rows, r.round, r.outcomes)
    _write_penalty(rows, r.round, r.penalty)


def _ranges_leased(rows: ChainedRows, r: RangesLeased, _wall: float) -> None:
    rows.insert_row("leases", (None, r.cluster, r.inc, r.seq, spell_ints(r.ranges)))


def _cluster_ended(rows: ChainedRows, r: ClusterEnded, wall: float) -> None:
    rows.insert_row("incarnations_ended", (r.cluster, r.inc, r.reason, r.tokens_lost, r.at, wall))
    if r.open_seq:
        rows.insert_row("left_open", (r.cluster, r.inc, r.open_seq, r.open_tokens))


def _write_statistics(rows: ChainedRows, r: ClusterReadmitted | ClusterDiverged, _wall: float) -> None:
    _write_penalty(rows, r.round, (r.penalty,))


def _versions_retired(rows: ChainedRows, r: VersionsRetired, _wall: float) -> None:
    for version in r.versions:
        rows.insert_row("retired", (version.round,))


def _rebalanced(rows: ChainedRows, r: Rebalanced, wall: float) -> None:
    rebalance = rows.insert_row("rebalances", (None, r.version.round, _last_round(rows), wall))
    digests = dict(r.digests)
    for place, (slave, layers) in enumerate(r.placement):
        rows.insert_row("rebalanced", (rebalance, place, slave, json.dumps(layers), digests.get(slave)))


def _run_finished(rows: ChainedRows, r: RunFinished, wall: float) -> None:
    row = (1, r.version.version, r.version.round, r.reason, r.at, wall)
    rows.replace_row("finished", row)  # a former one was undone


def _run_extended(rows: ChainedRows, r: RunExtended, wall: float) -> None:
    """Insert the new targets; a finished run goes on, and this row says where it had finished."""
    rows.delete_rows("finished")
    _write_targets(rows, r.targets, str(r.resumed) if r.resumed else "", r.at, wall)


def _write_targets(rows: ChainedRows, t: Targets, resumed: str, at: float, wall: float) -> None:
    told = (t.tokens, t.versions, t.wall_s, t.epochs, resumed, _last_round(rows), at, wall)
    rows.insert_row("targets", (None, *told))


def _write_tuning(rows: ChainedRows, r: OptionsTuned, wall: float) -> None:
    for change in r.changes:
        value = None if change.off else change.value
        rows.insert_row("tunings", (None, change.key, value, _last_round(rows), r.at, wall))


def _write_quarantine(rows: ChainedRows, r: ClusterQuarantined, wall: float) -> None:
    rows.insert_row("quarantines", (None, r.cluster, r.reason, _last_round(rows), r.at, wall))


def _write_audit(rows: ChainedRows, r: OperatorActed, wall: float) -> None:
    asked = (None, r.wall, r.caller, r.action, r.arguments)
    rows.insert_row("audit", (*asked, r.outcome, r.refused, r.passed_over, wall))


def _last_round(rows: ChainedRows) -> int:
    (last_round,) = rows.db.execute("SELECT coalesce(max(round), 0) FROM rounds").fetchone()
    return int(last_round)


def _write_restore(rows: ChainedRows, r: LedgerRestored, wall: float) -> None:
    rows.insert_row("restores", (None, r.source, r.unknown_from, r.known_again, r.incarnations_above, wall))


def _write_recovery(rows: ChainedRows, r: VersionRecovered, wall: float) -> None:
    rows.insert_row("recoveries", (r.version.round, r.source, json.dumps(r.layers), wall))


def _write_result(rows: ChainedRows, r: VersionResult, wall: float) -> None:
    row = (r.version.round, r.ok, r.reason, json.dumps(dict(r.numbers)), r.seconds, wall)
    rows.replace_row("version_results", row)  # replaces that of a master that has died since


_WRITERS: dict[type[Record], Callable[[ChainedRows, Any, float], None]] = {
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


def _write_outcomes(rows: ChainedRows, number: int, outcomes: Sequence[OutcomeRow]) -> None:
    for o in outcomes:
        push = (o.push.cluster, o.push.inc, o.push.seq)
        settled = (o.kind, o.reason, o.tokens, o.inner_steps, o.norm, o.score, spell_ints(o.ranges))
        begun = json.dumps(astuple(o.begun) if o.begun else ())
        rows.insert_row("outcomes", (None, number, *push, *settled, begun))


def _write_penalty(rows: ChainedRows, number: int, penalty: Sequence[PenaltyRow]) -> None:
    for p in penalty:
        norms, counts = (p.mu, p.sigma, p.last_norm), (p.warm_left, p.gated_in_a_row, p.quarantined, p.accepted)
        others = (p.loss, p.loss_shift, p.suspicion, json.dumps([astuple(layer) for layer in p.layers]))
        learned = (p.losses, p.loss_rises, p.cosine, p.cosines, json.dumps(p.tokens))
        first = (None, number, p.cluster, p.n, *norms, *counts, p.reference, p.steps, p.broken)
        rows.insert_row("penalty", (*first, *others, *learned))


# ---- reading back --------------------------------------------------------------------------------------------------

OUTCOME_COLUMNS = (
    "o.cluster, o.inc, o.seq, o.kind, o.reason, o.tokens, o.inner_steps, o.norm, o.score, o.ranges, o.begun"
)


STEP_COLUMNS = "v.scale, v.lr, v.a, v.b, v.c, v.e, v.returned"
THE_STEP = -1  # place of the step's scales in layer_factors


def read_step(row: Sequence[float | None], scales: Factors) -> OuterStep:
    """Build an OuterStep from STEP_COLUMNS and the step's row of layer_factors."""
    scale, *numbers = map(read_real, row)
    return OuterStep(scales or (scale,), *numbers)


def read_factors(db: sqlite3.Connection, first: int, last: int) -> dict[tuple[int, int], Factors]:
    """Return (round, place) → factors of the layers that have their own, in these rounds."""
    rows = db.execute("SELECT round, place, factors FROM layer_factors WHERE round BETWEEN ? AND ?", (first, last))
    return {(number, place): tuple(json.loads(factors)) for number, place, factors in rows}


def read_fold(row: Any, layer_weights: Factors = ()) -> FoldRow:
    _, _, cluster, inc, seq, base_version, base_round, tokens, inner_steps, *told = row
    weight, norm, score, loss, ranges = told
    reals = (read_real(weight), read_real(norm), read_real(score))
    push, base = PushId(cluster, inc, seq), VersionId(base_version, base_round)
    return FoldRow(push, base, tokens, inner_steps, *reals, loss, read_ints(ranges), layer_weights)


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
    """Return NaN for NULL, as which SQLite stores it."""
    return nan if value is None else value


def spell_ints(numbers: Sequence[int]) -> str:
    """Encode a list as JSON, in a third of the encoder's time."""
    return f"[{', '.join(map(str, numbers))}]"


_read_json = json.JSONDecoder().raw_decode


def read_ints(text: str) -> tuple[int, ...]:
    """Decode a list of `spell_ints`; `json.loads` takes twice as long, and a long ledger has a million lists."""
    numbers, end = _read_json(text)
    if end != len(text):
        raise ValueError(f"expected a list of numbers and no more, got {text!r:.80}")
    return tuple(numbers)
