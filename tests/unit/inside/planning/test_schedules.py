"""Schedules as pure machines: golden orders of the papers' figures, and what must hold for all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from dips.errors import ConfigError
from dips.inside.planning import simulate as simulating
from dips.inside.planning.schedules import (
    SCHEDULES,
    SPLITTING,
    Engine,
    Op,
    ScheduleMachine,
    ScheduleName,
    Seat,
    list_share,
    parse_order,
)
from dips.inside.planning.simulate import (
    MemoryCategory,
    PartBytes,
    PassSeconds,
    PipelineDevice,
    PipelineStage,
    Prediction,
    Route,
    SimulatedPipeline,
    StalledPipeline,
    bound_step,
    freeze_orders,
    make_chain,
    simulate,
    tune_depths,
    with_depths,
)

ONE = PassSeconds(1, 1, 1)
NAMES = list(ScheduleName)


def order(prediction: Prediction, device: str) -> str:
    """The computations of a device, without the part: F0 F1 I0."""
    return " ".join(f"{a.op}{a.microbatch}" for a in prediction.orders[device] if a.microbatch is not None)


def test_spantrain_figure_6() -> None:
    """Four groups, six micro-batches, slow links: FG1 begins with all six forwards, where the original waits for I0
    and W0; FG2 does I4 and I5 right after W2, ahead of its other W; downstream there is less idle time.

    The figure has no scale: these times are ones that give the order that its text tells of FG1 and FG2.
    """
    took = [ONE, PassSeconds(1, 1.5, 1), PassSeconds(1, 2, 1.5), ONE]
    compact = simulate(make_chain(ScheduleName.COMPACT_ZB, took, [2, 1.5, 1], 6, latency_s=0.5))
    assert order(compact, "g0").startswith("F0 F1 F2 F3 F4 F5 I0")
    assert order(compact, "g1") == "F0 F1 F2 F3 F4 F5 I0 W0 I1 W1 I2 I3 W2 I4 I5 W3 W4 W5"
    original = simulate(make_chain(ScheduleName.ZB_H1, took, [2, 1.5, 1], 6, latency_s=0.5))
    assert order(original, "g0").startswith("F0 F1 F2 F3 I0 W0 F4")
    assert compact.seconds < original.seconds
    assert all(compact.idle[d] < original.idle[d] for d in compact.idle)


def test_spantrain_figure_6_fg3() -> None:
    """FG3 fills the gap before F5 with W0, and goes on with I3 ahead of W1 and W2."""
    took = [PassSeconds(1, 1, 1.5), PassSeconds(1, 1, 1.5), PassSeconds(1, 2, 1.5), PassSeconds(1, 1, 0.5)]
    compact = simulate(make_chain(ScheduleName.COMPACT_ZB, took, [3, 1.5, 1.5], 6, latency_s=0.5))
    assert order(compact, "g2") == "F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 I4 W1 W2 I5 W3 W4 W5"


def zorse_figure_4(whole: float = 1.0) -> SimulatedPipeline:
    """20 layers on three groups of 4 ministages with 2, 2 and 1 layers, three micro-batches."""

    def stage(name: str, layers: int) -> PipelineStage:
        took = PassSeconds(layers * 1.0, layers * 1.0, layers * 1.0)
        sizes = (
            PartBytes(whole=whole * layers, gradients=layers, optimizer=layers / 2, activations=1, boundary=1),
        ) * 4
        devices = (
            PipelineDevice(f"{name}0", (0, 2), (took,) * 4, (), sizes),
            PipelineDevice(f"{name}1", (1,), (took,) * 4, (), sizes),
        )
        return PipelineStage(devices, (0.5,) * 4, (0.5,) * 4)

    return SimulatedPipeline(
        ScheduleName.BREADTH_FIRST, (stage("a", 2), stage("b", 2), stage("c", 1)), (1.0,) * 11,
        lambda a, b: Route(0.0, (((a, b), 0.25),)), ministages=4, keep=False,
    )  # fmt: skip


def test_zorse_figure_4() -> None:
    """A ministage's micro-batches all pass before the next ministage's; backward in reverse; two ministages are
    gathered at most.
    """
    played = simulate(zorse_figure_4())
    assert len(played.idle) == 6 and all(span.begin_s < span.end_s for span in played.spans), "resharding takes no time"
    assert " ".join(str(a) for a in played.orders["a1"]) == (
        "0UNSHARD 0F1 3UNSHARD 0RESHARD 6UNSHARD 3F1 3RESHARD 9UNSHARD 6F1 6RESHARD 6UNSHARD 9F1 "
        "9B1 9RESHARD 9REDUCE_GRAD 9STEP 3UNSHARD 6B1 6RESHARD 6REDUCE_GRAD 6STEP 0UNSHARD "
        "3B1 3RESHARD 3REDUCE_GRAD 3STEP 0B1 0RESHARD 0REDUCE_GRAD 0STEP"
    )
    order_of = [(a.op, a.part, a.microbatch) for a in played.orders["a0"] if a.microbatch is not None]
    forwards = [(Op.F, part, m) for part in (0, 3, 6, 9) for m in (0, 2)]
    backwards = [(Op.B, part, m) for part in (9, 6, 3, 0) for m in (0, 2)]
    assert order_of == forwards + backwards
    gathered = most = 0
    for action in played.orders["a0"]:
        gathered += (action.op is Op.UNSHARD) - (action.op is Op.RESHARD)
        most = max(most, gathered)
    assert most == 2
    peaks = simulate(zorse_figure_4(whole=1000.0)).peak_bytes  # beside which nothing else weighs
    assert {name: round(peak / 1000) for name, peak in peaks.items()} == {
        "a0": 2 * most, "a1": 2 * most, "b0": 2 * most, "b1": 2 * most, "c0": most, "c1": most,
    }  # fmt: skip


def test_only_copies_take_the_time_of_copies() -> None:
    """A device that copies slowly reshards as fast as any."""
    chain = zorse_figure_4()
    slow = [
        replace(stage, devices=tuple(replace(d, copy_byte_s=100.0) for d in stage.devices)) for stage in chain.stages
    ]
    assert simulate(replace(chain, stages=tuple(slow))).seconds == simulate(chain).seconds


def test_forwards_go_by_arrival_where_stages_share_unequally() -> None:
    """Without `offload` a later micro-batch that is here goes before an earlier one that is not."""
    machine = SCHEDULES[ScheduleName.BREADTH_FIRST](Seat(0, 2, (0, 1)))
    for m in (0, 1):
        action = machine.next_action(Engine.COMPUTE)
        assert action is not None and (action.op, action.microbatch) == (Op.F, m)
        machine.take_done(action)
    machine.take_arrival(Op.I, 0, 1)
    assert str(machine.next_action(Engine.COMPUTE)) == "0B1"


def test_ministages_step_while_the_next_one_computes() -> None:
    """The optimizer of a ministage runs as soon as its gradients are reduced (Zorse §4.1.2)."""
    actions = [str(a) for a in simulate(zorse_figure_4()).orders["a0"]]
    assert actions.index("9STEP") < actions.index("0B0")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_does_everything_once_in_order(name: ScheduleName, seed: int) -> None:
    """F before I before W for each micro-batch on each device, none twice, none left out; no step beats the bound."""
    rng = random.Random(seed)
    p, m = rng.randint(2, 4), rng.randint(3, 8)
    took = [PassSeconds(f, f + rng.randint(0, 1), f) for f in (rng.randint(1, 4) for _ in range(p))]
    chain = make_chain(name, took, [rng.choice([0, 1, 2, 6]) for _ in range(p - 1)], m, latency_s=0.5)
    played = simulate(chain)
    last = [Op.F, Op.I, Op.W] if name in SPLITTING else [Op.F, Op.B]
    for actions in played.orders.values():
        for microbatch in range(m):
            assert [a.op for a in actions if a.microbatch == microbatch] == last
    assert bound_step(chain) <= played.seconds


def test_a_bound_holds_where_devices_of_a_stage_are_far_from_each_other() -> None:
    """Each device may get its input over the shortest way, whichever device is named first: the search leaves out what
    the bound says is slower.
    """
    near, far = PassSeconds(5, 5, 5), PassSeconds(0.1, 0.1, 0.1)
    devices = PipelineDevice("far", (0,), (far,)), PipelineDevice("near", (1,), (near,))
    stages = PipelineStage((PipelineDevice("a", (0, 1), (ONE,)),)), PipelineStage(devices)
    chain = SimulatedPipeline(
        ScheduleName.GPIPE, stages, (1.0,), lambda a, b: Route(10.0 if "far" in (a, b) else 0.1, ())
    )
    assert bound_step(chain) <= simulate(chain).seconds


def test_a_bound_holds_where_devices_of_the_first_stage_are_unlike() -> None:
    """The first input of the next stage is the fast one's, and so may be the last backward."""
    slow, fast, last = PassSeconds(9, 9, 9), ONE, PassSeconds(10, 10, 0.1)
    first = PipelineStage((PipelineDevice("slow", (0,), (slow,)), PipelineDevice("fast", (1,), (fast,))))
    chain = SimulatedPipeline(
        ScheduleName.GPIPE,
        (first, PipelineStage((PipelineDevice("a", (0, 1), (last,)),))),
        (1.0,),
        lambda a, b: Route(0.0, ()),
    )
    assert bound_step(chain) <= simulate(chain).seconds


