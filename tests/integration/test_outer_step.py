"""The outer step as the daemons take it, beside plain torch: shards, versions, compiled kernels and snapshots on disk.

Differential (docs/architecture.md#tests): N = 1..8 clusters, weighted, several slaves, in any order of arrival, over
several rounds, against `SGD(nesterov=True)` on the clipped weighted mean of θ − θ_j in double precision, to 1e-6
relative.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
import xxhash
from safetensors.torch import load_file

from dips.ids import GENESIS, PushId, VersionId
from dips.outer import kernel_pool as kernel_pool_module
from dips.outer import kernels, reference
from dips.outer.kernel_pool import KernelPool
from dips.outer.versions import Versions
from dips.outer_step import nesterov_step
from dips.protocol.effects import (
    Apply,
    Commit,
    Fold,
    Hold,
    LoadVersion,
    Measure,
    OpenPush,
    Order,
    OrderBody,
    Persist,
    Registered,
)
from dips.protocol.events import Answer, Folded, Measured
from dips.protocol.heartbeats import Transfer
from dips.protocol.manifest import Manifest
from dips.protocol.placement import place_layers
from dips.slave.export import export_snapshot
from dips.slave.ports import Arrays, FlowEvent, SlaveIdentity, Staged
from dips.slave.shard import Followed, Shard
from dips.slave.snapshots import Snapshots
from dips.store.files import write_version
from tests.loading import follow_load
from tests.unit.slave.shard_rig import carry_out

SHAPES = [
    ("emb.weight", (37, 16)),
    *((f"layers.{i}.w{j}", (16, 9 + i)) for i in range(5) for j in range(2)),
    ("g", (1,)),
]
MANIFEST = Manifest.from_shapes(SHAPES)
LR, MU = 0.7, 0.8
ROUNDS = 4
Model = list[np.ndarray]  # by layer, flat


class ReceivedPush:
    """A data flow into which the test writes."""

    def __init__(self) -> None:
        self.buffers: dict[PushId, Arrays] = {}

    def start(self, sinc: int, on_event: Callable[[FlowEvent], None]) -> None:
        pass

    def open_push(
        self, push: PushId, order: tuple[int, ...], buffers: Arrays, deadline_s: float, codec: str, keys: object = ()
    ) -> None:
        self.buffers[push] = buffers

    def reorder_push(self, push: PushId, places: tuple[int, ...]) -> None:
        pass

    def drop_push(self, push: PushId) -> None:
        self.buffers.pop(push, None)

    def open_pull(
        self, pull: object, version: VersionId, source: Arrays, chain: object = (), keys: object = ()
    ) -> None:
        raise AssertionError("no pull is opened here")

    def move_pull(self, pull: object, source: Arrays) -> None:
        raise AssertionError("no pull is opened here")

    def close_pull(self, pull: object) -> None:
        raise AssertionError("no pull is opened here")

    def admit_probe(self, cluster: str, key: str) -> None:
        raise AssertionError("no probe is admitted here")

    def list_transfers(self) -> tuple[Transfer, ...]:
        return ()


class SlaveSet:
    """All slaves of a run, ordered about as a master does."""

    def __init__(self, directory: Path, count: int, theta: Model, kernel_pool: KernelPool, slots: int) -> None:
        self.directories = [directory / f"s{i}" for i in range(count)]
        self.flows = [ReceivedPush() for _ in range(count)]
        self.disks = []
        self.shards = []
        self.number = 0
        initial = directory / "initial"
        if not initial.exists():
            (initial / str(GENESIS)).mkdir(parents=True)
            layers = range(len(MANIFEST.layers))
            flat = (theta[layer] for layer in layers)
            write_version(initial / str(GENESIS), ("run", "", 0), GENESIS, MANIFEST, layers, flat, momentum=False)
        for i, (name, layers) in enumerate(place_layers(MANIFEST, [f"s{i}" for i in range(count)])):
            disk = Snapshots(self.directories[i], "run", name, initial, structlog.get_logger())
            genesis = tuple(xxhash.xxh3_128_hexdigest(theta[layer].tobytes()) for layer in layers)
            disk.bind_layers(MANIFEST, layers, genesis, 1)
            shard = Shard(name, Versions(kernel_pool, slots, 1), disk, self.flows[i])
            shard.on_registered(Registered(1, 1, LoadVersion(GENESIS), GENESIS, layers, genesis, MANIFEST.to_json()))
            assert follow_load(shard, GENESIS) is Followed.DONE
            assert shard.reason == ""
            assert shard.follow_order(Hold()) is Followed.SERVES
            self.disks.append(disk)
            self.shards.append(shard)

    def __enter__(self) -> SlaveSet:
        return self

    def __exit__(self, *error: object) -> None:
        for disk in self.disks:
            disk.close()

    def order(self, body: OrderBody) -> list[Answer]:
        self.number += 1
        return [carry_out(s, Order(s.name, 1, 1, self.number, body, 10.0)) for s in self.shards]

    def push(self, push: PushId, theta_j: Model, rng: random.Random) -> None:
        """Stage one push, at each slave when its turn comes."""
        self.order(OpenPush(push, 1, 60.0))
        for i in rng.sample(range(len(self.shards)), len(self.shards)):
            for layer, buffer in self.flows[i].buffers[push].items():
                buffer[:] = theta_j[layer]
            self.shards[i].transfers.on_flow_event(Staged(push, 0))

    def outer_step(self, version: VersionId, pushes: list[tuple[PushId, Model, int]], clip: float | None) -> float:
        """Push, measure and fold in the given order, apply, persist, commit; return the norm before clipping."""
        parent = VersionId(version.version - 1, version.round - 1)
        rng = random.Random(version.version)
        first = pushes[0][2]
        acc_sq = 0.0
        for push, theta_j, tokens in pushes:
            self.push(push, theta_j, rng)
            for answer in self.order(Measure(version.round, push, parent)):
                assert isinstance(answer, Measured)
                assert answer.finite
            folded = self.order(Fold(version.round, push, tokens / first))
            acc_sq = sum(sum(a.acc_sq) for a in folded if isinstance(a, Folded))
        c = first / sum(tokens for _, _, tokens in pushes)
        norm = c * sqrt(acc_sq)
        scale = c * (1.0 if clip is None else min(1.0, clip / norm))
        self.order(Apply(version.round, version, nesterov_step(scale, LR, MU)))
        self.order(Persist(version))
        self.order(Commit(version, ()))
        return norm

    def theta(self) -> Model:
        found: dict[int, np.ndarray] = {}
        for shard in self.shards:
            assert shard.versions.served_version is not None
            found.update(shard.versions.theta(shard.versions.served_version))
        return [found[layer].copy() for layer in range(len(MANIFEST.layers))]


def named(theta: Model) -> dict[str, np.ndarray]:
    tensors = {}
    for layer, flat in zip(MANIFEST.layers, theta, strict=True):
        for parameter, at in zip(layer.parameters, layer.param_offsets(), strict=True):
            tensors[parameter.name] = flat[at : at + parameter.numel].reshape(parameter.shape)
    return tensors


class Torch:
    """The outer step in ten lines of torch."""

    def __init__(self, theta: Model) -> None:
        self.parameters = [torch.nn.Parameter(torch.from_numpy(layer).double()) for layer in theta]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR, momentum=MU, nesterov=True)

    def outer_step(self, pushes: list[tuple[PushId, Model, int]], clip: float | None) -> float:
        total = sum(tokens for _, _, tokens in pushes)
        for layer, parameter in enumerate(self.parameters):
            weighted = [t / total * (parameter - torch.from_numpy(m[layer]).double()) for _, m, t in pushes]
            parameter.grad = sum(weighted).detach()  # type: ignore[union-attr]
        norm = sqrt(sum(float(p.grad.square().sum()) for p in self.parameters if p.grad is not None))
        if clip is not None and norm > clip:
            for parameter in self.parameters:
                parameter.grad *= clip / norm
        self.optimizer.step()
        return norm


def some_model(rng: np.random.Generator, spread: float, around: Model | None = None) -> Model:
    noise = [rng.standard_normal(layer.numel).astype(np.float32) * np.float32(spread) for layer in MANIFEST.layers]
    return noise if around is None else [a + b for a, b in zip(around, noise, strict=True)]


@pytest.mark.parametrize(
    ("clusters", "slaves", "clip"),
    [
        pytest.param(clusters, slaves, clip, id=f"{clusters}-{slaves}-{name}", marks=[pytest.mark.slow] * slow)
        for clusters in range(1, 9)
        for slaves, clip, name, slow in (
            (1, None, "unclipped", False), (1, 1.0, "clipped", True),
            (3, None, "unclipped", True), (3, 1.0, "clipped", False),
        )
    ],
)  # fmt: skip
def test_failure_6_wrong_mean_wrong_sign(tmp_path: Path, clusters: int, slaves: int, clip: float | None) -> None:
    """θ of every round equals torch's SGD(nesterov=True) on the weighted, clipped mean to 1e-6 relative."""
    rng, order = np.random.default_rng(clusters), random.Random(clusters)
    theta = some_model(rng, 1.0)
    plain = Torch(theta)
    with (
        ThreadPoolExecutor(2) as threads,
        SlaveSet(tmp_path, slaves, theta, KernelPool(kernels, threads, 2), slots=1 + clusters % 2) as run,
    ):
        for round_ in range(1, ROUNDS + 1):
            pushes = [
                (PushId(f"c{i}", 1, round_), some_model(rng, 0.1, run.theta()), order.randint(1, 10_000_000))
                for i in order.sample(range(clusters), clusters)
            ]
            norm = run.outer_step(VersionId(round_, round_), pushes, clip)
            assert norm == pytest.approx(plain.outer_step(pushes, clip), rel=1e-5)
            assert clip is None or norm > clip
            _compare(run.theta(), plain)


