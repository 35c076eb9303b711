"""The numbers of an outer step, and how long a window waits: each as the formula says, with values that tell."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from dips.errors import DipsError, RemoteProtocolError, UnresponsiveSlave
from dips.ids import GENESIS
from dips.protocol import events as ev
from dips.protocol.effects import Apply, ClosePull, Commit, Fold, Hold, Measure, Persist, Ping, RegisterLater
from dips.protocol.options import Clip, OuterOptions, PenaltyOptions, TimingOptions
from dips.protocol.records import RoundEnded, ScoreHistory
from dips.protocol.slaves import UNANSWERED_ORDERS
from tests.transcripts.story import Teller
from tests.unit.protocol.scripted_run import MANIFEST, OPTIONS, ScriptedRun


def clipped_by(clip: Clip, norms: tuple[float, ...] = (), clusters: str = "a") -> ScriptedRun:
    run = ScriptedRun(replace(OPTIONS, outer=OuterOptions(clip=clip)), history=ScoreHistory((), norms))
    run.train(*clusters)
    return run


def pushed_by_two(run: ScriptedRun, tokens: tuple[int, int] = (100, 300)) -> None:
    """Both clusters push into one round."""
    pushes = [run.push(cluster, n) for cluster, n in zip("ab", tokens, strict=True)]
    for push in pushes:
        run.outcome(push)


def test_the_mean_weighs_by_tokens() -> None:
    """w = T_j/T_first, c = T_first/ΣT, and the norm that is recorded is the mean's."""
    run = clipped_by(Clip(), clusters="ab")
    run.acc_norm = 8.0
    pushed_by_two(run, (100, 300))
    assert [fold.weight for fold in run.all_of(Fold)] == [1.0, 3.0]
    assert run.applied[-1].step.scales == pytest.approx((0.25,))
    assert run.committed[-1].delta_norm == pytest.approx(2.0)
    assert not run.committed[-1].clipped


def test_the_norm_is_that_of_the_last_fold() -> None:
    """Each fold answers the norm of the whole sum, so it takes the place of the one before."""
    run = clipped_by(Clip(), clusters="ab")
    run.held.add(Fold)
    first, second = (run.push(c, 100) for c in "ab")
    for norm in (100.0, 6.0):
        run.acc_norm = norm
        run.held.clear()
        order = run.orders.popleft()
        run.held.add(Fold)
        run.step(ev.OrderAnswered(order.slave, order.sinc, order.number, run._answer(order.body)))
    assert run.committed[-1].delta_norm == pytest.approx(3.0)
    assert {first, second} == {fold.push for fold in run.committed[-1].folds}


@pytest.mark.parametrize("per_layer", [False, True])
def test_an_absolute_clip_shortens_what_is_longer_and_leaves_what_is_shorter(per_layer: bool) -> None:
    """scale = c·φ/‖c·acc‖ above φ, c at or below it, of the whole model or of each layer; the row says which it was."""
    run = clipped_by(Clip(norm=0.5, per_layer=per_layer))
    for run.acc_norm in (2.0, 0.5, 0.25):
        run.outcome(run.push("a"))
    assert [a.step.scales for a in run.applied] == [(0.25,), (1.0,), (1.0,)]
    assert [row.clipped for row in run.committed] == [True, False, False]


def test_a_relative_clip_is_a_multiple_of_the_median_norm() -> None:
    """The median, not the largest, of the accepted norms; before the first there is no limit."""
    run = clipped_by(Clip(relative=2.0), norms=(1.0, 1.0, 100.0))
    run.acc_norm = 8.0
    run.outcome(run.push("a"))
    assert run.applied[-1].step.scales == pytest.approx((2.0 / 8.0,)) and run.committed[-1].clipped
    fresh = clipped_by(Clip(relative=2.0))
    fresh.acc_norm = 8.0
    fresh.outcome(fresh.push("a"))
    assert fresh.applied[-1].step.scales == (1.0,)


def test_the_norms_of_fifty_versions_are_kept() -> None:
    run = clipped_by(Clip(), norms=tuple(float(i) for i in range(50)))
    run.outcome(run.push("a"))
    assert run.committed[-1].history.delta_norms == (*map(float, range(1, 50)), 1.0)


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_mean_that_is_not_finite_is_never_applied(norm: float) -> None:
    """The round is skipped; θ stays."""
    run = clipped_by(Clip())
    run.acc_norm = norm
    push = run.push("a")
    assert run.outcome(push).kind == "skipped"
    assert run.applied == [] and str(run.head) == "v0@r0"


