"""Groupings, shares, cuts, and the search over them: against dumb twins and against exhaustive search."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import yaml

from dips.errors import ConfigError
from dips.inside.planning.group import (
    PROBE_BYTES,
    cut_evenly,
    cut_greedily,
    cut_lightest,
    link_by_speed,
    link_on_average,
    list_groupings,
    network_distances,
)
from dips.inside.planning.profile import (
    GB,
    GBIT_BYTES,
    ClusterProfile,
    DeviceKind,
    LinkSpeed,
    ModelProfile,
    parse_model,
    parse_profile,
)
from dips.inside.planning.schedules import ScheduleName
from dips.inside.planning.search import (
    USABLE,
    DoesNotFit,
    PipelineChoice,
    Planner,
    RankedPlan,
    _Beam,
    _find_nearest,
    balance_chain,
    count_events,
    deal_microbatches,
    parameter_costs,
    share_microbatches,
)
from dips.inside.planning.simulate import MemoryCategory, PassSeconds, bound_step, make_chain, simulate

INVENTORIES = Path(__file__).parents[4] / "configs" / "inventories"


def inventory(name: str) -> ClusterProfile:
    return parse_profile(yaml.safe_load((INVENTORIES / f"{name}.yaml").read_text()), name)


def small_model(layers: int = 8, batch: int = 8, **changes: Any) -> ModelProfile:
    layer = {
        "name": "block",
        "parameters": 10_000_000,
        "flops": 1e12,
        "activation_bytes": 4e6,
        "border_bytes": 1e6,
        "repeat": layers,
    }
    return parse_model({"name": "small", "batch": batch, "layers": [layer], "recompute": False, **changes}, "model")


def small_cluster(speeds: tuple[float, ...] = (100, 50, 25), gbit: float = 1.0, devices: int = 1) -> ClusterProfile:
    raw = {
        "nodes": [{"name": f"n{i}", "kind": f"k{i}", "devices": devices} for i in range(len(speeds))],
        "kinds": {f"k{i}": {"memory_gb": 16, "tflops": speed, "inside_gbit": 100} for i, speed in enumerate(speeds)},
        "links": {"site": {"site": gbit}},
    }
    return parse_profile(raw, "profile")


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_lightest_cut_is_networkxs(seed: int) -> None:
    """Stoer and Wagner's algorithm here and in networkx find cuts of one weight, on random graphs of 2 to 9 nodes."""
    rng = random.Random(seed)
    n = rng.randint(2, 9)
    weights = np.zeros((n, n))
    for a, b in itertools.combinations(range(n), 2):
        weights[a, b] = weights[b, a] = rng.randint(1, 20)
    cut, side = cut_lightest(weights)
    graph = nx.Graph([(a, b, {"weight": weights[a, b]}) for a, b in itertools.combinations(range(n), 2)])
    assert cut == nx.stoer_wagner(graph)[0]
    rest = [i for i in range(n) if i not in side]
    assert 0 < len(side) < n
    assert weights[np.ix_(side, rest)].sum() == cut


def test_linkage_merges_the_nearest_first() -> None:
    """Two pairs that are near each other, one device far away: finest, the pairs, both pairs, all."""
    far = np.full((5, 5), 100.0)
    for group, distance in (((0, 1, 2, 3), 10.0), ((0, 1), 1.0), ((2, 3), 1.0)):
        for a, b in itertools.permutations(group, 2):
            far[a, b] = distance
    levels = [sorted(map(sorted, level)) for level in link_on_average(far)]
    assert levels == [[[0], [1], [2], [3], [4]], [[0, 1], [2, 3], [4]], [[0, 1, 2, 3], [4]], [[0, 1, 2, 3, 4]]]


def test_a_pair_is_as_far_apart_as_its_slower_way() -> None:
    """Ten Gbit/s there and a tenth of one back: the same distance both ways, that of the way back."""
    links = {"n0": {"n1": LinkSpeed(10.0)}, "n1": {"n0": LinkSpeed(0.1)}}
    cluster = small_cluster((100, 50))
    nodes = tuple(replace(node, card_gbit=10.0) for node in cluster.nodes)
    far = network_distances(replace(cluster, nodes=nodes, links=links))
    assert far[0, 1] == far[1, 0] == pytest.approx(PROBE_BYTES / (0.1 * GBIT_BYTES) + 50e-6)


def test_up_to_four_kinds_are_split_each_for_itself() -> None:
    """One kind in halves while the others stay whole; of five kinds all are split alike."""
    for kinds, found_by in ((4, "by site and kind, some in pieces"), (5, None)):
        found = {g.groups: g.found_by for g in list_groupings(small_cluster((100,) * kinds, devices=2), lambda _: 1.0)}
        whole = tuple((f"n{i}.0", f"n{i}.1") for i in range(1, kinds))
        by = found.get((("n0.0",), ("n0.1",), *whole))
        assert by == found_by if found_by else by != "by site and kind, some in pieces"