@pytest.mark.parametrize("m", [1, 6])
def test_a_bound_counts_what_comes_before_and_after_a_stage(m: int) -> None:
    """Of one micro-batch it is the step itself; of many the last stage computes from its first input on."""
    chain = make_chain(ScheduleName.COMPACT_ZB, [ONE, ONE], [2], m, latency_s=0.5)
    assert bound_step(chain) == {1: simulate(chain).seconds, 6: 1 + 2.5 + 6 * 3}[m]


@pytest.mark.parametrize("held", [1, 2, 3])
def test_a_memory_limit_is_kept(held: int) -> None:
    """`compact_zb` holds the activations of no more micro-batches than its limit, and gets to its end."""
    sizes = (PartBytes(activations=1.0),)
    stages = tuple(
        PipelineStage((PipelineDevice(f"g{s}", tuple(range(6)), (ONE,), (), sizes),), most_held=held) for s in range(3)
    )
    chain = SimulatedPipeline(ScheduleName.COMPACT_ZB, stages, (1.0, 1.0), lambda a, b: Route(0.0, (((a, b), 2.0),)))
    assert max(simulate(chain).peak_bytes.values()) <= held


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_depth_bounds_the_micro_batches_between_forward_and_backward(depth: int) -> None:
    chain = make_chain(ScheduleName.COMPACT_ZB, [ONE, ONE], [4], 6)
    between = most = 0
    for action in simulate(with_depths(chain, [depth, depth])).orders["g0"]:
        between += (action.op is Op.F) - (action.op is Op.I)
        most = max(most, between)
    assert most == depth


