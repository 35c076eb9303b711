"""What operators change in a run that goes on: the gate, the windows, who is kept out; and what it must leave alone."""

from __future__ import annotations

from dips.dataclass import replace
from dips.ids import GENESIS
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Acknowledged, Extended, Failed, Ranges, Refused, Reply, Tuned
from dips.protocol.entities import IDLE_ROW_S, IDLE_ROWS, AuditBudget
from dips.protocol.events import (
    ExtensionAsked,
    OperatorAsked,
    OperatorReported,
    OperatorRequest,
    QuarantineAsked,
    RangesRequested,
    ReadmissionAsked,
    SlaveRegistered,
    TargetChange,
    TuningAsked,
)
from dips.protocol.operator import MOST_TEXT
from dips.protocol.options import (
    DataOptions,
    Options,
    OuterOptions,
    PenaltyOptions,
    StopOptions,
    Targets,
    TimingOptions,
    TunedOption,
)
from dips.protocol.records import OperatorActed, OptionsTuned, RunExtended
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun


def ask(run: ScriptedRun, request: OperatorRequest) -> object:
    return run.ask(OperatorAsked(0, "alice.operator", 1e9, request))


def tune(run: ScriptedRun, key: str, value: float) -> object:
    return ask(run, TuningAsked(0, (TunedOption(key, value),)))


def gated_run(**penalty: float) -> ScriptedRun:
    return ScriptedRun(Options(penalty=PenaltyOptions(**penalty), timing=TimingOptions(window_s=10.0)))  # type: ignore[arg-type]


def round_of(run: ScriptedRun, cluster: str) -> str:
    """A push of this cluster, alone in its round; return its outcome."""
    push = run.push(cluster)
    run.wait(11.0)
    return str(run.outcome(push).kind)


def test_a_tuned_gate_judges_the_next_push() -> None:
    """A norm of three times the usual is above 3 σ; β tuned to a thousand lets it in."""
    run = gated_run(warmup_rounds=2, gate_patience=99)
    run.train("a")
    assert [round_of(run, "a") for _ in range(4)] == ["accepted"] * 4
    run.norms["a"] = 3.0
    assert round_of(run, "a") == "gated"
    assert isinstance(tune(run, "penalty.beta", 1000.0), Tuned)
    assert round_of(run, "a") == "accepted"


def test_what_the_ledger_has_tuned_and_cannot_be_is_over_once_it_is_set() -> None:
    """Also to the run file's own value, which changes nothing now: the next master reads the row, and says no more."""
    run = ScriptedRun()
    state = replace(run.first, tuned=(TunedOption("penalty.beta", 1e-320),))
    run.machine = Coordinator(state, run.manifest, OPTIONS, run.now)
    run.ask(SlaveRegistered(0, "s", "n", "r", "s:1", ("s:2",), 0, GENESIS, None, (), 4, ""))
    (why,) = run.view.untuned
    assert "penalty.beta" in why and "dips set" in why
    tune(run, "outer.lr", 0.5)
    assert run.view.untuned == (why,)
    for _ in range(2):
        tune(run, "penalty.beta", OPTIONS.penalty.beta)
    assert not run.view.untuned and len(run.all_of(OptionsTuned)) == 2


def test_momentum_is_not_tuned_away() -> None:
    """What updates carry over in it would be lost; a run that begins without has nothing to lose."""
    run = ScriptedRun()
    assert isinstance(tune(run, "outer.momentum", 0.0), Failed)
    assert isinstance(tune(run, "outer.momentum", 0.5), Tuned)
    still = ScriptedRun(replace(OPTIONS, outer=OuterOptions(momentum=0.0)))
    assert isinstance(tune(still, "outer.momentum", 0.0), Tuned)


def test_a_tuned_window_is_the_next_rounds() -> None:
    run = ScriptedRun()
    run.train("a", "b")
    run.push("a")
    tune(run, "timing.window_s", 100.0)
    run.wait(11.0)
    assert str(run.head) == "v1@r1", "a window that is open closes when it was to"


def test_an_operators_quarantine_leaves_the_statistics_alone() -> None:
    """However often it pushes meanwhile, no patience ends, and it goes on where it was when it is released."""
    run = gated_run(warmup_rounds=2, gate_patience=2)
    run.train("a")
    assert [round_of(run, "a") for _ in range(4)] == ["accepted"] * 4
    before = run.machine._run.penalty.penalty_row("a")
    ask(run, QuarantineAsked(0, "a", "a look"))
    assert [round_of(run, "a") for _ in range(4)] == ["gated"] * 4
    assert run.view.clusters["a"].quarantined and run.view.clusters["a"].quarantine == "a look"
    assert run.machine._run.penalty.penalty_row("a") == before
    assert isinstance(ask(run, ReadmissionAsked(0, "a")), Acknowledged)
    assert round_of(run, "a") == "accepted"
    assert isinstance(ask(run, ReadmissionAsked(0, "a")), Refused), "nothing keeps it out"