def test_spantrain_figure_5() -> None:
    """Twelve devices make three groups by the network; by speed FG1 splits in three, FG2 into its devices, FG3 into
    one pair and two alone.
    """
    speeds = {"fg1": (8, 8, 4, 4, 2), "fg2": (9, 5, 3), "fg3": (6, 6, 4, 2)}
    raw = {
        "nodes": [
            {"name": f"{g}-{i}", "kind": f"s{s}", "site": g} for g, row in speeds.items() for i, s in enumerate(row)
        ],
        "kinds": {f"s{s}": {"memory_gb": 16, "tflops": s} for s in range(2, 10)},
        "links": {a: {b: 10 if a == b else 0.1 for b in speeds} for a in speeds},
    }
    profile = parse_profile(raw, "figure 5")
    found = {g.groups for g in list_groupings(profile, lambda d: profile.kind_of(d).tflops)}
    first = tuple(tuple(f"{g}-{i}.0" for i in range(len(row))) for g, row in speeds.items())
    assert first in found
    second = [sorted(map(len, level)) for level in link_by_speed(first[0], lambda d: profile.kind_of(d).tflops)]
    assert second[-1] == [1, 2, 2]
    assert any(sorted(map(len, groups)) == [1, 1, 1, 1, 1, 1, 2, 2, 2] for groups in found)


def test_groups_are_split_by_speed_as_far_as_any_of_them_can_be() -> None:
    """One site of three speeds, one of equal devices, all of one kind: the second stays whole while the first splits.
    What several ways find is named by the first of them.
    """
    raw = {
        "nodes": [{"name": f"{site}{i}", "kind": "k", "site": site} for site in "ab" for i in range(3)],
        "kinds": {"k": {"memory_gb": 16, "tflops": 1}},
        "links": {a: {b: 10 if a == b else 0.1 for b in "ab"} for a in "ab"},
    }
    speeds = {"a0.0": 1.0, "a1.0": 3.0, "a2.0": 30.0}
    found = {g.groups: g.found_by for g in list_groupings(parse_profile(raw, "p"), lambda d: speeds.get(d, 1.0))}
    whole = ("b0.0", "b1.0", "b2.0")
    assert found[("a0.0",), ("a1.0",), ("a2.0",), whole] == "linkage by network, then by speed"
    assert found[("a0.0", "a1.0"), ("a2.0",), whole] == "linkage by network, then by speed"
    assert found[("a0.0", "a1.0", "a2.0"), whole] == "by site"
    assert found[(("a0.0", "a1.0", "a2.0", *whole),)] == "all devices"


@pytest.mark.parametrize(("name", "sizes"), [("zorse-a", [2, 2, 8, 8]), ("zorse-b", [8, 16, 16, 24])])
def test_zorses_groups_are_candidates(name: str, sizes: list[int]) -> None:
    """Those of §6.2: by node on A, by kind on B. Cuts by the network find others, up to sixteen stages."""
    profile = inventory(name)
    groupings = list_groupings(profile, lambda d: profile.kind_of(d).tflops)
    assert sizes in [sorted(map(len, g.groups)) for g in groupings]
    assert max(len(g.groups) for g in groupings if g.found_by == "greedy min-k-cut") == 16


def test_zorses_seven_groups_on_c_are_candidates() -> None:
    """All A10Gs, V100s in two halves, T4s of each region in two halves (§6.2)."""
    profile = inventory("zorse-c")
    found = [g for g in list_groupings(profile, lambda d: profile.kind_of(d).tflops) if len(g.groups) == 7]
    assert [8, 8, 16, 24, 24, 24, 24] in [sorted(map(len, g.groups)) for g in found]
    assert all(
        len({profile.places[d].kind for d in group}) == 1 for g in found if "pieces" in g.found_by for group in g.groups
    )


def test_greedy_cuts_make_every_number_of_parts() -> None:
    """2 … most parts, each a partition; the first takes the lightest."""
    weights = np.array([[0, 9, 1, 1], [9, 0, 1, 1], [1, 1, 0, 5], [1, 1, 5, 0]], float)
    cuts = cut_greedily(weights, 4)
    assert [len(cut) for cut in cuts] == [2, 3, 4]
    assert sorted(map(sorted, cuts[0])) == [[0, 1], [2, 3]]
    assert sorted(map(sorted, cuts[1])) == [[0, 1], [2], [3]]


def test_a_group_is_cut_into_runs() -> None:
    """Nearly equal, in order, none empty."""
    assert cut_evenly(["a", "b", "c", "d", "e"], 2) == [["a", "b"], ["c", "d", "e"]]
    assert cut_evenly(["a"], 4) == [["a"]]


# ---- shares and cuts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_shares_make_the_last_device_as_early_as_can_be(seed: int) -> None:
    """Dealt to who would be done first; no other shares end earlier, by trying all."""
    rng = random.Random(seed)
    seconds, total = [rng.randint(1, 5) for _ in range(3)], rng.randint(3, 9)
    dealt = share_microbatches(seconds, total)
    assert sorted(m for own in dealt for m in own) == list(range(total))
    assert all(dealt)
    every = (c for c in itertools.product(range(1, total + 1), repeat=3) if sum(c) == total)
    best = min(max(n * s for n, s in zip(counts, seconds, strict=True)) for counts in every)
    assert max(len(own) * s for own, s in zip(dealt, seconds, strict=True)) == best


def test_a_slow_device_still_gets_one() -> None:
    """A hundred times slower, and as many micro-batches as devices: one each."""
    assert [len(own) for own in deal_microbatches((1.0, 100.0), 2)] == [1, 1]
    assert deal_microbatches((1.0, 1.0, 1.0), 2) == ((0,), (1,), ()), "fewer than devices: nothing is taken from any"