def test_tuned_depths_are_never_slower_than_the_papers_letter() -> None:
    """The letter (every forward first) is among the depths that are tried; on a fast chain a bound is better."""
    chain = make_chain(ScheduleName.COMPACT_ZB, [ONE, PassSeconds(4, 4, 4), PassSeconds(2, 3, 2)], [0, 4], 6)
    tuned, prediction = tune_depths(chain)
    assert prediction.seconds <= simulate(chain).seconds
    assert simulate(with_depths(chain, [s.depth for s in tuned.stages])).seconds == prediction.seconds
    slow, _ = tune_depths(make_chain(ScheduleName.COMPACT_ZB, [ONE] * 3, [9, 9], 4, most_held=[3, 4, 4]))
    assert [s.depth for s in slow.stages] == [3, 4, 4], "the letter has no more than there is, or has room"


@pytest.mark.parametrize("first", [(0, 4), (0, 4, 6)])
def test_stages_cut_micro_batches_in_their_own_way(first: tuple[int, ...]) -> None:
    """Two micro-batches of 4 slots, whole and then halved; the second stage takes halves. It begins with a half when
    that has come, and a whole one begins when both halves of its gradient have.
    """
    half, whole = PassSeconds(2, 2, 2), PassSeconds(4, 4, 4)
    devices = (
        PipelineDevice("a", first, (whole,), seconds_of={2: (half,)}),
        PipelineDevice("b", (0, 2, 4, 6), (half,)),
    )
    stages = tuple(PipelineStage((d,)) for d in devices)
    played = simulate(
        SimulatedPipeline(ScheduleName.GPIPE, stages, (1.0,), lambda a, b: Route(0.0, (((a, b), 1.0),)), slots=8)
    )
    begins = {(span.device, span.action): span.begin_s for span in played.spans}
    assert [begins["b", f"1F{m}"] for m in (0, 2, 4, 6)] == [6, 8, 10, 12]
    assert [begins["a", f"0B{m}"] for m in first] == {2: [24, 32], 3: [24, 32, 36]}[len(first)]
    assert played.seconds == 40 and played.bytes_moved["pipeline"] == 16


