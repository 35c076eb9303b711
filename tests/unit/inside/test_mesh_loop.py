"""`MeshLoop` on a mesh of one rank: when a sync begins, who completes it, and what is given back."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from structlog.testing import capture_logs
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dips.client import OuterLoop
from dips.client.parallel.devices import Device
from dips.config import Shared
from dips.errors import ConfigError, LocalProtocolError, Unavailable
from dips.inside.mesh import MeshLoop
from dips.inside.mesh.loop import SyncReport
from dips.inside.mesh.sync import LayerShard
from dips.outer_step import OuterStep

HALF = {"lr": 0.5, "momentum": 0.0, "step": "sgd"}  # a sync goes half of the way that was trained
NESTEROV = {"lr": 0.5, "momentum": 0.9, "step": "nesterov"}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("sync", "shard"))
    dist.destroy_process_group()


def rules(outer: dict[str, Any] = HALF) -> Shared:
    return Shared.model_validate({"run": "r", "outer": outer, "penalty": {"gates": []}})


class Scaled(nn.Module):
    """Two blocks, and a parameter of the root, which keeps it gathered after a forward without a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 1)]), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def make_model(mesh: DeviceMesh) -> nn.Module:
    model = Scaled()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    return fully_shard(model, mesh=mesh["shard"])


class MeshTrained:
    """A model, its optimizer and its loop; a step of it moves each parameter by 1."""

    def __init__(self, mesh: DeviceMesh, outer: dict[str, Any] = HALF, **options: Any) -> None:
        self.model = make_model(mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.loop = MeshLoop(self.model, mesh, self.optimizer, rules(outer), **options)
        self.start = self.values()

    def train(self) -> None:
        """Step the optimizer by gradients of −1."""
        for p in self.optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p).neg()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.train()
        self.loop.step(tokens=2, loss=1.0)

    def values(self) -> torch.Tensor:
        held = (p for shard in self.loop._sync.shards for p in shard.group.reads.values())
        return torch.cat([p.detach().full_tensor().flatten() for p in held])

    def moved(self) -> float:
        """Return how far every parameter is from where it started."""
        (far,) = {round(float(each), 4) for each in self.values() - self.start}
        return far


def attempt(call: Callable[[], Any]) -> str:
    """Return what a call is refused with; "" if it is not."""
    try:
        call()
    except ConfigError as refused:
        return str(refused)
    return ""


