"""The hooks for Megatron-LM's and torchtitan's own loops, by their calling conventions, on a script that is alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dips.client import OuterLoop
from dips.client.megatron import OuterPretrain
from dips.client.torchtitan import LeasedTitanLoader, check_experts, join_trainer
from dips.client.torchtitan import main as titan_main
from dips.data.build import BuildPlan, build_dataset, parse_source
from dips.errors import ConfigError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIPS_CLUSTER_FILE", "DIPS_AGENT", "DIPS_AGENT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIPS_ALONE", "1")


class Training(SimpleNamespace):
    """What the hook meets in megatron.training.training: the loop calls by these names, and its loop's arguments."""

    def __init__(self, saves: Path) -> None:
        self.__name__ = "megatron.training.training"
        self.args = SimpleNamespace(micro_batch_size=2, data_parallel_size=3, seq_length=5, save=saves, load=saves)
        self.seen: list[Any] = []
        self.loaded = 0
        self.train_step: Any = lambda f, data, model, optimizer, scheduler, config, schedule, iteration=None: (
            {"lm loss": torch.tensor(2.0)}, 0, False, False, 0, 1.0, 0, 0,
        )  # fmt: skip
        self.load_checkpoint: Any = lambda model, optimizer, scheduler, **_: (self.loaded, 0)
        self.save_checkpoint: Any = lambda iteration, *_, **__: (saves / f"iter_{iteration:07d}").mkdir(parents=True)

    def get_args(self) -> Any:
        return self.args

    def get_num_microbatches(self) -> int:
        return 4


def step(training: Training, model: nn.Module, optimizer: Any) -> tuple[Any, ...]:
    """As the loop of Megatron-LM calls it."""
    found: tuple[Any, ...] = training.train_step(None, None, [model], optimizer, None, None, None, iteration=0)
    return found


@pytest.fixture(params=[False, True], ids=["alone", "in a process group"])
def process_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the hook asks other ranks, asked of one."""
    if request.param:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if request.param:
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_megatrons_steps_are_counted_saved_and_resumed(tmp_path: Path) -> None:
    """Tokens of all data-parallel ranks; its functions come back; a removed checkpoint's state goes with it."""
    model, training = nn.Linear(2, 2), Training(tmp_path / "saves")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = training.train_step
    with OuterPretrain(training=training, learning_rate=lambda _: 0.25) as hook:
        assert step(training, model, optimizer)[3] is False
        assert optimizer.param_groups[0]["lr"] == 0.25 and hook.outer is not None
        counted: list[tuple[int, float]] = []
        hook.outer.step = lambda *, tokens, loss: counted.append((tokens, float(loss)))  # type: ignore[method-assign]
        step(training, model, optimizer)
        assert counted == [(4 * 2 * 3 * 5, 2.0)]
        training.save_checkpoint(7, [model], optimizer)
        (tmp_path / "saves" / "iter_0000007").rmdir()
        training.save_checkpoint(9, [model], optimizer)
        assert [path.name for path in (tmp_path / "saves" / "dips").iterdir()] == ["iter_0000009"]
    assert training.train_step is before
    training.loaded = 9
    with OuterPretrain(training=training) as hook:
        assert training.load_checkpoint([model], optimizer, None) == (9, 0)
        assert hook.outer is not None and hook.outer.inner_steps == 1, "of the checkpoint"


def test_megatrons_first_step_has_the_runs_learning_rate(tmp_path: Path) -> None:
    """After each start one step was taken with the rate of Megatron's scheduler, which knows nothing of the run."""
    model, training, rates = nn.Linear(2, 2), Training(tmp_path), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = training.train_step

    def train_step(*words: Any, **options: Any) -> Any:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] = 7.0  # its scheduler's
        return before(*words, **options)

    training.train_step = train_step
    with OuterPretrain(training=training, learning_rate=lambda _: 0.25):
        step(training, model, optimizer)
        step(training, model, optimizer)
    assert rates == [0.25, 0.25] and optimizer.param_groups[0]["lr"] == 0.25


