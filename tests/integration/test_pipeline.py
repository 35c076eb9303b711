"""`Pipeline` on real ranks: plans of unequal stages against one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from benchmarks.accelerator import DEVICE
from benchmarks.adapter import make_chain_of, open_ranks, play_cut
from benchmarks.namespaces import missing
from dips.cli import cli
from dips.ids import VersionId
from dips.inside.pipeline.orders import BorderTransfer, DeviceWork, IdleCause
from dips.inside.planning.schedules import Op
from dips.telemetry import timeline
from tests.integration import train_replanned as replanned
from tests.integration.check_pipeline import LEARNED
from tests.integration.test_constant_model import HERE, harness, train_beside_a_plain_rank
from tests.traces import check_chrome

pytestmark = pytest.mark.torchrun
WAITED_S = 5.0 + 5.0  # check_pipeline.py's deadline, and what a loaded machine takes besides


def run(directory: Path, *words: str, within_s: float = 300) -> dict[str, Any]:
    """Run check_pipeline.py; return what it wrote."""
    out = directory / "found.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "check_pipeline.py"), str(out), *words],
        cwd=harness.ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(harness.ROOT)},
        capture_output=True, text=True, timeout=within_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())  # type: ignore[no-any-return]


CHECKS = {
    "six": "test_six_plans_have_the_gradients_of_one_process",
    "geared": "test_gears_have_the_gradients_of_one_process",
    "narrow": "test_borders_in_bf16_take_half_the_bytes",
    "autocast": "test_layers_may_give_another_format_than_they_did_on_the_meta_device",
    "replaced": "test_ranks_end_together_for_a_plan_that_all_have",
    "clipped": "test_the_norm_is_the_whole_models",
    "dropout": "test_dropout_and_evaluation_do_not_depend_on_the_plan",
    "saved": "test_a_checkpoint_fits_another_plan",
    "tied": "test_shared_parameters_are_trained_as_one",
    "accounted=4": "test_offload_is_what_the_plan_says",
    "seen": "test_a_step_is_seen",
    "too_small": "test_a_device_that_is_too_small_is_told_before_the_first_step",
    "refused": "test_it_is_refused_with_one_sentence_on_all_ranks",
    "mistaken": "test_what_a_loss_or_an_optimizer_raises_is_no_rank_that_is_gone",
    **({"allocated": "test_an_allocator_holds_what_the_plan_says"} if DEVICE != "cpu" else {}),
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that takes a second or two and that a chosen test asks for, of processes that one has forked."""
    chosen = {getattr(item, "originalname", "") for item in request.session.items}
    return run(tmp_path_factory.mktemp("pipeline"), *(what for what, test in CHECKS.items() if test in chosen))


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_six_plans_have_the_gradients_of_one_process(found: dict[str, Any]) -> None:
    """Each schedule, stages of 1 to 3 ranks, unequal shares, ministages, recompute: gradients within 1e-6 in fp32 and
    1e-12 in float64, three AdamW steps within 1e-5 and 1e-10; check_pipeline.py holds each to its bound.
    """
    assert [gradient > 1e-9 for gradient in found["six"]] == [False, True, False, False, True, False], found["six"]


def test_gears_have_the_gradients_of_one_process(found: dict[str, Any]) -> None:
    """Micro-batches whole, in two and four pieces, and whole again: unequal stages and ministages, each rank."""
    assert len(found["geared"]) == 6
    for of in found["geared"]:
        assert of["gear"] == [1, 2, 4, 1]
        assert max(of["gradient"]) < 1e-12 and max(of["loss"]) < 1e-12 and max(of["evaluated"]) < 1e-12, of


def test_borders_in_bf16_take_half_the_bytes(found: dict[str, Any]) -> None:
    """Both ways, on each rank; parts compute in fp32, and gradients are those of one process but for the 8 bits of
    bf16's fraction, where they are equal otherwise.
    """
    wide, narrow = found["narrow"]
    assert all(wide["bytes"]) and [2 * n for n in narrow["bytes"]] == wide["bytes"]
    assert max(wide["gradient"]) < 1e-6 and 1e-4 < max(narrow["gradient"]) < 2 * 2**-8, narrow
    assert all(wide["fp32"] + narrow["fp32"])


