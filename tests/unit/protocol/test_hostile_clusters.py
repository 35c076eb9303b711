"""What one enrolled cluster may do to the others: nothing, whatever it says (docs/guides/threats.md)."""

from __future__ import annotations

from dips.errors import Busy, ConfigError, UnavailableSlave
from dips.protocol import events as ev
from dips.protocol.data import HELD_TIMES
from dips.protocol.effects import Committed, Dropped, Failed, Joined, OpenPush, Pending, Ranges
from dips.protocol.entities import INCARNATION_S, INCARNATIONS
from dips.protocol.options import DataOptions, StopOptions
from dips.protocol.rules import MOST_TIMES, TOKENS_KEPT
from dips.protocol.seeding import SEEDER
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun, replace


def test_nobody_has_the_seeders_name() -> None:
    """Its reports would be taken for those of `dips seed`."""
    run = ScriptedRun()
    answer = run.ask(ev.ClusterJoined(0, SEEDER, "p", "r", run.manifest.digest, "c"))
    assert isinstance(answer, Failed) and answer.error is ConfigError and SEEDER not in run.view.clusters


def test_a_push_that_moved_before_its_grant_is_not_committed() -> None:
    """It is staged everywhere, but a slave's answer to OpenPush is lost, and then that slave refuses it."""
    run = ScriptedRun()
    run.train("a")
    run.held = {OpenPush}
    push = run.open_push("a")
    assert isinstance(run.commit(push), Pending)
    (order,) = run.orders
    run.orders.clear()
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, UnavailableSlave, "gone"))
    assert isinstance(run.ask(ev.PushFinished(0, push, 100, 1, (), 2.5)), Dropped)


def test_tokens_far_beyond_what_is_usual_neither_make_a_version_nor_end_the_run() -> None:
    """12,500,000,000 : 1 before: θ was what the liar said, and the run at its end; of a script that miscounts, too."""
    run = ScriptedRun(replace(OPTIONS, stop=StopOptions(tokens=10**6)))
    run.train("a", "b", "c")
    for _ in range(TOKENS_KEPT):
        pushed = [run.push(cluster) for cluster in "ab"]
        run.wait(10.0)
        for push in pushed:
            run.outcome(push)
    honest, liar = run.push("a"), run.push("c", tokens=10**9)
    run.wait(10.0)
    row = run.committed[-1]
    assert [(fold.push, fold.tokens) for fold in row.folds] == [(honest, 100), (liar, MOST_TIMES * 100)]
    assert row.folds[1].weight == MOST_TIMES and run.view.finished is None
    said = run.outcome(liar)
    assert f"of its {10**9} tokens {MOST_TIMES * 100} count" in said.reason
    assert run.view.clusters["c"].tokens_accepted == 10**9, "its own account is as it says"


def test_a_young_run_believes_what_clusters_bring() -> None:
    """Until one of them has brought five pushes nothing is usual: a cluster that begins with one step may go on."""
    run = ScriptedRun()
    run.train("a")
    for tokens in (*[10] * (TOKENS_KEPT - 1), 10_000):
        push = run.push("a", tokens=tokens)
        run.wait(10.0)
        run.outcome(push)
    assert [row.folds[0].tokens for row in run.committed][-1] == 10_000


def test_who_joins_on_and_on_fills_no_ledger() -> None:
    """Each incarnation has its rows, 200 times a second before: a puller's certificate filled the master's disk."""
    run = ScriptedRun()
    run.train("a")
    asked = [
        run.ask(ev.ClusterJoined(0, "a", f"n{i}", "r", run.manifest.digest, "c", former=run.inc("a")))
        for i in range(INCARNATIONS + 10)
    ]
    assert [isinstance(answer, Joined) for answer in asked] == [True] * INCARNATIONS + [False] * 10
    assert isinstance(asked[-1], Failed) and asked[-1].error is Busy
    assert run.inc("a") == 1 + INCARNATIONS
    joins = ev.ClusterJoined(0, "a", "later", "r", run.manifest.digest, "c", former=run.inc("a"))
    run.wait(INCARNATION_S)
    assert isinstance(run.ask(joins), Joined) and isinstance(run.ask(joins), Joined), "a repetition is none"


FEW = 3  # data ranges that a cluster may hold


def lease(
    run: ScriptedRun, cluster: str, seq: int, count: int = 1024, claims: tuple[int, ...] = ()
) -> Ranges | Pending:
    answer = run.ask(ev.RangesRequested(0, cluster, run.inc(cluster), seq, count, claims))
    assert isinstance(answer, Ranges | Pending)
    return answer


def test_one_cluster_leases_a_few_data_ranges_and_no_more() -> None:
    """3,970 of 4,000 before, and the others were told that no range is left; by number or by name, it is the same."""
    run = ScriptedRun(replace(OPTIONS, data=DataOptions(ranges=40), ranges_held=FEW))
    run.train("a", "b")
    assert lease(run, "a", 1) == Ranges((0, 1, 2), False)
    assert lease(run, "a", 2) == lease(run, "a", 3, claims=(7, 8)) == Ranges((), False)
    assert lease(run, "b", 1, claims=tuple(range(10, 30))) == Ranges((10, 11, 12), False)
    push = run.push("a", ranges=(0, 1, 2))
    run.wait(11.0)
    run.outcome(push)
    assert lease(run, "a", 4) == Ranges((*range(3, 10), *range(13, 18)), False), f"{HELD_TIMES} times what it trained"


def test_a_data_range_counts_once_in_a_push() -> None:
    """A push that named one range a thousand times raised what its cluster may hold to 4,000, which left none to the
    others.
    """
    run = ScriptedRun(replace(OPTIONS, data=DataOptions(ranges=40), ranges_held=FEW))
    run.train("a")
    assert lease(run, "a", 1) == Ranges((0, 1, 2), False)
    push = run.open_push("a")
    said = run.commit(push, ranges=(0,) * 1000)
    assert isinstance(said, Failed) and "1000 numbers of 1 ranges" in said.message
    assert run.commit(push, ranges=(0, 1, 2)) == Committed(), "it may say what is true"


def test_ranges_that_others_hold_may_come_back() -> None:
    """Whoever has settled its own waits, and gets what another left; none is left only when nobody holds any."""
    run = ScriptedRun(replace(OPTIONS, data=DataOptions(ranges=4), ranges_held=FEW))
    run.train("a", "b")
    assert lease(run, "a", 1, 1) == Ranges((0,), False)
    assert lease(run, "b", 1) == Ranges((1, 2, 3), False)
    assert lease(run, "a", 2) == Ranges((), False), "its own first, or two would wait for each other"
    push = run.push("a", ranges=(0,))
    run.wait(11.0)
    run.outcome(push)
    waits = lease(run, "a", 3)
    assert isinstance(waits, Pending) and "3 are leased by b" in waits.reason
    run.ask(ev.ClusterLeft(0, "b", run.inc("b"), 0))
    assert lease(run, "a", 3) == Ranges((1, 2, 3), False)
    assert lease(run, "a", 4) == Ranges((), True)


def test_a_committed_push_of_who_left_is_waited_for() -> None:
    """Its round may be skipped, and then its ranges are free again: no cluster ends before that is known."""
    run = ScriptedRun(replace(OPTIONS, data=DataOptions(ranges=2)))
    run.train("a", "b")
    assert lease(run, "a", 1, 2) == Ranges((0, 1), False)
    run.push("a", ranges=(0, 1))
    run.ask(ev.ClusterLeft(0, "a", run.inc("a"), 100))
    assert isinstance(lease(run, "b", 1), Pending)
