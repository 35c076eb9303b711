"""What is changed when links sag, gear or plan, when, and that it comes to rest."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dips.errors import ConfigError
from dips.inside.pipeline.orders import read_gears, read_pipeline
from dips.inside.planning import adapt
from dips.inside.planning.adapt import (
    GAIN,
    OFF,
    PLAN_GAIN,
    WINDOW,
    Adapting,
    GearAdapter,
    PlanVerdict,
    PlanWanted,
    PlanWatch,
    TimedTransfer,
    compare_transfer,
    judge_plan,
    keep_useful,
    node_of,
    parse_gears,
    predict_steps,
    spell_gears,
)
from dips.inside.planning.plan import _make_gears, make_plan, plan_data
from dips.inside.planning.profile import parse_model, parse_profile
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import PipelineChoice, Planner
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
    """19 transfers of each way; the twentieth ends its window. Nor does a step without transfers count as a window."""
    gears = make_gears(fixed=0.4, link_s=0.02)
    adapter, transfers = GearAdapter(gears), list(window(gears, 1, 100))
    assert adapter.take_transfers(t for i, t in enumerate(transfers) if i % WINDOW) is None
    assert adapter.take_transfers(transfers[::WINDOW]) is not None
    assert adapter.take_transfers(window(gears, adapter.gear, 1)) is None, "the next change takes two"
    assert all(adapter.take_transfers([]) is None for _ in range(3))
    assert adapter.take_transfers(window(gears, adapter.gear, 1)) is not None


def test_the_link_that_is_worst_is_named() -> None:
    """Of several that are slow, by a change of gear and by a wish for a plan."""
    gears = make_gears(fixed=0.4, link_s=0.02)

    def transfers() -> Iterator[TimedTransfer]:
        for one in window(gears, 1, 100):
            worst = (one.sender, one.receiver) == ("g1", "g2")
            yield replace(one, seconds=2 * one.seconds) if worst else one

    change = GearAdapter(gears).take_transfers(transfers())
    assert change is not None and change.way == (1, 2)
    watch = PlanWatch(gears)
    wanted = [watch.take_transfers(transfers()) for _ in range(3)][-1]
    assert wanted is not None and wanted.link == ("g1", "g2")


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
    assert list(adapter._windows.slowdowns.values()) == pytest.approx([1.0] * 4)


def test_gears_that_never_help_are_not_kept() -> None:
    """Where each piece takes as long as the whole, small pieces are no gear; a slow link keeps them."""
    assert list(keep_useful(make_gears(fixed=1.0))) == [1]
    assert list(keep_useful(make_gears(fixed=0.02))) == [1, 4]


def test_a_gear_that_saves_just_enough_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, kept in ((1 - GAIN, [1, 4]), (math.nextafter(1 - GAIN, 1), [1])):
        monkeypatch.setattr(adapt, "predict_steps", lambda gears, slow, s=seconds: {1: 1.0, 2: 1.5, 4: s})
        assert list(keep_useful(make_gears())) == kept


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
    need no more memory. A file whose micro-batches have no halves is refused.
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
    data = plan_data(plan)
    found = data["pipeline"]
    gears = parse_gears(found, "plan.yaml")
    assert list(gears) == [1, 2]
    counts = [len(gear.stages[0].devices[0].microbatches) for gear in gears.values()]
    assert counts == [found["stages"][0]["microbatches"][0] * pieces for pieces in (1, 2)]
    assert predict_steps(gears, {}) == pytest.approx(predict_steps(plan.gears, {}), rel=1e-5)
    assert list(read_gears(data, read_pipeline(data, "plan"), "plan")[0]) == [1, 2]
    found["samples"] = 3
    with pytest.raises(ConfigError, match="pieces of micro-batches of 3 samples, cut into 2"):
        read_gears(data, read_pipeline(data, "plan"), "plan")


def test_pieces_for_which_a_device_has_no_room_are_no_gear() -> None:
    """The faster of two devices has 4 of 8 micro-batches, and 9 of 16 halves: a plan that fits was refused for them."""
    machines = {
        "nodes": [{"name": "a", "kind": "fast", "devices": 2}, {"name": "b", "kind": "slow", "devices": 2}],
        "kinds": {
            "fast": {"memory_gb": 14.2, "tflops": 100, "inside_gbit": 500},
            "slow": {"memory_gb": 14.2, "tflops": 80, "inside_gbit": 500},
        },
        "links": {"site": {"site": 5}},
    }
    layer = {"name": "l", "parameters": 5e6, "flops": 1e12, "activation_bytes": 2e8, "border_bytes": 1e8, "repeat": 8}
    model = parse_model({"name": "m", "batch": 32, "recompute": False, "layers": [layer]}, "m")
    planner = Planner(parse_profile(machines, "p"), model)
    choice = PipelineChoice(ScheduleName.BREADTH_FIRST, (("a.0", "b.0"), ("a.1", "b.1")), (0, 4, 8), 4)
    choice, prediction = planner.finish(choice)
    assert list(_make_gears(planner, choice, prediction)) == [1]
    alone = PipelineChoice(ScheduleName.BREADTH_FIRST, (tuple(planner.devices),), (0, 8), 4)
    for none in (alone, replace(choice, offload=True)):
        assert _make_gears(planner, none, prediction) == {}, "one stage has no borders; pieces are not offloaded"


def test_a_transfer_without_bytes_shows_no_rate() -> None:
    """As of a layer that gives nothing: it is no window's, and divides by nothing."""
    gears = make_gears()
    nothing = TimedTransfer("g0", "g1", 0.0, 1.0, waited=True)
    assert compare_transfer(nothing, gears[1].route("g0", "g1")) is None
    assert GearAdapter(gears).take_transfers([nothing] * WINDOW) is None