# ---- the gate --------------------------------------------------------------------------------------------------------


def test_a_push_without_tokens_is_gated() -> None:
    """It has no weight: a first one would divide by zero."""
    run = clipped_by(Clip())
    push = run.push("a", tokens=0)
    assert run.outcome(push).kind == "gated"
    assert run.all_of(Fold) == []


def test_a_slave_that_says_not_finite_is_believed() -> None:
    """Whatever numbers it sends beside."""
    run = clipped_by(Clip())
    run.finite = False
    assert run.outcome(run.push("a")).kind == "gated"


def test_a_base_of_the_lineage_is_scored() -> None:
    """After its warm-up a cluster's push of ten times its norm is gated: its base is an ancestor."""
    penalty = PenaltyOptions(warmup_rounds=2, hard_cap=1000.0)
    run = ScriptedRun(replace(OPTIONS, penalty=penalty))
    run.train("a")
    for _ in range(4):
        assert run.outcome(run.push("a")).kind == "accepted"
    run.norms["a"] = 10.0
    assert run.outcome(run.push("a")).kind == "gated"


def test_tokens_of_a_skipped_push_whose_cluster_died_are_lost() -> None:
    """And those of one that lives are still its own."""
    run = ScriptedRun()
    run.train("a", "b")
    run.held.add(Measure)
    run.push("a", tokens=70)
    run.step(ev.ClusterSilent("a", 1, 10.0, 70, 0))
    order = run.orders.popleft()
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, RemoteProtocolError, "broken"))
    assert run.all_of(RoundEnded)
    assert run.view.clusters["a"].tokens_lost == 70


# ---- the window ------------------------------------------------------------------------------------------------------


def paced(window_s: float | None = None, clusters: str = "ab") -> ScriptedRun:
    run = ScriptedRun(replace(OPTIONS, timing=TimingOptions(window_s=window_s)))
    run.train(*clusters)
    return run


def opened_window_s(run: ScriptedRun) -> float:
    notes = [e for e in run.effects if getattr(e, "kind", "") == "round_opened"]
    return float(dict(notes[-1].fields)["window_s"])


def test_a_window_is_a_twentieth_of_the_median_pace() -> None:
    """Paces of 100, 100 and 400 s: 5 s, not 20; a second before anything is known."""
    run = paced(clusters="a")
    for wait_s in (100.0, 100.0, 400.0):
        run.outcome(run.push("a"))
        run.wait(wait_s)
    run.push("a")
    assert opened_window_s(run) == pytest.approx(5.0)


def test_the_window_waits_only_for_who_comes_before_its_end() -> None:
    """`b` pushes every 100 s and has just begun: the window of `a` closes without waiting for it."""
    run = paced(window_s=20.0)
    for _ in range(2):
        pushed_by_two(run)
        run.wait(100.0)
    push = run.push("b")
    run.wait(20.0)
    run.outcome(push)
    assert run.view.clusters["b"].state == "training"
    assert run.outcome(run.push("a")).kind == "accepted", "nobody is expected: closed at once"


def test_the_window_waits_for_a_push_until_it_is_late() -> None:
    """A push that moves is due by its bandwidth; a second after that nobody waits for it any more."""
    run = paced(window_s=50.0)
    nbytes = MANIFEST.numel * 4
    run.step(ev.BandwidthMeasured("b", 1, nbytes / 10.0))  # its push moves for 10 s
    run.open_push("b")
    push = run.push("a")
    run.wait(10.5)
    assert run.committed == []
    run.wait(1.0)
    assert [fold.push for fold in run.committed[-1].folds] == [push]


def test_the_window_waits_for_ranks_that_train_on() -> None:
    """They look at the push at the end of an inner step: it is due that much later, and late after as much again."""
    run = paced(window_s=50.0)
    run.step(ev.BandwidthMeasured("b", 1, MANIFEST.numel * 4 / 10.0))  # its push moves for 10 s
    run.open_push("b", idle_s=6.0)
    push = run.push("a")
    run.wait(21.5)
    assert run.committed == []
    run.wait(1.0)
    assert [fold.push for fold in run.committed[-1].folds] == [push]


