"""Gears: what is changed when links sag, when, and that it comes to rest."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.errors import ConfigError
from dips.inside.planning.adapt import (
    GAIN,
    WINDOW,
    GearAdapter,
    TimedTransfer,
    keep_useful,
    parse_gears,
    predict_steps,
    spell_gears,
)
from dips.inside.planning.plan import make_plan, plan_data
from dips.inside.planning.profile import parse_model, parse_profile
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.simulate import (
    PassSeconds,
    SimulatedPipeline,
    freeze_orders,
    make_chain,
    simulate,
)

LATENCY_S = 0.01
EVERYWHERE = [(a, b) for a in range(3) for b in range(3)]


@cache
def make_gears(fixed: float = 0.1, link_s: float = 0.3) -> dict[int, SimulatedPipeline]:
    """Three stages and four micro-batches; `fixed` is the share of an action that a piece takes however small it is."""
    made = {}
    for pieces in (1, 2, 4):
        took = PassSeconds(*[fixed + (1 - fixed) / pieces] * 3)
        chain = make_chain(ScheduleName.GPIPE, [took] * 3, [link_s] * 2, 4 * pieces, LATENCY_S)
        chain = replace(chain, border_bytes=(1 / pieces,) * 2)
        made[pieces] = freeze_orders(chain, simulate(chain).orders)
    return made


def window(
    gears: dict[int, SimulatedPipeline], pieces: int, slow: float, waited: bool = True
) -> Iterator[TimedTransfer]:
    """A window of each way between neighbours, whose transfers take `slow` times the planned seconds."""
    gear = gears[pieces]
    for a, b in ((0, 1), (1, 0), (1, 2), (2, 1)):
        route = gear.route(f"g{a}", f"g{b}")
        seconds = LATENCY_S + slow * route.byte_s / pieces
        for _ in range(WINDOW):
            yield TimedTransfer(f"g{a}", f"g{b}", 1 / pieces, seconds, waited)


def seconds_of(gears: dict[int, SimulatedPipeline], slow: float) -> dict[int, float]:
    return predict_steps(gears, dict.fromkeys(EVERYWHERE, slow))


def test_a_cut_link_changes_to_the_gear_that_is_predicted_best() -> None:
    """After one window at a tenth of the rate; the change names gears, the slowest way and both predictions."""
    gears = make_gears(fixed=0.4, link_s=0.02)
    assert min(seconds_of(gears, 1), key=seconds_of(gears, 1).__getitem__) == 1
    adapter, predicted = GearAdapter(gears), seconds_of(gears, 100)
    best = min(predicted, key=predicted.__getitem__)
    assert adapter.take_transfers(window(gears, 1, 1)) is None
    change = adapter.take_transfers(window(gears, 1, 100))
    assert change is not None and (change.old, change.new, change.windows, change.way) == (1, best, 1, (0, 1))
    assert (change.old_s, change.new_s, change.slowdown) == pytest.approx((predicted[1], predicted[best], 100))
    assert best > 1 and adapter.gear == best
    assert str(change) == (
        f"gear 1 to {best}: stage 0 to 1 takes 100.00 × the planned seconds; predicted {predicted[best]:.3g} s a step "
        f"instead of {predicted[1]:.3g}, over 1 window"
    )


def test_a_window_that_is_not_full_says_nothing() -> None:
    """19 transfers of each way; the twentieth ends its window."""
    gears = make_gears(fixed=0.4, link_s=0.02)
    adapter, transfers = GearAdapter(gears), list(window(gears, 1, 100))
    assert adapter.take_transfers(t for i, t in enumerate(transfers) if i % WINDOW) is None
    assert adapter.take_transfers(transfers[::WINDOW]) is not None


def test_what_nobody_waited_for_is_only_a_bound() -> None:
    """Transfers that came before they were needed never make a link slower, and do make it faster."""
    gears = make_gears(fixed=0.4, link_s=0.02)
    adapter = GearAdapter(gears)
    assert adapter.take_transfers(window(gears, 1, 100, waited=False)) is None
    change = adapter.take_transfers(window(gears, 1, 100))
    assert change is not None
    back = None
    for _ in range(4):
        back = back or adapter.take_transfers(window(gears, adapter.gear, 1, waited=False))
    assert back is not None and back.new == 1


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 20), st.sampled_from([0.02, 0.1, 0.3, 0.5]))
def test_a_steady_link_is_answered_once_and_then_left_alone(slow: float, fixed: float) -> None:
    """Whatever the rate: the gear is then within 5 % of the best, and stays."""
    gears = make_gears(fixed)
    adapter = GearAdapter(gears)
    changes = [adapter.take_transfers(window(gears, adapter.gear, slow)) for _ in range(6)]
    assert changes[1:] == [None] * 5
    predicted = seconds_of(gears, slow)
    assert predicted[adapter.gear] * (1 - GAIN) <= min(predicted.values()) * (1 + 1e-9)
    assert (changes[0] is None) == (adapter.gear == 1)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 12), st.sampled_from([100.0, 200.0]))
def test_a_border_that_flaps_comes_to_rest(half: int, slow: float) -> None:
    """A link that is slow for `half` windows and fast for as many: few changes, and none once its mean is judged."""
    gears = make_gears(fixed=0.4, link_s=0.02)
    windows = {(n, by): list(window(gears, n, by)) for n in gears for by in (1.0, slow)}
    adapter, changed = GearAdapter(gears), []
    for number in range(300):
        if adapter.take_transfers(windows[adapter.gear, slow if number // half % 2 else 1.0]) is not None:
            changed.append(number)
    assert 1 <= len(changed) <= 7 and changed[-1] < 150, changed


def test_latency_is_not_taken_for_a_slow_rate() -> None:
    """What the plan says of the latency is no slowdown."""
    gears = make_gears()
    adapter = GearAdapter(gears)
    adapter.take_transfers(window(gears, 4, 1))
    assert list(adapter._slowdowns.values()) == pytest.approx([1.0] * 4)


def test_gears_that_never_help_are_not_kept() -> None:
    """Where each piece takes as long as the whole, small pieces are no gear; a slow link keeps them."""
    assert list(keep_useful(make_gears(fixed=1.0))) == [1]
    assert list(keep_useful(make_gears(fixed=0.02))) == [1, 4]


PLANNED: dict[str, Any] = {
    "schedule": "gpipe",
    "ministages": 1,
    "samples": 8,
    "stages": [{"devices": [f"g{s}"]} for s in range(3)],
}


def spell() -> dict[str, Any]:
    gears = make_gears()
    orders = {d.name: " ".join(map(str, d.order)) for stage in gears[1].stages for d in stage.devices}
    return {**copy.deepcopy(PLANNED), "orders": orders, **spell_gears(gears)}


def test_a_plan_keeps_its_gears() -> None:
    """What is read back predicts what was written, at any rate; the plan's own orders are not written twice."""
    written = spell()
    assert [row["pieces"] for row in written["gears"]] == [1, 2, 4] and "orders" not in written["gears"][0]
    gears = parse_gears(written, "plan.yaml")
    for slow in (1.0, 3.0):
        assert seconds_of(dict(gears), slow) == pytest.approx(seconds_of(make_gears(), slow), rel=1e-5)
    assert [row["step_s"] for row in written["gears"]] == pytest.approx(
        list(seconds_of(make_gears(), 1).values()), 1e-5
    )
    assert parse_gears(PLANNED, "plan.yaml") == {}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda p: p["gears"][1].pop("orders"), "got"),
        (lambda p: p["gears"].pop(0), "expected gears of 1, 2 and 4 pieces, got [2, 4]"),
        (lambda p: p["gears"][1].update(pieces=3), "expected gears of 1, 2 and 4 pieces, got [1, 3, 4]"),
        (lambda p: p["costs"]["links"].pop(), "KeyError(('g2', 'g1'))"),
        (lambda p: p["gears"][1]["orders"].update(g0="0F0 0X0"), "0X0 is no action"),
        (lambda p: p["gears"][1]["orders"].update(g1=p["orders"]["g1"]), "KeyError"),
    ],
)
def test_gears_that_cannot_be_are_refused(spoil: Any, told: str) -> None:
    """By the plan's name and what is wrong."""
    written = spell()
    spoil(written)
    with pytest.raises(ConfigError, match=r"plan\.yaml: pipeline\.gears: ") as refused:
        parse_gears(written, "plan.yaml")
    assert told in str(refused.value)


