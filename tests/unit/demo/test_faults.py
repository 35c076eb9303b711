"""The demo's exit code says what went wrong, and its losses are those of the files that it wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dips.demo.evaluate import Losses, evaluate_losses, validation_loss
from dips.demo.model import build, loss_of
from dips.demo.run import Kill, find_faults
from dips.ids import PushId, VersionId
from dips.protocol.records import FoldRow
from dips.view.points import RoundHistory

GOOD = Losses(first=5.55, head=1.9, exported=1.9, bigrams=2.4, left=2.2)


def applied(number: int, *clusters: str) -> RoundHistory:
    """A round that made version `number` of one push of each cluster."""
    version, parent = VersionId(number, number), VersionId(number - 1, number - 1)
    folds = tuple(FoldRow(PushId(c, 1, number), parent, 10, 2, 1.0, 1.0, 0.0, 2.0, ()) for c in clusters)
    return RoundHistory(number, "applied", "", number, number + 1, version, parent, 10, 1.0, 1.0, False, folds, ())


ROUNDS = [applied(1, "fast"), applied(2, "fast", "slow"), applied(3, "fast", "slow")]
KILL = Kill(VersionId(2, 2))


def test_a_good_run_has_no_faults() -> None:
    """With a kill and without, a long run and a short one, which need not get below the bigrams."""
    assert find_faults(GOOD, ROUNDS, KILL, 200.0) == []
    assert find_faults(replace(GOOD, head=3.0, exported=3.0, left=None), ROUNDS, None, 60.0) == []


@pytest.mark.parametrize(
    ("losses", "seconds", "word"),
    [
        (replace(GOOD, head=2.4, exported=2.4, left=None), 200.0, "too little"),
        (replace(GOOD, head=5.0, exported=5.0, left=None), 60.0, "too little"),
        (replace(GOOD, exported=1.9001), 200.0, "not the head"),
        (replace(GOOD, transformers=1.8999), 200.0, "not the head"),
        (replace(GOOD, left=1.8), 200.0, "learned nothing"),
    ],
)
def test_losses_that_are_wrong(losses: Losses, seconds: float, word: str) -> None:
    """A head that learned too little, an export that differs, and a loss that did not fall after a lost disk."""
    (fault,) = find_faults(losses, ROUNDS, KILL, seconds)
    assert word in fault


def test_a_cluster_that_does_not_come_back() -> None:
    """A push that was folded before the kill does not count."""
    (fault,) = find_faults(GOOD, [*ROUNDS[:2], applied(3, "fast")], KILL, 200.0)
    assert "slow" in fault
    assert len(find_faults(GOOD, [], None, 200.0)) == 2


def test_losses_come_from_the_files(tmp_path: Path) -> None:
    """Version 0, the slaves' snapshots put together, and the export are loaded strictly and evaluated alike."""
    torch.manual_seed(0)
    first, head = build(), build()
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    for i, (name, tensor) in enumerate(head.state_dict().items()):
        parts[i % 2][f"theta.{name}"] = tensor
        parts[i % 2][f"momentum.{name}"] = torch.zeros_like(tensor)
    for i, part in enumerate(parts):
        (tmp_path / str(i)).mkdir()
        save_file(part, tmp_path / str(i) / "model.safetensors")
    save_file(first.state_dict(), tmp_path / "first")
    save_file(head.state_dict(), tmp_path / "head")
    sample = np.random.default_rng(0).integers(0, 256, (3, 17), dtype=np.uint8)
    found = evaluate_losses(tmp_path / "first", [tmp_path / "0", tmp_path / "1"], tmp_path / "head", sample)
    assert found.head == found.exported != found.first
    assert found.left is None
    files = [tmp_path / str(i) / "model.safetensors" for i in (0, 1)]
    again = evaluate_losses(tmp_path / "first", [tmp_path / "0", tmp_path / "1"], tmp_path / "head", sample, files)
    assert again.left == found.head
    with torch.no_grad():
        assert found.head == pytest.approx(loss_of(head, torch.from_numpy(sample.astype(np.int64))).item(), rel=1e-5)
    with pytest.raises(RuntimeError, match="Missing key"):
        validation_loss({}, sample)
