"""The ledger gives back what was written, all or nothing, to one master at a time."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isnan, nan
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from dips.errors import ConfigError, Corrupt
from dips.ids import GENESIS, PushId, VersionId
from dips.master import ledger_history, ledger_rows, ledger_state, schema
from dips.master.ledger import MEMORY, Ledger
from dips.master.ledger_chain import ChainedRows
from dips.master.ledger_history import removed_slaves
from dips.master.ledger_rows import RowReader, _insert
from dips.master.page import MasterPage
from dips.master.restore import MirroredLedger, MirroredTransaction, build_file, make_aside
from dips.master.runtime import MasterOutside
from dips.outer_step import OuterStep, nesterov_step
from dips.protocol.data import BegunRange, Intervals
from dips.protocol.enums import OutcomeKind, Role, RoundResult
from dips.protocol.records import (
    ClusterEnded,
    ClusterQuarantined,
    FoldRow,
    IncarnationGiven,
    OutcomeRow,
    PeerRow,
    PenaltyRow,
    ProtocolRaised,
    RangesLeased,
    Rebalanced,
    RolledBack,
    RoundEnded,
    RoundReserved,
    RunFinished,
    RunRow,
    ScoreHistory,
    VersionCommitted,
    VersionDurable,
    VersionResult,
    VersionsRetired,
)
from dips.protocol.view import RunView

ROW = RunRow(
    "run", "d1", '{"format":1,"layers":[]}', (("s0", (0, 2)), ("s1", (1,))), ("aa", "bb", "cc"), (1.0, 2.5, 0.0)
)
V1, V2 = VersionId(1, 1), VersionId(2, 3)
A1, B1, A2 = PushId("a", 1, 1), PushId("b", 1, 1), PushId("a", 1, 2)


def penalty(cluster: str, n: int) -> PenaltyRow:
    return PenaltyRow(cluster, n, 1.5, 0.25, 1.25, 9, 0, False, n)


def outcome(push: PushId, kind: str, ranges: tuple[int, ...] = (), tokens: int = 10) -> OutcomeRow:
    return OutcomeRow(push, OutcomeKind(kind), "why", tokens, 4, 1.25, 0.5, ranges)


def committed(version: VersionId, parent: VersionId, *pushes: PushId, ranges: tuple[int, ...] = ()) -> VersionCommitted:
    return VersionCommitted(
        version, parent, True,
        tuple(FoldRow(p, parent, 10, 4, 1.0, 1.25, 0.5, 2.5, ranges) for p in pushes),
        tuple(outcome(p, "accepted", ranges) for p in pushes),
        nesterov_step(0.5, 0.7, 0.8), 3.0, True, (("s0", "d0"), ("s1", "d1")),
        tuple(penalty(p.cluster, version.version) for p in pushes),
        ScoreHistory((0.5,) * version.version, (3.0,) * version.version), 12.5,
    )  # fmt: skip


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger.create(MEMORY, ROW)
    yield made
    made.close()


def test_a_new_run(ledger: Ledger) -> None:
    """A new ledger knows the run as given, version 0, and nobody."""
    state = ledger.read_state()
    assert state.row == ROW
    assert (state.term, state.next_round, state.finished) == (0, 1, None)
    assert [v.version for v in state.versions] == [GENESIS]
    assert (state.clusters, state.slaves, state.outcomes, state.penalty, state.leased) == ((),) * 5
    assert state.settled == Intervals()
    assert state.history == ScoreHistory((), ())


def test_terms_rise(ledger: Ledger) -> None:
    """Every start of a master gets a term above all earlier ones."""
    assert [ledger.start_term() for _ in range(3)] == [1, 2, 3]
    assert ledger.read_state().term == 3


def test_whom_an_operator_keeps_out_and_lets_in_again(ledger: Ledger) -> None:
    """The newest row of a cluster counts, and stands where it was written."""
    for cluster, reason in (("a", "noise"), ("b", "old data"), ("c", "x"), ("a", "more noise"), ("b", "")):
        ledger.write_records([ClusterQuarantined(cluster, reason, 1.0)])
    assert ledger.read_state().quarantined == (("c", "x"), ("a", "more noise"))


def test_slaves_that_a_rebalance_took_the_layers_from(ledger: Ledger) -> None:
    """Each with the version from which on it has none; one that gets some again is no such slave."""
    ledger.write_records([RoundReserved(1, 1.0), committed(V1, GENESIS, A1)])
    ledger.write_records([Rebalanced(V1, (("s1", (0, 1, 2)),), (("s1", "e1"),))], 5.0)
    ledger.write_records([RoundReserved(3, 2.0), committed(V2, V1, A2)])
    ledger.write_records([Rebalanced(V2, (("s0", (0, 1)), ("s2", (2,))), (("s0", "f0"), ("s2", "f2")))], 6.0)
    first, second = ledger.read_rebalances()
    assert (first.version, first.before, first.placement, first.wall) == (V1, ROW.placement, (("s1", (0, 1, 2)),), 5.0)
    assert (second.version, second.before, second.last_round) == (V2, first.placement, 3)
    assert removed_slaves([first]) == (("s0", V1),) and removed_slaves([first, second]) == (("s1", V2),)


def test_the_story_of_two_versions(ledger: Ledger) -> None:
    """What two committed rounds and a skipped one between them left is what a new master starts from."""
    ledger.write_records([IncarnationGiven(Role.CLUSTER, "a", 1, "na"), IncarnationGiven(Role.SLAVE, "s0", 1, "ns")])
    ledger.write_records(
        [IncarnationGiven(Role.CLUSTER, "b", 1, "nb"), RangesLeased("a", 1, 1, (0, 1)), RoundReserved(1, 1.0)]
    )
    ledger.write_records([committed(V1, GENESIS, A1, B1, ranges=(0,))])
    ledger.write_records(
        [RoundReserved(2, 2.0), RoundEnded(2, RoundResult.SKIPPED, "s0 was lost", (outcome(A2, "skipped"),), (), 3.0)]
    )
    ledger.write_records([RoundReserved(3, 4.0), committed(V2, V1, PushId("b", 1, 5)), VersionsRetired((V1,))])
    state = ledger.read_state()
    assert [(v.version, v.parent, v.tokens, v.retired) for v in state.versions] == [
        (GENESIS, GENESIS, 0, False),
        (V1, GENESIS, 20, True),
        (V2, V1, 10, False),
    ]
    assert state.next_round == 4
    assert state.clusters == (PeerRow("a", 1, "na", False, 10), PeerRow("b", 1, "nb", False, 20))
    assert state.slaves == (PeerRow("s0", 1, "ns", False),)
    assert state.outcomes == (
        (outcome(A2, "skipped"), None),
        (outcome(PushId("b", 1, 5), "accepted"), V2),
    )
    assert state.penalty == (penalty("a", 1), penalty("b", 2))
    assert state.history == ScoreHistory((0.5, 0.5), (3.0, 3.0))
    assert (state.leased, (*state.settled,)) == ((("a", 1, 1, (1,)),), (0,))


def test_the_page_of_a_new_master_has_the_rounds_before_it(ledger: Ledger) -> None:
    """With the tokens that the lineage had after each of them."""
    ledger.write_records([RoundReserved(1, 1.0), committed(V1, GENESIS, A1, B1)])
    ledger.write_records([RoundReserved(3, 4.0), committed(V2, V1, A2)])
    page = MasterPage({})
    page.recall_ledger(ledger, ledger.read_state())
    runtime: Any = SimpleNamespace(build_view=RunView)
    document = page.read_state(runtime)
    assert [told["version"] for told in document["history"]] == [str(V2), str(V1)]
    assert [point[0] for point in document["curves"]["run"]] == [20, 30]


def test_a_new_master_recalls_the_newest_rounds_for_its_page_a_few_at_a_time(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand rounds of a thousand clusters would take 700 MB. The curve begins with what the lineage had before
    them, and a version that was undone counts no further."""
    monkeypatch.setattr("dips.master.page.ROUNDS_RECALLED", 4)
    monkeypatch.setattr("dips.master.page.AT_ONCE", 3)
    rolled_back(ledger)
    for n in range(2, 6):
        after = V1 if n == 2 else VersionId(n - 1, n + 2)
        ledger.write_records([RoundReserved(n + 3, 0.0), committed(VersionId(n, n + 3), after, PushId("a", 1, n + 3))])
    counts, read = list[int](), ledger.read_rounds_after

    def read_few(*arguments: Any) -> Any:
        counts.append(len(rounds := read(*arguments)))
        return rounds

    monkeypatch.setattr(ledger, "read_rounds_after", read_few)
    monkeypatch.setattr(ledger, "read_history", None)
    page = MasterPage({})
    page.recall_ledger(ledger, ledger.read_state())
    runtime: Any = SimpleNamespace(build_view=RunView)
    document = page.read_state(runtime)
    assert counts == [3, 1, 0]
    assert [told["round"] for told in document["history"]] == [8, 7, 6, 5]
    assert [point[0] for point in document["curves"]["run"]] == [20, 30, 40, 50]