def forward(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model(torch.ones(1, 2))
    return made


def test_a_sync_is_carried_out_by_whoever_reads_first(mesh: DeviceMesh) -> None:
    """Begun by the step that is due, it is complete after a forward, a save or a load of the model, another step of its
    optimizer, `is_synced`, `sync` and `close`; another optimizer's step is none of its business.
    """
    of, other = MeshTrained(mesh, steps=2), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    saved = {name: tensor.clone() for name, tensor in of.model.state_dict().items()}
    readers: dict[str, tuple[Callable[[], Any], float]] = {  # with how far the parameters then are from the start
        "forward": (lambda: forward(of.model), 1.0),
        "save": (lambda: of.model.state_dict(), 2.0),
        "load": (lambda: of.model.load_state_dict(saved), 0.0),
        "optimizer": (lambda: of.optimizer.step(), 1.0),
        "is_synced": (of.loop.is_synced, 2.0),
        "sync": (of.loop.sync, 3.0),
        "close": (of.loop.close, 4.0),
    }
    for number, (name, (read, far)) in enumerate(readers.items(), 1):
        of.step()
        assert not of.loop._sync.pending and not of.loop.is_synced(), "one step of two"
        of.step()
        other.step()
        assert of.loop._sync.pending, name
        read()
        assert not of.loop._sync.pending and of.loop.last_sync is not None, name
        assert of.moved() == far, name
        assert of.loop.last_sync == SyncReport(number, (2,), 4, 1.0, (0,), 0, ()), name
    assert of.loop._sync.most_held_bytes == 4 * (9 + 4 + 3 * 9), "two sums, and one layer's outer state"


class CopyingDevice(Device):
    """The host as a device whose copies run on a stream of their own: it notes what waits for which of them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.recorded, self.waits = list[Any](), list[tuple[int, bool]]()

    def record_event(self) -> Any:
        self.recorded.append(object())
        return self.recorded[-1]

    def wait_for_event(self, event: Any, *, all_streams: bool) -> None:
        self.waits.append((self.recorded.index(event), all_streams))


def test_a_forward_reads_a_layer_when_its_copies_are_complete(mesh: DeviceMesh) -> None:
    """On whatever stream: FSDP gathers on one of its own."""
    of = MeshTrained(mesh, steps=1)
    device = of.loop._sync._device = CopyingDevice()
    of.step()
    assert device.waits == []
    forward(of.model)
    assert device.waits == [(layer, True) for layer in range(len(of.loop._sync.shards))]


def test_the_outer_step_is_nesterovs(mesh: DeviceMesh) -> None:
    """θ′ = θ − η(Δ + μm′), and the momentum is the next sync's."""
    of, far, momentum = MeshTrained(mesh, NESTEROV, steps=1), 0.0, 0.0
    for _ in range(3):
        of.step()
        of.loop.sync()
        momentum = 0.9 * momentum + 1.0
        far += 0.5 * (1.0 + 0.9 * momentum)
        assert of.moved() == pytest.approx(far, abs=1e-3)


def test_what_is_gathered_is_read_anew(mesh: DeviceMesh) -> None:
    """An evaluation before a sync begins leaves the root's parameters gathered, which is no replacement; what is
    gathered by hand while a sync is under way is dropped, unless a forward would have read it.
    """
    of = MeshTrained(mesh, steps=1)
    of.train()
    first = forward(of.model)
    of.loop.step()
    of.model.unshard()
    of.loop.sync()
    synced, halves = forward(of.model), make_model(mesh)
    halves.load_state_dict(of.model.state_dict())
    assert of.moved() == 0.5 and float(first) != float(synced) == float(forward(halves))
    of.step()
    of.model.unshard()
    with pytest.raises(LocalProtocolError, match="gathered by FSDP before the forward"):
        forward(of.model)


@pytest.mark.parametrize("calls", [None, 2, 3])
def test_calls_without_steps_of_an_optimizer_are_refused(mesh: DeviceMesh, calls: int | None) -> None:
    """`step` follows each step of an optimizer that has parameters of the model, whatever else it has. One that never
    steps, or is stepped after some calls only, as of each micro-batch, is told of.
    """
    of = MeshTrained(mesh, steps=1000)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1)), *of.model.parameters()], lr=1.0)
    for _ in range(40):
        other.step()
        of.loop.step()

    def call_often() -> None:
        for number in range(1, 200):
            if calls is not None and number % calls == 0:
                other.step()
            of.loop.step()

    with pytest.raises(LocalProtocolError, match="call it once after each optimizer"):
        call_often()
    assert of.loop.inner_steps < 40 + 70


def test_a_step_that_a_scaler_skips_is_a_step(mesh: DeviceMesh) -> None:
    """A GradScaler skips up to 16 in a row at first, and one after a sync: the sync is completed, what was skipped
    changes nothing, and the next interval begins where the sync ended.
    """
    of = MeshTrained(mesh, steps=3)
    for _ in range(16):
        of.loop.step()
    of.loop.sync()
    assert of.moved() == 0.0 and of.loop.inner_steps == 16
    for _ in range(6):
        of.step()
    of.loop.sync()
    assert of.moved() == 3.0
    of.loop.step()
    of.step()
    of.step()
    assert of.loop._sync.pending
    of.loop.step()
    assert not of.loop._sync.pending and of.moved() == 4.0, "half of two that were trained"


