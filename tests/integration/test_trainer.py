"""transformers' Trainer in a run: it trains on the run's data, resumes, and its rate follows the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.integration import cluster_harness as harness
from tests.integration.test_adapters import EXAMPLES, HERE, load_example

pytest.importorskip("transformers", reason="transformers is not installed: its callback is NOT tested here")

RANGES, ROWS, STEPS = 5, 4, 3  # of the data, of an inner step, of a range


@pytest.mark.timeout(120)
def test_a_trainer_that_crashes_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Crashed in the middle of a range: rows between checkpoint and crash are read again, all others once; the run has
    the tokens of the data, and the learning rate is that of half the run when the data are at their end."""
    example = load_example("hf_trainer")
    torch.manual_seed(1)
    tensors = {name: p.detach().numpy() for name, p in example.build().named_parameters()}
    rows, out, text = RANGES * ROWS * STEPS, tmp_path / "seen", tmp_path / "text"
    text.write_bytes(bytes(range(256)) * (rows * example.LENGTH // 256))
    tokens = rows * example.LENGTH
    shared = {"data": {"ranges": RANGES}, "stop": {"tokens": 2 * tokens}}
    words = ["--text", str(text), "--out", str(tmp_path / "checkpoints"), "--save-steps", "4"]
    command = [sys.executable, str(HERE / "train_trainer.py"), str(out), str(EXAMPLES / "hf_trainer.py"), "6", *words]
    with harness.Run(tmp_path, tensors, shared=shared, slaves=1) as run:
        run.start_servers()
        run.wait(run.start_cluster("hf", command, steps=10, max_restarts=1), 100)
        history = run.versions()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    (told,) = (line["told"] for line in lines if "told" in line)
    assert told.startswith("resumed on v0@r0 with 4 inner steps")
    cut = next(i for i, line in enumerate(lines) if "told" in line)
    before, after = ([line["row"] for line in part if "row" in line] for part in (lines[:cut], lines[cut:]))
    assert len(before) == 6 * ROWS and sorted(before[: 4 * ROWS] + after) == list(range(rows))
    assert sum(r.tokens for r in history) == tokens and [len(r.folds) for r in history] == [1, 1]
    last = lines[-1]
    assert last["steps"] == RANGES * STEPS
    rates = [line["learning_rate"] for line in last["log"] if "learning_rate" in line]
    assert sorted(rates, reverse=True)[0] == 3e-3 and 1.4e-3 < rates[-1] < 2e-3