def test_megatrons_outer_state_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut it could be empty beside a whole checkpoint of Megatron's, and each start ended at it."""
    synced, fsync = set[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file)))
    model, training = nn.Linear(2, 2), Training(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with OuterPretrain(training=training):
        step(training, model, optimizer)
        training.save_checkpoint(7, [model], optimizer)
    file = tmp_path / "dips" / "iter_0000007" / "rank_00000.pt"
    assert {path.stat().st_ino for path in (file, file.parent, *file.parent.parents[:2])} <= synced
    assert list(file.parent.iterdir()) == [file]


def test_a_checkpoint_without_outer_state_is_pulled_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its θ is not the run's; one that was not there at all is none, and a teacher's is none of ours."""
    pulls: list[bool] = []
    monkeypatch.setattr(OuterLoop, "pull", lambda self: pulls.append(True))
    model, training = nn.Linear(2, 2), Training(tmp_path / "saves")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with OuterPretrain(training=training) as hook:
        training.load_checkpoint([model], None, None)
        assert hook.outer is None
        training.load_checkpoint([model], optimizer, None)
        assert pulls == []
    for iteration in (3, 0):  # with --finetune, and of a release, Megatron counts from 0
        training.load_checkpoint = lambda models, *_, n=iteration: (models[0].weight.data.fill_(n), (n, 0))[1]
        with OuterPretrain(training=training):
            training.load_checkpoint([model], optimizer, None)
    assert pulls == [True, True]


def test_a_finished_run_ends_megatrons_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left at once, and no outer state is saved: nothing could be resumed from it."""
    closed: list[bool] = []
    monkeypatch.setattr(OuterLoop, "finished", True)
    model, training = nn.Linear(2, 2), Training(tmp_path / "saves")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with OuterPretrain(training=training) as hook:
        training.load_checkpoint([model], optimizer, None)
        assert hook.outer is not None
        hook.outer.close = lambda: closed.append(True)  # type: ignore[method-assign]
        assert step(training, model, optimizer)[3] is True and closed == [True]
        training.save_checkpoint(7, [model], optimizer)
        assert not (tmp_path / "saves" / "dips").exists()


@pytest.mark.parametrize("stepped", [True, False])
def test_a_loop_that_exits_leaves_the_run_only_if_it_trained(tmp_path: Path, stepped: bool) -> None:
    """`sys.exit()` is how Megatron ends after --exit-interval, and how it gives up on a checkpoint."""
    model, training = nn.Linear(2, 2), Training(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    closed, failed = list[bool](), list[Any]()
    hook = OuterPretrain(training=training)

    def pretrain() -> None:
        with hook:
            training.load_checkpoint([model], optimizer, None)
            assert hook.outer is not None
            hook.outer.close = lambda: closed.append(True)  # type: ignore[method-assign]
            hook.outer.__exit__ = lambda kind, *_: failed.append(kind)  # type: ignore[method-assign]
            if stepped:
                step(training, model, optimizer)
            sys.exit()

    with pytest.raises(SystemExit):
        pretrain()
    assert (closed, failed) == (([True], []) if stepped else ([], [SystemExit]))


def test_another_module_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="expected the functions of Megatron-LM, has no load_checkpoint"):
        OuterPretrain(training=SimpleNamespace(__name__="mine", train_step=print)).__enter__()


class TitanTrainer:
    """What the hook meets in a torchtitan Trainer: its attributes, and two methods."""

    def __init__(self) -> None:
        self.model_parts = [nn.Linear(2, 2)]
        self.parallel_dims = SimpleNamespace(dp_replicate=2, dp_shard=3, cp=1, pp_enabled=False)
        self.metrics_processor = SimpleNamespace(log=lambda step, loss, *_: None)
        self.checkpointer = SimpleNamespace(enable=True, states={}, load=lambda step=-1: step != -1)
        self.optimizers = [torch.optim.SGD(self.model_parts[0].parameters(), 1.0)]
        self.dataloader: Any = None
        self.ntokens_seen, self.gradient_accumulation_steps = 0, 1
        self.logs = self.goes_on = True

    def train_step(self, batches: Any) -> None:
        self.ntokens_seen += 7
        if self.logs:
            self.metrics_processor.log(1, 3.5)

    def should_continue_training(self) -> bool:
        return self.goes_on


def test_torchtitans_steps_are_counted_and_its_checkpoints_carry_the_outer_state() -> None:
    """7 tokens of each of 6 ranks; the state goes through the checkpointer's states and comes back after its load."""
    trainer = TitanTrainer()
    outer, counted = join_trainer(trainer, learning_rate=lambda _: 0.5), list[Any]()
    trainer.train_step(None)
    assert trainer.should_continue_training() and trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    held = trainer.checkpointer.states["dips"]
    saved, own = held.state_dict(), outer.step
    outer.step = lambda *, tokens, loss: (counted.append((tokens, loss)), own(tokens=tokens))  # type: ignore[method-assign]
    trainer.train_step(None)
    trainer.logs = False
    trainer.train_step(None)
    assert counted == [(7 * 6, 3.5), (7 * 6, None)] and outer.inner_steps == 3
    held.load_state_dict(saved)
    assert trainer.checkpointer.load(3) and outer.inner_steps == 1
    assert held.state == {}, "it may be as large as the rank's shard"
    assert not trainer.checkpointer.load()
    mine = torch.ones(2)
    held.load_state_dict({"text": "{}", "mine": mine})
    assert held.state == {"mine": mine}, "a rank's own tensors travel beside the text"


def test_a_titan_checkpoint_without_outer_state_is_pulled_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its θ is not the run's; where none is loaded there is nothing to pull over."""
    pulls, trainer = list[bool](), TitanTrainer()
    monkeypatch.setattr(OuterLoop, "pull", lambda self: pulls.append(True))
    join_trainer(trainer)
    assert not trainer.checkpointer.load() and pulls == []
    assert trainer.checkpointer.load(3) and pulls == [True]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("now", [{"owed.rank0": 6}, {"owed.rank0": 4, "owed.rank1": 4}])
def test_a_titan_checkpoint_of_other_ranks_is_pulled_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: dict[str, int]
) -> None:
    """What each rank owes has another size, or is missing, which torch refuses: the model is loaded all the same. What
    cannot be loaded for another reason is not.
    """
    pulls, remarks, trainer, owed = list[bool](), list[str](), TitanTrainer(), {"owed.rank0": 4}
    monkeypatch.setattr(OuterLoop, "pull", lambda self: pulls.append(True))
    monkeypatch.setattr(OuterLoop, "remark", lambda self, text: remarks.append(text))
    monkeypatch.setattr(OuterLoop, "state_dict", lambda self: {name: torch.zeros(n) for name, n in owed.items()})
    place: dict[str, Any] = {"checkpoint_id": tmp_path / "saved", "no_dist": True}
    weight = torch.ones(3)

    def load(step: int) -> bool:
        dcp.load({"weight": weight, **trainer.checkpointer.states}, **place)
        return True

    trainer.checkpointer.load = load
    join_trainer(trainer)
    dcp.save({"weight": torch.full((3,), 2.0), **trainer.checkpointer.states}, **place)
    owed |= now
    assert trainer.checkpointer.load(3) and bool((weight == 2.0).all()) and pulls == [True]
    assert "owed.rank" in remarks[0] and list(trainer.checkpointer.states) == ["dips"], "it is saved from now on"
    weight = torch.ones(5)
    with pytest.raises(CheckpointException, match="weight"):
        trainer.checkpointer.load(3)
    assert len(pulls) == 1