def test_ranges_that_are_trained_in_part(ledger: Ledger) -> None:
    """The newest Outcome that names a range counts; a skipped one changes nothing, a settled range is no part."""

    def settled(number: int, push: PushId, kind: str, ranges: tuple[int, ...], begun: BegunRange | None) -> None:
        row, ended = replace(outcome(push, kind, ranges), begun=begun), RoundResult.SKIPPED
        if kind != "skipped":
            ended = RoundResult.UNCHANGED
        ledger.write_records([RoundReserved(number, 0.0), RoundEnded(number, ended, "x", (row,), (), 0.0)])

    settled(1, A1, "gated", (), BegunRange(4, 2, 9))
    settled(2, A2, "skipped", (4,), BegunRange(5, 1, 9))
    settled(3, B1, "gated", (3,), BegunRange(6, 8, 9))
    assert ledger.read_state().begun == (BegunRange(4, 2, 9), BegunRange(6, 8, 9))
    assert ledger.read_state().outcomes[1][0].begun == BegunRange(6, 8, 9)
    settled(4, PushId("a", 1, 3), "gated", (4,), None)
    assert ledger.read_state().begun == (BegunRange(6, 8, 9),)


def test_ranges_of_a_incarnation(ledger: Ledger) -> None:
    """Each lease is one entry; skipped pushes settle nothing; the dead hold nothing."""
    ledger.write_records([IncarnationGiven(Role.CLUSTER, "a", 1, "n"), IncarnationGiven(Role.CLUSTER, "b", 1, "n")])
    ledger.write_records(
        [RangesLeased("a", 1, 1, (0, 1)), RangesLeased("b", 1, 1, (2,)), RangesLeased("a", 1, 2, (3,))]
    )
    ledger.write_records(
        [RoundReserved(1, 0.0), RoundEnded(1, RoundResult.SKIPPED, "x", (outcome(A1, "skipped", (0,)),), (), 0.0)]
    )
    ledger.write_records(
        [RoundReserved(2, 0.0), RoundEnded(2, RoundResult.UNCHANGED, "x", (outcome(A2, "gated", (1,)),), (), 0.0)]
    )
    assert ledger.read_state().leased == (("a", 1, 1, (0,)), ("b", 1, 1, (2,)), ("a", 1, 2, (3,)))
    ledger.write_records([ClusterEnded("a", 1, "silent", 7, 1.0)])
    state = ledger.read_state()
    assert state.leased == (("b", 1, 1, (2,)),)
    assert [*state.settled] == [1]
    assert state.clusters[0] == PeerRow("a", 1, "n", True, 10, 17)
    ledger.write_records([IncarnationGiven(Role.CLUSTER, "a", 2, "m")])
    assert ledger.read_state().clusters[0] == PeerRow("a", 2, "m", False, 0, 17)
    assert ledger.read_tokens() == {
        "a": {"accepted": 0, "gated": 10, "lost": 7, "undone": 0},
        "b": {"accepted": 0, "gated": 0, "lost": 0, "undone": 0},
    }


