"""Converts records to the ledger's rows and back, by the records' field names and the columns of schema.py.

A field is written to the column of the same name. A field whose class is in SPREAD takes one column for each field of
that class; a version other than the record's own has the field's name as a prefix, as in `parent_version`. Lists are
JSON. Fields for which a table has no column are not written. Columns that are no field of the record are passed beside
it, or belong to the row itself (`place`).

Written inside one transaction of ledger.py; read by ledger_state.py and ledger_history.py.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import astuple
from functools import cache
from math import nan
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast, get_type_hints

import msgspec

from dips.ids import GENESIS, PushId, VersionId
from dips.master.ledger_chain import ChainedRows
from dips.master.schema import RAISES, REPLACED, columns_of
from dips.outer_step import NO_STEP, Factors, OuterStep
from dips.protocol import records
from dips.protocol.data import BegunRange
from dips.protocol.enums import OutcomeKind
from dips.protocol.options import Targets
from dips.protocol.releases import PROTOCOL

T = TypeVar("T")

THE_STEP = -1  # place of the step's scales in layer_factors

# ---- values of SQLite ------------------------------------------------------------------------------------------------


def spell_ints(numbers: Sequence[int]) -> str:
    """Encode a list as JSON, in a third of the encoder's time."""
    return f"[{', '.join(map(str, numbers))}]"


read_ints = msgspec.json.Decoder(tuple[int, ...]).decode  # of `spell_ints`: a long ledger has a million lists


def read_real(value: float | None) -> float:
    """Return NaN for NULL, as which SQLite stores it."""
    return nan if value is None else value


def read_begun(text: str) -> BegunRange | None:
    numbers = read_ints(text)
    return BegunRange(*numbers) if numbers else None


_Convert = Callable[[Any], Any] | None

# Fields of these types are converted: how they are written, and how they are read. All others are as SQLite has them.
_CONVERSIONS: dict[Any, tuple[_Convert, _Convert]] = {
    bool: (None, bool),
    float: (None, read_real),
    OutcomeKind: (None, OutcomeKind),
    tuple[int, ...]: (spell_ints, read_ints),
    tuple[float, ...]: (json.dumps, lambda text: tuple(json.loads(text))),
    tuple[str, ...]: (json.dumps, lambda text: tuple(json.loads(text))),
    tuple[tuple[str, float], ...]: (lambda pairs: json.dumps(dict(pairs)), None),
    tuple[records.LayerStatistics, ...]: (
        lambda layers: json.dumps([astuple(layer) for layer in layers]),
        lambda text: tuple(records.LayerStatistics(*layer) for layer in json.loads(text)),
    ),
    BegunRange | None: (lambda begun: spell_ints(astuple(begun) if begun else ()), read_begun),
    VersionId | None: (lambda version: str(version) if version else "", None),
}

# ---- columns of a record ---------------------------------------------------------------------------------------------

SPREAD = (PushId, VersionId, OuterStep, Targets)
OTHER_MOMENTS = frozenset({"base", "head", "parent"})  # the versions in these fields are not the record's own
RENAMED: dict[tuple[type, str], str] = {(records.OperatorActed, "wall"): "asked"}  # `wall` is the time of every row


class _Column(NamedTuple):
    name: str
    path: str  # of the attribute in the record
    spell: _Convert
    read: _Convert


def _list_columns(cls: type) -> Iterator[_Column]:
    for field, hint in get_type_hints(cls).items():
        if hint in SPREAD:
            before = f"{field}_" if field in OTHER_MOMENTS else ""
            for column in _list_columns(hint):
                yield column._replace(name=before + column.name, path=f"{field}.{column.path}")
        else:
            yield _Column(RENAMED.get((cls, field), field), field, *_CONVERSIONS.get(hint, (None, None)))


@cache
def _plan_row(form: int, table: str, cls: Any) -> list[tuple[str, Callable[[Any], Any] | None]]:
    """Return for each column of a table how a record of this class gives it; None if it does not.

    A column that the table does not have in this format is not written, so its field has its default there.
    """

    def getter(get: Callable[[Any], Any], spell: _Convert) -> Callable[[Any], Any]:
        return get if spell is None else lambda record: spell(get(record))

    getters = {c.name: getter(attrgetter(c.path), c.spell) for c in _list_columns(cls)}
    return [(name, getters.get(name)) for name in columns_of(form)[table]]