@pytest.mark.parametrize(("idle_s", "window_s"), [(0.0, 5.0), (40.0, 13.0), (1e9, 25.0)])
def test_pushes_in_fragments_come_in_a_longer_window(idle_s: float, window_s: float) -> None:
    """By a fifth of the time in which they do not move, of which no more is believed than the pace."""
    run = paced()
    for _ in range(3):
        pushed_by_two(run)
        run.wait(100.0)
    run.open_push("b", idle_s=idle_s)
    run.push("a")
    assert opened_window_s(run) == pytest.approx(window_s)


def test_the_window_does_not_wait_for_a_push_that_is_due_after_it() -> None:
    """A slow link keeps no window open."""
    run = paced(window_s=5.0)
    run.step(ev.BandwidthMeasured("b", 1, MANIFEST.numel * 4 / 10.0))
    run.open_push("b")
    assert run.outcome(run.push("a")).kind == "accepted"


# ---- orders that are refused -----------------------------------------------------------------------------------------


def fail_order(run: ScriptedRun, error: type[DipsError]) -> None:
    """The oldest order that is held fails."""
    order = run.orders.popleft()
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, error, "broken"))


def test_a_slave_that_refuses_to_commit_registers_again() -> None:
    """Nobody knows what it serves; the version stands."""
    run = ScriptedRun()
    run.train("a")
    run.held.add(Commit)
    run.push("a")
    fail_order(run, RemoteProtocolError)
    assert (run.view.slaves["s"].state, run.view.slaves["s"].cause) == ("lost", "refused")
    assert len(run.committed) == 1


def test_a_push_that_waits_for_the_flip_is_skipped_with_its_slave() -> None:
    """What lay in the slave's memory is gone: the cluster keeps its progress, and trains on."""
    run = ScriptedRun()
    run.train("a", "b")
    run.held.add(Commit)
    run.push("a")
    run.wait(11.0)
    push = run.push("b")
    run.step(ev.SlaveSilent("s", 1, 99.0))
    assert run.outcome(push).kind == "skipped" and run.view.clusters["b"].state == "training"


def test_an_order_on_which_nothing_depends_may_be_refused() -> None:
    """The slave goes on, and the order is forgotten."""
    run = ScriptedRun()
    run.held.add(ClosePull)
    run.train("a")
    fail_order(run, RemoteProtocolError)
    assert run.view.slaves["s"].state == "ready" and not run.machine._run.orders.orders
    assert run.outcome(run.push("a")).kind == "accepted"


def test_any_answer_to_a_ping_shows_that_orders_arrive() -> None:
    """A refusal too; while there is none, each Register sends another."""
    run = ScriptedRun()
    run.train("a")
    run.held |= {Measure, Ping}
    run.push("a")
    (order,) = run.orders
    for _ in range(UNANSWERED_ORDERS):
        run.orders.clear()
        run.step(ev.OrderFailed(order.slave, order.sinc, order.number, UnresponsiveSlave, "no answer"))
    register = ev.SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, GENESIS, None, (), 4, "")
    for error in (UnresponsiveSlave, RemoteProtocolError):
        run.orders.clear()
        assert isinstance(run.ask(register).order, RegisterLater)
        fail_order(run, error)
    assert isinstance(run.ask(register).order, Hold) and run.view.slaves["s"].state == "ready"


@pytest.mark.parametrize("kind", [Measure, Fold, Apply, Persist])
def test_nothing_is_due_while_slaves_work(kind: type) -> None:
    """Their answers are waited for: a master whose window is over does not look at its clock again and again."""
    run = ScriptedRun()
    run.train("a")
    run.held.add(kind)
    run.push("a")
    run.wait(20.0)
    assert run.orders and run.machine.next_deadline() == inf


def test_a_push_that_one_slave_finds_not_finite_is_gated() -> None:
    """Whatever the others find of their layers [invariant 8]."""
    teller = Teller({})
    teller.ready("all", {})
    teller.trains("a", {})
    teller.pushes("a", {"push": "a/1#2"})
    teller.answers("s0", {"only": "Measure", "norm": "0.1"})
    (gated, *_) = teller.answers("s1", {"only": "Measure", "norm": "0.1", "nan": "yes"})
    assert "DropPush a/1#2: gated: not finite" in gated
