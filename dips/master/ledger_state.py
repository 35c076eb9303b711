"""Reads the state from which a new master starts from the ledger."""

from __future__ import annotations

import sqlite3
from collections import deque

from dips.dataclass import replace
from dips.errors import Corrupt
from dips.ids import GENESIS, VersionId
from dips.master import ledger_history
from dips.master.ledger_rows import OUTCOMES, RowReader, read_begun, read_ints, read_real
from dips.protocol import records
from dips.protocol.data import BegunRange, Intervals, Parts, newest_parts
from dips.protocol.enums import OutcomeKind
from dips.protocol.run_state import oldest_offered

_PENALTY, _HISTORY = RowReader(records.PenaltyRow, "penalty"), RowReader(records.ScoreHistory, "score_history")


def read_state(db: sqlite3.Connection) -> records.LedgerState:
    """Return the state from which a new master starts; raise Corrupt if rows contradict each other."""
    (term,) = db.execute("SELECT coalesce(max(term), 0) FROM terms").fetchone()
    (last_round,) = db.execute("SELECT coalesce(max(round), 0) FROM rounds").fetchone()
    finished = db.execute(
        "SELECT version, round FROM finished WHERE round NOT IN (SELECT round FROM undone)"
    ).fetchone()
    restored = db.execute("SELECT incarnations_above FROM restores ORDER BY place DESC").fetchone()
    lineage, undone = _read_versions(db)
    settled, leased = _settled_ranges(db), _leased_ranges(db)
    begun, parts = _begun_ranges(db, oldest_offered(lineage).round)
    held = {r for *_, ranges in leased for r in ranges}
    return records.LedgerState(
        row=read_run(db),
        term=term,
        next_round=last_round + 1,
        versions=lineage,
        clusters=_read_peers(db, "cluster"),
        slaves=_read_peers(db, "slave"),
        outcomes=_newest_outcomes(db),
        penalty=_newest_penalty(db),
        history=_score_history(db),
        leased=leased,
        settled=settled,
        finished=VersionId(*finished) if finished else None,
        totals=read_totals(db),
        rounds=tuple(db.execute("SELECT kind, count(*) FROM round_ends GROUP BY kind ORDER BY kind")),
        undone=undone,
        begun=begun,
        undone_ranges=tuple(sorted(r for r in _undone_ranges(db) - held if r not in settled)),
        unknown_rounds=_unknown_rounds(db),
        incarnations_above=restored[0] if restored else 0,
        tuned=ledger_history.read_tuned(db),
        quarantined=ledger_history.read_quarantined(db),
        parts=parts,
    )


def _unknown_rounds(db: sqlite3.Connection) -> tuple[tuple[int, int], ...]:
    """Return the rounds that restores know nothing of, as (from, known again), since `dips-master recover` last closed
    all gaps: it leaves a row without one.
    """
    query = """SELECT unknown_from, known_again FROM restores
               WHERE place > (SELECT coalesce(max(place), 0) FROM restores WHERE unknown_from = known_again)
               ORDER BY place"""
    return tuple(db.execute(query))


def read_totals(db: sqlite3.Connection) -> tuple[records.ClusterTotals, ...]:
    """Return the sums over all rounds for each cluster that was ever known."""
    names = db.execute(
        "SELECT name FROM incarnations WHERE role = 'cluster' UNION SELECT cluster FROM outcomes ORDER BY 1"
    )
    totals = {name: records.ClusterTotals(name) for (name,) in names}
    for cluster, kind, pushes, tokens in db.execute(
        """SELECT cluster, iif(kind = 'accepted' AND u.round IS NOT NULL, 'undone', kind), count(*),
                  sum(iif(kind = 'skipped', 0, tokens))  -- they come again with the next push
           FROM outcomes LEFT JOIN undone u USING (round) GROUP BY 1, 2"""
    ):
        t = totals[cluster]
        match kind:
            case "accepted":
                totals[cluster] = replace(t, accepted=pushes, tokens_accepted=tokens)
            case "gated":
                totals[cluster] = replace(t, gated=pushes, tokens_gated=tokens)
            case "undone":
                totals[cluster] = replace(t, undone=pushes, tokens_undone=tokens)
            case _:
                totals[cluster] = replace(t, skipped=pushes)
    for cluster, tokens in db.execute("SELECT cluster, sum(tokens_lost) FROM incarnations_ended GROUP BY cluster"):
        totals[cluster] = replace(totals[cluster], tokens_lost=tokens)
    for (cluster, _), tokens in _died_open(db).items():
        t = totals[cluster]
        totals[cluster] = replace(t, lost=t.lost + 1, tokens_lost=t.tokens_lost + tokens)
    return tuple(totals.values())


