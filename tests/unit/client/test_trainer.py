"""transformers' Trainer: what the callback sets, what it refuses, and the learning rate over the run."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from torch.optim.lr_scheduler import LambdaLR, StepLR

pytest.importorskip("transformers", reason="transformers is not installed: its callback is NOT tested here")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler

from dips.client import transformers as trainer_module
from dips.client.transformers import (
    NO_LIMIT,
    CollateStep,
    HeldParameters,
    OuterCallback,
    RunRate,
    checkpoint_path,
    find_coarse,
    lease_ranges,
    read_outer_state,
    write_outer_state,
)
from dips.errors import ConfigError
from dips.ids import VersionId
from dips.protocol.options import StopOptions
from tests.disk_calls import DiskCalls

TARGET = 1000  # tokens of the run


@pytest.fixture
def cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DIPS_AGENT", "DIPS_ALONE", "DIPS_CLUSTER_FILE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    keys = {"shared": {"run": "r", "data": {"ranges": 3}}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    return tmp_path / "cluster.yaml"


def training(**keys: Any) -> TrainingArguments:
    return TrainingArguments("out", report_to=[], use_cpu=True, **keys)


def outer_at(progress: float, tokens: int = TARGET) -> Any:
    shared = SimpleNamespace(stop=StopOptions(tokens=tokens, versions=9))
    return SimpleNamespace(progress=progress, lr_scale=1.0, shared=shared, version=VersionId(0, 0), accepted_pushes=0)


def taken_over(outer: Any, **keys: Any) -> tuple[RunRate, LambdaLR, torch.optim.Optimizer, str]:
    """A rate that has taken over the scheduler that the Trainer would make for ten steps."""
    args = training(learning_rate=2.0, **keys)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(10), 10)
    rate = RunRate(outer, args)
    return rate, scheduler, optimizer, rate.take_over(scheduler, optimizer)


def step(scheduler: LambdaLR, optimizer: torch.optim.Optimizer) -> float:
    optimizer.step()
    scheduler.step()
    return float(optimizer.param_groups[0]["lr"])


def test_the_trainers_curve_lies_over_the_runs_tokens() -> None:
    """Accepted ones and one's own since; max_steps, ten here, means nothing to it; a late cluster begins slowly."""
    outer = outer_at(0.2)
    rate, scheduler, optimizer, told = taken_over(outer, lr_scheduler_type="linear")
    assert told == "" and optimizer.param_groups[0]["lr"] == pytest.approx(1.6) == scheduler.get_last_lr()[0]
    rate.record_step(100)
    assert rate.pending and step(scheduler, optimizer) == pytest.approx(1.4)
    for _ in range(20):
        assert step(scheduler, optimizer) == pytest.approx(1.4)
    outer.progress, outer.version, outer.lr_scale = 0.5, VersionId(1, 1), 0.25
    rate.record_step(100)  # they are among those accepted, or gone
    assert not rate.pending and step(scheduler, optimizer) == pytest.approx(0.25)
    outer.lr_scale, outer.progress = 1.0, 1.5
    assert step(scheduler, optimizer) == 0.0


def test_what_others_train_hides_nothing_of_ones_own() -> None:
    """A question that begins no push tells of their tokens: the rate would have gone up, and the last steps of a
    Trainer with max_steps been lost.
    """
    outer = outer_at(0.2)
    rate = RunRate(outer, training())
    rate.record_step(100)
    outer.progress = 0.25
    rate.record_step(100)
    assert rate.pending and rate.share == pytest.approx(0.45)
    outer.progress, outer.accepted_pushes = 0.45, 1  # one's own; the pull behind it has failed
    rate.record_step(100)
    assert not rate.pending and rate.share == pytest.approx(0.45)


