"""The emulator: real learning under the real Coordinator, and the same bits for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from dips.codecs import Codec
from dips.errors import ConfigError
from dips.ids import GENESIS, PushId, VersionId
from dips.outer import kernels
from dips.outer_step import OuterStep, nesterov_numbers
from dips.protocol.enums import LayerUnit, MergeRule, StepRule
from dips.protocol.options import Clip, Options, OuterOptions
from dips.sim.scenario import Site
from dips.sim.world import World
from dips.slave.ports import F32
from dips.study import baselines, emulator
from dips.study.baselines import (
    begin_workers,
    realign,
    train_data_parallel,
    train_naive,
    train_synchronous,
    train_together,
)
from dips.study.emulator import Emulated, GateCount, RunAccount, _Comings, emulate, make_scenario
from dips.study.fleet import KINDS, Fault, Fleet, FleetCluster
from dips.study.learner import LastRounds, LearnedModel, Recipe, make_optimizers, split_matrices
from tests.unit.study.tiny import TINY, TOKENS, WIDTH, WORDS, build, fleet

STEPS, LONGER = 48, 96
TWO = fleet(1.0, 1.5)
TASK = build()


def options(clip: Clip | None = None) -> Options:
    """Nesterov: a push that is alone in its round steps as far as all together."""
    return Options(outer=OuterOptions(clip=clip or Clip(), step=StepRule.NESTEROV))


def emulated(members: Fleet, steps: int = STEPS, seed: int = 3, recipe: Recipe = TINY) -> tuple[Emulated, GateCount]:
    return emulate(TASK, members, recipe, steps, seed, options())


@pytest.fixture(name="made", scope="module")
def made_once() -> Emulated:
    return emulated(TWO)[0]


def test_it_trains_until_its_tokens_are_accepted(made: Emulated) -> None:
    assert made.finished and made.tokens >= STEPS * TOKENS and made.versions > 5
    assert sum(made.shares.values()) == made.tokens and set(made.shares) == {"a", "b"}
    assert all(made.steps[name] * TOKENS >= made.shares[name] for name in made.shares)
    assert 1.0 < made.effective_clusters <= 2.0 and made.shares["a"] > made.shares["b"]
    assert made.clipped == 0 and made.gated == 0
    assert len(made.staleness) * TWO.inner_steps * TOKENS == made.tokens


def test_it_learns(made: Emulated) -> None:
    assert not made.diverged and made.loss < made.first_loss - 0.5


def test_the_cosine_to_the_momentum_is_known_from_the_second_version_on(made: Emulated) -> None:
    assert len(made.cosines) == made.versions - 1 and all(-1.0 <= c <= 1.0 for c in made.cosines)
    together = emulated(fleet(1.0, 1.0, pace="aligned"))[0]
    assert together.cosines[0] > 0 > made.cosines[0]  # who pushes alone meets a θ that has overshot its base


def test_a_layer_that_stays_adds_nothing_to_the_cosine() -> None:
    """Its momentum stays, too: what the gate `edit` left out of a round was counted as a gradient along it."""
    m = {
        GENESIS: {0: np.array([1.0, 0.0]), 1: np.array([1.0])},
        VersionId(1, 1): {0: np.array([0.8, 1.0]), 1: np.array([1.0])},
    }
    world, result = Mock(), Emulated()
    world.machines = {"s": Mock(process=Mock(versions=Mock(prepared=VersionId(1, 1), momentum=m.get)))}
    step = OuterStep((1.0, 0.0), 0.7, *nesterov_numbers(0.8))
    record = SimpleNamespace(version=VersionId(1, 1), parent=GENESIS, step=step)
    RunAccount(world, result, Mock(), 1)._note_cosine(record)  # type: ignore[arg-type]
    assert result.cosines == [pytest.approx(0.0, abs=1e-6)]


def test_what_is_validated_is_the_mean_of_the_last_five_rounds() -> None:
    """Each counts once, however late it is seen; θ is copied; a run that ended too early has its last θ, too."""
    last, theta = LastRounds(40, fleet(1.0, 1.0, inner_steps=3)), {0: np.zeros(2, np.float32)}
    for steps in (
        6,
        15,
        16,
        17,
        22,
        34,
        39,
    ):  # rounds end at 16, 22, 28, 34, 40: the third is seen with the fourth
        theta[0][:] = steps
        last.note(steps, theta)
    assert not last.is_due(39) and last.is_due(40)
    assert last.mean({0: np.full(2, 48, np.float32)})[0].tolist() == [(16 + 22 + 34 + 48) / 4] * 2
    short = LastRounds(2, fleet(1.0, 1.0, inner_steps=3))
    assert short.mean({0: np.full(1, 7, np.float32)})[0].tolist() == [7.0]


def test_every_method_is_validated_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round apart, and the last at the end of the tokens."""
    noted: list[list[int]] = []

    class Watched(LastRounds):
        def __init__(self, steps: int, members: Fleet) -> None:
            super().__init__(steps, members)
            noted.append([])

        def note(self, steps: int, theta: Mapping[int, F32]) -> None:
            if self.is_due(steps):
                noted[-1].append(steps)
            super().note(steps, theta)

    monkeypatch.setattr(baselines, "LastRounds", Watched)
    monkeypatch.setattr(emulator, "LastRounds", Watched)
    together = fleet(1.0, 1.0, pace="aligned")
    train_data_parallel(TASK, together, TINY, STEPS, 3)
    train_synchronous(TASK, together, TINY, STEPS, 3, 0.7, 0.8)
    train_naive(TASK, together, TINY, STEPS, 3, 0.7, 0.8)
    emulate(TASK, together, TINY, STEPS, 3, options())
    rounds = together.inner_steps * 2
    *baselines_noted, ours = noted
    assert baselines_noted == [[STEPS - back * rounds for back in (4, 3, 2, 1, 0)]] * 3
    assert (
        len(ours) >= 4 and ours[0] >= STEPS - 4 * rounds and ours[-1] >= STEPS
    )  # pushes of this pace are as they come