def _died_open(db: sqlite3.Connection) -> dict[tuple[str, int], int]:
    """Return (cluster, inc) → tokens of the committed push that it left open and that no Outcome settled.

    One walk over the outcomes, in which those that were left open are looked up: the other way round each would walk
    all outcomes of its cluster.
    """
    rows = db.execute(
        """SELECT cluster, inc, tokens FROM left_open WHERE (cluster, inc) NOT IN (
               SELECT l.cluster, l.inc FROM outcomes o CROSS JOIN left_open l USING (cluster, inc, seq)
               WHERE o.kind != 'skipped'
           ) ORDER BY cluster, inc"""
    )
    return {(cluster, inc): tokens for cluster, inc, tokens in rows}


# ---- the state, part by part --------------------------------------------------------------------------------------


def read_run(db: sqlite3.Connection) -> records.RunRow:
    """Return the row of `dips init`, with the placement of the last rebalance; raise Corrupt if `dips init` did not
    finish.
    """
    row = db.execute("SELECT run, config_digest, manifest FROM run").fetchone()
    if row is None:
        raise Corrupt("the ledger names no run: `dips init` did not finish")
    rebalances = ledger_history.read_rebalances(db)
    genesis = db.execute("SELECT digest, norm FROM genesis ORDER BY layer").fetchall()
    run, config_digest, manifest = row
    return records.RunRow(
        run,
        config_digest,
        manifest,
        rebalances[-1].placement if rebalances else ledger_history.read_first_placement(db),
        tuple(digest for digest, _ in genesis),
        tuple(read_real(norm) for _, norm in genesis),
        ledger_history.removed_slaves(rebalances),
        extensions[-1].targets if (extensions := ledger_history.read_extensions(db)) else None,
        read_protocol(db),
    )


def read_protocol(db: sqlite3.Connection) -> int:
    """Return the protocol that the run speaks."""
    (protocol,) = db.execute("SELECT max(protocol) FROM protocols").fetchone()
    return int(protocol)


def _read_versions(db: sqlite3.Connection) -> tuple[tuple[records.VersionRow, ...], tuple[records.VersionRow, ...]]:
    """Return the lineage of the newest version that is not undone, oldest first; and the undone versions."""
    query = """SELECT v.round, v.version, v.parent_version, v.parent_round, v.durable OR d.round IS NOT NULL, v.tokens,
                      r.round IS NOT NULL, u.round IS NOT NULL
               FROM versions v LEFT JOIN retired r USING (round) LEFT JOIN durable d USING (round)
               LEFT JOIN undone u USING (round) ORDER BY v.round"""
    rows: dict[VersionId, records.VersionRow] = {}
    undone = list[records.VersionRow]()
    for number, version, parent_version, parent_round, durable, tokens, retired, over in db.execute(query):
        name, parent = VersionId(version, number), VersionId(parent_version, parent_round)
        row = records.VersionRow(name, parent, bool(durable), tokens, bool(retired))
        if over:
            undone.append(row)
        else:
            rows[name] = row
    lineage = _walk_lineage(rows)
    shares = _read_shares(db, oldest_offered(lineage).round)
    return tuple(replace(v, shares=tuple(shares.get(v.version.round, ()))) for v in lineage), tuple(undone)


def _read_shares(db: sqlite3.Connection, after: int) -> dict[int, list[tuple[str, int, tuple[int, ...]]]]:
    """Return round → (cluster, tokens, ranges) of its version's pushes as folded, for rounds that may be undone."""
    shares: dict[int, list[tuple[str, int, tuple[int, ...]]]] = {}
    # + keeps SQLite from scanning all outcomes of a cluster for each of its folds: it builds an index instead.
    query = """SELECT f.round, f.cluster, o.tokens, f.ranges FROM folds f
               JOIN outcomes o ON (o.round, +o.cluster, o.inc, o.seq) = (f.round, f.cluster, f.inc, f.seq)
               WHERE f.round > ? ORDER BY f.round, f.place"""
    for number, cluster, tokens, ranges in db.execute(query, (after,)):
        shares.setdefault(number, []).append((cluster, tokens, read_ints(ranges)))
    return shares