def test_layers_may_give_another_format_than_they_did_on_the_meta_device(found: dict[str, Any]) -> None:
    """As under autocast, which is not for that device: a part takes over a border what the shapes of borders say."""
    assert len(found["autocast"]) == 4 and max(found["autocast"]) < 1e-2, found["autocast"]


def test_ranks_end_together_for_a_plan_that_all_have(found: dict[str, Any]) -> None:
    """One looks elsewhere: rank 0 says once which, and training goes on. When it has the plan, all end in the step
    after the next accepted push, with one sentence, and can save a checkpoint before.
    """
    ranks = found["replaced"]
    assert all(of["had"] == [False] * 5 + [True] * 2 for of in ranks), ranks
    assert [of["saved"] for of in ranks] == [7] * 3
    assert {of["told"] for of in ranks} == {"a push was accepted, and PLAN is another plan now: start the ranks anew"}
    assert all(of["new"].startswith("new plan taken: s0d0 to s1d0 takes 4.00 ×") for of in ranks)
    assert [len(of["warned"]) for of in ranks] == [1, 0, 0] and "ranks [2] do not have" in ranks[0]["warned"][0]


def test_the_norm_is_the_whole_models(found: dict[str, Any]) -> None:
    """Gradients are clipped by the norm over all parts, which counts a shared parameter once, and then all step."""
    assert found["clipped"]["norm"] < 1e-12 and found["clipped"]["stepped"] < 1e-12


def test_dropout_and_evaluation_do_not_depend_on_the_plan(found: dict[str, Any]) -> None:
    """Three plans train alike with dropout; all ranks are told one loss; an evaluation has none, and leaves each
    module in its mode.
    """
    first, *others = found["dropout"]["losses"]
    assert all(of == pytest.approx(first, abs=1e-12) for ranks in others for of in ranks)
    assert all(len({tuple(of) for of in ranks}) == 1 for ranks in others), "ranks are told different losses"
    assert max(found["dropout"]["worst"]) < 1e-12
    assert first[2] != pytest.approx(first[0], abs=1e-3)


def test_a_checkpoint_fits_another_plan(found: dict[str, Any]) -> None:
    """Model, moments and the count of steps, loaded into three plans, with shared parameters: the next step is that of
    the job that went on. A checkpoint of the beginning changes nothing of what follows it.
    """
    of = found["saved"]
    assert max(of["worst"]) < 1e-12 and of["losses"] == pytest.approx([of["losses"][0]] * 5, abs=1e-12), of
    assert of["steps"] == [3, 3, 3, 3]


def check_account(of: dict[str, Any]) -> None:
    """Each category is within 5 % of the plan's, two ministages are gathered at most; the model is one process's."""
    account, plan = of["account"], of["plan"]
    assert of["worst"] < 1e-10, of
    for category in ("parameters", "gathered", "gradients", "optimizer", "activations", "peak"):
        assert account[category] == pytest.approx(plan[category], rel=0.05), (category, of)
    whole = 8 * 8 * 17 * 16 if of["device"] != "s0d0" else 0
    assert account["gathered"] <= min(2 / of["ministages"], 1) * whole, of
    assert bool(account["offloaded"]) == of["offload"], of


def test_offload_is_what_the_plan_says(found: dict[str, Any]) -> None:
    """Activations, parameters and optimizer state of four ministages on one rank and on two, byte by byte."""
    assert len(found["accounted"]) == 3
    for of in found["accounted"]:
        check_account(of)