class RowReader(Generic[T]):
    """Makes records of a class from the table's columns for their fields: `columns`, in a query.

    `without` names fields that are stored elsewhere; the class has them last.
    """

    def __init__(self, cls: type[T], table: str, alias: str = "", without: Collection[str] = ()) -> None:
        columns = [column for column in _list_columns(cls) if column.path not in without]
        missing = [column.path for column in columns if column.name not in columns_of(PROTOCOL)[table]]
        assert not missing, f"the ledger's table {table} has no column for {missing} of {cls.__name__}: see schema.py"
        self.columns = ", ".join(alias + column.name for column in columns)
        self._cls = cls
        self._reads = [(place, column.read) for place, column in enumerate(columns) if column.read is not None]
        self._spread = list[tuple[slice, Callable[..., Any]]]()  # the last first, so that places stay
        for field, hint in get_type_hints(cls).items():
            if hint in SPREAD:
                places = [i for i, column in enumerate(columns) if column.path.startswith(f"{field}.")]
                self._spread.insert(0, (slice(places[0], places[-1] + 1), hint))

    def read(self, row: Sequence[Any], *more: Any) -> T:
        """Make a record; `more` are the values of the fields `without`."""
        values = list(row)
        for place, read in self._reads:
            values[place] = read(values[place])
        for places, cls in self._spread:
            values[places] = [cls(*values[places])]
        return self._cls(*values, *more)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_run(rows: ChainedRows, row: records.RunRow, wall: Callable[[], float]) -> None:
    """Write the rows of `dips init`, and version 0."""
    _insert(rows, "run", row)
    for place, (slave, layers) in enumerate(row.placement):
        _insert(rows, "placement", place=place, slave=slave, layers=spell_ints(layers))
    for layer, (digest, norm) in enumerate(zip(row.genesis, row.genesis_norms, strict=True)):
        _insert(rows, "genesis", layer=layer, digest=digest, norm=norm)
    if rows.form > 1:
        _insert(rows, "protocols", protocol=row.protocol, at=0.0, wall=None)
    parent = {"parent_version": GENESIS.version, "parent_round": GENESIS.round}
    step = {"scale": _one_scale(NO_STEP), "delta_norm": 0.0, "clipped": False}
    _insert(rows, "versions", NO_STEP, version=0, round=0, durable=True, tokens=0, **parent, **step)
    if row.targets is not None:
        _insert(rows, "targets", row.targets, resumed="", at=0.0, wall=wall())


def write_record(rows: ChainedRows, record: records.Record, wall: float) -> None:
    """Insert one record's rows; `wall` is Unix seconds."""
    table_or_writer = _ROWS[type(record)]
    if isinstance(table_or_writer, str):
        _insert(rows, table_or_writer, record, wall=wall)
    else:
        table_or_writer(rows, record, wall)


def _insert(rows: ChainedRows, table: str, record: Any = None, **more: Any) -> int:
    """Insert a row of a record's fields and `more`, which takes precedence; return its rowid."""
    values = [
        more[name] if name in more else get(record) if get is not None else _OF_ITSELF[name](rows)
        for name, get in _plan_row(rows.form, table, cast(Hashable, type(record)))
    ]
    return rows.replace_row(table, values) if table in REPLACED else rows.insert_row(table, values)


def _last_round(rows: ChainedRows) -> int:
    (last_round,) = rows.db.execute("SELECT coalesce(max(round), 0) FROM rounds").fetchone()
    return int(last_round)


# Columns that no record has: SQLite numbers the rows by `place`.
_OF_ITSELF: dict[str, Callable[[ChainedRows], int | None]] = {
    "place": lambda _: None,
    "only": lambda _: 1,
    "last_round": _last_round,
}


def _version_committed(rows: ChainedRows, r: records.VersionCommitted, wall: float) -> None:
    """Insert the rows of the commit point of an outer step, with everything that it settles."""
    number, tokens = r.version.round, sum(fold.tokens for fold in r.folds)
    _insert(rows, "versions", r, tokens=tokens, scale=_one_scale(r.step))
    _write_factors(rows, number, THE_STEP, r.step.scales if len(r.step.scales) > 1 else ())
    _insert(rows, "round_ends", r, kind="applied", reason="", wall=wall)
    for place, fold in enumerate(r.folds):
        _insert(rows, "folds", fold, round=number, place=place)
        _write_factors(rows, number, place, fold.layer_weights)
    _write_digests(rows, r)
    _write_settled(rows, number, r.outcomes, r.penalty)
    _insert(rows, "score_history", r.history)


def _one_scale(step: OuterStep) -> float | None:
    return step.scales[0] if len(step.scales) == 1 else None


def _write_factors(rows: ChainedRows, number: int, place: int, factors: Factors) -> None:
    if factors:
        _insert(rows, "layer_factors", round=number, place=place, factors=json.dumps(factors))


def _write_digests(rows: ChainedRows, r: records.VersionCommitted | records.VersionDurable) -> None:
    for slave, digest in r.digests:
        _insert(rows, "digests", round=r.version.round, slave=slave, digest=digest)


def _version_durable(rows: ChainedRows, r: records.VersionDurable, wall: float) -> None:
    _insert(rows, "durable", r, wall=wall)
    _write_digests(rows, r)


def _rolled_back(rows: ChainedRows, r: records.RolledBack, wall: float) -> None:
    place = _insert(rows, "rollbacks", r, wall=wall)
    for version in r.undone:
        _insert(rows, "undone", round=version.round, rollback=place)