def test_by_arrival_an_action_that_waits_lets_others_go_first() -> None:
    """W0 goes before an I1 whose gradient has not come, where a frozen order waits."""
    orders = {"g0": "0F0 0F1 0I0 0I1 0W0 0W1", "g1": "1F0 1I0 1W0 1F1 1I1 1W1"}
    chain = make_chain(ScheduleName.COMPACT_ZB, [ONE] * 2, [2], 2)
    frozen = freeze_orders(chain, {name: parse_order(text) for name, text in orders.items()})
    assert simulate(frozen).seconds == 13
    played = simulate(replace(frozen, by_arrival=True))
    assert played.seconds == 12 and order(played, "g0") == "F0 F1 I0 W0 I1 W1"


def test_a_share_is_read_from_the_forwards_of_the_last_part() -> None:
    """In their order: that of the first part may be another."""
    order = parse_order("0F2 0F0 0F4 2UNSHARD 2F0 2F4 2F2 2B2 2B0 2B4 2REDUCE_GRAD 2STEP 0B2 0B0 0B4")
    assert list_share(order) == (0, 4, 2) and list_share(()) == ()


def test_fewer_microbatches_than_devices_are_refused() -> None:
    """A device without a micro-batch would never come to its stage's collectives."""
    with pytest.raises(ConfigError, match="stage 1: expected a micro-batch for each device"):
        SCHEDULES[ScheduleName.GPIPE](Seat(1, 2, ()))
    for limits in ({"depth": 0}, {"most_held": 0}):
        with pytest.raises(ConfigError, match="stage 1: expected limits of at least 1"):
            SCHEDULES[ScheduleName.COMPACT_ZB](Seat(1, 2, (0,), **limits))


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    """No machine of the product does; a machine that never begins is told by name."""

    class Asleep(ScheduleMachine):
        def choose_computation(self) -> None:
            return None

    before = SCHEDULES[ScheduleName.GPIPE]
    SCHEDULES[ScheduleName.GPIPE] = Asleep
    try:
        with pytest.raises(StalledPipeline, match="g0, g1 wait for each other"):
            simulate(make_chain(ScheduleName.GPIPE, [ONE, ONE], [1], 2))
    finally:
        SCHEDULES[ScheduleName.GPIPE] = before


@pytest.mark.parametrize("cards", [("card",), ("card", "of its own")])
def test_collectives_at_one_card_follow_one_another(cards: tuple[str, ...]) -> None:
    """Of two stages that gather for one second and reduce for two over the same card, whatever the second one uses
    besides, and a ring of two devices moves what one of them lacks.
    """
    sizes = (PartBytes(whole=8.0, gradients=4.0),)
    stages = tuple(
        PipelineStage(tuple(PipelineDevice(f"{s}{i}", (i,), (ONE,), (), sizes) for i in range(2)), (1.0,), (2.0,), used)
        for s, used in enumerate((("card",), cards))
    )
    played = simulate(
        SimulatedPipeline(ScheduleName.GPIPE, stages, (0.0,), lambda a, b: Route(0.0, (((a, b), 0.0),)), keep=True)
    )
    ends = sorted(span.end_s for span in played.spans if "UNSHARD" in span.action)
    assert ends == [1.0, 1.0, 2.0, 2.0]
    assert (played.bytes_moved["gather"], played.bytes_moved["reduce"]) == (2 * 8.0, 2 * 4.0)