def test_a_plan_for_slow_links_has_gears() -> None:
    """Three devices, 1 Gbit/s between them: `dips plan cluster` writes halves of the micro-batches, too, whose orders
    need no more memory.
    """
    machines = {
        "nodes": [{"name": name, "kind": "k", "site": name} for name in "abc"],
        "kinds": {"k": {"memory_gb": 40, "tflops": 100}},
        "links": {a: dict.fromkeys("abc", 1) for a in "abc"},
        "measured": {"k": {"l": {key: [0.01, 0.005] for key in ("forward", "input", "weight")}}},
    }
    layer = {"name": "l", "parameters": 1e9, "flops": 1e10, "activation_bytes": 4e6, "border_bytes": 1e6, "repeat": 6}
    model = {"name": "m", "batch": 32, "recompute": False, "layers": [layer]}
    plan = make_plan(parse_profile(machines, "p"), parse_model(model, "m"))
    found = plan_data(plan)["pipeline"]
    gears = parse_gears(found, "plan.yaml")
    assert list(gears) == [1, 2]
    counts = [len(gear.stages[0].devices[0].microbatches) for gear in gears.values()]
    assert counts == [found["stages"][0]["microbatches"][0] * pieces for pieces in (1, 2)]
    assert predict_steps(gears, {}) == pytest.approx(predict_steps(plan.gears, {}), rel=1e-5)