def test_a_warm_up_is_of_own_steps_or_a_share_of_the_run() -> None:
    """From 0, as the Trainer's own; never so that a run whose progress waits for the first push stands still."""
    _, scheduler, optimizer, _ = taken_over(outer_at(0.0), lr_scheduler_type="constant_with_warmup", warmup_steps=4)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert [step(scheduler, optimizer) for _ in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    rate, scheduler, optimizer, _ = taken_over(outer_at(0.0), lr_scheduler_type="constant", warmup_steps=0.2)
    rate.record_step(50)
    assert step(scheduler, optimizer) == pytest.approx(2.0 * 50 / 200)
    _, scheduler, optimizer, _ = taken_over(outer_at(0.0), lr_scheduler_type="constant", warmup_steps=1)
    assert step(scheduler, optimizer) == 2.0, "one step, not all of the run"


def test_a_rate_that_cannot_follow_is_told() -> None:
    """No token target, a curve of step counts, a scheduler of the script's own: the Trainer's stays, and says why."""
    outer = outer_at(0.5, tokens=0)
    outer.lr_scale = 0.5
    _, scheduler, optimizer, told = taken_over(outer, lr_scheduler_type="linear")
    assert "stop.tokens" in told and optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
    assert step(scheduler, optimizer) == pytest.approx(0.9)
    assert "inverse_sqrt counts steps" in taken_over(outer_at(0.5), lr_scheduler_type="inverse_sqrt")[3]
    for own in (lambda o: LambdaLR(o, lambda s: 1.0), lambda o: StepLR(o, 3)):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
        rate = RunRate(cast(Any, outer_at(0.5)), training())
        assert "the learning rate follows the Trainer's own steps" in rate.take_over(own(optimizer), optimizer)
        assert optimizer.param_groups[0]["lr"] == 2.0
    groups = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in range(2)], lr=2.0)
    own_of_one = LambdaLR(groups, [get_scheduler("constant", groups).lr_lambdas[0], lambda s: 1.0])
    rate = RunRate(cast(Any, outer_at(0.5)), training())
    assert "its scheduler is the script's own" in rate.take_over(own_of_one, groups)


