"""`timing.window: adaptive`: windows that last longer for clusters that are due soon."""

from __future__ import annotations

import pytest

from dips.codecs import Codec
from dips.errors import ConfigError
from dips.ids import GENESIS
from dips.protocol import events as ev
from dips.protocol.effects import Refused
from dips.protocol.enums import ClusterState, WindowRule
from dips.protocol.options import TimingOptions
from dips.protocol.round import MOST_LENGTHS
from tests import rules_reference
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun, replace

WINDOW_S = 10.0


def windowed(rule: str, due: dict[str, float] | None = None, codec: Codec = Codec.FP32) -> ScriptedRun:
    """a to d train; `due` says when a push of each is due, by its last ones."""
    timing = TimingOptions(window_s=WINDOW_S, window=WindowRule(rule))
    run = ScriptedRun(replace(OPTIONS, timing=timing, codec=codec))
    run.train(*"abcd")
    for name, at in (due or {}).items():
        cluster = run.machine._run.clusters[name]
        cluster.requested_at = at - 1000.0
        cluster.paces.append(1000.0)
        run.machine._run.follow_cluster(cluster)
    return run


def closes(run: ScriptedRun) -> float:
    r = run.machine._run.round
    assert r is not None
    return r.closes


def test_a_fixed_window_has_one_length() -> None:
    """Whatever comes."""
    run = windowed("fixed", due={"b": 12.0})
    run.push("a")
    run.now = 9.0
    run.push("b")
    assert closes(run) == WINDOW_S


@pytest.mark.parametrize(
    "due",
    [
        {},
        {"b": 4.0},
        {"b": 18.0},
        {"b": 18.0, "c": 24.0},
        {"b": 25.0},
        {"b": 25.0, "c": 25.0, "d": 25.0},
        {"b": 3.0, "c": 19.0, "d": 39.0},
        {"b": 14.0, "c": 14.5, "d": 18.0},
        dict.fromkeys("bcd", MOST_LENGTHS * WINDOW_S),  # at the very end of the longest window
    ],
)
def test_an_adaptive_window_waits_for_those_due_soon(due: dict[str, float]) -> None:
    """As long as all wait a length in the mean at most, as the reference has it; and after each arrival anew."""
    run = windowed("adaptive", due=due)
    run.push("a")
    assert closes(run) == pytest.approx(rules_reference.window_end(WINDOW_S, MOST_LENGTHS, [0.0], sorted(due.values())))


@pytest.mark.parametrize("moving", [True, False])
def test_no_window_waits_for_a_push_whose_trainer_hangs(moving: bool) -> None:
    """One hung cluster would keep each window open to MOST_LENGTHS."""
    run = windowed("adaptive")
    run.step(ev.BandwidthMeasured("b", 1, 4000 / 14.0))  # 14 s for the 4,000 bytes of the model
    run.push("a")
    run.now = 1.0
    if not moving:
        run.step(ev.TrainerChanged("b", 1, False, "its trainer hangs"))
    run.open_push("b")
    assert closes(run) == pytest.approx(20.0 if moving else WINDOW_S)


@pytest.mark.parametrize(("due", "waits"), [(WINDOW_S, True), (WINDOW_S + 0.1, False)])
def test_who_comes_at_the_very_end_of_a_window_is_in_it(due: float, waits: bool) -> None:
    """A cluster that is about to push, and a push under way."""
    run = windowed("fixed", due={"b": due, "c": 99.0, "d": 99.0})
    run.push("a")
    assert (run.committed == []) is waits
    run = windowed("fixed", due={"c": 99.0, "d": 99.0})
    run.step(ev.BandwidthMeasured("b", 1, 4000 / due))
    run.open_push("b")
    run.push("a")
    assert (run.committed == []) is waits