def _round_ended(rows: ChainedRows, r: records.RoundEnded, wall: float) -> None:
    _insert(rows, "round_ends", r, wall=wall)
    _write_settled(rows, r.round, r.outcomes, r.penalty)


def _write_settled(
    rows: ChainedRows, number: int, outcomes: Sequence[records.OutcomeRow], penalty: Sequence[records.PenaltyRow]
) -> None:
    for outcome in outcomes:
        _insert(rows, "outcomes", outcome, round=number)
    for statistics in penalty:
        _insert(rows, "penalty", statistics, round=number)


def _cluster_ended(rows: ChainedRows, r: records.ClusterEnded, wall: float) -> None:
    _insert(rows, "incarnations_ended", r, wall=wall)
    if r.open_seq:
        _insert(rows, "left_open", r, seq=r.open_seq, tokens=r.open_tokens)


def _write_statistics(rows: ChainedRows, r: records.ClusterReadmitted | records.ClusterDiverged, _wall: float) -> None:
    _insert(rows, "penalty", r.penalty, round=r.round)


def _versions_retired(rows: ChainedRows, r: records.VersionsRetired, _wall: float) -> None:
    for version in r.versions:
        _insert(rows, "retired", version)


def _rebalanced(rows: ChainedRows, r: records.Rebalanced, wall: float) -> None:
    rebalance, digests = _insert(rows, "rebalances", r, wall=wall), dict(r.digests)
    for place, (slave, layers) in enumerate(r.placement):
        told = {"layers": spell_ints(layers), "digest": digests.get(slave)}
        _insert(rows, "rebalanced", rebalance=rebalance, place=place, slave=slave, **told)


def _run_extended(rows: ChainedRows, r: records.RunExtended, wall: float) -> None:
    """Insert the new targets; a finished run goes on, and this row says where it had finished."""
    rows.delete_rows("finished")
    _insert(rows, "targets", r, wall=wall)


def _write_tuning(rows: ChainedRows, r: records.OptionsTuned, wall: float) -> None:
    for change in r.changes:
        _insert(rows, "tunings", change, value=None if change.off else change.value, at=r.at, wall=wall)


def _raise_protocol(rows: ChainedRows, r: records.ProtocolRaised, wall: float) -> None:
    """Give the ledger the tables of the protocol that the run speaks from here on, and the row that says so."""
    added = RAISES[r.protocol]
    for name in added.lacking:
        rows.db.execute(f"DROP VIEW IF EXISTS temp.{name}")
    run_statements(rows.db, added.statements)
    rows.db.execute(f"PRAGMA user_version = {r.protocol}")
    rows.chain_tables(added.lacking.keys() & columns_of(r.protocol - 1).keys())
    _insert(rows, "protocols", r, wall=wall)


def run_statements(db: sqlite3.Connection, statements: str) -> None:
    """Run statements that each end in `;` and a line's end, within the present transaction."""
    for statement in statements.split(";\n"):
        db.execute(statement)


# The table of a record that is one row, or what writes its rows.
_ROWS: dict[type[records.Record], str | Callable[[ChainedRows, Any, float], None]] = {
    records.IncarnationGiven: "incarnations",
    records.RoundReserved: "rounds",
    records.VersionCommitted: _version_committed,
    records.VersionDurable: _version_durable,
    records.RolledBack: _rolled_back,
    records.RoundEnded: _round_ended,
    records.RangesLeased: "leases",
    records.ClusterEnded: _cluster_ended,
    records.ClusterReadmitted: _write_statistics,
    records.ClusterDiverged: _write_statistics,
    records.VersionsRetired: _versions_retired,
    records.Rebalanced: _rebalanced,
    records.RunFinished: "finished",
    records.RunExtended: _run_extended,
    records.OptionsTuned: _write_tuning,
    records.ClusterQuarantined: "quarantines",
    records.OperatorActed: "audit",
    records.LedgerRestored: "restores",
    records.VersionRecovered: "recoveries",
    records.VersionResult: "version_results",
    records.ProtocolRaised: _raise_protocol,
}

# ---- reading back ----------------------------------------------------------------------------------------------------

FOLDS = RowReader(records.FoldRow, "folds", "f.", without=("layer_weights",))
OUTCOMES = RowReader(records.OutcomeRow, "outcomes", "o.")
STEP_COLUMNS = "v.scale, v.lr, v.a, v.b, v.c, v.e, v.returned"


def read_step(row: Sequence[float | None], scales: Factors) -> OuterStep:
    """Build an OuterStep from STEP_COLUMNS and the step's row of layer_factors."""
    scale, *numbers = map(read_real, row)
    return OuterStep(scales or (scale,), *numbers)


def read_factors(db: sqlite3.Connection, first: int, last: int) -> dict[tuple[int, int], Factors]:
    """Return (round, place) → factors of the layers that have their own, in these rounds."""
    rows = db.execute("SELECT round, place, factors FROM layer_factors WHERE round BETWEEN ? AND ?", (first, last))
    return {(number, place): tuple(json.loads(factors)) for number, place, factors in rows}