@pytest.mark.parametrize("seed", range(6))
def test_cuts_balance_a_chain(seed: int) -> None:
    """The slowest run is as fast as in the best of all cuts."""
    rng = random.Random(seed)
    rows = [[0.0, *itertools.accumulate(rng.randint(1, 9) for _ in range(7))] for _ in range(3)]
    cuts = balance_chain(rows)

    def slowest(edges: tuple[int, ...]) -> float:
        return max(row[b] - row[a] for row, a, b in zip(rows, edges, edges[1:], strict=False))

    assert slowest(cuts) == min(slowest((0, *inner, 7)) for inner in itertools.combinations(range(1, 7), 2))


# ---- the search ------------------------------------------------------------------------------------------------------


def exhaust(planner: Planner, schedules: tuple[ScheduleName, ...]) -> float:
    """The best of every order, cut and micro-batch of pipelines with a device for each stage."""
    best = float("inf")
    layers = len(planner.layers)
    for order in itertools.permutations(planner.devices):
        for inner in itertools.combinations(range(1, layers), len(order) - 1):
            for samples, schedule in itertools.product((1, 2, 4), schedules):
                choice = PipelineChoice(schedule, tuple((d,) for d in order), (0, *inner, layers), samples)
                best = min(best, simulate(planner.make_pipeline(choice), spans=False).seconds)
    return best


@pytest.mark.parametrize(("speeds", "gbit"), [((80, 50, 100), 0.3)])
def test_the_search_is_near_exhaustive_search(speeds: tuple[float, ...], gbit: float) -> None:
    """Within 3 % of every order × cut × micro-batch of three unequal devices and six layers; `planning --part search`
    has more.
    """
    planner = Planner(small_cluster(speeds, gbit), small_model(6, batch=4))
    best = exhaust(planner, (ScheduleName.COMPACT_ZB, ScheduleName.BREADTH_FIRST))
    ranked = planner.search().ranked
    assert min(plan.step_s for plan in ranked if plan.choice is not None) <= 1.03 * best
    assert ranked == sorted(ranked, key=lambda plan: -plan.rate), "the first one is taken"


def test_no_pipeline_beats_its_bound() -> None:
    """Every schedule, with ministages on single devices and on groups, gets to its end, and not before its bound."""
    schedules = set()
    for gbit, devices in ((0.1, 1), (10.0, 2)):
        planner = Planner(small_cluster((100, 50, 25), gbit, devices), small_model(7))
        for choice in list(planner.list_choices(list_groupings(planner.profile, planner.speed_of)))[::3]:
            pipeline = planner.make_pipeline(choice)
            assert bound_step(pipeline) <= simulate(pipeline, spans=False).seconds * (1 + 1e-9), choice
            schedules.add((choice.schedule, choice.ministages > 1, len(choice.groups[0]) > 1))
    assert {(ScheduleName.BREADTH_FIRST, True, True), (ScheduleName.BREADTH_FIRST, True, False)} <= schedules
    assert {(ScheduleName.ONE_F_ONE_B, False, True), (ScheduleName.ZB_H1, False, True)} <= schedules


def test_stages_of_equal_size_alone_run_one_forward_one_backward() -> None:
    """Micro-batches go to each device of a stage alike, so they have to divide by all of them."""
    even, uneven = (("n0.0", "n0.1"), ("n1.0", "n1.1")), (("n0.0", "n0.1"), ("n1.0",))
    planner, plain = Planner(small_cluster(devices=2), small_model()), {ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1}
    for groups, total, may in ((even, 4, True), (even, 3, False), (uneven, 4, False), (uneven[::-1], 4, False)):
        ways = {schedule for schedule, *_ in planner._ways(groups, total)}
        assert (plain <= ways) is may and (plain & ways == set()) is not may


def test_layers_are_cut_by_the_speeds_of_groups() -> None:
    """Three quarters of them for the one that is three times as fast."""
    planner = Planner(small_cluster((75, 25)), small_model(8))
    assert planner.cut_layers((("n0.0",), ("n1.0",)), 1, 1) == (0, 6, 8)


def test_micro_batches_are_those_that_each_device_can_have() -> None:
    """Divisors of the batch, of which each device of the largest stage gets one; ministages up to eight of a layer."""
    planner = Planner(small_cluster((100, 50), devices=2), small_model(20))
    (grouping,) = (
        g
        for g in list_groupings(planner.profile, planner.speed_of)
        if sorted(map(len, g.groups)) == [1, 1, 2] and ("n1.0", "n1.1") in g.groups
    )
    found = list(planner.list_choices([grouping]))
    assert {choice.samples for choice in found} == {1, 2, 4} and {choice.ministages for choice in found} == {
        *range(1, 7)
    }
    odd = Planner(planner.profile, small_model(20, batch=20))
    assert {choice.samples for choice in odd.list_choices([grouping])} == {1, 2, 4}
    assert {ways[1] for ways in planner._ways([("n0.0",)], 8)} == {*range(1, 9)}
    exact = PipelineChoice(ScheduleName.COMPACT_ZB, (("n0.0", "n0.1"),), (0, 20), 4)
    assert len(planner.make_pipeline(exact).stages[0].devices) == 2, "two micro-batches of four samples for two devices"