def test_a_push_that_its_incarnation_left_open(ledger: Ledger) -> None:
    """Its tokens are lost, unless an Outcome settles it: one that is skipped, or that never comes, does not."""
    clusters = [PushId("a", 1, 1), PushId("b", 1, 1), PushId("c", 1, 1)]
    ledger.write_records([IncarnationGiven(Role.CLUSTER, p.cluster, 1, "n") for p in clusters])
    ledger.write_records([RoundReserved(1, 0.0), *(ClusterEnded(p.cluster, 1, "x", 3, 1.0, 1, 10) for p in clusters)])
    ledger.write_records([RoundEnded(1, RoundResult.SKIPPED, "x", (outcome(clusters[0], "skipped"),), (), 0.0)])
    ledger.write_records(
        [RoundReserved(2, 0.0), RoundEnded(2, RoundResult.UNCHANGED, "x", (outcome(clusters[1], "gated"),), (), 0.0)]
    )
    counts = {name: (t["gated"], t["lost"]) for name, t in ledger.read_tokens().items()}
    assert counts == {"a": (0, 13), "b": (10, 3), "c": (0, 13)}
    assert [peer.tokens_accounted for peer in ledger.read_state().clusters] == [13, 13, 13]
    ledger.write_records([IncarnationGiven(Role.CLUSTER, "a", 2, "m")])
    assert ledger.read_state().clusters[0].tokens_accounted == 13


def test_pushes_left_open_are_found_in_one_walk_over_the_outcomes(ledger: Ledger) -> None:
    """Each walked all outcomes of its cluster: an hour before a master serves after a month of twenty clusters and
    10,000 such restarts."""
    for inc in range(1, 101):
        ledger.write_records([IncarnationGiven(Role.CLUSTER, "a", inc, f"n{inc}"), RoundReserved(2 * inc, 0.0)])
        settled = tuple(outcome(PushId("a", inc, seq), "gated") for seq in (1, 2, 3))
        ended = RoundEnded(2 * inc, RoundResult.UNCHANGED, "x", settled, (), 0.0)
        ledger.write_records([ended, ClusterEnded("a", inc, "x", 0, 1.0, 3 + inc % 2, 10)])
    found, steps = count_steps(ledger, ledger.read_tokens)
    assert found["a"] == {"accepted": 0, "gated": 3000, "lost": 500, "undone": 0}
    assert steps < 60_000, "a walk for each takes 200,000"


def test_skipped_tokens_are_not_added_up(ledger: Ledger) -> None:
    """They come again with the next push, so however often the largest push is skipped, the ledger can be read."""
    ledger.write_records([IncarnationGiven(Role.CLUSTER, "a", 1, "n")])
    largest = (1 << 53) - 1
    rounds = [
        RoundEnded(n, RoundResult.SKIPPED, "x", (outcome(PushId("a", 1, n), "skipped", tokens=largest),) * 200, (), 0.0)
        for n in range(1, 8)
    ]
    ledger.write_records([record for r in rounds for record in (RoundReserved(r.round, 0.0), r)])
    assert ledger.read_tokens() == {"a": {"accepted": 0, "gated": 0, "lost": 0, "undone": 0}}
    assert ledger.read_state().totals[0].skipped == 1400


V3, V2B = VersionId(3, 4), VersionId(2, 5)
A3, A4 = PushId("a", 1, 3), PushId("a", 1, 4)


def rolled_back(ledger: Ledger) -> None:
    """v1 keeps range 0; v2 and v3 with ranges 1 and 2 are undone; a gated push in v3's round brought range 3."""
    ledger.write_records([IncarnationGiven(Role.CLUSTER, "a", 1, "n"), IncarnationGiven(Role.CLUSTER, "b", 1, "n")])
    ledger.write_records([RangesLeased("a", 1, 1, (0, 1, 2)), RangesLeased("b", 1, 1, (3, 4))])
    ledger.write_records([RoundReserved(1, 0.0), committed(V1, GENESIS, A1, ranges=(0,))])
    ledger.write_records([RoundReserved(3, 0.0), committed(V2, V1, A2, ranges=(1,)), RoundReserved(4, 0.0)])
    third = committed(V3, V2, A3, ranges=(2,))
    ledger.write_records([replace(third, outcomes=(*third.outcomes, outcome(B1, "gated", (3,))))])
    ledger.write_records([RunFinished(V3, "3 outer steps are made", 1.0)])
    ledger.write_records([RolledBack(V1, (V2, V3), "s0 cannot offer v3@r4", 2.0), VersionsRetired((V2, V3))])