# ---- a new plan ------------------------------------------------------------------------------------------------------

ALL = {("g0", "g1"), ("g1", "g0"), ("g1", "g2"), ("g2", "g1")}


def after(watch: PlanWatch, gears: dict[int, SimulatedPipeline], slow: float, windows: int) -> list[PlanWanted]:
    """What is wanted in so many windows of each link; each search finds its end at once."""
    found = []
    for _ in range(windows):
        if (wanted := watch.take_transfers(window(gears, 1, slow))) is not None:
            watch.settle_search()
            found.append(wanted)
    return found


def test_a_rate_that_lacks_for_three_windows_makes_a_plan_wanted() -> None:
    """With the measured rates of all links that are off, the best gear's step at these, and the worst link; not before
    the third window, and not again at the same rates.
    """
    gears = make_gears()
    watch = PlanWatch(gears)
    assert after(watch, gears, 1, 2) == after(watch, gears, 4, 2) == []
    (wanted,) = after(watch, gears, 4, 1)
    byte_s = gears[1].route("g0", "g1").byte_s
    assert set(wanted.rates) == ALL and list(wanted.rates.values()) == pytest.approx([1 / (4 * byte_s)] * 4)
    assert wanted.old_s == pytest.approx(min(seconds_of(gears, 4).values()), rel=1e-6)
    assert (wanted.windows, wanted.slowdown) == (3, pytest.approx(4)) and wanted.link in ALL
    assert after(watch, gears, 4, 20) == []


@pytest.mark.parametrize(("slow", "searches"), [(OFF * 0.99, 0), (OFF * 1.01, 1), (0.99 / OFF, 1), (1.01 / OFF, 0)])
def test_links_that_are_near_their_rates_are_not_searched_for(slow: float, searches: int) -> None:
    """A quarter over or under, each way."""
    gears = make_gears()
    assert len(after(PlanWatch(gears), gears, slow, 6)) == searches


def test_windows_that_end_in_one_step_count_each() -> None:
    """Three of each link, of which one is as planned: nothing, be the others slow or fast; three that are slow: a
    search.
    """
    gears = make_gears()
    fast = [*window(gears, 1, 0.25), *window(gears, 1, 1), *window(gears, 1, 0.25)]
    assert PlanWatch(gears).take_transfers(fast) is None
    watch = PlanWatch(gears)
    assert watch.take_transfers([*window(gears, 1, 4), *window(gears, 1, 1), *window(gears, 1, 4)]) is None
    assert watch.take_transfers([*window(gears, 1, 4), *window(gears, 1, 4)]) is not None


def test_links_that_are_as_planned_again_are_wanted_too() -> None:
    """After a search with a quarter of the rate a plan for the whole rate is searched for, over twice the windows; the
    profile gets that rate back.
    """
    gears = make_gears()
    watch = PlanWatch(gears)
    assert len(after(watch, gears, 4, 3)) == 1
    assert after(watch, gears, 1, 5) == []
    (wanted,) = after(watch, gears, 1, 1)
    assert wanted.windows == 6 and wanted.slowdown == pytest.approx(1) and set(wanted.rates) == ALL