@pytest.mark.skipif(DEVICE == "cpu", reason="it asks the allocator of an accelerator")
def test_an_allocator_holds_what_the_plan_says(found: dict[str, Any]) -> None:
    """Its peak is within 10 % of the plan's, and of the account's where copies are on their way that are over in the
    plan: those of one micro-batch. They run beside computation most of their time.
    """
    for of in found["allocated"]:
        assert of["allocator"] == pytest.approx(of["account"], rel=0.1), found["allocated"]
        assert of["plan"] <= of["account"] <= of["plan"] * (1.2 if of["offload"] else 1.0), found["allocated"]
        assert not of["offload"] or min(of["overlap"].values()) > 0.5, found["allocated"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_step_is_seen(found: dict[str, Any], which: int) -> None:
    """Seconds of each stage by work and by what is waited for add up to the step, with bytes by category. The trace has
    each device as planned and as measured, with the same computations, in the gear that was played; an evaluation
    later changes none of it.
    """
    ranks = found["seen"][which]
    assert all(isinstance(of, dict) for of in ranks), ranks
    causes, missing = set(IdleCause), ({IdleCause.TIED}, {IdleCause.COPY, IdleCause.NORM})[which]
    first = ranks[0]
    assert [bool(of["told"]) for of in ranks] == [True, False, False]
    assert [of["refused"] for of in ranks] == [first["refused"]] * 3
    before, unwritten = first["refused"]
    assert "expected a step before it" in before and "DIR/step.json/file: cannot be written" in unwritten
    for of in ranks:
        step_s = of["seconds"].pop("step")
        assert set(of["seconds"]) == {*DeviceWork, *causes - missing} - {DeviceWork.WEIGHT}
        assert sum(of["seconds"].values()) == pytest.approx(step_s, rel=1e-6)
    told = first["told"][0]
    assert len(told["stages"]) == 2 and 0 < told["idle"] < 1
    for stage in told["stages"]:
        assert sum([*stage["seconds"].values(), *stage["idle"].values()]) == pytest.approx(told["step_s"], rel=1e-6)
        assert set(stage["seconds"]) == set(DeviceWork) - {DeviceWork.WEIGHT} and set(stage["peak_bytes"]) == set(
            first["peaks"]
        )
        assert stage["peak_bytes"]["peak"] > stage["peak_bytes"]["activations"] > 0
    assert "gather" not in told["stages"][0]["idle"] and told["stages"][1]["idle"]["gather"] > 0
    trace = check_chrome(first["trace"])["traceEvents"]
    names = {event["pid"]: event["args"]["name"].split() for event in trace if event["name"] == "process_name"}
    played: dict[str, dict[str, set[str]]] = {"planned": {}, "measured": {}}
    for event in trace:
        if event["ph"] == "X" and re.fullmatch(r"\d+[FIBW]\d+", event["name"]):
            kind, device = names[event["pid"]]
            played[kind].setdefault(device, set()).add(event["name"])
    assert played["planned"] == played["measured"] and set(played["planned"]) == {"s0d0", "s1d0", "s1d1"}
    assert len(played["planned"]["s0d0"]) == (6 * 4, 4 * 2 * 2)[which] * 2
    assert [kind for kind, _ in names.values()] == ["planned", "measured"] * 3
    waited = {event["name"] for event in trace if event["ph"] == "X" and names[event["pid"]] == ["measured", "s1d1"]}
    assert waited > {"gather", "border", "1UNSHARD", "1REDUCE_GRAD", "1STEP"}


def test_a_device_that_is_too_small_is_told_before_the_first_step(found: dict[str, Any]) -> None:
    """All ranks are, in one sentence; where the plan has no sizes the account says so in the step."""
    told = found["too_small"]
    (start,) = set(told["start"])
    assert "ConfigError: plan: s1d0 needs 6.14e-05 GB of memory, and has 5.53e-05: plan again" in start
    assert told["enough"] == ["nothing"] * 3
    (grown,) = told["grow"]
    assert "OutOfDeviceMemory: s0d0: out of memory: " in grown and " of 6000 are left" in grown


@pytest.mark.slow
def test_shared_parameters_are_trained_as_one(found: dict[str, Any]) -> None:
    """Embedding and head, and two blocks, on two stages, on other shards, in one part, and in host memory, also where
    the norm is limited: gradients within 1e-12 of one process, three AdamW steps within 1e-10, and all copies equal to
    the bit.
    """
    assert found["tied"] == [True] * 6


REFUSED = {
    "ranks": "expected 1 ranks, one for each device, got 3",
    "no file": "expected a plan of `dips plan cluster`",
    "model": "it is for drawn, of 8 layers; `build` has 9",
    "tied, no optimizer": "blocks.5.inner.weight and blocks.0.inner.weight are one parameter: expected `optimizer`",
    "ties differ": "ranks 0 and 1 differ in the parameters that layers of `build` share: blocks.5.inner.weight",
    "BatchNorm": "layer norm: BatchNorm1d has statistics of the batch",
    "no layers": "expected the model's layers in order, as nn.Sequential or a generator, got Linear",
    "plans differ": "ranks 0 and 2 differ in the arguments of Pipeline: plan",
    "seeds differ": "ranks 0 and 1 differ in the arguments of Pipeline: seed",
    "a device twice": "expected one rank for each device, got two for s1d1",
    "no such device": "expected a device of s0d0, s1d0, s1d1, got s2d0",
    "norm": "max_grad_norm: expected a number above 0, got -1.0",
    "gears differ": "ranks 0 and 1 differ in the arguments of Pipeline: plan",
    "adapt differs": "ranks 0 and 1 differ in the arguments of Pipeline: adapt",
    "adapt": "adapt: expected one of off, gears, ask, auto, got 'on'",
    "no file to plan from": "plan: expected a file for adapt=ask, which writes another beside it, got a mapping",
    "orders of a gear": "pipeline.gears: expected 8 pieces of micro-batches of 4 samples, cut into 2, got 16",
    "batch on one rank": "expected inputs of 12 samples, 6 micro-batches of 2, got the shape [11, 5]",
    "no targets": "batch: expected targets, got none but -100",
    "calls differ": "ranks 0 and 1 differ in their calls: method",
    "inputs": "layer embed: its output's shape cannot be found",
    "checkpoint": "ConfigError: Pipeline.load_state_dict: the checkpoint has no 'embed.weight'",
    "then": "nothing",
    "frozen": "nothing",
    "unfrozen": "embed.weight: was unfrozen after Pipeline was made, and no optimizer has it",
    "frozen, shared": "nothing",
    "unfrozen, shared": "embed.weight: was unfrozen after Pipeline was made, and several layers share it",
    "NaN": "Diverged: the loss of step 1 is nan",
    "NaN, clipped": "Diverged: the norm of the gradient is nan in step 1, which was not taken",
    "closed": "this Pipeline is closed",
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_one_sentence_on_all_ranks(found: dict[str, Any], what: str) -> None:
    """Nobody waits for those who cannot; after a batch that was refused, a right one is trained on."""
    told = set(found["refused"][what])
    assert len(told) == 1 and REFUSED[what] in told.pop(), found["refused"][what]


def test_what_a_loss_or_an_optimizer_raises_is_no_rank_that_is_gone(found: dict[str, Any]) -> None:
    """As for a loss of another shape, or a device that is full when the optimizer makes its state."""
    assert found["mistaken"] == dict.fromkeys(("loss", "optimizer"), "RuntimeError: it does not fit")


def check_told(found: list[Any], but: int) -> None:
    """All ranks but one have one sentence, in time."""
    told = [of.split(" | ") for rank, of in enumerate(found) if rank != but]
    assert len({text for text, _ in told}) == 1 and "a step did not end: a rank is gone" in told[0][0], told
    assert all(float(waited) < WAITED_S for _, waited in told), told


# ---- slow ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_sixty_random_plans_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    """Up to 3 stages of 1 to 3 ranks, 1 to 4 ministages, every schedule; offload, shared parameters, dropout, the whole
    model's norm, evaluations, gears, and checkpoints that go on by another plan.
    """
    assert run(tmp_path, "drawn=60", within_s=1200)["drawn"] == 60


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_memory_is_what_the_plan_says(tmp_path: Path) -> None:
    """Each category of each rank within 5 % of the plan's, for 1 to 8 ministages, with offload and without; two are
    gathered at most, buffers of all-gathers included (Zorse, Table 2: 2/S of the stage), none after a step.
    What is offloaded comes back: parameters and losses are those of one process.
    """
    rows = run(tmp_path, "accounted")["accounted"]
    assert len(rows) == 4 * 3 * 3
    for of in rows:
        check_account(of)


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_offloaded_shards_are_those_of_one_process(tmp_path: Path) -> None:
    """Also where all parts step at the end, by the norm of the whole model; between two steps they lie in one place,
    and a checkpoint fits the same plan and one without offload.
    """
    of = run(tmp_path, "offloaded")["offloaded"]
    assert of["worst"] < 1e-9 and of["loaded"] < 1e-9 and of["stayed"], of


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_two_hundred_jobs_of_ministages_end_without_an_abort(tmp_path: Path) -> None:
    """Each rank ends by itself with exit code 0: no thread of gloo still holds a tensor when Python ends."""
    assert run(tmp_path, "repeated=200", within_s=1800)["repeated"] == 200


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_rank_may_die_or_stop_at_any_point(tmp_path: Path) -> None:
    """After each action of each rank's order, and before each kind of action there is; a rank that does not come is
    waited for as long as was said.
    """
    found = run(tmp_path, "a_rank_dies=1", "a_rank_stops", within_s=1400)
    assert len(found["a_rank_dies"]) > 150
    assert {kind for _, kind, _ in found["a_rank_dies"]} == {*Op, *BorderTransfer, "end"} - {Op.STEP}
    for dying, _, ranks in found["a_rank_dies"]:
        check_told(ranks, dying)
    check_told(found["a_rank_stops"], 1)


@pytest.mark.slow
@pytest.mark.timeout(530)
def test_a_pipeline_is_a_cluster_like_any_other(tmp_path: Path) -> None:
    """2 + 1 + 1 ranks with two ministages each and a plain cluster through master and slaves, the reference's number on
    every rank after every round. The last rank dies twice, in a forward and between two reductions: each time
    the job is started again, pulls, and its pushes count.
    """
    points = [tmp_path / f"fast.out.die.{after}" for after in (3, 24)]
    train_beside_a_plain_rank(tmp_path, "train_pipeline.py", points, steps=2, within_s=450)


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_pipeline_learns_under_di_ps(tmp_path: Path) -> None:
    """2 + 1 ranks whose ministages step by themselves push and pull every fourth step; all ranks are told one loss, and
    it falls. What layers share is one parameter of the run, also where it waits in host memory.
    """
    torch.manual_seed(0)
    named = {p: f"{name}.{key}" for name, l in reversed([*LEARNED.build()]) for key, p in l.named_parameters()}
    tensors = {name: p.detach().numpy() for p, name in named.items()}
    shared = {"outer": {"lr": 1.0, "momentum": 0.0, "step": "sgd"}, "penalty": {"gates": []}, "stop": {"versions": 8}}
    with harness.Run(tmp_path, tensors, shared=shared) as run:
        run.start_servers()
        words = ["learner", "60", "1", str(tmp_path / "learner.out")]
        command = [*harness.TORCHRUN, "3", str(HERE / "train_pipeline.py"), *words]
        run.wait(run.start_cluster("learner", command, steps=4), 200)
    told = [(tmp_path / f"learner.out.{rank}").read_text() for rank in range(3)]
    assert len(set(told)) == 1
    version, losses = json.loads(told[0])
    assert VersionId.parse(version).version == 8
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cut_link_changes_the_gear_and_not_what_is_learned() -> None:
    """Four ranks behind links of 100 Mbit/s, of which a tenth is left after five steps: the gear is kept while links
    are as planned, changed on all ranks when they are not, and the losses are those of a run without the adapter.
    """
    if reason := missing():
        pytest.skip(reason)
    gears, rows = make_chain_of(0.1, 0.2, fixed=0.2)
    with open_ranks() as (hosts, ranks):
        on, off = (play_cut(hosts, ranks, (gears, rows, 0.2), 1, adapt, 0.9, (5, 0, 12)) for adapt in (True, False))
    assert [step.gear for step in on[:5]] == [1] * 5 and on[-1].gear > 1, on
    assert "× the planned seconds; predicted" in on[-1].why
    assert [step.loss for step in on] == pytest.approx([step.loss for step in off], rel=1e-5)
    assert on[-1].loss < 0.99 * on[0].loss


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_link_that_lacks_is_left_by_a_new_plan(tmp_path: Path) -> None:
    """Three ranks under an agent that may restart nothing: the line between the first two stages falls to a tenth. With
    `auto` rank 0 finds a plan that goes around it, the ranks end after the next accepted push and start anew with it,
    which is no crash; steps then take less than half as long. `dips status` and the timeline show it.
    """
    torch.manual_seed(0)
    tensors = {
        f"{i}.{key}": p.detach().numpy() for i, l in enumerate(replanned.build()) for key, p in l.named_parameters()
    }
    shared = {"outer": {"lr": 1.0, "momentum": 0.0, "step": "sgd"}, "penalty": {"gates": []}}
    made = tmp_path / "plans"
    made.mkdir()
    (made / "profile.yaml").write_text(yaml.safe_dump(replanned.PROFILE))
    (made / "model.yaml").write_text(yaml.safe_dump(replanned.MODEL))
    words = ["plan", "cluster", str(made / "profile.yaml"), str(made / "model.yaml"), "--for", "pipeline"]
    assert CliRunner().invoke(cli, [*words, "-o", str(made / "plan.yaml")]).exit_code == 0

    def steps() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (made / "out").read_text().splitlines()] if (made / "out").exists() else []

    with harness.Run(tmp_path, tensors, shared=shared) as run:
        run.start_servers()
        command = [*harness.TORCHRUN, "3", str(HERE / "train_replanned.py"), str(made)]
        west = run.start_cluster("west", command, steps=2)
        status = ["status", "--config", str(run.file), "--json"]
        run.until(lambda: "new plan taken" in CliRunner().invoke(cli, status).output, 150, "the master shows it")
        run.until(lambda: len({tuple(step["stages"]) for step in steps()}) > 1, 250, "ranks with another plan")
        begun = len(steps())
        run.until(lambda: len(steps()) >= begun + 4, 60, "steps of the new plan")
        west.terminate()
        marks = list(timeline.read_marks(run.timeline("west")))
    played, new = steps(), yaml.safe_load((made / "plan.yaml").read_text())
    before, after = (list(each) for _, each in groupby(played, key=lambda step: step["stages"]))
    assert before[0]["stages"] == ["a", "b", "c"] and {"a", "b"} not in map(set, pairwise(after[0]["stages"])), after[0]
    assert "new plan taken: " in before[-1]["new_plan"] and before[-1]["version"] != before[0]["version"]
    took = [median(step["seconds"] for step in of[-3:]) for of in (before, after)]
    assert took[1] < 0.5 * took[0], took
    assert new["made_from"]["replans"] == 1 and set(after[-1]["spent"]) > {"forward", "backward", "border", "step"}
    kinds = [mark["kind"] for mark in marks]
    assert kinds.count("trainer_start") == 2 and kinds.count("pipeline") >= 4
    played_as = [mark for mark in marks if mark["kind"] == "pipeline"]
    assert all(stage["seconds"]["forward"] > 0 for mark in played_as for stage in mark["stages"])
    assert all(0 < mark["idle"] < 1 and len(mark["stages"]) == 3 for mark in played_as)
    told = [mark["text"] for mark in marks if mark["kind"] == "remark" and mark["subject"] == "inside"]
    assert told[0].startswith("new plan taken: ") and told[-1].startswith("a push was accepted"), told
    assert not [mark for mark in marks if mark["kind"] == "remark" and mark["subject"] == "crash"]