def test_the_run_ends_the_training(cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without max_steps, or with the script's own; alone the Trainer's epochs stay."""
    control, state = TrainerControl(), TrainerState()
    for given, expected in ((-1, NO_LIMIT), (0, NO_LIMIT), (7, 7)):
        args = training(max_steps=given)
        OuterCallback(cluster_file).on_init_end(args, state, control)
        assert args.max_steps == expected
    with pytest.raises(ConfigError, match="save_steps: a share of max_steps"):
        OuterCallback(cluster_file).on_init_end(training(save_steps=0.1), state, control)
    for given in (-1, 0):
        with pytest.raises(ConfigError, match=r"Trainer\(callbacks="):
            OuterCallback(cluster_file).on_train_begin(training(max_steps=given), state, control)
    monkeypatch.setenv("DIPS_ALONE", "1")
    args = training()
    OuterCallback(cluster_file).on_init_end(args, state, control)
    assert args.max_steps == -1


@pytest.mark.parametrize("finished", [False, True])
def test_the_outer_state_lies_in_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """In the last one, too: `dips set` has the run go on, and the Trainer from there. It is durable."""
    args, state = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), TrainerState(global_step=7)
    (tmp_path / "checkpoint-7").mkdir()
    callback = OuterCallback()
    callback.on_save(args, state, TrainerControl())
    assert list((tmp_path / "checkpoint-7").iterdir()) == [], "it has not joined: the script only evaluates"
    callback.outer = cast(Any, SimpleNamespace(finished=finished, state_dict=lambda: {"format": 3}))
    disk = DiskCalls(tmp_path / "checkpoint-7", monkeypatch)
    callback.on_save(args, state, TrainerControl())
    aside, file = ".unfinished-outer_state_0.pt", "outer_state_0.pt"
    assert disk.calls == [f"fsync {aside}", f"rename {aside} {file}", "fsync ."]
    assert read_outer_state(checkpoint_path(args, state)) == ({"format": 3}, {})


class FakeOuter(SimpleNamespace):
    """An outer loop that has pulled a version, and whose lazy install writes it over the model when it is completed."""

    def __init__(self, model: torch.nn.Linear, *_: Any) -> None:
        super().__init__(**vars(outer_at(0.5)), finished=False, resumed=True)
        self.model, self.remarks, self.did, self.pending = model, list[str](), list[Any](), True
        torch.nn.init.constant_(model.weight, 2.0)

    def install(self) -> None:
        if self.pending:
            torch.nn.init.constant_(self.model.weight, 2.0)
        self.pending = False

    def step(self, **given: Any) -> None:
        self.did.append(given)

    def load_state_dict(self, state: Any) -> None:
        self.install()
        self.did.append((state, self.model.weight.unique().item()))

    def remark(self, text: str) -> None:
        self.remarks.append(text)


@pytest.mark.parametrize("resumed", [True, False])
def test_a_checkpoint_is_put_over_the_version_that_was_pulled(tmp_path: Path, resumed: bool) -> None:
    """Which is complete before, or it would come over the checkpoint. Without the outer state the version stays."""
    args, state = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), TrainerState(global_step=7)
    model, callback = torch.nn.Linear(2, 2).requires_grad_(True), OuterCallback()
    torch.nn.init.ones_(model.weight)
    held = HeldParameters(model)
    outer = FakeOuter(model)
    outer.resumed = resumed
    with pytest.warns(UserWarning, match="the checkpoint was saved without the outer loop"):
        callback._resume(cast(Any, outer), held, args, state)
    assert len(outer.remarks) == 1 and not outer.did and bool((model.weight == 2.0).all())
    (tmp_path / "checkpoint-7").mkdir()
    write_outer_state(checkpoint_path(args, state), {"format": 3}, {"range": 4})
    callback._resume(cast(Any, outer), held, args, state)
    assert outer.did == [({"format": 3}, 1.0)] and len(outer.remarks) == 1
    assert callback.resumed_feed == ({"range": 4} if resumed else {}), "a version that was pulled begins anew"


def test_buffers_of_a_checkpoint_are_put_back() -> None:
    """A pull replaces those that the run shares, too."""
    model = torch.nn.BatchNorm1d(2)
    held = HeldParameters(model)
    for tensor in model.state_dict().values():
        tensor.fill_(7)
    held.put_back()
    values = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    assert values.pop("num_batches_tracked") == 0 and values.pop("running_mean") == [0.0, 0.0] == values.pop("bias")
    assert set(map(tuple, values.values())) == {(1.0, 1.0)}


def test_a_checkpoint_of_fewer_ranks_is_pulled_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has no file of its own: none puts the checkpoint back, or waits for that one to resume."""
    asked = list[bool]()

    def lacks(holds: bool) -> bool:
        asked.append(holds)
        return False

    monkeypatch.setattr(trainer_module, "check_all_ranks", lacks)
    args, state = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), TrainerState(global_step=7)
    (tmp_path / "checkpoint-7").mkdir()
    write_outer_state(checkpoint_path(args, state), {"format": 3}, {})
    outer = FakeOuter(model := torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"outer_state_RANK.pt is not there on each rank.* by fewer ranks"):
        OuterCallback()._resume(cast(Any, outer), HeldParameters(model), args, state)
    assert asked == [True] and not outer.did and bool((model.weight == 2.0).all())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_joins_and_says_what_is_wrong(
    cluster_file: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, rank: int
) -> None:
    """Rank 0 as warnings, and in one remark; it counts tokens from where the Trainer is, and resumes what it loaded."""
    outers, resumed = list[FakeOuter](), list[int]()

    def join(*given: Any) -> FakeOuter:
        outers.append(FakeOuter(*given))
        outers[-1].finished = len(outers) > 1
        return outers[-1]

    monkeypatch.setattr("dips.client.transformers.OuterLoop", join)
    monkeypatch.setattr(OuterCallback, "_resume", lambda self, outer, held, args, state: resumed.append(1))
    monkeypatch.setenv("RANK", str(rank))
    model = torch.nn.Linear(2, 2).bfloat16()
    for step in (0, 7):
        args, state = training(max_steps=9, learning_rate=2.0), TrainerState(global_step=step)
        args.include_num_input_tokens_seen = "no"
        state.num_input_tokens_seen, state.logging_steps = 100, 1
        optimizer, callback = torch.optim.SGD(model.parameters(), lr=2.0), OuterCallback(cluster_file)
        scheduler, control = StepLR(optimizer, 3), TrainerControl()
        callback.on_train_begin(args, state, control, model, optimizer, scheduler)
        assert control.should_training_stop == outers[-1].finished
        assert args.include_num_input_tokens_seen == "all" and callback._tokens == 100
        assert resumed == [1] * (step > 0)
    told = {str(warned.message).partition(",")[0] for warned in recwarn if issubclass(warned.category, UserWarning)}
    expected = {"the learning rate follows the Trainer's own steps", "the run has data ranges"}
    assert told == (expected if rank == 0 else set())
    (remark,) = outers[0].remarks
    parts = ("StepLR has no curve", "the run has data ranges", "weight has 16 bits")
    assert all(remark.count(part) == 1 for part in parts)


