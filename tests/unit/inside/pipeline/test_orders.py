"""The plan as its ranks play it: transfers where they are needed, and no order that cannot get to its end."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from dips.errors import ConfigError
from dips.inside.pipeline import orders
from dips.inside.pipeline.orders import (
    BorderTransfer,
    DeviceWork,
    IdleCause,
    RankAction,
    describe_stage,
    lower_forward,
    lower_order,
    match_transfers,
    read_gears,
    read_pipeline,
    settle_seconds,
)
from dips.inside.planning.adapt import TimedTransfer
from dips.inside.planning.schedules import Op, ScheduleName
from dips.inside.planning.search import deal_microbatches
from dips.inside.planning.simulate import (
    PartBytes,
    PassSeconds,
    PipelineDevice,
    PipelineStage,
    Route,
    SimulatedPipeline,
    simulate,
)

# Two stages of one and two devices, two micro-batches, in the order in which 1F1B would take them.
PLAN: dict[str, Any] = {
    "model": "tiny",
    "plan": "1f1b 1+2",
    "pipeline": {
        "ministages": 1,
        "samples": 4,
        "offload": False,
        "recompute": False,
        "stages": [{"devices": ["a"], "layers": [[0, 3]]}, {"devices": ["b", "c"], "layers": [[3, 5]]}],
        "orders": {
            "a": "0F0 0F1 0B0 0B1 0REDUCE_GRAD 0STEP",
            "b": "1UNSHARD 1F0 1B0 1REDUCE_GRAD 1STEP",
            "c": "1UNSHARD 1F1 1B1 1RESHARD 1REDUCE_GRAD 1STEP",
        },
    },
}
# One device with two ministages, of which the second splits its backward.
ALONE: dict[str, Any] = {
    "model": "tiny",
    "plan": "breadth_first 1",
    "pipeline": {
        "ministages": 2,
        "samples": 1,
        "offload": False,
        "recompute": True,
        "stages": [{"devices": ["a"], "layers": [[0, 1], [1, 2]]}],
        "orders": {"a": "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"},
    },
}


# Its first stage has no device.
EMPTY: dict[str, Any] = {
    **PLAN["pipeline"],
    "stages": [{"devices": [], "layers": [[0, 3]]}, PLAN["pipeline"]["stages"][1]],
    "orders": {device: PLAN["pipeline"]["orders"][device] for device in "bc"},
}
# The second stage's devices gather its two parts in one order and in the other.
CROSSED: dict[str, Any] = {
    **PLAN["pipeline"],
    "ministages": 2,
    "stages": [{"devices": ["a"], "layers": [[0, 1], [2, 3]]}, {"devices": ["b", "c"], "layers": [[1, 2], [3, 4]]}],
    "orders": {
        "a": "0F0 0F1 2F0 2F1 2B0 2B1 2REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD",
        "b": "1UNSHARD 3UNSHARD 1F0 3F0 3B0 3REDUCE_GRAD 1B0 1REDUCE_GRAD",
        "c": "3UNSHARD 1UNSHARD 1F1 3F1 3B1 3REDUCE_GRAD 1B1 1REDUCE_GRAD",
    },
}


def spell(actions: Any) -> str:
    return " ".join(f"{part}{op}{'' if m is None else m}" for op, part, m in actions)


def test_transfers_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends follow their computation, receives begin some computations before their use, and what is gathered is
    resharded after its reduction, once.
    """
    monkeypatch.setattr(orders, "AHEAD", 2)
    plan = read_pipeline(PLAN, "plan.yaml")
    assert (plan.devices, plan.microbatches, plan.owner(1, 1)) == (("a", "b", "c"), 2, "c")
    assert spell(lower_order(plan, "a")) == "0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1 0REDUCE_GRAD"
    assert spell(lower_order(plan, "b")) == "1RECV_F0 1UNSHARD 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1RESHARD"
    assert spell(lower_order(plan, "c")) == "1RECV_F1 1UNSHARD 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD"
    assert spell(lower_forward(plan, "c")) == "1RECV_F1 1UNSHARD 1F1 1RESHARD"


