"""Every way to lay a model over ranks, with the real frameworks on gloo: exact on all ranks, alone and together."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.integration import cluster_harness as harness

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "configs" / "examples"
LAYOUTS = ["plain", "ddp", "fsdp", "hsdp", "tp", "tp_fsdp"]
pytestmark = pytest.mark.torchrun


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def under_torchrun(ranks: int, out: Path, script: str, *words: str, within_s: float) -> list[dict[str, Any]]:
    """Run a script of this directory on some ranks; return what each wrote."""
    done = subprocess.run(
        [*harness.TORCHRUN, str(ranks), str(HERE / script), str(out), *words],
        cwd=harness.ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(harness.ROOT)},
        capture_output=True, text=True, timeout=within_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return found(out, ranks)


def found(out: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads(out.with_name(f"{out.name}.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four ranks that went through all of torch's layouts."""
    out = tmp_path_factory.mktemp("layouts") / "found"
    return under_torchrun(4, out, "check_layouts.py", *LAYOUTS, within_s=150)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_round_trip_is_exact_on_every_rank(four: list[dict[str, Any]], kind: str) -> None:
    """What is pushed is θ; a pull of the same leaves each shard as it was, a pull of another brings it to each."""
    for rank, of in enumerate(four):
        assert of[kind]["wrong"] == {"push": [], "same": [], "change": []}, f"rank {rank}"


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_is_replicated_travels_once_and_is_spread(four: list[dict[str, Any]], kind: str) -> None:
    """Four ranks move the model once between them, in nearly equal shares, whatever each of them holds."""
    moved = [of[kind]["moved"] for of in four]
    assert sum(moved) == four[0][kind]["parameters"]
    assert max(moved) - min(moved) <= 100, moved


@pytest.mark.parametrize("kind", LAYOUTS)
def test_host_memory_is_the_ranks_shard(four: list[dict[str, Any]], kind: str) -> None:
    """4 B a parameter of the shard, also where pieces and shard are cut differently."""
    assert all(of[kind]["host"] <= 1.02 * of[kind]["held"] for of in four)


@pytest.mark.parametrize(("kind", "sharers"), [("plain", 4), ("ddp", 4), ("hsdp", 2), ("fsdp", 1)])
def test_ranks_of_a_host_that_hold_the_same_share_one_copy(four: list[dict[str, Any]], kind: str, sharers: int) -> None:
    """A rank's part of it is 4 B a parameter, divided by how many they are."""
    assert all(of[kind]["host"] <= 1.02 * of[kind]["held"] / sharers for of in four)