def test_a_beam_improves_until_nothing_gets_better() -> None:
    """A layer at a time, from the worst cut of two equal stages to the best; neighbours are divisors of the batch, and
    exchanged groups with cuts of their own. A pipeline that stalls is none of the best.
    """
    planner = Planner(small_cluster((100, 100, 25)), small_model(8, batch=12))
    groups = ("n0.0",), ("n1.0",)
    worst = PipelineChoice(ScheduleName.ONE_F_ONE_B, groups, (0, 1, 8), 4)
    beam = _Beam(planner, 1)
    assert beam.worst_s == float("inf") and beam.score(worst, planner.make_pipeline(worst))
    assert beam.worst_s == simulate(planner.make_pipeline(worst)).seconds
    assert {near.samples for near in beam._neighbours(worst)} == {4, 2}
    unequal = replace(worst, groups=(("n0.0",), ("n2.0",)), cuts=(0, 3, 8))
    exchanged = {near.cuts for near in beam._neighbours(unequal) if near.groups == unequal.groups[::-1]}
    assert exchanged == {(0, 3, 8), (0, 1, 8)}
    beam.improve(lambda choice: (choice.groups, choice.samples) == (groups, 4))
    ((_, best),) = beam.best(9)
    assert best.cuts == (0, 4, 8)
    beam._scores = {worst: float("inf")}
    assert beam.best(9) == []


def test_the_nearest_refusal_lacks_the_fewest_bytes() -> None:
    """Who has too little memory is told of the plan that nearly fits."""
    far, near, other = DoesNotFit("far", 5.0), DoesNotFit("near", 3.0), ConfigError("other")
    assert _find_nearest([other, far, near]) is near and _find_nearest([other]) is other


def test_events_are_counted_before_they_are_played() -> None:
    """A search that took each simulation for one event would not end in seconds."""
    assert count_events(make_chain(ScheduleName.GPIPE, [PassSeconds(1, 1, 1)] * 3, [1, 1], 6)) == 4 * 6 * 3


def test_a_slow_border_is_part_of_the_bound() -> None:
    """All activations and gradients of a step cross it, so no step is shorter than that: 8 MB each way at 1 Mbit/s."""
    planner = Planner(small_cluster((100, 100), gbit=0.001), small_model(2))
    pipeline = planner.make_pipeline(PipelineChoice(ScheduleName.ONE_F_ONE_B, (("n0.0",), ("n1.0",)), (0, 1, 2), 1))
    assert 8 * 1e6 * 8 / 1e6 <= bound_step(pipeline) <= simulate(pipeline, spans=False).seconds


def test_what_cannot_run_has_no_rate() -> None:
    """Whatever its seconds would be."""
    assert RankedPlan("FSDP2", 2.0, 8.0).rate == 4.0 and RankedPlan("FSDP2", 2.0, 8.0, missing="memory").rate == 0.0


def test_a_round_of_edit_takes_as_long_as_its_slowest_node() -> None:
    """Of two nodes, one four times as fast as the other: EDiT waits for the slow one, under whose forward the
    parameters cross, A-EDiT for nobody.
    """
    planner = Planner(small_cluster((100, 25), gbit=0.2), small_model(8, batch=40))
    waits, apart = planner.average_nodes([("n0.0",), ("n1.0",)], tau=1)
    fast, slow = (planner.shard_in_nodes([(f"n{i}.0",)], average=False).step_s / 2 for i in range(2))
    assert slow == pytest.approx(4 * fast, rel=0.01)
    assert waits.step_s == pytest.approx(slow, rel=0.01)
    assert apart.rate == pytest.approx(20 / fast + 20 / slow, rel=0.01)


def test_edit_trains_the_whole_batch() -> None:
    """Of three samples one of two nodes has two: EDiT was said to train them all in the time of one."""
    planner = Planner(small_cluster((100, 100), gbit=0.2), small_model(8, batch=3))
    two_s = Planner(planner.profile, small_model(8, batch=2)).shard_in_nodes([("n0.0",)], average=False).step_s
    assert planner.average_nodes([("n0.0",), ("n1.0",)])[0].step_s >= two_s


def test_each_device_of_a_node_has_a_sample() -> None:
    """Two samples on two nodes of two devices: HSDP was the plan, with a sample on each of the four. And three: EDiT
    was, where one node has one sample.
    """
    planner = Planner(small_cluster((100, 100), devices=2), small_model(1, batch=2))
    nodes = [("n0.0", "n0.1"), ("n1.0", "n1.1")]
    for few in (planner, Planner(planner.profile, small_model(1, batch=3))):
        missing = [plan.missing for plan in (few.shard_in_nodes(nodes), *few.average_nodes(nodes))]
        assert missing == [f"{few.model.batch} samples for 4 devices"] * 2
    with pytest.raises(ConfigError, match="the model fits nowhere on these devices"):
        planner.search()
    enough = Planner(planner.profile, small_model(1, batch=4))
    assert [plan.missing for plan in (enough.shard_in_nodes(nodes), *enough.average_nodes(nodes))] == [""] * 3


def test_edit_fits_where_each_nodes_share_does() -> None:
    """Two nodes with room for the activations of half of the batch each, and not of all of it."""
    planner = Planner(small_cluster((100, 100), gbit=0.2), small_model(8, batch=600))
    assert planner.shard_in_nodes([("n0.0",)], average=False).missing
    plans = planner.average_nodes([("n0.0",), ("n1.0",)])
    assert [plan.missing for plan in plans] == ["", ""] and plans[0].step_s < float("inf")
    planner = Planner(small_cluster((100, 100), gbit=0.2), small_model(8, batch=6000))
    assert [plan.missing.partition(":")[0] for plan in planner.average_nodes([("n0.0",), ("n1.0",)])] == ["n0.0"]