def test_after_a_rollback(ledger: Ledger) -> None:
    """The lineage ends at the row's head; tokens, ranges, the run's end go back; names and rounds do not."""
    rolled_back(ledger)
    state = ledger.read_state()
    assert [v.version for v in state.versions] == [GENESIS, V1]
    assert [(v.version, v.retired) for v in state.undone] == [(V2, True), (V3, True)]
    assert (state.next_round, state.finished) == (5, None)
    assert ((*state.settled,), state.undone_ranges) == ((0, 3), (1, 2))
    assert state.leased == (("a", 1, 1, ()), ("b", 1, 1, (4,)))
    assert ledger.read_tokens()["a"] == {"accepted": 10, "gated": 0, "lost": 0, "undone": 20}
    assert ledger.read_tokens()["b"]["gated"] == 10
    totals = {t.cluster: t for t in state.totals}
    assert (totals["a"].accepted, totals["a"].undone) == (1, 2)
    assert state.penalty[0] == penalty("a", 3)
    assert state.outcomes[0] == (outcome(A3, "accepted", (2,)), V3)


def test_what_follows_a_rollback(ledger: Ledger) -> None:
    """The next version has the head as its parent and a number that was used, under a round that was not."""
    rolled_back(ledger)
    ledger.write_records(
        [RoundReserved(5, 3.0), committed(V2B, V1, A4), RunFinished(V2B, "2 outer steps are made", 4.0)]
    )
    state = ledger.read_state()
    assert [v.version for v in state.versions] == [GENESIS, V1, V2B]
    assert state.finished == V2B
    history = {h.round: h for h in ledger.read_history()}
    assert (history[3].undone, history[5].undone) == ("s0 cannot offer v3@r4", None)
    with pytest.raises(sqlite3.IntegrityError):
        ledger.write_records([RoundReserved(3, 5.0)])


def test_undone_ranges_are_leased_again(ledger: Ledger) -> None:
    """A range that is leased anew is held by that lease alone, also by the incarnation that trained it before."""
    rolled_back(ledger)
    ledger.write_records([RangesLeased("a", 1, 2, (1,)), RangesLeased("b", 1, 2, (2,))])
    state = ledger.read_state()
    assert state.leased == (("b", 1, 1, (4,)), ("a", 1, 2, (1,)), ("b", 1, 2, (2,)))
    assert state.undone_ranges == ()
    ledger.write_records([RoundReserved(5, 3.0), committed(V2B, V1, A4, ranges=(1,))])
    state = ledger.read_state()
    assert [*state.settled] == [0, 1, 3]
    assert state.leased[1] == ("a", 1, 2, ())


@pytest.mark.parametrize("seed", range(20))
def test_leases_are_read_as_outcomes_left_them(ledger: Ledger, seed: int) -> None:
    """Held against the plain count: of the leases of one range each Outcome ends the oldest. What is over is left out,
    but for the newest lease: a run of 100,000 rounds has as many of each cluster."""
    rng, settled, leases = Random(seed), Counter[tuple[str, int]](), list[tuple[str, int, int, tuple[int, ...]]]()
    for number in range(1, 60):
        name = rng.choice("ab")
        if rng.random() < 0.5:
            seq = 1 + sum(lease[0] == name for lease in leases)
            leases.append((name, 1, seq, tuple(rng.sample(range(9), rng.randrange(4)))))
            ledger.write_records([RangesLeased(*leases[-1])])
        else:
            ranges = tuple(rng.sample(range(9), rng.randrange(3)))
            settled.update((name, r) for r in ranges)
            row = outcome(PushId(name, 1, number), "gated", ranges)
            ended = RoundEnded(number, RoundResult.UNCHANGED, "x", (row,), (), 0.0)
            ledger.write_records([RoundReserved(number, 0.0), ended])
    expected, newest = [], {lease[0]: lease[2] for lease in leases}
    for name, inc, seq, ranges in leases:
        held = tuple(r for r in ranges if not settled[name, r])
        settled.subtract((name, r) for r in ranges if r not in held)
        if held or seq == newest[name]:
            expected.append((name, inc, seq, held))
    assert ledger.read_state().leased == tuple(expected)


def test_durable_afterwards(ledger: Ledger) -> None:
    """A version that was committed before its snapshots is durable when a later row says so, with their digests."""
    ledger.write_records([RoundReserved(1, 0.0), replace(committed(V1, GENESIS, A1), durable=False, digests=())])
    assert ledger.read_state().versions[-1].durable is False
    ledger.write_records([VersionDurable(V1, (("s0", "d0"), ("s1", "d1")), 1.0)])
    assert ledger.read_state().versions[-1].durable is True
    assert ledger.read_history()[-1].durable is True