def test_the_manifest_is_of_the_model_not_of_its_layout(four: list[dict[str, Any]]) -> None:
    """Six layouts, one digest."""
    assert len({of[kind]["digest"] for of in four for kind in LAYOUTS}) == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_three_clusters_with_three_layouts_train_one_model(tmp_path: Path) -> None:
    """1 rank plain, 2 ranks FSDP2, 4 ranks TP2 × FSDP2: after the last round all seven hold θ; the loss has fallen."""
    script, rounds = str(HERE / "run_example.py"), 4
    example, fsdp2 = load_example("fsdp2"), str(EXAMPLES / "fsdp2.py")
    torch.manual_seed(1)
    tensors = {name: p.detach().numpy() for name, p in example.build().named_parameters()}
    shared = {"stop": {"versions": rounds}, "outer": {"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}}}
    layouts = {"plain": 1, "fsdp": 2, "tp_fsdp": 4}
    with harness.Run(tmp_path, tensors, shared=shared, timing={"window_s": 5.0}) as run:
        run.start_servers()
        clusters = []
        for seed, (layout, ranks) in enumerate(layouts.items()):
            words = [script, str(tmp_path / f"{layout}.out"), "3", fsdp2, "--layout", layout, "--seed", str(seed)]
            start = [sys.executable] if ranks == 1 else [*harness.TORCHRUN, str(ranks)]
            name = layout.replace("_", "-")
            clusters.append(run.start_cluster(name, [*start, *words], steps=5))
        for cluster in clusters:
            run.wait(cluster, 200)
        history = run.versions()
        exported = tmp_path / "model.safetensors"
        run.export(exported)
    theta = {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in load_file(exported).items()}
    for layout, ranks in layouts.items():
        for rank, of in enumerate(found(tmp_path / f"{layout}.out", ranks)):
            assert of["theta"] == theta, f"{layout}, rank {rank}"
            assert of["losses"][-1] < of["losses"][0] - 0.5, (layout, of["losses"])
    assert len(history) == rounds
    assert {fold.push.cluster for r in history for fold in r.folds} == {"plain", "fsdp", "tp-fsdp"}


MEGATRON = ["tp1", "tp2 pp2", "pp2 vpp2", "tp2, bf16, distributed optimizer", "tp1, bf16"]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four ranks that went through the layouts of Megatron-core."""
    if importlib.util.find_spec("megatron") is None:  # not imported: the ranks are other processes
        pytest.skip("megatron-core is not installed: its adapter is NOT tested here")
    out = tmp_path_factory.mktemp("megatron") / "found"
    return under_torchrun(4, out, "check_megatron.py", "dense", within_s=200)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", MEGATRON)
def test_megatron_holds_and_pushes_exactly_what_was_pulled(megatron: list[dict[str, Any]], kind: str) -> None:
    """On every rank, as Megatron itself cuts it; fp32 masters bit for bit; a step of its optimizer undoes nothing."""
    for rank, of in enumerate(megatron):
        assert len(of[kind]["wrong"]) == 8
        assert not any(of[kind]["wrong"].values()), (rank, of[kind]["wrong"])


def test_megatron_has_one_model_in_every_layout(megatron: list[dict[str, Any]]) -> None:
    """Names over stages and virtual stages, tied embeddings once: one digest, and the loss of the whole model."""
    assert len({of[kind]["digest"] for of in megatron for kind in MEGATRON}) == 1
    losses = {kind: [of[kind]["loss"] for of in megatron if of[kind]["loss"] == of[kind]["loss"]] for kind in MEGATRON}
    assert [len(losses[kind]) for kind in MEGATRON[:4]] == [4, 2, 2, 4]
    assert all(loss == pytest.approx(losses["tp1"][0], abs=1e-5) for kind in MEGATRON[:3] for loss in losses[kind])


def test_megatrons_ranks_share_the_load(megatron: list[dict[str, Any]]) -> None:
    """The model travels once; no rank keeps more in host memory than its shard, within a small parameter."""
    for kind in MEGATRON:
        assert sum(of[kind]["moved"] for of in megatron) == megatron[0][kind]["parameters"]
        assert all(of[kind]["host"] <= 1.05 * of[kind]["held"] for of in megatron), kind


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_megatron_clusters_with_two_layouts_train_one_model(tmp_path: Path) -> None:
    """TP1 on one rank and TP2 × PP2 on four: the loss falls on both, what is replicated is equal at the end."""
    if importlib.util.find_spec("megatron") is None:  # not imported: the ranks are other processes
        pytest.skip("megatron-core is not installed: its adapter is NOT tested here")
    megatron = str(EXAMPLES / "megatron_gpt.py")
    start = [sys.executable, str(HERE / "start_megatron.py"), str(tmp_path / "start.npz"), megatron]
    subprocess.run(start, check=True)
    shared = {"stop": {"versions": 6}, "outer": {"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}}}
    script = str(HERE / "run_example.py")
    with harness.Run(tmp_path, dict(np.load(tmp_path / "start.npz")), shared=shared, timing={"window_s": 5.0}) as run:
        run.start_servers()
        one = [*harness.TORCHRUN, "1", script, str(tmp_path / "one.out"), "2", megatron]
        four = [
            *harness.TORCHRUN,
            "4",
            script,
            str(tmp_path / "four.out"),
            "2",
            megatron,
            "--tp",
            "2",
            "--pp",
            "2",
        ]
        clusters = [run.start_cluster("one", one, steps=6), run.start_cluster("four", [*four, "--seed", "2"], steps=6)]
        for cluster in clusters:
            run.wait(cluster, 240)
        history = run.versions()
    whole, *parts = found(tmp_path / "one.out", 1) + found(tmp_path / "four.out", 4)
    folds = [fold for r in history for fold in r.folds]
    assert {fold.push.cluster for fold in folds} == {"one", "four"}
    assert all(fold.loss > 0.0 for fold in folds), "the loss of a pipeline's last stage came through rank 0"
    for of in (whole, parts[2], parts[3]):  # the last stage has the loss
        assert of["losses"][-1] < of["losses"][0] - 0.3, of["losses"]
    norms = [n for n in parts[0]["stage"] if n.endswith("norm.weight")]
    assert norms and all(of["stage"][n] == whole["stage"][n] for n in norms for of in parts[:2])
    last = "decoder.final_layernorm.weight"
    assert parts[2]["stage"][last] == parts[3]["stage"][last] == whole["stage"][last]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_trainer_of_transformers_takes_part_by_three_lines(tmp_path: Path) -> None:
    """A tiny Llama on two ranks: the loss falls, the ledger has the tokens that the Trainer counted, both hold θ."""
    pytest.importorskip("transformers", reason="transformers is not installed: its callback is NOT tested here")
    example = load_example("hf_trainer")
    torch.manual_seed(1)
    tensors = {name: p.detach().numpy() for name, p in example.build().named_parameters()}
    shared = {"stop": {"versions": 5}, "outer": {"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}}}
    words = [str(HERE / "run_example.py"), str(tmp_path / "hf.out"), "1", str(EXAMPLES / "hf_trainer.py")]
    with harness.Run(tmp_path, tensors, shared=shared) as run:
        run.start_servers()
        run.wait(run.start_cluster("hf", [*harness.TORCHRUN, "2", *words], steps=6), 200)
        history = run.versions()
    of = found(tmp_path / "hf.out", 2)
    assert of[0]["theta"] == of[1]["theta"] and of[0]["steps"] == 5 * 6
    assert sum(r.tokens for r in history) == of[0]["tokens"] == 5 * 6 * 2 * 4 * example.LENGTH
    assert of[0]["losses"][-1] < of[0]["losses"][0] - 0.3, of[0]["losses"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("stem", ["own_gpt", "muon_gpt"])
def test_a_gpt_of_ones_own_on_two_sharded_ranks_and_a_plain_one(stem: str, tmp_path: Path) -> None:
    """The example as it stands: tied embeddings, a text file, the rate by progress; all three ranks end with θ."""
    example, script = load_example("own_gpt"), str(EXAMPLES / f"{stem}.py")
    torch.manual_seed(1)
    tensors = {name: p.detach().numpy() for name, p in example.build().named_parameters()}
    text = tmp_path / "text"
    text.write_bytes(Path(__file__).read_bytes())
    each = 3 * 4 * example.LENGTH  # tokens of an inner step of all three ranks
    shared = {"stop": {"tokens": 4 * 10 * each}, "outer": {"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}}}
    with harness.Run(tmp_path, tensors, shared=shared, timing={"window_s": 30.0}) as run:
        run.start_servers()
        for name, ranks in (("west", 2), ("east", 0)):
            start = [*harness.TORCHRUN, str(ranks)] if ranks else [sys.executable]
            words = [str(HERE / "run_example.py"), str(tmp_path / f"{name}.out"), "2", script, str(text)]
            run.start_cluster(name, [*start, *words, "--seed", str(ranks)], steps=10)
        for cluster in run.processes[-2:]:
            run.wait(cluster, 200)
        history = run.versions()
    west, east = found(tmp_path / "west.out", 2), found(tmp_path / "east.out", 1)
    assert west[0]["theta"] == west[1]["theta"] == east[0]["theta"]
    assert [r.tokens for r in history] == [10 * each] * 4
    assert all(of["losses"][-1] < of["losses"][0] - 1.0 for of in (*west, *east))