def test_what_is_resharded_between_two_passes_is_gathered_again() -> None:
    """Only the reshard after a part's last computation waits for its reduction."""
    spare = copy.deepcopy(PLAN)
    spare["pipeline"]["orders"]["c"] = "1UNSHARD 1F1 1RESHARD 1UNSHARD 1B1 1RESHARD 1REDUCE_GRAD 1STEP"
    spare["pipeline"]["orders"]["b"] = "1UNSHARD 1F0 1RESHARD 1UNSHARD 1B0 1RESHARD 1REDUCE_GRAD 1STEP"
    played = spell(lower_order(read_pipeline(spare, "plan.yaml"), "c"))
    assert played == "1RECV_F1 1UNSHARD 1F1 1RESHARD 1UNSHARD 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD"


def ministages(*devices: str) -> dict[str, Any]:
    """A plan with offload of one stage with three ministages, as the simulator orders them."""
    wide = len(devices) > 1
    order = (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 0OFFLOAD0 1RESHARD 1UNSHARD 2F0 2B0 2RESHARD 2REDUCE_GRAD 2STEP "
        "0UNSHARD 0FETCH0 1B0 1RESHARD 1REDUCE_GRAD 1STEP 0B0 0RESHARD 0REDUCE_GRAD 0STEP"
    )
    if not wide:
        order = " ".join(word for word in order.split() if "SHARD" not in word)
    stage = {"devices": list(devices), "layers": [[0, 1], [1, 2], [2, 3]]}
    orders = {device: order.replace("F0", f"F{m}").replace("B0", f"B{m}") for m, device in enumerate(devices)}
    orders = {
        d: o.replace("OFFLOAD0", f"OFFLOAD{m}").replace("FETCH0", f"FETCH{m}")
        for m, (d, o) in enumerate(orders.items())
    }
    return {
        **ALONE,
        "pipeline": {**ALONE["pipeline"], "ministages": 3, "offload": True, "stages": [stage], "orders": orders},
    }


def test_shards_of_two_ministages_are_on_the_device() -> None:
    """A sharded part is fetched a computation ahead of its UNSHARD and offloaded after its RESHARD; one that a device
    holds alone when the part before the last is offloaded. Activations are copied where the plan says.
    """
    alone, wide = (read_pipeline(ministages(*devices), "plan.yaml") for devices in (("a",), ("a", "b")))
    assert spell(lower_order(alone, "a")) == (
        "0FETCH 1FETCH 0F0 0OFFLOAD 2FETCH 1F0 1OFFLOAD 1FETCH 0OFFLOAD0 2F0 2B0 2REDUCE_GRAD 2OFFLOAD "
        "0FETCH 0FETCH0 1B0 1REDUCE_GRAD 1OFFLOAD 0B0 0REDUCE_GRAD 0OFFLOAD"
    )
    assert spell(lower_forward(alone, "a")) == "0FETCH 1FETCH 0F0 0OFFLOAD 2FETCH 1F0 1OFFLOAD 2F0 2OFFLOAD"
    for played in (lower_order(alone, "a"), lower_order(wide, "b"), lower_forward(wide, "a")):  # which gathers one
        here = most = 0
        for op, _, m in played:
            here += {"FETCH": 1, "OFFLOAD": -1}.get(op, 0) if m is None else 0
            most = max(most, here)
        assert (here, most) == (0, 2 if "B" in spell(played) else 1), spell(played)
    assert spell(lower_order(wide, "b")).startswith(
        "0FETCH 0UNSHARD 1FETCH 0F1 1UNSHARD 0RESHARD 0OFFLOAD 2FETCH 1F1 2UNSHARD"
    )