def test_an_operators_quarantine_holds_for_pushes_without_tokens() -> None:
    """They count for no patience either, at whose end the gates would keep the cluster out, too."""
    run = gated_run(gate_patience=2)
    run.train("a")
    ask(run, QuarantineAsked(0, "a", "a look"))
    for _ in range(3):
        push = run.push("a", tokens=0)
        run.wait(11.0)
        assert "quarantined by an operator: a look" in run.outcome(push).reason
    assert run.machine._run.penalty.penalty_row("a").gated_in_a_row == 0


def test_a_row_stands_before_its_answer_and_is_bounded() -> None:
    run = ScriptedRun()
    run.train("a")
    ask(run, QuarantineAsked(0, "a", "\x1b[2J\u202e" + "x" * 10_000))
    kinds = [type(effect) for effect in run.effects]
    (row,) = run.all_of(OperatorActed)
    assert run.view.clusters["a"].quarantine.isprintable()
    assert kinds.index(OperatorActed) < len(kinds) - 1 - kinds[::-1].index(Reply)
    assert row.wall == 1e9 and row.caller == "alice.operator"
    for text in (row.caller, row.action, row.arguments, row.outcome):
        assert len(text) <= MOST_TEXT and text.isprintable()


def test_nobody_fills_the_ledger_with_denied_calls() -> None:
    """A budget at once, then one row in so long; the next row counts those that had none."""
    run = ScriptedRun()
    for _ in range(1000):
        run.step(OperatorReported("eve.viewer", "drain", "s", "no", True, 0.0))
    assert len(run.all_of(OperatorActed)) == IDLE_ROWS
    run.now += IDLE_ROW_S
    run.step(OperatorReported("eve.viewer", "drain", "s", "no", True, 0.0))
    assert run.all_of(OperatorActed)[-1].passed_over == 1000 - IDLE_ROWS


def test_a_budget_fills_with_time_and_no_farther() -> None:
    budget = AuditBudget(0.0)
    assert sum(budget.take_row(0.0) for _ in range(IDLE_ROWS + 5)) == IDLE_ROWS
    assert not budget.take_row(IDLE_ROW_S / 2) and budget.take_row(IDLE_ROW_S * 1.5)
    assert sum(budget.take_row(1e9) for _ in range(IDLE_ROWS + 5)) == IDLE_ROWS
    assert budget.take_passed_over() == 11 and budget.take_passed_over() == 0


def test_nobody_fills_the_ledger_with_requests_that_change_nothing() -> None:
    """They have a budget of rows; a request that changes something has its row all the same."""
    run = ScriptedRun()
    for _ in range(IDLE_ROWS + 10):
        tune(run, "outer.lr", -1.0)
    assert len(run.all_of(OperatorActed)) == IDLE_ROWS
    tune(run, "outer.lr", 0.5)
    assert run.all_of(OperatorActed)[-1].passed_over == 10


def extend(run: ScriptedRun, **targets: float) -> object:
    return run.ask(ExtensionAsked(0, tuple(TargetChange(key, value) for key, value in targets.items())))


def test_targets_that_cannot_be_are_refused() -> None:
    """Nothing is recorded of them, nor of those that the run has already."""
    run = ScriptedRun(replace(OPTIONS, stop=StopOptions(tokens=1000, versions=5)))
    run.train("a")
    run.outcome(run.push("a"))
    for wrong in ({"tokens": 0.0}, {"epochs": 0.0}, {"epochs": 2.0}, {"versions": 1.0}):
        assert isinstance(extend(run, **wrong), Refused), wrong
    for wrong in ({"round": 5.0}, {"tokens": 1000.5}):
        assert isinstance(extend(run, **wrong), Failed), wrong
    assert extend(run, tokens=1000.0, epochs=1.0) == Extended(Targets(tokens=1000, versions=5), None)
    assert not run.all_of(RunExtended)
    assert extend(run, wall_s=99.5, versions=0.0) == Extended(targets := Targets(tokens=1000, wall_s=99.5), None)
    assert run.all_of(RunExtended) == [RunExtended(targets, None, run.now)]


def test_a_finished_run_goes_on_to_its_new_target() -> None:
    """A target that is reached already would end it at once; with one more epoch there is data again."""
    run = ScriptedRun(replace(OPTIONS, stop=StopOptions(versions=1), data=DataOptions(ranges=2)))
    run.train("a")
    run.outcome(run.push("a"))
    end = run.head
    assert run.view.finished == str(end) and isinstance(extend(run, versions=1.0), Refused)
    assert extend(run, versions=9.0, epochs=2.0) == Extended(targets := Targets(versions=9, epochs=2), end)
    assert run.all_of(RunExtended) == [RunExtended(targets, end, run.now)] and run.view.finished is None
    assert run.ask(RangesRequested(0, "a", run.inc("a"), 1, 9)) == Ranges((0, 1, 2, 3), False)
    assert round_of(run, "a") == "accepted" and run.view.finished is None