def test_what_does_not_fit_names_device_and_bytes() -> None:
    """A model of 30 GB of states on devices of 16 GB fits on no two of them."""
    model = replace(
        small_model(), layers=tuple(replace(layer, parameters=4e9, repeat=2) for layer in small_model().layers)
    )
    with pytest.raises(
        ConfigError, match=r"fits nowhere on these devices; nearest: n\d\.0 of stage \d: [\d.]+ GB missing"
    ):
        Planner(small_cluster((100, 50)), model).search()


def test_more_memory_than_there_is_is_never_used() -> None:
    """The simulation's peak of each device stays below the sum by which the plan was accepted."""
    planner = Planner(
        inventory("zorse-a"),
        replace(parse_model(yaml.safe_load((INVENTORIES / "llama-13b.yaml").read_text()), "m"), batch=32),
    )
    groups = planner.order_groups((("h100-0.0", "h100-0.1"), tuple(f"a100-0.{i}" for i in range(8))))
    for ministages in (1, 2, 4):
        for offload in (False, True):
            cuts = planner.cut_layers(groups, ministages, 1)
            assert cuts is not None
            choice = PipelineChoice(ScheduleName.BREADTH_FIRST, groups, cuts, 1, ministages, offload)
            try:
                pipeline = planner.make_pipeline(choice)
            except ConfigError:
                continue
            for device, peak in simulate(pipeline, spans=False).peak_bytes.items():
                assert peak <= planner.capacity(device)


def test_a_stage_of_one_device_holds_all_its_ministages() -> None:
    """Which have no shards: what was accepted is enough for whole parameters of all, and with `offload` of two."""
    planner = Planner(small_cluster((100, 50)), small_model(16))
    for offload in (False, True):
        choice = PipelineChoice(
            ScheduleName.BREADTH_FIRST, (("n0.0",), ("n1.0",)), tuple(range(0, 17, 2)), 1, 4, offload
        )
        played = simulate(planner.make_pipeline(choice), spans=False)
        layer = 10_000_000 * planner.model.parameter_bytes
        assert played.category_bytes["n0.0"][MemoryCategory.PARAMETERS] == (4 if offload else 8) * layer
        kinds = (replace(planner.profile.kinds["k0"], memory_gb=gb / 100) for gb in range(1, 400))
        fitting = (k.memory_gb for k in kinds if _fits(_with_kind(planner.profile, "k0", k), planner.model, choice))
        enough = min(fitting)
        assert played.peak_bytes["n0.0"] <= enough * GB * USABLE


def test_two_ministages_that_have_room_are_the_two_largest() -> None:
    """With `offload`. The search counted the largest one's shards twice, and refused what fits."""
    planner = Planner(small_cluster((100,), devices=2), small_model(4))
    layers = tuple(replace(planner.layers[0], parameters=1e8 * n, activation_bytes=0.0) for n in (9, 1, 1, 1))
    model = replace(planner.model, layers=layers)
    m, choice = model, PipelineChoice(ScheduleName.BREADTH_FIRST, (("n0.0", "n0.1"),), (0, 1, 2, 3, 4), 1, 4, True)
    each = m.parameter_bytes + m.gradient_bytes
    boundary = 4 * layers[0].border_bytes  # of activations on their way
    needed = 1e9 * (each + each / 2) + 9e8 * m.state_bytes / 2 + boundary
    kind = replace(planner.profile.kinds["k0"], memory_gb=1.01 * needed / GB / USABLE)
    assert _fits(_with_kind(planner.profile, "k0", kind), model, choice)
    kind = replace(kind, memory_gb=0.99 * needed / GB / USABLE)
    assert not _fits(_with_kind(planner.profile, "k0", kind), model, choice), "the largest optimizer state counts"
    assert max(simulate(Planner(planner.profile, model).make_pipeline(choice)).peak_bytes.values()) <= needed


def test_two_ministages_keep_the_state_of_both() -> None:
    """With `offload`, which takes that of idle ones to the host where there are more: a plan that was accepted for one
    state met a full device.
    """
    model, cluster = small_model(4), small_cluster((100,))
    choice = PipelineChoice(ScheduleName.BREADTH_FIRST, (("n0.0",),), (0, 2, 4), 1, 2, True)
    needed = 4e7 * (model.parameter_bytes + model.gradient_bytes + model.state_bytes)
    for share, fits in ((0.9, False), (1.2, True)):
        kind = replace(cluster.kinds["k0"], memory_gb=share * needed / GB / USABLE)
        assert _fits(_with_kind(cluster, "k0", kind), model, choice) is fits


def test_the_largest_border_of_any_ministage_has_room_four_times() -> None:
    """With `offload`: two that are fetched, one in use, one on its way; and the largest layer is computed again."""
    model, cluster = small_model(4, recompute=True), small_cluster((100,))
    model = replace(model, layers=(replace(model.layers[0], parameters=1.0, activation_bytes=0.0, border_bytes=1e8),))
    choice = PipelineChoice(ScheduleName.BREADTH_FIRST, (("n0.0",),), (0, 2, 4), 1, 2, True)  # 1 and 2 inputs
    for needed, fits in ((7e8, False), (9e8, True)):
        kind = replace(cluster.kinds["k0"], memory_gb=needed / GB / USABLE)
        assert _fits(_with_kind(cluster, "k0", kind), model, choice) is fits
    layers = tuple(replace(model.layers[0], repeat=1, activation_bytes=size) for size in (1.0, 9.0, 2.0))
    assert Planner(cluster, replace(model, layers=layers))._workspace([(0, 1), (1, 3)], 2) == 18.0