def test_what_is_loaded_before_the_first_step_was_synchronised(mesh: DeviceMesh) -> None:
    """Also when torch has stepped an optimizer that has no state yet, to say what a checkpoint has of it."""
    of = MeshTrained(mesh, steps=1)
    get_optimizer_state_dict(of.model, of.optimizer)
    of.model.load_state_dict({name: value + 10.0 for name, value in of.model.state_dict().items()})
    of.step()
    of.loop.sync()
    assert of.moved() == 10.5


def test_parameters_that_a_sync_does_not_know_are_refused(mesh: DeviceMesh) -> None:
    """They were replaced, or are trained since the loop was made, each replica for itself; those that are frozen since
    then are not.
    """
    of = MeshTrained(mesh, steps=1)
    block, late = of.model.blocks[0], of.model.blocks[1]
    late.weight.requires_grad_(False)
    of.step()
    of.loop.sync()
    of.train()
    weight = block.weight
    block.weight = nn.Parameter(block.weight.detach().clone())
    with pytest.raises(LocalProtocolError, match="weight: was replaced after MeshLoop was made"):
        of.loop.step()
    block.weight = weight
    again = MeshLoop(of.model, mesh, of.optimizer, rules(), steps=1)
    late.weight.requires_grad_(True)
    of.train()
    with pytest.raises(LocalProtocolError, match=r"^blocks\.1\.weight: was unfrozen or added after MeshLoop was made"):
        again.step()