def test_depths_are_tuned_by_so_many_plays_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one of what was found: a search over a hundred devices ends."""
    chain, plays = make_chain(ScheduleName.COMPACT_ZB, [ONE] * 4, [1, 2, 1], 8), list[float]()

    def count(*words: Any) -> Prediction:
        played = simulate(*words)
        plays.append(played.seconds)
        return played

    monkeypatch.setattr(simulating, "simulate", count)
    _, prediction = tune_depths(chain, most_plays=5)
    assert len(plays) == 5 + 1 and prediction.seconds == min(plays)


def test_memory_is_counted_by_category() -> None:
    """Gradients are whole until they are reduced, which a device waits for, and a share until the step; of a stage of
    one device they are what it steps by, while the next ministage's come.
    """
    sizes = (PartBytes(8.0, 8.0, 4.0, 2.0, 16.0, 1.0),) * 4
    for gather in ((), (0.1,) * 4):
        device = PipelineDevice("g0", (0, 1, 2), (ONE,) * 4, (), sizes, workspace_bytes=5.0)
        chain = SimulatedPipeline(
            ScheduleName.BREADTH_FIRST, (PipelineStage((device,), gather, gather),), (1.0,) * 3,
            lambda a, b: Route(0, ()), ministages=4, keep=False,
        )  # fmt: skip
        played = simulate(chain)
        assert {str(key): nbytes for key, nbytes in played.category_bytes["g0"].items()} == {
            "parameters": 16.0 if gather else 32.0, "gathered": 16.0 if gather else 0.0,
            "gradients": 8.0 if gather else 16.0,
            "optimizer": 64.0, "activations": 12.0, "workspace": 5.0,
        }  # fmt: skip
        assert played.peak_bytes["g0"] <= sum(played.category_bytes["g0"].values())


def test_two_ministages_at_work_are_the_two_largest() -> None:
    """With `offload`. The largest counted twice, so a plan that fits needed more than its device has, which `Pipeline`
    refused: "plan again".
    """
    sizes = tuple(PartBytes(whole) for whole in (1.0, 8.0, 2.0))
    device = PipelineDevice("g0", (0,), (ONE,) * 3, (), sizes)
    chain = SimulatedPipeline(
        ScheduleName.BREADTH_FIRST, (PipelineStage((device,)),), (1.0,) * 2, lambda a, b: Route(0, ()), ministages=3,
        keep=False, offload=True,
    )  # fmt: skip
    assert simulate(chain).category_bytes["g0"][MemoryCategory.PARAMETERS] == 10.0
    device = PipelineDevice("g0", (0,), (ONE,) * 2, (), (PartBytes(optimizer=3.0), PartBytes(optimizer=4.0)))
    two = replace(chain, stages=(PipelineStage((device,)),), border_bytes=(1.0,), ministages=2)
    assert simulate(two).category_bytes["g0"][MemoryCategory.OPTIMIZER] == 7.0, "the state of two stays"


def test_offloaded_activations_come_back_in_time() -> None:
    """With `offload` a device keeps those of few micro-batches; without, those of all; the copies count as bytes."""
    sizes = (PartBytes(activations=1.0, boundary=1.0),)
    device = PipelineDevice("g0", tuple(range(8)), (ONE,), (), sizes, copy_byte_s=0.01)
    peaks = {}
    for offload in (False, True):
        chain = SimulatedPipeline(
            ScheduleName.BREADTH_FIRST, (PipelineStage((device,)),), (), lambda a, b: Route(0, ()), offload=offload
        )
        played = simulate(chain)
        peaks[offload] = played.peak_bytes["g0"]
    assert peaks == {False: 8.0, True: 4.0}
    assert played.bytes_moved["copy"] == 12.0
    copies = [span.end_s - span.begin_s for span in played.spans if span.engine is Engine.COPY]
    assert copies == pytest.approx([0.01] * 12)