@pytest.mark.parametrize(
    ("offload", "layers", "order"),
    [
        (False, [[0, 1], [1, 2], [2, 3]], "0F0 1F0 2F0 2B0 2REDUCE_GRAD 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"),
        (True, [[0, 1], [1, 3]], "0F0 0OFFLOAD0 1F0 1B0 1REDUCE_GRAD 0FETCH0 0B0 0REDUCE_GRAD"),
    ],
)
def test_shards_stay_where_two_ministages_are_all(offload: bool, layers: list[list[int]], order: str) -> None:
    """Or where nothing is offloaded: the order is played as it is."""
    data = ministages("a")
    data["pipeline"] |= {"offload": offload, "ministages": len(layers), "orders": {"a": order}}
    data["pipeline"]["stages"][0]["layers"] = layers
    assert spell(lower_order(read_pipeline(data, "plan.yaml"), "a")) == order


def test_what_is_fetched_beside_a_computation_is_asked_for_before_it() -> None:
    """As the plan has it: the copy goes on while that computes."""
    data = ministages("a")
    order = "0F0 1F0 0OFFLOAD0 1B0 0FETCH0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"
    data["pipeline"] |= {"ministages": 2, "orders": {"a": order}}
    data["pipeline"]["stages"][0]["layers"] = [[0, 1], [1, 3]]
    played = spell(lower_order(read_pipeline(data, "plan.yaml"), "a"))
    assert played == "0F0 1F0 0OFFLOAD0 0FETCH0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"


def test_a_part_is_gathered_halfway_to_its_use() -> None:
    """Of two computations between after the first, of three after the second; at once where there is none."""
    gather, use = RankAction(Op.UNSHARD, 2), RankAction(Op.F, 2, 0)
    for between, at in ((0, 0), (1, 1), (2, 1), (3, 2)):
        order = [gather, *[RankAction(Op.F, 0, m) for m in range(between)], use, RankAction(Op.F, 0, 9)]
        assert orders._delay_gather(order, 0) == at


@pytest.mark.parametrize(
    ("word", "by", "told"),
    [
        ("0OFFLOAD0", "", "expected 0FETCH0 after 0OFFLOAD0, before 0B0"),
        ("1F0", "1F0 0OFFLOAD1", "expected 0OFFLOAD1 after 0F1, before 0B1"),
        ("1F0", "0FETCH0 1F0", "expected 0FETCH0 after 0OFFLOAD0, before 0B0"),
    ],
)
def test_copies_of_activations_have_their_place(word: str, by: str, told: str) -> None:
    """Between the forward and the backward of a micro-batch of the device's own, out and back."""
    data = ministages("a")
    data["pipeline"]["orders"]["a"] = data["pipeline"]["orders"]["a"].replace(f" {word} ", f" {by} ")
    with pytest.raises(ConfigError, match=told):
        read_pipeline(data, "plan.yaml")