def test_seconds_are_refused_under_an_outer_loop(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first step: ranks that take unequal numbers of steps would wait for each other at an outer step."""
    monkeypatch.setenv("DIPS_ALONE", "1")
    keys = {"shared": {"run": "r"}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    for of in (MeshTrained(mesh, steps=4), MeshTrained(mesh, seconds=1000.0)):
        with OuterLoop(of.model, tmp_path / "cluster.yaml", may_push=of.loop.is_synced):
            told = attempt(of.step)
        assert ("expected steps under an OuterLoop, got seconds" in told) == (of.loop._seconds_due is not None), told
        assert attempt(of.step) == "", "without an outer loop"


def test_what_install_lazy_has_left_was_synchronised(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that no forward has called is installed as late as the optimizer steps: a sync went half of the way
    back to what was there before the pull.
    """
    monkeypatch.setenv("DIPS_ALONE", "1")
    keys = {"shared": {"run": "r"}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(keys))
    of, left = MeshTrained(mesh, steps=2), [10.0]

    def install(*_: Any) -> None:
        handle.remove()  # torch walks over these hooks: a removed one that had yet to come would end the step
        for p in of.model.parameters() if left else ():
            p.data.add_(left[-1])
        left.clear()

    with OuterLoop(of.model, tmp_path / "cluster.yaml", may_push=of.loop.is_synced) as outer:
        monkeypatch.setattr(outer, "install", install)
        handle = register_optimizer_step_pre_hook(install)  # as LazyMemory's, which comes after the loop's
        for _ in range(2):
            of.step()
        of.loop.sync()
        assert of.moved() == 10.0 + 1.0
        left.append(20.0)
        for _ in range(2):
            of.loop.step()  # a GradScaler has skipped both: no optimizer's hook has installed what is left
        of.loop.sync()
    assert of.moved() == 10.0 + 1.0 + 20.0


def test_a_warm_up_begins_no_sync(mesh: DeviceMesh) -> None:
    """Nor does `sync` in it; the first interval begins after it."""
    of = MeshTrained(mesh, seconds=1000.0, warmup_steps=2)
    of.step()
    of.loop.sync()
    of.loop._began_s = -10_000.0
    of.step()
    of.step()
    assert of.loop.last_sync is None and of.loop.inner_steps == 3, "its time is counted from the warm-up's end"
    of.loop._began_s = -10_000.0
    of.step()
    of.loop.sync()
    assert of.loop.last_sync is not None and of.loop.last_sync.inner_steps == (2,) and of.moved() == 3.0


def test_a_checkpoint_of_a_warm_up_warms_up_no_loop_that_was_made_without(mesh: DeviceMesh) -> None:
    """Such a loop averages no gradients, so its steps count and it synchronises; another ends the warm-up of before."""
    of = MeshTrained(mesh, steps=1, warmup_steps=3)
    of.step()
    saved = of.loop.state_dict()
    cold, warm = MeshTrained(mesh, steps=1), MeshTrained(mesh, steps=1, warmup_steps=9)
    for each, before in ((cold, 0), (warm, 2)):
        each.loop.load_state_dict(saved)
        for _ in range(before):
            each.step()
        assert each.loop.last_sync is None
        each.step()
        each.loop.sync()
        assert each.loop.last_sync is not None and each.loop.inner_steps == 2 + before


def test_a_checkpoint_names_layers_and_momentum(mesh: DeviceMesh) -> None:
    """The names are the format; without momentum there is none to save, and none is loaded."""
    of = MeshTrained(mesh, NESTEROV, steps=1)
    of.step()
    of.loop.sync()
    state = of.loop.state_dict()
    told = json.loads(state["told"])
    names = ["scale", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]
    assert list(state["momentum"]) == names
    assert {**told, "layers": list(told["layers"])} == {
        "format": 1, "steps": 1, "warmup": 0, "syncs": 1, "layers": ["scale", "blocks.0.bias", "blocks.1.bias"]
    }  # fmt: skip
    parts = torch.cat([part.full_tensor().flatten() for part in state["momentum"].values()])
    assert parts.tolist() == pytest.approx([-1.0] * len(parts))
    again = MeshTrained(mesh, NESTEROV, steps=1)
    with pytest.raises(LocalProtocolError, match="expected a checkpoint of format 1, got 2"):
        again.loop.load_state_dict({**state, "told": json.dumps({**told, "format": 2})})
    less = {name: part for name, part in state["momentum"].items() if name != "blocks.1.bias"}
    with pytest.raises(LocalProtocolError, match=r"the checkpoint has no momentum of blocks\.1\.bias"):
        again.loop.load_state_dict({**state, "momentum": less})
    assert again.loop.state_dict()["momentum"]["scale"].full_tensor().item() == 0.0, "none of it is loaded"
    again.loop.load_state_dict(state)
    assert again.loop.state_dict()["momentum"]["scale"].full_tensor().item() == -1.0
    with pytest.raises(LocalProtocolError, match="load before the first"):
        of.loop.load_state_dict(state)
    plain = MeshTrained(mesh, steps=1)
    assert plain.loop.state_dict()["momentum"] == {}
    plain.loop.load_state_dict(state)
    assert plain.loop.inner_steps == 1


def test_syncs_and_what_they_correct_are_in_the_log(mesh: DeviceMesh) -> None:
    """A layer in which no replica counts is rolled back, and a replica with a NaN is replaced: its moments, which would
    bring the NaN back, too.
    """
    of = MeshTrained(mesh, steps=1)
    of.optimizer.param_groups[0]["momentum"] = 0.9
    with capture_logs() as logs:
        of.step()
        of.train()
        assert any(of.optimizer.state.values())
        with torch.no_grad():
            of.model.scale.to_local().fill_(float("nan"))
        of.loop.step()
        of.loop.sync()
    assert not any(of.optimizer.state.values())
    assert [(line["log_level"], line["what"]) for line in logs] == [
        ("info", "sync"), ("info", "sync"), ("warning", "rollback"), ("warning", "replaced")
    ]  # fmt: skip
    assert logs[2]["why"] == "sync 2 rolls 1 of 3 layers back: no replica counts there"
    assert of.loop.last_sync is not None and of.loop.last_sync.rolled_back == 1


def test_a_sum_that_is_not_finite_leaves_the_layer(mesh: DeviceMesh) -> None:
    """A scale of 0 writes what was there after the last sync, whatever the sum holds."""
    of = MeshTrained(mesh, steps=1)
    of.train()
    shard = of.loop._sync.shards[0]
    with torch.no_grad():
        shard.write_step(torch.full((1,), float("nan")), OuterStep((0.0,), 0.5, 0.0, 1.0, 1.0, 0.0))
    assert of.model.scale.full_tensor().item() == 1.0


def test_a_sync_that_fails_leaves_what_the_last_one_made(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank that is left, and nothing of it is carried on; each later call says why, and the loop is closed."""
    of = MeshTrained(mesh, steps=1)
    of.step()
    of.loop.sync()

    def fail(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("connection closed by peer\nat some address")

    of.train()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", fail)
        with pytest.raises(Unavailable, match="a sync did not end: a rank is gone"):
            of.loop.step()
    assert of.moved() == 0.5 and not of.loop._sync.pending
    assert not of.loop._sync._under_way, "no device memory is held by it"
    forward(of.model)
    for call in (of.loop.step, of.loop.sync, of.loop.is_synced):
        with pytest.raises(Unavailable, match="a sync did not end"):
            call()
    of.loop.close()


def test_a_device_that_is_full_in_a_sync_is_no_rank_that_is_gone(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that has no room said that another was gone, and so did `dips status`."""
    of = MeshTrained(mesh, steps=1)
    of.train()

    def fail(shard: LayerShard) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(LayerShard, "subtract_parameters", fail)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        of.loop.step()
    with pytest.raises(Unavailable, match="a sync did not end: this rank's device is full"):
        of.loop.sync()
    assert of.moved() == 0.0
    of.loop.close()


def test_a_rank_that_is_gone_before_a_sync_begins_is_named(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    of = MeshTrained(mesh, steps=1)
    of.train()

    def fail(mine: bytes) -> list[bytes]:
        raise RuntimeError("connection closed by peer\nat some address")

    monkeypatch.setattr(of.loop._collectives, "all_gather", fail)
    with pytest.raises(Unavailable, match=r"^MeshLoop\.step: a rank is gone: connection closed by peer$"):
        of.loop.step()
    of.loop.close()


def test_what_is_closed_holds_nothing(mesh: DeviceMesh) -> None:
    """No hook of an optimizer or a module, and no process group; every method says so, and `close` may come twice."""
    groups = len(dist.distributed_c10d._world.pg_map)
    of = MeshTrained(mesh, seconds=1000.0)
    state = of.loop.state_dict()
    of.step()
    for _ in range(2):
        of.loop.close()
    assert len(dist.distributed_c10d._world.pg_map) == groups
    of.train()
    loop = of.loop
    for call in (of.step, loop.sync, loop.is_synced, loop.state_dict, partial(loop.load_state_dict, state)):
        with pytest.raises(LocalProtocolError, match="this MeshLoop is closed"):
            call()
    kept = weakref.ref(of.model)
    del of, loop, call
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"steps": 1, "seconds": 1.0}, "or seconds instead, got steps=1, seconds=1.0"),
        ({"steps": 0}, "steps of at least 1"),
        ({"seconds": 0.0}, "seconds: expected a time above 0, got 0.0"),
        ({"seconds": float("inf")}, "seconds: expected a time above 0, got inf"),
        ({"warmup_steps": -1}, "warmup_steps: expected 0 or more, got -1"),
    ],
)
def test_a_time_that_is_none_is_refused(mesh: DeviceMesh, options: dict[str, Any], told: str) -> None:
    """By a sentence that names the argument."""
    with pytest.raises(ConfigError, match=told):
        MeshTrained(mesh, **options)


def test_parameters_that_fsdp_does_not_hold_are_refused(mesh: DeviceMesh) -> None:
    """A layer that was sharded by hand, and one of 16 bits."""
    by_hand = distribute_module(nn.Linear(2, 3), mesh["shard"])
    of_16_bits = fully_shard(nn.Linear(2, 3, dtype=torch.bfloat16), mesh=mesh["shard"])
    for model, told in ((by_hand, "expected one group of parameters"), (of_16_bits, "float32, got torch.bfloat16")):
        with pytest.raises(ConfigError, match=told):
            MeshLoop(model, mesh, torch.optim.SGD(model.parameters(), lr=1.0), rules())