def test_compact_zb_holds_as_many_as_its_smallest_device_has_room_for() -> None:
    """At least those of 1F1B, without which it is refused; what takes no memory is not counted."""
    cluster, model = small_cluster((100, 100, 100)), small_model(6, batch=24)
    cluster = _with_kind(cluster, "k1", replace(cluster.kinds["k1"], memory_gb=8 / USABLE))
    heavy = replace(model, layers=(replace(model.layers[0], parameters=1.0, activation_bytes=0.5e9),))
    pair = PipelineChoice(ScheduleName.COMPACT_ZB, (("n0.0", "n1.0"),), (0, 6), 1)
    assert Planner(cluster, heavy).make_pipeline(pair).stages[0].most_held == 2, "of 3 GB each in 8 and 14.7 GB"
    light = replace(model, layers=(replace(model.layers[0], activation_bytes=0.0),))
    assert Planner(cluster, light).make_pipeline(pair).stages[0].most_held > light.batch
    chain = PipelineChoice(ScheduleName.COMPACT_ZB, (("n0.0",), ("n2.0",), ("n1.0",)), (0, 2, 4, 6), 1)
    held = [stage.most_held for stage in Planner(cluster, heavy).make_pipeline(chain).stages]
    assert held == [14, 14, 7], "24 of each would not fit"


@pytest.mark.parametrize(
    ("schedule", "offload"),
    [(ScheduleName.BREADTH_FIRST, True), (ScheduleName.ZB_H1, False), (ScheduleName.ONE_F_ONE_B, False)],
)
def test_activations_have_room_where_a_plan_is_accepted(schedule: ScheduleName, offload: bool) -> None:
    """A model that is nearly all activations, on the middle one of three stages: offloaded, of which four are on the
    way or in use; and with backwards that are split, whose second halves wait.
    """
    model = small_model(9, recompute=True)
    layers = tuple(replace(layer, parameters=1.0, border_bytes=1e8) for layer in model.layers)
    model, cluster = replace(model, layers=layers), small_cluster((100, 100, 100))
    choice = PipelineChoice(schedule, (("n0.0",), ("n1.0",), ("n2.0",)), (0, 3, 6, 9), 1, 1, offload)
    peak = simulate(Planner(cluster, model).make_pipeline(choice), spans=False).peak_bytes["n1.0"]
    kinds = (replace(cluster.kinds["k1"], memory_gb=gb / 50) for gb in range(1, 400))
    enough = next(k for k in kinds if _fits(_with_kind(cluster, "k1", k), model, choice))
    assert peak <= enough.memory_gb * GB * USABLE <= 1.1 * peak


def test_groups_with_fast_links_inside_come_first() -> None:
    """Their first gather overlaps nothing; a device alone gathers nothing."""
    cluster = small_cluster((100, 50, 25), devices=2)
    kinds = {**cluster.kinds, "k0": replace(cluster.kinds["k0"], inside_gbit=1.0)}
    planner = Planner(replace(cluster, kinds=kinds), small_model())
    slow, fast, alone = ("n0.0", "n0.1"), ("n1.0", "n1.1"), ("n2.0",)
    assert planner.order_groups((slow, fast, alone)) == (alone, fast, slow)


def test_three_layers_of_fsdp_are_whole() -> None:
    """The one at work, the one before it and the one that comes: of 8 GB a device of 1 GB lacks these and its share."""
    cluster = small_cluster((100,), devices=2)
    cluster = replace(cluster, kinds={"k0": replace(cluster.kinds["k0"], memory_gb=1 / USABLE)})
    model = replace(small_model(8), parameter_bytes=2.0, gradient_bytes=2.0, state_bytes=12.0)
    model = replace(model, layers=tuple(replace(layer, parameters=1e9, activation_bytes=0.0) for layer in model.layers))
    assert Planner(cluster, model).shard_fully(("n0.0", "n0.1"), equal=True).missing == "n0.0: 75.0 GB missing"


def test_the_largest_layers_of_fsdp_are_whole() -> None:
    """Of layers that are unlike; with recompute the activations of the largest are made again beside all borders."""
    cluster = small_cluster((100,), devices=2)
    cluster = replace(cluster, kinds={"k0": replace(cluster.kinds["k0"], memory_gb=1 / USABLE)})
    (layer,) = replace(small_model(), parameter_bytes=2.0, gradient_bytes=2.0, state_bytes=12.0).layers
    layers = tuple(
        replace(layer, repeat=1, parameters=n * 1e9, activation_bytes=n * 1e9, border_bytes=0.0) for n in (1, 2, 1)
    )
    planner = Planner(cluster, replace(small_model(), layers=layers, recompute=True))
    states, gathered, activations = 4 * 16 / 2, 3 * 2 * 4, 4 * 2
    missing = planner._missing_sharded(("n0.0", "n0.1"), (4, 4), 2)
    assert missing == f"n0.0: {states + gathered + activations - 1:.1f} GB missing"