@pytest.mark.parametrize("seed", range(12))
def test_what_the_simulator_orders_can_be_played(seed: int) -> None:
    """With offload: each micro-batch goes out and comes back in its place, shards of two ministages at most are on a
    device, and no rank waits for ever.
    """
    draw = random.Random(seed)
    sizes, count, total = (
        [draw.randint(1, 3) for _ in range(draw.randint(1, 3))],
        draw.randint(1, 4),
        draw.randint(3, 7),
    )
    part = PartBytes(8.0, 8.0, 4.0, 4.0, 8.0, 2.0, 1.0)
    stages = []
    for s, size in enumerate(sizes):
        speeds = [draw.uniform(1, 4) for _ in range(size)]
        shares = deal_microbatches(tuple(speeds), total)
        devices = tuple(
            PipelineDevice(f"s{s}d{i}", shares[i], (PassSeconds(took, took, took),) * count, (), (part,) * count, 0.1)
            for i, took in enumerate(speeds)
        )
        collective = (draw.uniform(0, 2),) * count if size > 1 else ()
        stages.append(PipelineStage(devices, collective, collective))
    parts = count * len(sizes)
    played = simulate(
        SimulatedPipeline(
            ScheduleName.BREADTH_FIRST, tuple(stages), (1.0,) * (parts - 1), lambda a, b: Route(0.1, (((a, b), 0.5),)),
            count, keep=count == 1, offload=True,
        )
    )  # fmt: skip
    data = {
        "model": "drawn",
        "pipeline": {
            "ministages": count, "samples": 1, "offload": True, "recompute": True,
            "stages": [
                {
                    "devices": [device.name for device in stage.devices],
                    "layers": [[v * len(sizes) + s, v * len(sizes) + s + 1] for v in range(count)],
                }
                for s, stage in enumerate(stages)
            ],
            "orders": {device: " ".join(map(str, order)) for device, order in played.orders.items()},
        },
    }  # fmt: skip
    plan = read_pipeline(data, "plan.yaml")
    for device in plan.devices:
        here = most = 0
        away: set[tuple[int, int]] = set()
        for op, number, m in lower_order(plan, device):
            if m is None:
                here += {"FETCH": 1, "OFFLOAD": -1}.get(op, 0)
                most = max(most, here)
            elif op == "OFFLOAD":
                away.add((number, m))
            elif op == "FETCH":
                away.remove((number, m))
            else:
                assert op not in ("I", "B") or (number, m) not in away, (device, op, number, m)
        assert (here, most) == (0, 2 if count > 2 else 0) and not away


def planned(**orders: str) -> dict[str, Any]:
    """A plan of two devices, one after the other, with these orders."""
    pipeline = {**PLAN["pipeline"], "stages": [PLAN["pipeline"]["stages"][0], {"devices": ["b"], "layers": [[3, 5]]}]}
    return {**PLAN, "pipeline": {**pipeline, "orders": orders}}


def test_an_evaluation_gathers_a_part_once() -> None:
    """However many micro-batches it computes."""
    more = copy.deepcopy(PLAN)
    more["pipeline"]["orders"] = {
        "a": "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0REDUCE_GRAD",
        "b": "1UNSHARD 1F0 1B0 1F2 1B2 1REDUCE_GRAD",
        "c": "1UNSHARD 1F1 1B1 1F3 1B3 1REDUCE_GRAD",
    }
    played = lower_forward(read_pipeline(more, "plan.yaml"), "b")
    assert spell(played) == "1RECV_F0 1RECV_F2 1UNSHARD 1F0 1F2 1RESHARD"


def test_a_device_numbers_micro_batches_as_its_last_part_computes_them() -> None:
    """As torch's runtime wants them, whatever the order of the parts before."""
    turned = copy.deepcopy(ALONE)
    turned["pipeline"]["orders"]["a"] = "0F0 0F1 1F1 1F0 1B1 1B0 1REDUCE_GRAD 0B1 0B0 0REDUCE_GRAD"
    assert read_pipeline(turned, "plan.yaml").shares == {"a": (1, 0)}


def test_a_forward_waits_for_the_one_before_it() -> None:
    """b would compute micro-batch 1 first, which a computes when it has the gradient of 0."""
    read_pipeline(planned(a="0F0 0F1 0B0 0B1 0REDUCE_GRAD", b="1F1 1F0 1B0 1B1 1REDUCE_GRAD"), "plan.yaml")
    with pytest.raises(ConfigError, match="a, b would wait for each other for ever"):
        read_pipeline(planned(a="0F0 0B0 0F1 0B1 0REDUCE_GRAD", b="1F1 1F0 1B0 1B1 1REDUCE_GRAD"), "plan.yaml")