def test_a_step_is_passed_on_with_its_tokens_and_a_logged_loss() -> None:
    """The tokens since the last one, and a loss once; the last step of the run ends the training."""
    args, callback, state, control = training(), OuterCallback(), TrainerState(), TrainerControl()
    outer = FakeOuter(torch.nn.Linear(2, 2))
    callback.outer, callback._rate = cast(Any, outer), RunRate(cast(Any, outer), args)
    for seen, logs in ((50, {"loss": 2.0}), (80, {"eval_loss": 1.0}), (90, None)):
        state.num_input_tokens_seen = seen
        callback.on_log(args, state, control, logs)
        assert not control.should_training_stop
        outer.finished = seen == 90
        callback.on_step_end(args, state, control)
    assert outer.did == [{"tokens": 50, "loss": 2.0}, {"tokens": 30, "loss": None}, {"tokens": 10, "loss": None}]
    assert callback._rate.pending and control.should_training_stop


@pytest.mark.parametrize(("texts", "warned", "remarks"), [([""], "", []), ([""], "b", ["b"]), (["a"], "", ["a"])])
def test_a_remark_is_of_what_there_is(texts: list[str], warned: str, remarks: list[str]) -> None:
    """An empty one would be a line of `dips status`."""
    outer = FakeOuter(torch.nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        OuterCallback()._tell(cast(Any, outer), texts, warned)
    assert outer.remarks == remarks


@pytest.mark.parametrize(("strategy", "saves"), [("steps", True), ("no", False)])
def test_the_end_of_the_run_ends_the_training_once(strategy: str, saves: bool) -> None:
    """With a checkpoint, as the Trainer has one at its max_steps: `dips set` may have the run go on."""
    args, callback, control = training(save_strategy=strategy), OuterCallback(), TrainerControl()
    callback.outer = cast(Any, FakeOuter(torch.nn.Linear(2, 2)))
    callback.on_epoch_end(args, TrainerState(), control)
    assert not control.should_training_stop and not control.should_save
    callback.outer.finished = True  # type: ignore[union-attr,misc]
    callback.on_epoch_end(args, TrainerState(), control)
    assert control.should_training_stop and control.should_save == saves
    control = TrainerControl(should_save=True)
    callback.on_epoch_end(args, TrainerState(), control)
    assert not control.should_training_stop, "it was told"
    callback._over = False
    callback.on_epoch_end(args, TrainerState(), control)
    assert control.should_save, "the Trainer saves at this step anyway"


def test_without_an_optimizer_no_outer_state_is_saved(tmp_path: Path) -> None:
    """`save_only_model`: nothing can be resumed from it, so no rank asks the agent what to save."""
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, save_only_model=True)
    (tmp_path / "checkpoint-7").mkdir()
    callback = OuterCallback()
    callback.outer = cast(Any, SimpleNamespace(finished=False))  # it has no state_dict
    callback.on_save(args, TrainerState(global_step=7), TrainerControl())
    assert list((tmp_path / "checkpoint-7").iterdir()) == []


@pytest.mark.parametrize("pace", [{"steps": 8}, {"aligned": 8}])
def test_a_loss_that_is_logged_too_seldom_is_told(cluster_file: Path, pace: dict[str, int]) -> None:
    """Most pushes would carry none; a Trainer that logs at each push is fine."""
    cluster_file.write_text(yaml.safe_dump({**yaml.safe_load(cluster_file.read_text()), "pace": pace}))
    state = TrainerState(logging_steps=9)
    (said, _) = OuterCallback(cluster_file)._find_faults(training(logging_steps=9), state)
    assert said.startswith("the Trainer logs its loss every 9 steps and a push comes after 8")
    state.logging_steps = 8
    callback = OuterCallback(cluster_file)
    assert len(callback._find_faults(training(logging_steps=8), state)) == 1
    callback.loader = cast(Any, "leased")
    assert callback._find_faults(training(logging_steps=8), state) == []