def test_collectives_of_fsdp_hide_behind_the_slowest_device() -> None:
    """A forward hides the gather of the next layer, a backward that of the one before and the reduction behind it."""
    planner = Planner(small_cluster((100, 50)), small_model(2))
    planner._kind_seconds = {("k0", 1): [PassSeconds(1, 1, 1)] * 2, ("k1", 1): [PassSeconds(2, 2, 2)] * 2}
    forward, backward = 1 + max(2, 5) + 2, max(4, 0 + 6) + max(4, 1 + 0) + 2
    assert planner.overlap_layers(("n0.0", "n1.0"), (1, 1), [1, 5], [2, 6]) == forward + backward


def test_a_step_of_hsdp_takes_as_long_as_its_slowest_node() -> None:
    """Each has half of the batch."""
    planner = Planner(small_cluster((100, 25)), small_model(8))
    slow = Planner(planner.profile, small_model(8, batch=4)).shard_in_nodes([("n1.0",)], average=False)
    assert planner.shard_in_nodes([("n0.0",), ("n1.0",)], average=False).step_s == slow.step_s


def test_only_what_there_are_several_of_is_apart() -> None:
    """One node is no HSDP, nor are nodes of unequal size; one site is no clusters."""
    for devices in ([2], [1, 2]):
        raw = {
            "nodes": [{"name": f"n{i}", "kind": "k", "devices": n} for i, n in enumerate(devices)],
            "kinds": {"k": {"memory_gb": 16, "tflops": 100}},
            "links": {"site": {"site": 10}},
        }
        found = Planner(parse_profile(raw, "p"), small_model(2)).list_others()
        assert [plan.name.split()[0] for plan in found] == ["FSDP2"] * 2


def test_clusters_wait_for_the_slowest_link_and_train_as_each_can() -> None:
    """H steps of each site's best way, then a push and a pull over the slowest way between two sites, after these or,
    with overlap, beside them.
    """
    raw = {
        "nodes": [
            {"name": name, "kind": f"k{speed}", "site": name[0], "card_gbit": 100}
            for name, speed in (("e0", 100), ("e1", 25), ("w", 50))
        ],
        "kinds": {f"k{speed}": {"memory_gb": 16, "tflops": speed} for speed in (100, 50, 25)},
        "links": {"e": {"e": 100, "w": 1}, "w": {"e": 0.5, "w": 100}},
    }
    planner = Planner(parse_profile(raw, "p"), small_model(8, batch=35))
    sites = ("e0.0", "e1.0"), ("w.0",)
    plans = {plan.name.rpartition(" ")[2]: plan.rate for plan in planner.train_apart(sites, 64)}
    moved_s, shares = 4.0 * planner.model.parameters / (0.5 * GBIT_BYTES), (25, 10)
    steps = [
        Planner(planner.profile.only(site), small_model(8, batch=share)).shard_fully(site, equal=False).step_s
        for site, share in zip(sites, shares, strict=True)
    ]
    rows = [(64 * share, 64 * step_s) for step_s, share in zip(steps, shares, strict=True)]
    assert plans["none"] == pytest.approx(sum(n / (cycle + 2 * moved_s) for n, cycle in rows))
    assert plans["full"] == pytest.approx(sum(n / max(cycle, 2 * moved_s) for n, cycle in rows))


def _with_kind(profile: ClusterProfile, name: str, kind: DeviceKind) -> ClusterProfile:
    return replace(profile, kinds={**profile.kinds, name: kind})


def _fits(profile: ClusterProfile, model: ModelProfile, choice: PipelineChoice) -> bool:
    try:
        Planner(profile, model).make_pipeline(choice)
    except ConfigError:
        return False
    return True


def test_activations_are_what_layers_take() -> None:
    """With recompute a layer keeps its input, which is the output of the layer before, on whatever stage that is."""
    layers = [
        {"name": name, "parameters": 1e6, "flops": 1e9, "activation_bytes": 9e6, "border_bytes": border}
        for name, border in (("embedding", 1e6), ("block", 2e6), ("narrow", 3e6), ("head", 0.0))
    ]
    model = parse_model({"name": "odd", "batch": 8, "layers": layers, "recompute": True}, "model")
    planner = Planner(small_cluster((100, 50)), model)
    kept = [planner.part_bytes(a, b, 1, 2).activations for a, b in ((0, 1), (0, 2), (1, 3), (2, 4))]
    assert kept == [0.0, 2e6, 6e6, 10e6]
    alone = planner.part_bytes(0, 4, 1, 2)
    assert alone.parameters == alone.gradient_share == 0.0, "no share beside what a device alone has whole"


def test_a_model_that_takes_no_time_is_refused() -> None:
    """Layers without FLOP, on a device of which nothing was measured: no plan of them is faster than another."""
    layers = tuple(replace(layer, flops=0.0) for layer in small_model().layers)
    with pytest.raises(ConfigError, match="small: takes no time on k0: expected `flops` of its layers"):
        Planner(small_cluster((100,)), replace(small_model(), layers=layers)).search()