def _compare(theta: Model, plain: Torch) -> None:
    for mine, parameter in zip(theta, plain.parameters, strict=True):
        expected = parameter.detach().numpy()
        assert np.linalg.norm(mine - expected) <= 1e-6 * np.linalg.norm(expected)
        assert np.abs(mine - expected).max() <= 1e-6 * np.abs(expected).max()


def test_the_number_of_slaves_and_threads_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ledger gives one θ, bit for bit, on 1 or 4 slaves, 1 or 3 threads, compiled or reference (guards invariant
    1).
    """
    monkeypatch.setattr(kernel_pool_module, "SLICE", 100)
    thetas = []
    with ThreadPoolExecutor(3) as threads:
        for name, slaves, kernel_pool in (
            ("a", 1, KernelPool(kernels)),
            ("b", 4, KernelPool(kernels, threads, 3)),
            ("c", 2, KernelPool(reference)),
        ):
            (tmp_path / name).mkdir()
            rng = np.random.default_rng(5)
            theta = some_model(rng, 1.0)
            with SlaveSet(tmp_path / name, slaves, theta, kernel_pool, slots=2) as run:
                for round_ in (1, 2):
                    pushes = [(PushId(f"c{i}", 1, round_), some_model(rng, 0.05, theta), 100 * i + 7) for i in range(3)]
                    run.outer_step(VersionId(round_, round_), pushes, None)
                thetas.append([layer.tobytes() for layer in run.theta()])
    assert thetas[0] == thetas[1] == thetas[2]


def test_what_was_committed_is_exported_and_restored(tmp_path: Path) -> None:
    """A new process loads the committed version from disk bit for bit, and export gives the same parameters."""
    rng = np.random.default_rng(1)
    theta = some_model(rng, 1.0)
    version = VersionId(1, 1)
    with SlaveSet(tmp_path, 2, theta, KernelPool(kernels), slots=2) as run:
        run.outer_step(version, [(PushId("c", 1, 1), some_model(rng, 0.05, theta), 5)], 1.0)
        expected = run.theta()
        assert export_snapshot(run.directories, None, tmp_path / "out.safetensors") == version
    with SlaveSet(tmp_path, 2, theta, KernelPool(kernels), slots=2) as again:
        for shard in again.shards:
            assert shard.make_registration(SlaveIdentity("run", shard.name, "", "", (), "")).complete == (version,)
            follow_load(shard, version)
            assert shard.reason == ""
        assert [a.tobytes() for a in again.theta()] == [a.tobytes() for a in expected]
    loaded = load_file(tmp_path / "out.safetensors")
    assert loaded.keys() == named(expected).keys()
    assert all(torch.equal(loaded[name], torch.from_numpy(t)) for name, t in named(expected).items())