def test_16_bits_without_masters_are_told() -> None:
    """As transformers' dtype="auto" loads them; adapters in float32 on such a base are fine."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    assert find_coarse(model).startswith(
        "1.weight has 16 bits and no fp32 master: load the model with dtype=torch.float32"
    )
    model[1].requires_grad_(False)
    assert find_coarse(model) == ""


def test_a_trainer_of_one_rank_among_several_is_refused(cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it joins anything, with what to write."""
    args = training(max_steps=3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="the job has 2 ranks, the Trainer trains on 1 of them"):
        OuterCallback(cluster_file).on_train_begin(args, TrainerState(), TrainerControl())


def test_a_step_always_has_all_its_micro_batches() -> None:
    """Fewer rows than usual, as in the last step of the data: the Trainer steps only after as many as it waits for."""
    collate = CollateStep(list, 3)
    assert collate([1, 2, 3, 4, 5, 6]) == [[1, 2], [3, 4], [5, 6]]
    assert collate([1, 2, 3, 4, 5]) == [[1], [2, 3], [4, 5]]
    assert collate([1, 2]) == [[1], [2], [1]]


def test_rows_are_dealt_and_a_script_alone_trains_them(cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row once, two micro-batches a step; too small ranges, and ranks that share a batch, are refused."""
    monkeypatch.setenv("DIPS_ALONE", "1")

    class Model(torch.nn.Module):
        main_input_name = "x"

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.extend(x[:, 0].int().tolist())
            calls.append(len(x))
            return {"loss": self.linear(x).square().mean()}

    def trainer_of(rows: Any) -> Trainer:
        args = training(
            per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="no", disable_tqdm=True
        )
        callback = OuterCallback(cluster_file)
        trainer = Trainer(model=Model(), args=args, train_dataset=rows, callbacks=[callback])
        lease_ranges(trainer, callback)
        return trainer

    seen, calls = list[int](), list[int]()
    trainer = trainer_of([{"x": torch.tensor([float(i), 1.0])} for i in range(24)])
    assert trainer.get_train_dataloader().state_dict() == {}, "before its first row"  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a Trainer on CPUs
        assert trainer.train().global_step == 6
        assert sorted(seen) == list(range(24)) and trainer.state.num_input_tokens_seen == 48
        assert calls == [2] * 12
        seen.clear()
        trainer = trainer_of([{"x": torch.tensor([float(i), 1.0])} for i in range(24)])
        stops = TrainerControl(should_epoch_stop=True)
        trainer.add_callback(type("Stops", (TrainerCallback,), {"on_step_end": lambda *_, **__: stops}))
        trainer.train()
        assert sorted(seen) == list(range(24)), "the next epoch goes on in the range that is begun"
        with pytest.raises(ConfigError, match=r"11 rows in .* are fewer than one optimizer step takes, 4"):
            trainer_of([{"x": torch.zeros(2)}] * 11).train()
        together = trainer_of([{"x": torch.zeros(2)}] * 24)
        monkeypatch.setattr(type(together.accelerator), "parallelism_config", SimpleNamespace(non_data_parallel_size=2))
        with pytest.raises(ConfigError, match="got 2 ranks that compute one batch together"):
            together.get_train_dataloader()


@pytest.mark.parametrize(("finished", "best", "pushes"), [(False, False, 1), (True, False, 0), (False, True, 0)])
def test_the_last_steps_are_pushed_before_the_trainer_leaves(
    cluster_file: Path, finished: bool, best: bool, pushes: int
) -> None:
    """Unless the run is over, or the model that is left is an older one. A training that never began leaves nothing."""
    did = list[str]()
    outer = outer_at(0.5)
    outer.finished, outer.push, outer.close = finished, lambda: did.append("push"), lambda: did.append("close")
    args, callback = training(), OuterCallback(cluster_file)
    args.load_best_model_at_end = best
    callback.on_train_end(args, TrainerState(), TrainerControl())
    callback.outer, callback._rate = outer, RunRate(outer, args)
    callback._rate.record_step(100)
    callback.on_train_end(args, TrainerState(), TrainerControl())
    assert did == ["push"] * pushes + ["close"] and callback.outer is None
    callback.on_train_end(args, TrainerState(), TrainerControl())
    assert did[-1:] == ["close"] and did.count("close") == 1, "once"
