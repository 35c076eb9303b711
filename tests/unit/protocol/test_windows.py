"""`timing.window`: windows that last longer for pushes that come, or are due soon."""

from __future__ import annotations

import pytest

from dips.errors import ConfigError
from dips.protocol import events as ev
from dips.protocol.enums import WindowRule
from dips.protocol.options import TimingOptions
from tests import rules_reference
from tests.unit.protocol.scripted_run import OPTIONS, ScriptedRun, replace

WINDOW_S = 10.0


def windowed(rule: str, most: float = 4.0, due: dict[str, float] | None = None) -> ScriptedRun:
    """a to d train; `due` says when a push of each is due, by its last ones."""
    timing = TimingOptions(window_s=WINDOW_S, window=WindowRule(rule), window_most=most)
    run = ScriptedRun(replace(OPTIONS, timing=timing))
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


def test_a_sliding_window_lasts_a_length_after_the_last_arrival() -> None:
    """Never longer than `window_most` lengths."""
    run = windowed("sliding", most=2.0)
    arrived = []
    for cluster, at in (("a", 0.0), ("b", 6.0), ("c", 15.0)):
        run.now = at
        run.push(cluster)
        arrived.append(at)
        assert closes(run) == rules_reference.window_end("sliding", WINDOW_S, 2.0, arrived, [])
    assert closes(run) == 20.0


def test_a_sliding_window_waits_for_what_is_under_way() -> None:
    """A push that is granted while it is open, and is due after its end."""
    run = windowed("sliding")
    run.step(ev.BandwidthMeasured("b", 1, 4000 / 14.0))  # 14 s for the 4,000 bytes of the model
    run.push("a")
    run.now = 2.0
    run.open_push("b")
    assert closes(run) == pytest.approx(16.0) == rules_reference.window_end("sliding", WINDOW_S, 4.0, [0.0], [16.0])


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
    ],
)
def test_an_adaptive_window_waits_for_those_due_soon(due: dict[str, float]) -> None:
    """As long as all wait a length in the mean at most, as the reference has it; and after each arrival anew."""
    run = windowed("adaptive", due=due)
    run.push("a")
    assert closes(run) == pytest.approx(
        rules_reference.window_end("adaptive", WINDOW_S, 4.0, [0.0], sorted(due.values()))
    )


@pytest.mark.parametrize("rule", ["sliding", "adaptive"])
@pytest.mark.parametrize("moving", [True, False])
def test_no_window_waits_for_a_push_whose_trainer_hangs(rule: str, moving: bool) -> None:
    """One hung cluster would keep each window open to `window_most`."""
    run = windowed(rule)
    run.step(ev.BandwidthMeasured("b", 1, 4000 / 14.0))  # 14 s for the 4,000 bytes of the model
    run.push("a")
    run.now = 1.0
    if not moving:
        run.step(ev.TrainerChanged("b", 1, False, "its trainer hangs"))
    run.open_push("b")
    assert closes(run) == pytest.approx({"sliding": 15.0, "adaptive": 20.0}[rule] if moving else WINDOW_S)


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


@pytest.mark.parametrize("most", [0.5, 0.0, float("nan"), 1e6])
def test_how_long_it_may_last_is_bounded(most: float) -> None:
    """From one length to a thousand."""
    with pytest.raises(ConfigError, match=r"timing\.window_most: expected a number from 1 to 1000"):
        TimingOptions(window_most=most)


def test_a_rule_that_does_not_exist_is_refused() -> None:
    """By name, with those that do."""
    with pytest.raises(ConfigError, match=r"timing\.window: expected fixed or sliding or adaptive, got 'tumbling'"):
        TimingOptions(window="tumbling")  # type: ignore[arg-type]