def _walk_lineage(rows: dict[VersionId, records.VersionRow]) -> tuple[records.VersionRow, ...]:
    """Return the lineage, by walking from the newest version to v0@r0 by parents."""
    lineage = list[records.VersionRow]()
    at = max(rows, key=lambda name: name.round, default=GENESIS)
    while True:
        if at not in rows:
            child = lineage[-1].version if lineage else "the head"
            raise Corrupt(f"the ledger's lineage is broken: {child} names {at}, which has no row")
        lineage.append(rows[at])
        if at == GENESIS:
            return tuple(reversed(lineage))
        at = rows.pop(at).parent


def _read_peers(db: sqlite3.Connection, role: str) -> tuple[records.PeerRow, ...]:
    query = """SELECT i.name, max(i.inc), i.nonce, e.inc IS NOT NULL, e.tokens_lost, f.tokens_lost, i.frozen_digest
               FROM incarnations i
               LEFT JOIN incarnations_ended e ON i.role = 'cluster' AND e.cluster = i.name AND e.inc = i.inc
               LEFT JOIN incarnations_ended f ON i.role = 'cluster' AND f.cluster = i.name AND f.inc = i.inc - 1
               WHERE i.role = ? GROUP BY i.name ORDER BY i.name"""  # a bare column goes with its max in SQLite
    rows = db.execute(query, (role,)).fetchall()
    settled, died_open = (_settled_tokens(db), _died_open(db)) if role == "cluster" else ({}, {})

    def count_tokens(incarnation: tuple[str, int], lost: int | None) -> int:
        return settled.get(incarnation, 0) + died_open.get(incarnation, 0) + (lost or 0)

    return tuple(
        records.PeerRow(
            name, inc, nonce, bool(ended), settled.get((name, inc), 0),
            count_tokens((name, inc), lost) if ended else count_tokens((name, inc - 1), lost_before), frozen_digest,
        )
        for name, inc, nonce, ended, lost, lost_before, frozen_digest in rows
    )  # fmt: skip


def _settled_tokens(db: sqlite3.Connection) -> dict[tuple[str, int], int]:
    """Return (cluster, inc) → tokens accepted or gated."""
    query = "SELECT cluster, inc, sum(tokens) FROM outcomes WHERE kind != 'skipped' GROUP BY cluster, inc"
    return {(cluster, inc): tokens for cluster, inc, tokens in db.execute(query)}


def _newest_outcomes(db: sqlite3.Connection) -> tuple[tuple[records.OutcomeRow, VersionId | None], ...]:
    query = f"""SELECT {OUTCOMES.columns}, v.version, v.round FROM outcomes o LEFT JOIN versions v USING (round)
                WHERE o.place IN (SELECT max(place) FROM outcomes GROUP BY cluster) ORDER BY o.cluster"""
    found = []
    for *row, version, number in db.execute(query):
        outcome = OUTCOMES.read(row)
        found.append((outcome, VersionId(version, number) if outcome.kind is OutcomeKind.ACCEPTED else None))
    return tuple(found)


def _newest_penalty(db: sqlite3.Connection) -> tuple[records.PenaltyRow, ...]:
    query = f"""SELECT {_PENALTY.columns} FROM penalty
                WHERE place IN (SELECT max(place) FROM penalty GROUP BY cluster) ORDER BY cluster"""
    return tuple(map(_PENALTY.read, db.execute(query)))


def _score_history(db: sqlite3.Connection) -> records.ScoreHistory:
    row = db.execute(f"SELECT {_HISTORY.columns} FROM score_history").fetchone()
    return records.ScoreHistory((), ()) if row is None else _HISTORY.read(row)


def _settled_ranges(db: sqlite3.Connection) -> Intervals:
    """Return the ranges trained in the lineage, or gated; gated ones stay settled if their version is undone."""
    rows = db.execute(
        """SELECT ranges FROM outcomes LEFT JOIN undone u USING (round)
           WHERE ranges != '[]' AND (kind = 'gated' OR kind = 'accepted' AND u.round IS NULL)"""
    )
    return Intervals.of(r for (ranges,) in rows for r in read_ints(ranges))