def test_a_search_that_failed_is_followed_by_another() -> None:
    """At the same rates, over twice the windows."""
    gears = make_gears()
    watch = PlanWatch(gears)
    found = [n for n in range(12) if watch.take_transfers(window(gears, 1, 4)) is not None]
    assert found == [2, 8]


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 40), st.floats(1.5, 20), st.integers(0, 4))
@example(3, 4.0, 0)
@example(3, 4.0, 4)
def test_a_link_that_flaps_has_few_new_plans(half: int, slow: float, replans: int) -> None:
    """In 250 windows: as many as n doubles, whatever the period; a plan that came of others begins with more."""
    gears = make_gears()
    watch, found = PlanWatch(gears, replans), 0
    assert watch.needed == 3 << replans
    for number in range(250):
        found += len(after(watch, gears, slow if number // half % 2 else 1.0, 1))
    assert found <= 7 - replans
    assert PlanWatch(gears, 1000).needed == 3072, "bounded, whatever a file says"


def test_devices_of_one_node_have_no_link() -> None:
    """What goes inside a node is not in `links` of a profile."""
    gears = make_gears()
    watch = PlanWatch(gears)
    names = {f"g{s}": f"n.{s}" for s in range(3)}
    watch._route = lambda a, b: gears[1].route(f"g{a[-1]}", f"g{b[-1]}")
    inside = [replace(t, sender=names[t.sender], receiver=names[t.receiver]) for t in window(gears, 1, 9)]
    assert [watch.take_transfers(inside) for _ in range(9)] == [None] * 9
    assert node_of("n.0") == "n" and node_of("g0") == "g0"


WANTED = PlanWanted({("a", "b"): 1e6}, old_s=2.0, windows=3, link=("a", "b"), slowdown=4.0)


def planned(seconds: float, devices: str = "ab", samples: int = 8) -> dict[str, Any]:
    stages = [{"devices": [f"{d}.0"]} for d in devices]
    return {"plan": "p", "step_s": seconds, "samples": samples, "pipeline": {"stages": stages}}


@pytest.mark.parametrize(
    ("seconds", "adapting", "offered", "verdict"),
    [
        (2.0 * (1 - PLAN_GAIN), Adapting.ASK, False, PlanVerdict.OFFERED),
        (2.0 * (1 - PLAN_GAIN), Adapting.AUTO, False, PlanVerdict.ADOPTED),
        (2.0 * (1 - PLAN_GAIN) + 1e-6, Adapting.AUTO, False, None),
        (2.0 * (1 - PLAN_GAIN) + 1e-6, Adapting.ASK, True, PlanVerdict.WITHDRAWN),
        (1.0, Adapting.ASK, True, PlanVerdict.OFFERED),
    ],
)
def test_a_plan_is_changed_for_a_tenth(
    seconds: float, adapting: Adapting, offered: bool, verdict: PlanVerdict | None
) -> None:
    """Of the best gear's step; what was offered before and is no better now is withdrawn."""
    change = judge_plan(WANTED, planned(9.0, "ba"), planned(seconds), adapting, offered)
    assert (change and change.verdict) == verdict
    if change is not None:
        assert (change.old_s, change.new_s, change.link, change.plan) == (2.0, seconds, ("a", "b"), "p")


def test_a_change_of_plan_says_why_and_what_to_do() -> None:
    """In so few characters that `dips status` shows them, with names of hosts as they are."""
    long = replace(WANTED, link=("gpu-node-0123", "gpu-node-0456"))
    change = judge_plan(long, planned(9.0), planned(1.0), Adapting.ASK, offered=False)
    assert str(change) == (
        "new plan: gpu-node-0123 to gpu-node-0456 takes 4.00 × the planned seconds over 3 windows; predicted 1 s a "
        "step, not 2. To accept, rename it and the new profile, and start anew"
    )
    for verdict in PlanVerdict:
        said = str(replace(change, verdict=verdict, file="/runs/llama/plan.new.yaml"))  # type: ignore[type-var]
        assert said.endswith(": /runs/llama/plan.new.yaml") and len(said) <= 240


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (planned(1.0, "abc"), "expected one of 8 samples for a.0, b.0, got 8 for a.0, b.0, c.0"),
        (planned(1.0, samples=16), "got 16 for a.0, b.0"),
        ({"plan": "FSDP2", "step_s": 1.0, "samples": 8, "pipeline": None}, "expected what `dips plan cluster` writes"),
    ],
)
def test_a_plan_that_these_ranks_cannot_play_is_refused(found: dict[str, Any], told: str) -> None:
    """For other devices, another batch, or no pipeline: profile or model were changed meanwhile."""
    with pytest.raises(ConfigError, match="a new plan") as refused:
        judge_plan(WANTED, planned(9.0), found, Adapting.AUTO, offered=False)
    assert told in str(refused.value)