def test_a_push_is_due_by_the_bytes_of_its_codec() -> None:
    """In int8 it takes 4 of the 16 s of fp32: by those its window closed before it, and clusters with other links began
    their pushes too early by unequal times. From an older base it is fp32.
    """
    run = windowed("fixed", due={"c": 99.0, "d": 99.0}, codec=Codec.INT8)
    assert run.machine.window_timing().model_bytes == 1016
    run.step(ev.BandwidthMeasured("b", 1, 4000 / 16.0))
    awaited = run.open_push("b")
    run.push("a")
    assert run.committed == []
    run.commit(awaited)
    assert len(run.committed) == 1
    run.outcome(awaited)
    run.open_push("b", base=GENESIS)
    run.push("a")
    assert len(run.committed) == 2


@pytest.mark.parametrize("older", [False, True])
def test_who_borrows_a_slot_is_asked_for_the_bytes_of_its_push(older: bool) -> None:
    """In int8 it is over, after 4 s, before the next in the queue asks; from an older base it is fp32, and takes 16."""
    run = ScriptedRun(replace(OPTIONS, codec=Codec.INT8), slots=1)
    run.train(*"abc")
    run.step(ev.BandwidthMeasured("c", 1, 4000 / 16.0))
    run.outcome(run.push("a"))
    run.wait(WINDOW_S)
    assert run.head != GENESIS
    under_way = run.open_push("a")
    assert isinstance(run.ask(ev.PushRequested(0, run.next_push("b"), run.head, 1, step_s=12.0)), Refused)
    run.step(ev.PushAborted(0, under_way, "its slot is free, and kept for b"))
    asked = run.ask(ev.PushRequested(0, run.next_push("c"), GENESIS if older else run.head, 1))
    assert isinstance(asked, Refused) is older


def test_a_trainer_changes_neither_its_push_nor_whom_a_window_awaits_for_long() -> None:
    """A push goes on, whatever its trainer does; one that trains again while its cluster asks for a slot is awaited."""
    run = ScriptedRun(slots=1)
    run.train("a", "b")
    first = run.open_push("b")
    for moving in (False, True):
        run.step(ev.TrainerChanged("b", 1, moving, "its trainer hangs, or not"))
        assert run.view.clusters["b"].state is ClusterState.PUSHING
    run.step(ev.TrainerChanged("a", 1, False, "its trainer hangs"))
    asked = run.next_push("a")
    assert isinstance(run.ask(ev.PushRequested(0, asked, run.head, 1)), Refused)
    run.step(ev.TrainerChanged("a", 1, True, "training"))
    run.commit(first)
    assert not run.committed, "a may push before the window ends"
    run.step(ev.TrainerChanged("a", 1, False, "its trainer hangs"))
    assert len(run.committed) == 1


def test_an_adaptive_window_learns_from_each_arrival() -> None:
    """b, due at 25, comes early: the mean wait for d allows more."""
    run = windowed("adaptive", due={"b": 30.0, "d": 25.0})
    run.push("a")
    assert closes(run) == WINDOW_S
    run.now = 9.0
    run.push("b")
    assert closes(run) == WINDOW_S  # (25 + 16) / 3 is more than a length
    run = windowed("adaptive", due={"b": 30.0, "d": 18.0})
    run.push("a")
    run.now = 9.0
    run.push("b")
    assert closes(run) == pytest.approx(23.0)


def test_an_extended_window_ends_early_when_all_are_in() -> None:
    """It waits for nobody who is not expected."""
    run = windowed("adaptive", due=dict.fromkeys("bcd", 18.0))
    run.push("a")
    for name in "bcd":
        run.now += 5.0
        run.push(name)
    assert run.machine._run.round is None or not run.machine._run.round.folded
    assert [len(row.folds) for row in run.committed] == [4]


def test_a_rule_that_does_not_exist_is_refused() -> None:
    """By name, with those that do."""
    with pytest.raises(ConfigError, match=r"timing\.window: expected fixed or adaptive, got 'tumbling'"):
        TimingOptions(window="tumbling")  # type: ignore[arg-type]