def test_ministages_of_one_device_send_nothing() -> None:
    """Borders inside a device are none."""
    plan = read_pipeline(ALONE, "plan.yaml")
    assert spell(lower_order(plan, "a")) == "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"
    assert spell(lower_forward(plan, "a")) == "0F0 1F0"
    assert plan.recompute


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("pipeline",), None, "expected a pipeline, got '1f1b 1+2', which has no stages"),
        (("pipeline", "orders"), {}, "expected an order for each device"),
        (
            ("pipeline", "orders", "a"),
            "0F0 0X1",
            "expected what `dips plan cluster` writes, got ValueError('0X1 is no action')",
        ),
        (
            ("pipeline", "orders", "a"),
            "0F0 0OFFLOAD0 0F1 0B0 0B1 0REDUCE_GRAD",
            "expected 0OFFLOAD0 after 0F0, before 0B0",
        ),
        (("pipeline", "stages", 1, "layers"), [[2, 5]], "expected parts that follow each other"),
        (("pipeline", "stages", 1, "layers"), [[3, 3]], "expected parts that follow each other"),
        (("pipeline", "ministages"), 0, "expected parts that follow each other from layer 0 on, got []"),
        (("pipeline", "stages", 1, "devices"), ["b", "d"], "expected an order for each device"),
        (("pipeline", "samples"), 0, "of at least one sample"),
        (("pipeline", "orders", "b"), "1UNSHARD 1F1 1B1 1REDUCE_GRAD", "stage 1: expected each micro-batch on one"),
        (
            ("pipeline", "orders"),
            {**PLAN["pipeline"]["orders"], "b": "1UNSHARD 1F0 1F1 1B0 1B1 1REDUCE_GRAD", "c": "1UNSHARD 1REDUCE_GRAD"},
            "stage 1: expected each micro-batch on one of its devices, and one for each",
        ),
        (("pipeline", "orders", "a"), "0F0 0F1 0B0 0REDUCE_GRAD", "orders.a: expected F, B of each of its"),
        (("pipeline", "orders", "a"), "0F0 0F1 0B0 0B0 0REDUCE_GRAD", "orders.a: expected F, B of each of its"),
        (("pipeline", "orders", "a"), "0F0 0F1 0B0 0B0 0B1 0REDUCE_GRAD", "orders.a: expected F, B of each of its"),
        (("pipeline", "orders", "a"), "0F0 0F1 0B0 0REDUCE_GRAD 0B1", "after all other actions of part 0"),
        (("pipeline", "orders", "a"), "0F0 0B1 0F1 0B0 0REDUCE_GRAD", "would wait for each other for ever"),
        (("pipeline", "orders", "c"), "1F1 1B1 1REDUCE_GRAD", "would wait for each other for ever"),
        (
            ("pipeline", "orders", "b"),
            "0UNSHARD 1UNSHARD 1F0 1B0 1REDUCE_GRAD",
            "orders.b: expected actions of its parts, [1], got 0UNSHARD",
        ),
        (("pipeline",), EMPTY, "stage 0: expected at least one device"),
        (("pipeline",), CROSSED, "stage 1: expected UNSHARD and REDUCE_GRAD of its parts in one order on b, c"),
    ],
)
def test_what_cannot_be_played_is_refused(path: tuple[Any, ...], value: Any, told: str) -> None:
    """An order that was edited cannot hang a job: it is refused before anything is built."""
    data = copy.deepcopy(PLAN)
    at: Any = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ConfigError) as refused:
        read_pipeline(data, "plan.yaml")
    assert told in str(refused.value) and str(refused.value).startswith("plan.yaml: pipeline")


# ---- gears -----------------------------------------------------------------------------------------------------------