@pytest.mark.parametrize("fragments", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_aligned_clusters_that_train_on_meet(fragments: int) -> None:
    """Inner steps longer than anybody waits, at whose ends alone the ranks look at push and pull."""
    members = replace(fleet(4.0, 4.7, 6.0, pace="aligned", inner_steps=32), overlap=True, fragments=fragments)
    made = emulated(members, steps=4 * 3 * 32)[0]
    assert made.finished and made.versions <= 8
    assert made.mean_staleness < 0.5, "1.1 and 1.9 as long as windows did not wait for them"


def test_a_model_moves_in_as_many_fragments_as_it_has_layers() -> None:
    """A study of eight moved any model in four, and compared a row of eight with one of four that was the same."""
    layers = (nn.Embedding(WORDS, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    model = LearnedModel(replace(TASK, make_model=lambda: nn.Sequential(*layers)), TINY, 1)
    for fragments, moved in ((5, 5), (8, 6)):
        scenario = make_scenario(replace(fleet(1.0), overlap=True, fragments=fragments), Options(), 1.0, Codec.FP32)
        assert World(1, scenario, model).make_site(0).fragments == moved


def test_a_model_of_one_layer_is_emulated() -> None:
    """Each row of method dips failed: `slaves: expected at most 1`, of which no study has a key."""
    one = replace(TASK, make_model=lambda: nn.Embedding(WORDS, WORDS))
    made = emulate(one, TWO, TINY, 16, 3, options())[0]
    assert made.finished and len(LearnedModel(one, TINY, 3).manifest.layers) == 1


def test_a_study_finds_a_cache_of_kernels_that_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a slave: each row of method dips failed with `pickle data was truncated` after a power cut."""
    monkeypatch.setattr(kernels, "_call_all", Mock(side_effect=EOFError("kernels are called before all else")))
    monkeypatch.setattr(kernels, "_fold_loop", Mock(stats=Mock(cache_path=None)))
    with pytest.raises(EOFError, match="before all else"):
        emulated(TWO)


def test_the_same_seed_gives_the_same_bits(made: Emulated) -> None:
    assert emulated(TWO)[0] == made
    assert emulated(TWO, seed=4)[0].loss != made.loss


@pytest.mark.slow
def test_rda_weighs_blocks_or_modules() -> None:
    """The mean has the same bits by both: layers are weighed alike."""

    def make_model() -> nn.Module:
        inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), inside, nn.Linear(WIDTH, WORDS))

    task = replace(TASK, make_model=make_model)
    losses = {
        (merge, unit): emulate(task, TWO, TINY, STEPS, 3, Options(OuterOptions(merge=merge)), layers=unit)[0].loss
        for merge in (MergeRule.MEAN, MergeRule.RDA)
        for unit in LayerUnit
    }
    assert losses[MergeRule.MEAN, LayerUnit.BLOCK] == losses[MergeRule.MEAN, LayerUnit.MODULE]
    assert len(set(losses.values())) == 3


def test_the_paper_s_clip_is_counted() -> None:
    assert emulate(TASK, TWO, TINY, STEPS, 3, options(Clip(norm=1e-3)))[0].clipped > 5


def test_a_cluster_s_parameters_are_what_its_rank_holds() -> None:
    """A step of the module changes θ in place, in every layer."""
    model, site = LearnedModel(TASK, TINY, 3), Site("a", 1, 1.0, None)  # type: ignore[arg-type]
    theta = {layer: array.copy() for layer, array in model.genesis.items()}
    model.on_install(site, 1, theta, theta)
    loss = model.take_inner_step(site, theta, 0.5)
    changed = [layer for layer in theta if not np.array_equal(theta[layer], model.genesis[layer])]
    assert sorted(changed) == sorted(theta) and abs(loss - np.log(12)) < 0.5


def test_a_model_is_validated_with_the_buffers_of_a_healthy_cluster() -> None:
    """Running means were those of the first model, though the baselines' are trained: each row of dips looked bad."""
    task = replace(
        TASK,
        make_model=lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WORDS)),
        validate=lambda model: float(model[1].num_batches_tracked),
    )
    model = LearnedModel(task, TINY, 3, ("a", "b"), {"a": Fault("nan")}, {"a": 9.0})
    assert model.evaluate(model.genesis) == 0.0
    for name, steps in (("b", 2), ("a", 1)):
        site, theta = Site(name, 1, 1.0, None), {layer: a.copy() for layer, a in model.genesis.items()}  # type: ignore[arg-type]
        model.on_install(site, 1, theta, theta)
        for _ in range(steps):
            model.take_inner_step(site, theta, 0.5)
    assert model.evaluate(model.genesis) == 2.0


def test_clusters_join_leave_and_fail_by_the_run_s_tokens() -> None:
    members = (FleetCluster(), FleetCluster(joins=0.3), FleetCluster(leaves=0.4), FleetCluster(fails=0.5, down_s=5.0))
    made = emulated(Fleet(members, 4), steps=120)[0]
    assert made.finished and set(made.shares) == {"a", "b", "c", "d"}
    assert made.shares["a"] > max(made.shares["b"], made.shares["c"]) > 0


@pytest.mark.parametrize("fails", [0.28, 0.6])
def test_who_has_left_is_not_started_again(fails: float) -> None:
    """Killed just before it leaves, or after it: it was started `down_s` later, and took part to the end."""
    cluster, later, result = Mock(), list[tuple[float, str, Callable[[], None]]](), Emulated()
    world = Mock(clusters={"a": cluster, "b": Mock()}, call_later=lambda *planned: later.append(planned))
    fleet = Fleet((FleetCluster(leaves=0.3, fails=fails), FleetCluster()))
    comings = _Comings(world, fleet, result, tokens=100)
    result.tokens = 100
    comings.time_passed()
    while later:
        later.sort(key=lambda planned: planned[0])
        later.pop(0)[2]()
    assert cluster.crash.called and cluster.leave_run.called and not cluster.start.called


def test_stragglers_take_longer(made: Emulated) -> None:
    assert emulated(fleet(1.0, 1.5, straggles=0.2))[0].lasted_s > 1.5 * made.lasted_s


@pytest.mark.slow
def test_all_gated_ends_in_bounded_time() -> None:
    """Every cluster pushes NaN for good: no tokens are accepted, and the run is over all the same."""
    always = Fault("nan", 0.0, 1.0)
    made, gates = emulated(fleet(1.0, 1.5, fault=always))
    assert not made.finished and made.tokens == 0 and gates.bad_gated == gates.bad > 0


@pytest.mark.parametrize("kind", [k if k == "nan" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_bad_data_is_pushed_and_counted(kind: str) -> None:
    """In the middle third of the cluster's own steps, and nowhere else."""
    made, gates = emulated(_with_fault(kind), steps=144)
    assert made.finished and np.isfinite(made.loss)
    assert 3 <= gates.bad <= 5 and gates.healthy > gates.bad
    if kind in ("nan", "inf", "frozen"):  # of the last, θ moved meanwhile: its d is as long as others'
        assert gates.bad_gated == gates.bad


def test_a_frozen_cluster_that_trains_on_pushes_what_it_pulled() -> None:
    """It pushed a version merged with its training, which is no fault: with overlap gates were called blind."""
    model = LearnedModel(TASK, TINY, 3, faults={"a": Fault("frozen", 0.0, 1.0)}, due={"a": 9.0})
    merged, site = {layer: a + 1 for layer, a in model.genesis.items()}, Site("a", 1, 1.0, None)  # type: ignore[arg-type]
    model.on_install(site, 1, merged, model.genesis)
    pushed = model.prepare_push(site, PushId("a", 1, 1), merged)
    assert all(np.array_equal(pushed[layer], a) for layer, a in model.genesis.items())


@pytest.mark.slow
def test_an_operator_readmits_who_pushed_nan_when_it_is_repaired() -> None:
    """No gate lets it back: the study does what an operator would, once, and says so."""
    made, gates = emulated(_with_fault("nan"), steps=240)
    assert made.readmitted == 1 and gates.recovered_after is not None
    assert emulated(_with_fault("sign"), steps=240)[0].readmitted == 0


@pytest.mark.slow
def test_a_cluster_leaves_for_a_while() -> None:
    """It comes back as another incarnation, and pushes again; without it the run goes on."""
    away = Fleet((FleetCluster(1.0, leaves=0.3, returns=0.7), FleetCluster(1.2), FleetCluster(1.5)), 4)
    made, _ = emulated(away, steps=240)
    incarnations = {push.inc for push, _ in made.outcomes if push.cluster == "a"}
    assert made.finished and len(incarnations) == 2
    assert made.gated == 0, "it trains what it pulled, not what it held before it left"
    assert made.shares["a"] < made.shares["b"]
    with pytest.raises(ConfigError, match="returns: expected a share above leaves"):
        FleetCluster(leaves=0.5, returns=0.4)


def _with_fault(kind: str) -> Fleet:
    return Fleet((FleetCluster(1.0, fault=Fault(kind)), FleetCluster(1.2), FleetCluster(1.5)), 4)


def test_what_is_spoilt() -> None:
    """Each kind does what its name says, to a copy."""
    base, theta = {0: np.zeros(3, np.float32)}, {0: np.float32([1, 2, 3])}
    assert np.array_equal(Fault("sign").spoil_push(theta, base)[0], [-1, -2, -3])
    assert np.array_equal(Fault("zeros").spoil_push(theta, base)[0], [0, 0, 0])
    assert np.array_equal(Fault("frozen").spoil_push(theta, base)[0], base[0])
    assert np.isnan(Fault("nan").spoil_push(theta, base)[0]).any() and np.isfinite(theta[0]).all()
    assert Fault("lr_x100").lr_times == 100.0
    assert Fault("sign").is_over(0.7) and not Fault("sign", 0.5, 1.0).is_over(1.2)
    with pytest.raises(ConfigError, match="expected one of nan, inf"):
        Fault("wrong")


def test_gates_are_counted_after_the_first_bad_push() -> None:
    pushes = [PushId("a", 1, i) for i in range(6)]
    others = [(PushId("b", 1, i), True) for i in range(4)]
    settled = [(push, fate) for push, fate in zip(pushes, (True, True, False, False, False, True), strict=True)]
    count = GateCount.of_run([*settled, *others], {"a": pushes[1:4]})
    assert (count.bad, count.bad_gated) == (2, 2)  # the first one passed, and is not counted
    assert (count.healthy, count.healthy_gated) == (5, 0)  # b's, and a's before its fault
    assert count.recovered_after == 1  # the one that was gated after the fault
    never = GateCount.of_run([(push, push is pushes[0]) for push in pushes], {"a": pushes[1:4]})
    assert never.recovered_after is None


def test_the_baselines_learn_from_as_many_tokens() -> None:
    both = (TASK, TWO, TINY, LONGER, 3)
    first = LearnedModel(TASK, TINY, 3)
    begun = first.evaluate(first.genesis)
    parallel, waiting = train_data_parallel(*both), train_synchronous(*both, 0.7, 0.8)
    local, naive = train_synchronous(*both, 1.0, 0.0, parallel=0.25), train_naive(*both, 0.7, 0.8)
    assert parallel.tokens == waiting.tokens == local.tokens == naive.tokens == LONGER * TOKENS
    assert parallel.first_loss == naive.first_loss == begun
    assert max(parallel.loss, waiting.loss, local.loss) < begun - 0.3
    assert naive.steps > LONGER / 2 == waiting.steps  # nobody waits for the slower one
    assert parallel.effective_clusters == waiting.effective_clusters == 2
    faster = naive.steps / LONGER
    assert naive.effective_clusters == pytest.approx(1 / (faster**2 + (1 - faster) ** 2)) and faster > 0.55
    assert waiting.lasted_s == LONGER / 2 * 1.5 > naive.lasted_s


def test_each_tensor_is_brought_into_line_with_the_momentum() -> None:
    """HeLoCo: one in line stays; one against it loses a part of that; one between is turned and keeps its length."""
    ahead = np.array([2.0, 0.0], np.float32)
    in_line, against, across = (np.array(d, np.float32) for d in ([1.0, 1.0], [-3.0, 4.0], [0.0, 5.0]))
    push, momentum = np.concatenate([in_line, against, across, ahead]), np.concatenate([ahead, ahead, ahead, 0 * ahead])
    made = np.split(realign(push, momentum, np.array([2, 4, 6])), 4)
    assert made[0].tolist() == [1.0, 1.0] and made[3].tolist() == [2.0, 0.0]  # without momentum nothing is known
    lost = 0.6 * (5.0 / 7.0)  # 0.6 against it, of a push that is longer than the momentum
    assert made[1] == pytest.approx([-3.0 * (1 - lost), 4.0])
    assert np.linalg.norm(made[2]) == pytest.approx(5.0) and made[2][0] > 0
    assert made[2][0] / made[2][1] == pytest.approx(0.5 * 5 / 7 / (1 - 0.5 * 5 / 7))  # half way, as far as it is sure
    assert made[2].dtype == np.float32


def test_a_loop_that_brings_pushes_into_line_is_another_one() -> None:
    both = (TASK, TWO, TINY, STEPS, 3, 0.7, 0.8)
    plain, realigned = train_naive(*both), train_naive(*both, realigned=True)
    assert realigned.tokens == plain.tokens and realigned.loss != plain.loss
    assert realigned.cosine > plain.cosine  # to the momentum before


def test_a_run_may_begin_data_parallel() -> None:
    """Its tokens and seconds count; each cluster goes on with its own batches and the common optimizer state."""
    together = fleet(1.0, 2.0, pace="aligned")
    made = emulate(TASK, together, TINY, LONGER, 3, options(), parallel=0.5)[0]
    plain = emulate(TASK, together, TINY, LONGER, 3, options())[0]
    assert made.tokens >= LONGER * TOKENS and not made.diverged and made.first_loss == plain.first_loss
    assert made.versions < plain.versions and made.shares["b"] > plain.shares["b"] >= LONGER // 4 * TOKENS * 0.9
    assert made.lasted_s > plain.lasted_s  # data parallel waits for the slower one
    workers, _ = begin_workers(TASK, together, TINY, 3)
    assert train_together(workers, LONGER, 0.5) == LONGER // 4
    first, second = workers
    assert all(torch.equal(a, b) for a, b in zip(first.parameters.values(), second.parameters.values(), strict=True))
    states = [worker.optimizers[0].state_dict()["state"][0] for worker in workers]
    assert torch.equal(states[0]["exp_avg"], states[1]["exp_avg"]) and states[1]["step"] == LONGER // 4
    inputs = [worker.draw_batch()[0] for worker in (*workers, *begin_workers(TASK, together, TINY, 3)[0])]
    assert not torch.equal(inputs[0], inputs[1]) and not torch.equal(inputs[0], inputs[2])


def test_a_validation_leaves_every_worker_as_it_was_made() -> None:
    """The first worker, of a process group the only one, trained without dropout where `validate` calls eval()."""
    task = replace(TASK, validate=lambda model: TASK.validate(model.eval()))
    workers, _ = begin_workers(task, TWO, TINY, 3)
    assert all(worker.model.training for worker in workers)


def test_muon_trains_the_matrices_inside() -> None:
    """Embedding and output, with a row for each word, are AdamW's; and so is what is no matrix."""
    model = TASK.make_model()
    inside, rest = split_matrices(model)
    assert [tuple(p.shape) for p in inside] == [(8, 8)] and len(rest) == 3
    names = [type(o).__name__ for o in make_optimizers("muon", model, 1e-3)]
    assert names == ["Muon", "AdamW"]
    with pytest.raises(ConfigError, match="adamw or muon, got 'sgd'"):
        make_optimizers("sgd", model, 1e-3)
    made = emulated(TWO, recipe=Recipe(lr=2e-2, optimizer="muon"))[0]
    assert made.loss < made.first_loss - 0.3