def test_torchtitans_loop_ends_with_the_run_or_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TitanTrainer()
    join_trainer(trainer)
    trainer.goes_on = False
    assert not trainer.should_continue_training()
    trainer.goes_on = True
    monkeypatch.setattr(OuterLoop, "finished", True)
    assert not trainer.should_continue_training()


class TitanProgram(TitanTrainer):
    """What `main` meets in torchtitan: a trainer that its configuration builds, in the job's process group."""

    def __init__(self, calls: list[str], raises: bool) -> None:
        super().__init__()
        self._calls, self._raises = calls, raises
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def train(self) -> None:
        self._calls.append("train")
        if self._raises:
            raise RuntimeError("a layer's")

    def close(self) -> None:
        self._calls.append("close")
        assert dist.is_initialized(), "its checkpointer waits for other ranks"


@pytest.mark.parametrize("ends", ["", "train", "join"])
def test_torchtitans_command_line_ends_in_order(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Without a line of torchtitan's log nobody sees a step; a loop that stays open holds up the run's other clusters,
    a trainer the checkpoint that it still writes, a process group the other ranks. What raises leaves the loop to the
    agent, which sees a crash.
    """
    calls, close = list[str](), OuterLoop.close
    monkeypatch.setattr(OuterLoop, "close", lambda self: (calls.append("leave"), close(self)))
    modules = {name: ModuleType(name) for name in ("torchtitan", "torchtitan.config", "torchtitan.tools.logging")}
    modules["torchtitan.tools"] = ModuleType("torchtitan.tools")
    modules["torchtitan.tools.logging"].init_logger = lambda: calls.append("log")  # type: ignore[attr-defined]
    built = lambda: TitanProgram(calls, ends == "train")  # noqa: E731
    parsed = SimpleNamespace(parse_args=lambda: SimpleNamespace(build=built))
    modules["torchtitan.config"].ConfigManager = lambda: parsed  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    if ends == "join":
        monkeypatch.setenv("DIPS_CLUSTER_FILE", "/nowhere/cluster.yaml")
    with pytest.raises((RuntimeError, ConfigError), match=r"a layer|/nowhere") if ends else nullcontext():
        titan_main()
    began = ["log", *([] if ends == "join" else ["train"])]
    assert calls == [*began, *([] if ends else ["leave"]), "close"] and not dist.is_initialized()


def make_titan_data(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a data set of 600 tokens in 2 ranges, and the cluster file of a run that leases them; return the set."""
    np.save(directory / "t.npy", np.arange(600, dtype=np.uint16))
    np.save(directory / "t.documents.npy", np.arange(0, 600, 50))
    build_dataset(BuildPlan((parse_source(f"t={directory}/t.npy"),), directory / "set", 2, 0))
    keys = {"shared": {"run": "r", "data": {"ranges": 2}}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (directory / "cluster.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.setenv("DIPS_CLUSTER_FILE", str(directory / "cluster.yaml"))
    return directory / "set"


def test_torchtitan_trains_on_leased_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, positions, and labels one token on; a loader that is loaded goes on in the middle of its range."""
    data = make_titan_data(tmp_path, monkeypatch)

    def join() -> Any:
        torch.manual_seed(0)  # a checkpoint is of the model that holds it
        trainer, loader = TitanTrainer(), LeasedTitanLoader(data, workers=0)
        trainer.dataloader = loader.build(dp_world_size=1, dp_rank=0, seq_len=16, local_batch_size=2)
        return loader, join_trainer(trainer)

    (first, outer), (again, resumed) = join(), join()
    batches = iter(first)
    inputs, labels = next(batches)
    assert inputs["input"].shape == labels.shape == (2, 16)
    assert torch.equal(inputs["input"][:, 1:], labels[:, :-1]) and inputs["positions"][1].tolist() == list(range(16))
    outer.step(tokens=32)
    again.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match="expected 99 samples, as in the checkpoint"):
        again.load_state_dict({**first.state_dict(), "of": 99})
    resumed.load_state_dict(json.loads(json.dumps(outer.state_dict())))
    assert torch.equal(next(iter(again))[1], next(batches)[1])


def test_torchtitans_last_step_has_all_its_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan drops a step for which its micro-batches do not suffice, and what they held counted as trained."""
    trainer, loader = TitanTrainer(), LeasedTitanLoader(make_titan_data(tmp_path, monkeypatch), workers=0)
    trainer.gradient_accumulation_steps = 5
    trainer.dataloader = loader.build(dp_world_size=1, dp_rank=0, seq_len=16, local_batch_size=2)
    outer, batches, steps = join_trainer(trainer), iter(loader), list[list[int]]()
    while step := [len(labels) for _, labels in islice(batches, 5)]:
        steps.append(step)
        outer.step(tokens=16)
    assert steps == [[2] * 5] * 3 + [[2, 1, 1, 1, 1]], "36 sequences of two ranges: 30 in whole steps, 6 in the last"


def test_torchtitans_plain_experts_are_refused() -> None:
    """A part of the experts as a plain tensor: each rank's would be taken for all of them."""
    experts = nn.Module()
    experts.num_experts = 8
    experts.w1 = nn.Parameter(torch.zeros(4, 2, 2))
    model = nn.ModuleDict({"experts": experts})
    with pytest.raises(ConfigError, match=r"experts\.w1: this rank holds 4 of 8 experts as a plain tensor"):
        check_experts(model)
    trainer = TitanTrainer()
    trainer.model_parts = [model]
    with pytest.raises(ConfigError, match="as a plain tensor"):
        join_trainer(trainer)
    check_experts(nn.ModuleDict({"router": experts}))
    experts.w1, experts.b1 = nn.Parameter(torch.zeros(8, 2, 2)), nn.Parameter(torch.zeros(4, 2))
    check_experts(model)