def test_transfers_are_told_from_when_both_ends_had_named_them() -> None:
    """Of two activations from a to b and a gradient back. The first is waited for: from the later end's word until it
    was here. The second went behind it, so it took from then on. The gradient was here before it was looked for: a
    bound.
    """
    data = copy.deepcopy(PLAN)
    data["pipeline"]["stages"][1]["devices"] = ["b"]
    data["pipeline"]["orders"] = {
        "a": "0F0 0F1 0B0 0B1 0REDUCE_GRAD", "b": "1F0 1F1 1B0 1B1 1REDUCE_GRAD"
    }  # fmt: skip
    plan = read_pipeline(data, "plan.yaml")
    first, second = (plan.tag(BorderTransfer.SEND_F, 0, m) for m in (0, 1))
    back = plan.tag(BorderTransfer.SEND_B, 1, 0)
    ranks = [
        {"sent": {str(first): 1.0, str(second): 2.0}, "came": {str(back): [0.0, 9.0, 9.0]}},
        {"sent": {str(back): 8.0}, "came": {str(first): [0.5, 0.5, 4.0], str(second): [0.5, 4.0, 7.0]}},
    ]
    assert match_transfers(plan, ranks, [100.0], 2) == [
        TimedTransfer("a", "b", 50.0, 3.0, True),
        TimedTransfer("a", "b", 50.0, 3.0, True),
        TimedTransfer("b", "a", 50.0, 1.0, False),
    ]
    # The first was here before it was waited for: when the second began is unknown, and it took no longer than this.
    ranks[1]["came"][str(first)] = [0.5, 4.0, 4.0]
    assert match_transfers(plan, ranks, [100.0], 2)[1] == TimedTransfer("a", "b", 50.0, 5.0, False)
    # A look at what is there takes a moment, and is no wait.
    ranks[1]["came"][str(first)] = [0.5, 3.999, 4.0]
    assert match_transfers(plan, ranks, [100.0], 2)[0] == TimedTransfer("a", "b", 50.0, 3.0, False)


def test_a_plan_of_before_has_one_gear() -> None:
    """Its own orders, and nothing to simulate."""
    plan = read_pipeline(PLAN, "plan.yaml")
    assert read_gears(PLAN, plan, "plan.yaml") == ({1: plan}, {})


def test_a_stages_seconds_add_up_to_the_step() -> None:
    """Of two ranks the slower one's step; what neither has recorded is the runtime's, or waits for that rank. Means of
    seconds, the most of bytes.
    """
    ranks = settle_seconds([({"forward": 2.0, "border": 1.0}, 4.0), ({"forward": 1.0, "gather": 0.5}, 2.0)])
    assert ranks[0] == {"forward": 2.0, "border": 1.0, "runtime": 1.0, "end": 0.0}
    assert ranks[1] == {"forward": 1.0, "gather": 0.5, "runtime": 0.5, "end": 2.0}
    assert settle_seconds([({"forward": 2.0, "copy": 0.5}, 2.0)])[0]["runtime"] == 0.0, "two at the same time"
    stage = describe_stage(ranks, [{"gathered": 3, "peak": 5}, {"gathered": 4, "peak": 4}])
    assert stage["seconds"] == {DeviceWork.FORWARD: 1.5} and stage["peak_bytes"] == {"gathered": 4, "peak": 5}
    assert stage["idle"] == {"border": 0.5, "gather": 0.25, "end": 1.0, "runtime": 0.75}
    assert list(stage["idle"]) == [cause for cause in IdleCause if cause in stage["idle"]]


def test_a_plan_has_its_timeline() -> None:
    """One that was made before has none; one that was edited is refused, as are its orders."""
    assert read_pipeline(PLAN, "plan.yaml").timeline == ()
    plan = copy.deepcopy(PLAN)
    plan["pipeline"]["timeline"] = {"a": "0F0:0:1000 0B0:2000:500"}
    first, second = read_pipeline(plan, "plan.yaml").timeline
    assert (first.device, first.action, second.begin_s, second.end_s) == ("a", "0F0", 0.002, 0.0025)
    assert read_pipeline(plan, "plan.yaml").cut(2, {"a": ()}).timeline == (), "another gear is another step"
    for wrong in ({"a": "0F0:0"}, "0F0:0:1"):
        plan["pipeline"]["timeline"] = wrong
        with pytest.raises(ConfigError, match="expected what `dips plan cluster` writes"):
            read_pipeline(plan, "plan.yaml")
