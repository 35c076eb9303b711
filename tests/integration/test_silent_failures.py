"""Failures that would train on with a wrong model and say nothing: each is mended, or ends the job with what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import pytest

from tests.integration import cluster_harness as harness
from tests.integration import train_diverging as diverging

HERE = Path(__file__).parent
H = 5


def marks(timeline: Path, kind: str) -> Iterator[dict[str, Any]]:
    return (m for m in map(json.loads, timeline.read_text().splitlines()) if m["kind"] == kind)


@pytest.mark.torchrun
@pytest.mark.timeout(120)
@pytest.mark.parametrize("overlap", ["none", "full"])
def test_a_nan_heals(tmp_path: Path, overlap: str) -> None:
    """One NaN in one of two ranks' gradients in the second round: nothing of it travels, the head replaces the model
    and AdamW begins anew, so by the third round all is finite, and the loss falls on."""
    tensors = {name: p.detach().numpy() for name, p in diverging.build().named_parameters()}
    shared = {"stop": {"versions": 8}, "outer": {"lr": 1.0, "momentum": 0.0, "clip": {}}, "penalty": {"rule": "none"}}
    out, spoilt = tmp_path / "found", H + 2
    command = [*harness.TORCHRUN, "2", str(HERE / "train_diverging.py"), str(out), str(spoilt)]
    with harness.Run(tmp_path, tensors, shared=shared, timing={"window_s": 0.05}) as run:
        run.start_master()
        run.start_slaves()
        run.wait(run.start_cluster("a", command, steps=H, overlap=overlap), 90)
        with run.ledger() as ledger:
            rounds = ledger.read_history(1000)
    assert len([r for r in rounds if r.version]) == 8
    assert all(isfinite(fold.norm) for r in rounds for fold in r.folds)
    assert not any(o.kind == "gated" for r in rounds for o in r.outcomes), "what is not finite reached a slave"
    (told,) = marks(run.timeline("a"), "diverged")
    assert "is not finite on rank" in told["reason"]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        losses, at = found["losses"], found["at"]
        assert found["finite"]
        assert any(isnan(loss) for loss in losses)
        healed = [at[i] for i, loss in enumerate(losses) if i > spoilt and isfinite(loss)]
        assert min(healed) <= 3 and not any(isnan(loss) for loss, v in zip(losses, at, strict=True) if v >= 3)
        assert losses[-1] < 0.8 * losses[spoilt], (losses[spoilt], losses[-1])