def _begun_ranges(
    db: sqlite3.Connection, oldest: int
) -> tuple[tuple[BegunRange, ...], tuple[tuple[int, BegunRange], ...]]:
    """Return the ranges that are settled in part, by the newest Outcome that named each; and what RangeBook knows of
    parts, where versions of rounds from `oldest` on may be undone.
    """
    begun: dict[int, BegunRange] = {}
    parts: dict[int, Parts] = {}
    query = """SELECT ranges, begun, iif(kind = 'accepted', round, 0), kind = 'accepted' AND u.round IS NOT NULL
               FROM outcomes LEFT JOIN undone u USING (round) WHERE kind != 'skipped' ORDER BY place"""
    for ranges, part, settled_by, over in db.execute(query):
        for number in read_ints(ranges) if begun or parts else ():
            begun.pop(number, None)
            if not over and (not settled_by or settled_by < oldest):
                parts.pop(number, None)
        if (read := read_begun(part)) is not None:
            begun[read.number] = read
            if not over:
                parts[read.number] = newest_parts((*parts.get(read.number, ()), (settled_by, read)), oldest)
    chains = tuple(entry for number in sorted(parts) for entry in parts[number])
    return tuple(begun[number] for number in sorted(begun)), chains


def _undone_ranges(db: sqlite3.Connection) -> set[int]:
    rows = db.execute("SELECT ranges FROM outcomes JOIN undone USING (round) WHERE kind = 'accepted'")
    return {r for (ranges,) in rows for r in read_ints(ranges)}


def _leased_ranges(db: sqlite3.Connection) -> tuple[tuple[str, int, int, tuple[int, ...]], ...]:
    """Return, for each live incarnation, its newest lease and those with ranges that are not settled; in order.

    Each lease has those of its ranges that no Outcome of its incarnation settled. An undone range may be leased again,
    even to the same incarnation: each Outcome ends the oldest of its leases.
    """
    query = """SELECT DISTINCT l.cluster, l.inc FROM leases l
               LEFT JOIN incarnations_ended e ON e.cluster = l.cluster AND e.inc = l.inc WHERE e.inc IS NULL"""
    found = [
        (place, (cluster, inc, seq, ranges))
        for cluster, inc in db.execute(query).fetchall()
        for place, seq, ranges in _read_open_leases(db, cluster, inc)
    ]
    return tuple(lease for _, lease in sorted(found))


def _read_open_leases(db: sqlite3.Connection, cluster: str, inc: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (place, seq, open ranges) of each open lease.

    Leases and Outcomes are walked side by side, an Outcome as soon as all of its ranges are leased, so few leases are
    open at a time; the result does not depend on the order. A lease that the next Outcome settles whole while no other
    is open, as in most rounds, is not decoded.
    """
    leases = db.execute(
        "SELECT place, seq, ranges FROM leases WHERE cluster = ? AND inc = ? ORDER BY seq", (cluster, inc)
    )
    outcomes = db.execute(
        """SELECT ranges FROM outcomes
           WHERE cluster = ? AND inc = ? AND kind != 'skipped' AND ranges != '[]' ORDER BY place""",
        (cluster, inc),
    )
    settled = (ranges for (ranges,) in outcomes)
    still, text = _OpenLeases(), next(settled, None)
    for place, seq, ranges in leases:
        if ranges == text and still.is_empty:
            still.add_lease(place, seq, ())
            text = next(settled, None)
            continue
        still.add_lease(place, seq, read_ints(ranges))
        while text is not None and still.has_all(due := read_ints(text)):
            still.end_ranges(due)
            text = next(settled, None)
    while text is not None:  # of ranges never leased, or settled a second time
        still.end_ranges(read_ints(text))
        text = next(settled, None)
    return still.list_leases()


class _OpenLeases:
    """The leases of one incarnation with their unsettled ranges, and its newest lease."""

    def __init__(self) -> None:
        self._places: dict[int, deque[int]] = {}  # range → places of its leases, the oldest first
        self._open: dict[int, tuple[int, dict[int, None]]] = {}  # place → (seq, ranges)
        self._newest = 0

    def add_lease(self, place: int, seq: int, ranges: tuple[int, ...]) -> None:
        if self._newest and not self._open[self._newest][1]:
            del self._open[self._newest]
        self._newest, self._open[place] = place, (seq, dict.fromkeys(ranges))
        for number in ranges:
            self._places.setdefault(number, deque()).append(place)

    @property
    def is_empty(self) -> bool:
        return not self._places

    def has_all(self, ranges: tuple[int, ...]) -> bool:
        return all(number in self._places for number in ranges)

    def end_ranges(self, ranges: tuple[int, ...]) -> None:
        """Remove each range from the oldest lease that has it, if any."""
        for number in filter(self._places.__contains__, ranges):
            place = self._places[number].popleft()
            if not self._places[number]:
                del self._places[number]
            left = self._open[place][1]
            del left[number]
            if not left and place != self._newest:
                del self._open[place]

    def list_leases(self) -> list[tuple[int, int, tuple[int, ...]]]:
        return [(place, seq, tuple(left)) for place, (seq, left) in self._open.items()]
