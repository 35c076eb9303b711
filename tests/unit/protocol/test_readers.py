"""Who only pulls, an export or a follower, in the eyes of the master: nothing waits for it, and nothing counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.errors import Denied
from dips.ids import PushId
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.entities import IDLE_ROWS
from dips.protocol.enums import ClusterCause, ClusterState
from dips.protocol.records import OperatorActed, PeerRow
from tests.unit.protocol.scripted_run import OPTIONS
from tests.unit.protocol.test_bites_transfers import failure, make

READERS = ("eval.puller", "ada.operator")


@pytest.mark.parametrize("reader", READERS)
def test_no_window_waits_for_one_that_only_pulls(reader: str) -> None:
    """Whatever its heartbeats say of a trainer; a cluster that trains as long as it would be waited for."""
    for name, closed in ((reader, True), ("eval", False)):
        run = make("a")
        run.train(name)
        run.step(ev.TrainerChanged(name, run.inc(name), True, "it says that it trains"))
        run.push("a")
        run.wait(0.5)
        assert bool(run.committed) is closed, name


@pytest.mark.parametrize("reader", READERS)
def test_what_clusters_may_is_denied_to_one_that_only_pulls(reader: str) -> None:
    run = make("a", ranges=4)
    run.train(reader)
    assert failure(run.ask(ev.PushRequested(0, PushId(reader, 1, 9), run.head, 1))) is Denied
    assert failure(run.ask(ev.RangesRequested(0, reader, 1, 1, 1, ()))) is Denied
    assert run.view.ranges.free == 4 and not run.view.slaves["s"].slots_used


def test_one_that_only_pulls_is_no_cluster_of_the_run() -> None:
    """Neither its tokens nor its base nor its number count; it is shown with the version that it has."""
    run = make("a")
    run.train("eval.puller")
    run.step(ev.TokensReported("eval.puller", 1, 1_000, 10, 5))
    run.push("a")
    run.wait(11.0)
    seen = run.view.clusters["eval.puller"]
    assert (seen.state, seen.cause, seen.base) == (ClusterState.IDLE, ClusterCause.FOLLOWS, "v0@r0")
    assert (run.view.met.all, run.view.met.versions) == (1, 1)
    run.ask(ev.ClusterLeft(0, "eval.puller", 1, 1_000))
    assert run.view.clusters["eval.puller"].tokens_lost == 0


def test_one_that_only_pulls_does_so_after_a_restart_of_the_master() -> None:
    """Its name says so, since the ledger keeps no more of it."""
    run = make("a")
    peers = tuple(PeerRow(name, 1, "n", False) for name in ("a", "eval.puller"))
    again = Coordinator(replace(run.first, clusters=peers), run.manifest, OPTIONS, 0.0)
    states = {name: c.state for name, c in again.build_view(0.0).clusters.items()}
    assert states == {"a": ClusterState.TRAINING, "eval.puller": ClusterState.IDLE}


def test_who_takes_the_parameters_out_is_in_the_audit() -> None:
    """Once for an incarnation, before a byte can move; never for a cluster. Pullers cannot displace an operator's."""
    run = make("a")
    for process in range(IDLE_ROWS + 5):
        run.train("eval.puller", process=f"p{process}")
        run.pull("eval.puller")
    run.train("ada.operator")
    rows = run.all_of(OperatorActed)
    assert [r.caller for r in rows] == ["eval.puller"] * IDLE_ROWS + ["ada.operator"]
    assert (rows[0].action, rows[0].arguments) == ("pull", "v0@r0")
    assert rows[0].outcome == "4000 bytes of parameters, as incarnation 1" and not rows[0].refused
    assert rows[-1].passed_over == 5


def test_an_operators_row_counts_pulls_that_had_none() -> None:
    """So that it is seen in the audit that there were more, whoever has its next row."""
    run = make("a")
    for process in range(IDLE_ROWS + 3):
        run.train("eval.puller", process=f"p{process}")
    for passed_over in (3, 0):
        run.ask(ev.OperatorAsked(0, "ada.operator", 1e9, ev.QuarantineAsked(0, "a", f"look {passed_over}")))
        assert run.all_of(OperatorActed)[-1].passed_over == passed_over