def test_a_ledger_of_another_format_is_refused(tmp_path: Path) -> None:
    """Refused in one sentence that says what to do."""
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, ROW).close()
    for number in (0, 10, 99):
        with sqlite3.connect(path) as db:
            db.execute(f"PRAGMA user_version = {number}")
        db.close()
        with pytest.raises(
            ConfigError,
            match=f"expected ledger format 1 or 2, got {number}; go on with .*dips export",
        ):
            Ledger.open(path)


OLD_ROW = replace(ROW, protocol=1)  # of a run that speaks the protocol of the release before


def read_form(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_a_ledger_of_the_release_before_goes_on_in_its_format(tmp_path: Path) -> None:
    """So that the release before may have it back at any time: no table is added, however often it is opened."""
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, OLD_ROW).close()
    for number in (1, 3):
        with closing(Ledger.open(path)) as ledger:
            assert ledger.start_term() and ledger.read_state().row == OLD_ROW
            ledger.write_records([RoundReserved(number, 0.0)])
    with closing(sqlite3.connect(path)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    assert read_form(path) == 1 and tables == {*schema.columns_of(1), "chain"}
    with closing(Ledger.open(path, readonly=True)) as ledger:
        assert ledger.read_state().next_round == 4


def test_a_raised_ledger_keeps_its_former_file_beside_it(tmp_path: Path) -> None:
    """It says what the run speaks; every row is still proven by the chain, old ones and new, and who had it open reads
    on. The former file is the ledger as it was, for the release before.
    """
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.create(path, OLD_ROW)) as ledger, closing(Ledger.open(path, readonly=True)) as reader:
        ledger.write_records([RoundReserved(1, 0.0), committed(V1, GENESIS, A1)])
        before = ledger.read_state()
        (tmp_path / "ledger.format1.tmp").write_bytes(b"of a try that crashed")
        ledger.write_records([ProtocolRaised(2, 5.0)], 7.0)
        ledger.write_records([RoundReserved(3, 0.0), committed(V2, V1, A2)])
        assert ledger.run_row().protocol == 2 and reader.read_state().versions == ledger.read_state().versions
    with closing(Ledger.open(path)) as ledger:
        state = ledger.read_state()
        assert state.row == ROW and state.versions[:2] == before.versions and state.versions[-1].version == V2
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT * FROM protocols").fetchall() == [(2, 5.0, 7.0)]
    former = tmp_path / "ledger.format1.sqlite"
    assert (read_form(path), read_form(former)) == (2, 1)
    with closing(Ledger.open(former)) as ledger:
        assert ledger.read_state() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_a_ledger_is_raised_whole_or_not_at_all(ledger: Ledger, tmp_path: Path) -> None:
    """If a record beside it cannot be written, the tables are those of before; a new run has the newest at once."""
    assert ledger.run_row().protocol == 2
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger.create(path, OLD_ROW)) as old:
        with pytest.raises(sqlite3.IntegrityError):
            old.write_records([ProtocolRaised(2, 5.0), RoundReserved(2, 0.0), RoundReserved(2, 0.0)])
        assert old.run_row() == OLD_ROW and read_form(path) == 1
        old.write_records([ProtocolRaised(2, 5.0)])
    Ledger.open(path).close()


def test_a_mirror_has_the_moment_at_which_the_ledger_was_raised(tmp_path: Path) -> None:
    """A base in the format of before and the transactions since are the ledger, in its new format."""
    since = ((RoundReserved(1, 0.0),), (ProtocolRaised(2, 5.0),), (RoundReserved(2, 0.0),))
    path = tmp_path / "ledger.sqlite"
    with make_aside(path) as fetched:
        with closing(Ledger.create(MEMORY, OLD_ROW)) as ledger:
            ledger.copy_to(fetched)
        build_file(MirroredLedger(1, fetched, tuple(MirroredTransaction(written, 7.0) for written in since)), path)
    with closing(Ledger.open(path)) as ledger:
        assert ledger.read_state().row == ROW and ledger.read_state().next_round > 2
    assert read_form(path) == 2 and sorted(p.name for p in tmp_path.iterdir()) == [
        "ledger.sqlite",
        "ledger.sqlite.lock",
    ]


@dataclass(frozen=True, slots=True)
class _Moody:
    version: VersionId
    reason: str
    mood: float = 0.5
    at: float = 0.0