def test_fewer_layers_than_stages_and_fewer_microbatches_than_devices() -> None:
    """No cut for the former, a sentence for the latter."""
    planner = Planner(small_cluster((100, 50, 25), devices=4), small_model(2, batch=2))
    groups = tuple(tuple(f"n{i}.{k}" for k in range(4)) for i in range(3))
    assert planner.cut_layers(groups, 1, 1) is None and planner.cut_layers(groups[:2], 1, 1) == (0, 1, 2)
    with pytest.raises(ConfigError, match="stage 0: expected a micro-batch for each of 4 devices, got 2"):
        planner.make_pipeline(PipelineChoice(ScheduleName.COMPACT_ZB, groups[:2], (0, 1, 2), 1))


def test_collectives_of_stages_wait_for_each_other_only_at_a_card_of_both() -> None:
    """Stages inside nodes of their own gather at the same time; those that span the same two nodes share both cards."""
    planner = Planner(small_cluster((100, 100), gbit=1.0, devices=2), small_model(8))
    inside = (("n0.0", "n0.1"), ("n1.0", "n1.1"))
    across = (("n0.0", "n1.0"), ("n0.1", "n1.1"))
    uses = {}
    for groups in (inside, across):
        choice = PipelineChoice(ScheduleName.BREADTH_FIRST, groups, (0, 2, 4, 6, 8), 1, 2)
        uses[groups] = [set(stage.collective_uses) for stage in planner.make_pipeline(choice).stages]
    assert uses[inside][0].isdisjoint(uses[inside][1])
    cards = {("out", "n0"), ("in", "n0"), ("out", "n1"), ("in", "n1")}
    assert cards <= uses[across][0] & uses[across][1]


def test_what_shared_parameters_take_is_planned() -> None:
    """After the last action gradients go from the last stage to the first, and values back; each of two devices holds
    half. A copy has no optimizer state, and in one stage nothing goes anywhere.
    """
    cluster = small_cluster((100, 100), gbit=1.0, devices=2)
    apart = small_model(8)
    shared = replace(apart.layers[0], repeat=1)
    chain = (replace(shared, name="embed"), replace(shared, repeat=6), replace(shared, name="head"))
    apart = replace(apart, layers=chain, parameter_bytes=4.0, gradient_bytes=2.0)
    tied = replace(apart, layers=(*chain[:2], replace(chain[2], tied="embed")))
    groups = tuple(tuple(f"n{i}.{j}" for j in range(2)) for i in range(2))
    choice = PipelineChoice(ScheduleName.COMPACT_ZB, groups, (0, 4, 8), 1)
    before, after = (simulate(Planner(cluster, model).make_pipeline(choice)) for model in (apart, tied))
    nbytes = {2.0: 2.0 * shared.parameters, 4.0: 4.0 * shared.parameters}
    took = sum(moved / 1.25e8 + 50e-6 for moved in nbytes.values())  # both halves leave by one card
    assert after.seconds - before.seconds == pytest.approx(took)
    assert after.bytes_moved["tied"] == sum(nbytes.values()) and "tied" not in before.bytes_moved
    states = [Planner(cluster, model).part_bytes(4, 8, 2, 1).states for model in (apart, tied)]
    assert states[0] - states[1] == shared.parameters * apart.state_bytes / 2
    assert Planner(cluster, tied).part_bytes(7, 8, 2, 1).optimizer == 0.0, "a part that begins with the copy"
    assert Planner(cluster, tied).part_bytes(0, 4, 2, 1) == Planner(cluster, apart).part_bytes(0, 4, 2, 1)
    alone = PipelineChoice(ScheduleName.BREADTH_FIRST, groups[:1], (0, 4, 8), 1, 2)
    assert "tied" not in simulate(Planner(cluster, tied).make_pipeline(alone)).bytes_moved


def test_zorse_table_2() -> None:
    """L 24, P 10, four ministages, eight devices, 16 micro-batches; and the simulated gathers of `breadth_first`."""
    rows = parameter_costs(24, 10, 4, 8, 16)
    assert (rows["Zorse"].materialised, rows["Zorse"].gathers) == (120, 48)
    assert (rows["PP + ZeRO-2"].materialised, rows["PP + ZeRO-2"].gathers) == (240, 48)
    assert rows["PP + ZeRO-2"].corrections
    assert (rows["PP + ZeRO-3"].materialised, rows["PP + ZeRO-3"].sharded, rows["PP + ZeRO-3"].gathers) == (
        20,
        27.5,
        768,
    )


def test_the_others_are_on_the_same_scale() -> None:
    """FSDP2 with equal and unequal shares, HSDP, EDiT and clusters have samples a second; unequal shares win on
    unequal devices.
    """
    found = {plan.name.split(",")[0] if "FSDP2" not in plan.name else plan.name: plan for plan in Planner(
        inventory("spantrain-1"), small_model(8, batch=180)).list_others()}  # fmt: skip
    assert {"FSDP2 over 22 devices", "FSDP2 over 22 devices, unequal shares", "3 clusters"} <= found.keys()
    equal = {plan.name: plan for plan in Planner(inventory("edit"), small_model(8, batch=512)).list_others()}
    assert {"FSDP2 over 64 devices", "HSDP 8 × 8", "EDiT, τ 128", "A-EDiT, τ 128"} <= equal.keys()
    assert equal["EDiT, τ 128"].step_s < equal["HSDP 8 × 8"].step_s
    inside = {
        plan.name: plan for plan in Planner(small_cluster((100, 25), gbit=1000), small_model(8, batch=40)).list_others()
    }
    assert inside["FSDP2 over 2 devices, unequal shares"].rate > 1.4 * inside["FSDP2 over 2 devices"].rate
