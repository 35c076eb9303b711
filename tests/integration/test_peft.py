"""PEFT's LoRA: only the adapters are shared, by two clusters, one of them transformers' Trainer; the base stays."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.numpy import load_file

import dips
from tests.integration import cluster_harness as harness

pytest.importorskip("peft", reason="peft is not installed: LoRA is NOT tested here")

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
H, VERSIONS = 6, 5


def load(name: str) -> ModuleType:
    """A file of this directory as a module, whatever the test runner's import mode."""
    sys.path.insert(0, str(HERE))
    try:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HERE))
    return module


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT 0.21 calls transformers so
@pytest.mark.timeout(120)
def test_clusters_share_adapters_and_nothing_else(tmp_path: Path) -> None:
    """Both end with the exported adapters and an untouched base, and learn; accumulated micro-batches count once."""
    train_lora = load("train_lora")
    model = train_lora.build()
    tensors = {name: p.detach().numpy() for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: train_lora.digest(p) for name, p in model.named_parameters() if not p.requires_grad}
    assert tensors and all(".lora_" in name for name in tensors)
    shared = {"stop": {"versions": VERSIONS}, "outer": {"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}}}
    with harness.Run(tmp_path, tensors, shared=shared, timing={"window_s": 20.0}, slaves=1) as run:
        run.start_servers()
        command = [sys.executable, str(HERE / "train_lora.py")]
        for seed, kind in enumerate(("loop", "trainer")):
            run.start_cluster(kind, [*command, str(tmp_path / f"{kind}.out"), kind, str(seed)], steps=H)
        for cluster in run.processes[-2:]:
            run.wait(cluster, 100)
        history = run.versions()
        exported = tmp_path / "adapters.safetensors"
        run.export(exported)
    dips.load(model, exported)
    theta = {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in load_file(exported).items()}
    assert theta == {name: train_lora.digest(p) for name, p in model.named_parameters() if p.requires_grad}
    tokens = H * train_lora.ROWS * train_lora.LENGTH * train_lora.MICRO_BATCHES
    assert [r.tokens for r in history] == [2 * tokens] * VERSIONS
    for kind in ("loop", "trainer"):
        found = json.loads((tmp_path / f"{kind}.out").read_text())
        assert found["theta"] == theta and found["base"] == frozen, kind
        assert len(found["losses"]) == H * VERSIONS
        assert sum(found["losses"][-3:]) < sum(found["losses"][:3]) - 0.3, (kind, found["losses"])