def test_a_column_that_the_release_before_lacks_is_read_as_its_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Until the ledger is raised: the field is not written, and read as the view says. Then it is a column, and the
    rows that got it are chained anew.
    """
    made = schema.RAISES[2]
    more = schema.Raise(
        f"{made.statements}ALTER TABLE finished ADD COLUMN mood REAL DEFAULT 0.5;\n",
        {**made.lacking, "finished": "SELECT *, 0.5 AS mood FROM main.finished"},
    )
    monkeypatch.setitem(schema.RAISES, 2, more)
    monkeypatch.setitem(ledger_rows._ROWS, _Moody, "finished")
    for cached in (schema.columns_of, ledger_rows._plan_row):
        cached.cache_clear()
    try:
        path, reader = tmp_path / "ledger.sqlite", RowReader(_Moody, "finished")
        with closing(Ledger.create(path, OLD_ROW)) as ledger:

            def read() -> Any:
                return reader.read(ledger._db.execute(f"SELECT {reader.columns} FROM finished").fetchone())

            ledger.write_records([_Moody(V1, "tired", 0.9)])  # type: ignore[list-item]
            assert read() == _Moody(V1, "tired", 0.5)
            ledger.write_records([ProtocolRaised(2, 5.0)])
            assert read() == _Moody(V1, "tired", 0.5)
        Ledger.open(path).close()
        with closing(Ledger.open(path)) as ledger:
            ledger.write_records([_Moody(V2, "awake", 0.9)])  # type: ignore[list-item]
            assert read() == _Moody(V2, "awake", 0.9)
    finally:
        monkeypatch.undo()
        for cached in (schema.columns_of, ledger_rows._plan_row):
            cached.cache_clear()


def test_one_write_is_all_or_nothing(ledger: Ledger) -> None:
    """A transaction whose last record is impossible leaves no trace of the first."""
    ledger.write_records([RoundReserved(1, 0.0)])
    with pytest.raises(sqlite3.IntegrityError):
        ledger.write_records([RoundReserved(2, 0.0), RoundReserved(1, 0.0)])
    assert ledger.read_state().next_round == 2
    ledger.write_records([RoundReserved(2, 0.0)])


def test_a_push_is_in_one_version_only(ledger: Ledger) -> None:
    """The ledger itself refuses to fold a push twice (docs/architecture.md#invariant-4)."""
    ledger.write_records([RoundReserved(1, 0.0), committed(V1, GENESIS, A1), RoundReserved(3, 0.0)])
    with pytest.raises(sqlite3.IntegrityError, match=r"folds\.cluster"):
        ledger.write_records([committed(V2, V1, A1)])
    assert ledger.read_state().versions[-1].version == V1


def test_numbers_that_are_not_finite(ledger: Ledger) -> None:
    """A gated push's infinite norm and a score of NaN survive as what they were; a missing loss is null, never 0."""
    fold = FoldRow(A1, GENESIS, 10, 4, 1.0, inf, nan, None, ())
    version = committed(V1, GENESIS)
    row = VersionCommitted(
        V1, GENESIS, True, (fold,), (), nesterov_step(1.0, 0.7, 0.8), inf, False, (), (), version.history, 0.0
    )
    ledger.write_records([RoundReserved(1, 0.0), row])
    (found,) = ledger.read_history()
    assert (found.folds[0].norm, found.delta_norm) == (inf, inf)
    assert found.folds[0].loss is None and isnan(found.folds[0].score)


def test_history_tells_each_round() -> None:
    """`dips history` sees how each round ended, what it made and of what; times are wall-clock."""
    times = iter(range(100, 200))
    ledger = Ledger.create(MEMORY, ROW, wall=lambda: float(next(times)))
    ledger.write_records([RoundReserved(1, 0.0)])
    ledger.write_records([committed(V1, GENESIS, A1, B1)])
    ledger.write_records([RoundReserved(2, 0.0)])
    ledger.write_records([RoundEnded(2, RoundResult.SKIPPED, "s0 was lost", (outcome(A2, "skipped"),), (), 3.0)])
    ledger.write_records([RoundReserved(3, 0.0)])
    applied, skipped, open_round = ledger.read_history()
    assert (applied.kind, applied.version, applied.parent, applied.tokens) == ("applied", V1, GENESIS, 20)
    assert [f.push for f in applied.folds] == [A1, B1]
    assert (applied.opened, applied.ended) == (100.0, 101.0)
    assert (skipped.kind, skipped.reason, skipped.version) == ("skipped", "s0 was lost", None)
    assert skipped.outcomes == (outcome(A2, "skipped"),)
    assert (open_round.kind, open_round.ended) == ("unfinished", None)
    assert [r.round for r in ledger.read_history(limit=2)] == [2, 3]
    ledger.close()


def test_some_rounds_are_read_without_a_walk_over_all_pushes(ledger: Ledger) -> None:
    """A tracker asks for them every two seconds, and a new master 63 times before it serves: in a month of twenty
    clusters that would take a minute."""
    for number in range(1, 401):
        pushes = tuple(outcome(PushId(c, 1, number), "skipped") for c in "abc"[: number % 4])
        ended = RoundEnded(number, RoundResult.SKIPPED, "x", pushes, (), 0.0)
        ledger.write_records([RoundReserved(number, 0.0), ended])
    for after in (0, 1, 3, 200, 397, 398, 399, 400):
        found, steps = count_steps(ledger, lambda after=after: ledger.read_rounds_after(after, 2))
        assert [(r.round, len(r.outcomes)) for r in found] == [(n, n % 4) for n in (after + 1, after + 2) if n <= 400]
        assert steps < 1_000, "a walk takes 3,000"


@pytest.mark.parametrize("seed", range(8))
def test_what_is_read_by_places_is_what_a_walk_finds(ledger: Ledger, seed: int) -> None:
    """Held against the plain queries, over rounds that are open, skipped, unchanged, applied and undone, with gaps as
    after a restore. Places of outcomes ascend with their rounds, by which they are found.
    """
    rng, number, seqs, head = Random(seed), 0, Counter[str](), [GENESIS]
    for _ in range(40):
        number += rng.choice((1, 1, 1, 5))
        ledger.write_records([RoundReserved(number, 0.0)])
        names = rng.sample("abcd", rng.randrange(5))
        seqs.update(names)
        pushes = [PushId(name, 1 + seqs[name] // 8, seqs[name]) for name in names]
        match rng.randrange(4):
            case 0 if pushes:
                version = VersionId(head[-1].version + 1, number)
                ledger.write_records([committed(version, head[-1], *pushes)])
                head.append(version)
            case 1 | 2:
                kind = rng.choice((RoundResult.SKIPPED, RoundResult.UNCHANGED))
                told = "skipped" if kind is RoundResult.SKIPPED else "gated"
                ended = RoundEnded(number, kind, "x", tuple(outcome(push, told) for push in pushes), (), 0.0)
                ledger.write_records([ended])
        if len(head) > 2 and rng.random() < 0.1:
            to = rng.randrange(len(head) - 1)
            ledger.write_records([RolledBack(head[to], tuple(head[to + 1 :]), "x", 0.0)])
            del head[to + 1 :]
    for name in "abcd":
        for inc in range(1, 2 + seqs[name] // 8):
            if seq := rng.choice((0, *range(8 * (inc - 1), 8 * inc))):
                ledger.write_records([ClusterEnded(name, inc, "x", 0, 1.0, seq, seq)])
    db = ledger._db
    placed = [row[0] for row in db.execute("SELECT round FROM outcomes ORDER BY place")]
    assert placed == sorted(placed)
    walked = db.execute("SELECT round, cluster, inc, seq FROM outcomes ORDER BY place").fetchall()
    reserved = [row[0] for row in db.execute("SELECT round FROM rounds ORDER BY round")]
    for after in range(number + 2):
        for limit in (1, 2, 7, 100):
            read = ledger.read_rounds_after(after, limit)
            assert [r.round for r in read] == [n for n in reserved if n > after][:limit]
            for r in read:
                found = [row for row in walked if row[0] == r.round]
                assert [(r.round, o.push.cluster, o.push.inc, o.push.seq) for o in r.outcomes] == found
    assert ledger.read_history(100) == ledger.read_rounds_after(0, 100)
    by_join = db.execute(
        """SELECT l.cluster, l.inc, l.tokens FROM left_open l LEFT JOIN outcomes o
           ON o.cluster = l.cluster AND o.inc = l.inc AND o.seq = l.seq AND o.kind != 'skipped'
           WHERE o.place IS NULL"""
    )
    assert ledger_state._died_open(db) == {(cluster, inc): tokens for cluster, inc, tokens in by_join}


def test_results_are_read_without_a_walk_over_the_rounds_between(ledger: Ledger) -> None:
    """A tracker looks for them every two seconds, mostly of a run that has none; one that begins late would have had
    all pushes between two results in memory."""
    versions = [VersionId(number, number) for number in range(401)]
    for parent, version in pairwise(versions):
        push = PushId("a", 1, version.round)
        ledger.write_records([RoundReserved(version.round, 0.0), committed(version, parent, push)])
    none, steps = count_steps(ledger, lambda: ledger.read_rounds_after(0, 2, with_result=True))
    assert not none and steps < 1_000, "a walk takes 10,000"
    for version in (versions[1], versions[400]):
        ledger.write_records([VersionResult(version, True, "", (("loss", 1.5),), 1.0)])
    found, steps = count_steps(ledger, lambda: ledger.read_rounds_after(0, 2, with_result=True))
    assert [(r.round, r.result.numbers) for r in found if r.result] == [(1, {"loss": 1.5}), (400, {"loss": 1.5})]
    assert steps < 1_000, "the pushes between them take 10,000"
    _, steps = count_steps(ledger, lambda: ledger.read_rounds_after(1, 1, with_result=True))
    assert steps < 1_000


def count_steps(ledger: Ledger, read: Callable[[], Any]) -> tuple[Any, int]:
    """Return what was read, and how many steps of its machine SQLite has taken for it."""
    taken = [0]

    def count_step() -> None:
        taken[0] += 1

    ledger._db.set_progress_handler(count_step, 1)
    try:
        return read(), taken[0]
    finally:
        ledger._db.set_progress_handler(None, 0)


def test_a_finished_run_stays_finished(ledger: Ledger) -> None:
    """The end of a run is a row like any other."""
    ledger.write_records([RunFinished(GENESIS, "0 outer steps", 1.0)])
    assert ledger.read_state().finished == GENESIS


def test_it_is_on_disk(tmp_path: Path) -> None:
    """What was written is there after the process is gone, and a reader may look while a master holds it."""
    path = tmp_path / "deep" / "ledger.sqlite"
    ledger = Ledger.create(path, ROW)
    ledger.write_records([RoundReserved(1, 0.0)])
    reader = Ledger.open(path, readonly=True)
    assert reader.read_state() == ledger.read_state()
    reader.close()
    ledger.close()
    again = Ledger.open(path)
    assert again.read_state().next_round == 2
    (mode,) = again._db.execute("PRAGMA journal_mode").fetchone()
    (synchronous,) = again._db.execute("PRAGMA synchronous").fetchone()
    assert (mode, synchronous) == ("wal", 2)
    again.close()


def test_a_second_master_is_refused(tmp_path: Path) -> None:
    """Two masters never share a ledger; the second learns which process holds it."""
    first = Ledger.create(tmp_path / "ledger.sqlite", ROW)
    with pytest.raises(ConfigError, match=r"in use by another master \(pid \d+\)"):
        Ledger.open(tmp_path / "ledger.sqlite")
    first.close()
    Ledger.open(tmp_path / "ledger.sqlite").close()


def test_an_existing_ledger_is_not_overwritten(tmp_path: Path) -> None:
    """A run is initialised once."""
    Ledger.create(tmp_path / "ledger.sqlite", ROW).close()
    with pytest.raises(ConfigError, match="already"):
        Ledger.create(tmp_path / "ledger.sqlite", ROW)


def test_what_is_no_ledger_is_named(tmp_path: Path) -> None:
    """Nothing there, garbage, another program's database and a newer format: each is a clear error."""
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(ConfigError, match="`dips init` makes one"):
        Ledger.open(path)
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(Corrupt, match="not a ledger of Di-PS"):
        Ledger.open(path)
    path.unlink()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE t (x)")
    foreign.commit()
    foreign.close()
    with pytest.raises(Corrupt, match="not a ledger of Di-PS"):
        Ledger.open(path)


def test_a_broken_lineage_is_corrupt(ledger: Ledger) -> None:
    """A version whose parent has no row cannot be started from."""
    ledger.write_records([RoundReserved(3, 0.0), committed(V2, V1, A1)])
    with pytest.raises(Corrupt, match="v2@r3 names v1@r1, which has no row"):
        ledger.read_state()


def test_what_layers_have_of_their_own_is_read_back(tmp_path: Path) -> None:
    """Weights of a fold and scales of a step, bit for bit; a version of one number has no row for its layers."""
    ledger = Ledger.create(tmp_path / "ledger.sqlite", ROW)
    plain, made = committed(V1, GENESIS, A1), committed(V2, V1, B1)
    step = OuterStep((0.1, 1 / 3, 0.0), 0.6, 0.8**0.3, 0.3, 0.3, 0.8**0.3, 0.7)
    made = replace(made, folds=(replace(made.folds[0], layer_weights=(1.0, 0.0, 2 / 3)),), step=step)
    history = ScoreHistory((0.0,), (1.5,))
    ledger.write_records([RoundReserved(1, 0.0), plain, RoundReserved(3, 0.0), replace(made, history=history)])
    found = ledger.read_history()
    assert [r.step for r in found] == [plain.step, step]
    assert [r.folds for r in found] == [plain.folds, made.folds]
    assert ledger.read_state().history == history
    assert ledger._db.execute("SELECT round, place FROM layer_factors").fetchall() == [(3, -1), (3, 0)]
    ledger.close()


def test_a_reader_sees_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that is committed while the history is read is in it whole, or not at all."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.create(path, ROW)
    ledger.write_records([RoundReserved(1, 0.0)])
    reader = Ledger.open(path, readonly=True)

    def commits_meanwhile(db: sqlite3.Connection, first: int, last: int, *more: Any) -> Any:
        monkeypatch.undo()
        ledger.write_records([RoundEnded(1, RoundResult.SKIPPED, "x", (outcome(A1, "skipped", (0,)),), (), 0.0)])
        return ledger_history._read_pushes(db, first, last, *more)

    monkeypatch.setattr(ledger_history, "_read_pushes", commits_meanwhile)
    (seen,) = reader.read_history()
    assert (seen.kind, seen.outcomes) == ("unfinished", ())
    assert [(r.kind, len(r.outcomes)) for r in reader.read_history()] == [("skipped", 1)]
    reader.close()
    ledger.close()


@dataclass(frozen=True)
class _Widened(ScoreHistory):
    """A record with a field for which no column was made."""

    verdict: str = ""


def test_a_field_without_a_column_and_a_column_without_a_value_are_refused() -> None:
    """Neither is passed over: a field would be read back as its default, a column would be NULL."""
    with pytest.raises(AssertionError, match=r"score_history has no column for \['verdict'\] of _Widened"):
        RowReader(_Widened, "score_history")
    assert RowReader(_Widened, "score_history", without=("verdict",)).read(("[1.0]", "[2.0]", "[3]"), "x") == (
        _Widened((1.0,), (2.0,), (3,), "x")
    )
    db = sqlite3.connect(":memory:")
    db.executescript(schema.tables_of(2))
    with pytest.raises(KeyError, match="digests"):
        _insert(ChainedRows(db), "score_history", scores="[]", delta_norms="[]")


async def test_the_newest_version_is_the_lineages_after_a_rollback(ledger: Ledger) -> None:
    """Its loss, its time and who contributed, at once as after the next start."""
    outside = MasterOutside(ledger)
    await outside.write_records([RoundReserved(1, 0.0), committed(V1, GENESIS, A1)])
    before = outside.complete_view(RunView()).newest
    await outside.write_records([RoundReserved(3, 0.0), committed(V2, V1, A2, B1)])
    await outside.write_records([RolledBack(V1, (V2,), "a disk was lost", 2.0)])
    assert outside.complete_view(RunView()).newest == before == MasterOutside(ledger).complete_view(RunView()).newest
    assert before.clusters == 1
    await outside.close()


async def test_the_newest_version_has_its_age_behind_any_number_of_rounds_without_one(ledger: Ledger) -> None:
    """As in a run whose rounds are all skipped: its age is what rings, also after a restart of the master."""
    outside = MasterOutside(ledger)
    later = replace(committed(V2, V1, A2, B1), durable=False)
    await outside.write_records([RoundReserved(1, 0.0), committed(V1, GENESIS, A1), RoundReserved(3, 0.0), later])
    before = outside.complete_view(RunView()).newest
    for n in range(4, 30):
        await outside.write_records([RoundReserved(n, 0.0), RoundEnded(n, RoundResult.SKIPPED, "x", (), (), 0.0)])
    assert MasterOutside(ledger).complete_view(RunView()).newest == before
    assert before.committed and before.durable and before.clusters == 2
    await outside.close()
