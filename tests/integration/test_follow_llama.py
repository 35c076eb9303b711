"""A tiny Llama of transformers generates while its versions change under it and slaves are killed (dips.follow).

This file is also its own programs: `python test_follow_llama.py train`, and `generate MASTER OUT`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: what an engine generates is NOT tested here")
from transformers import LlamaConfig, LlamaForCausalLM

import dips
from dips.client import OuterLoop
from dips.ids import VersionId
from dips.slave.export import export_snapshot
from tests.integration import cluster_harness as harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
# FOLLOW_FULL=1: four minutes on two busy cores.
VERSIONS, KILLS = (100, 20) if os.environ.get("FOLLOW_FULL") else (20, 4)
PROMPT, NEW_TOKENS = [1, 5, 9, 2], 12
SLAVES = 2


def build() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def complete(model: LlamaForCausalLM) -> tuple[list[int], str]:
    """Return the tokens that the model goes on with, and a digest of every logit on the way."""
    with torch.no_grad():
        done = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    logits = torch.stack(done.logits).numpy().tobytes()
    return done.sequences[0].tolist(), hashlib.sha256(logits).hexdigest()


# ---- the programs ----------------------------------------------------------------------------------------------------


def train() -> None:
    """Walk at random, far enough for other tokens, one outer step after another."""
    model, noise = build(), torch.Generator().manual_seed(2)
    with OuterLoop(model) as outer:
        while not outer.finished:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
            time.sleep(0.25)  # a version a second: an engine sees most of them
            outer.step(tokens=8)


def generate(master: str, out: Path) -> None:
    """Complete the prompt again and again, each time by the newest version; a line for each completion."""
    torch.set_num_threads(1)
    model = build()
    with dips.follow(model, master) as follower, out.open("a", buffering=1) as lines:
        finished = False
        while not finished:
            began = time.monotonic()
            version, took_s = follower.update(), time.monotonic() - began
            tokens, digest = complete(model)
            lines.write(f"{json.dumps([version, tokens, digest, took_s])}\n")
            finished = follower.finished


# ---- the test --------------------------------------------------------------------------------------------------------


def read(out: Path) -> list[Any]:
    return (
        [json.loads(line) for line in out.read_text().splitlines(True) if line.endswith("\n")] if out.exists() else []
    )


@pytest.mark.parametrize("pull_codec", ["int8"])
def test_each_completion_is_of_the_one_version_that_it_names(tmp_path: Path, pull_codec: str) -> None:
    """Over all versions and kills of slaves, without a pause; none mixes two (docs/architecture.md#invariant-6)."""
    tensors = {name: p.detach().numpy() for name, p in build().named_parameters()}
    shared = {"penalty": {"gates": []}, "stop": {"versions": VERSIONS}, "pull_codec": pull_codec}
    out, me = tmp_path / "completions", str(Path(__file__))
    with harness.Run(tmp_path, tensors, shared=shared, slaves=SLAVES, master={"keep_every": 1}) as run:
        run.start_master()
        slaves = {name: run.start_slave(name) for name in run.slaves}
        engine = run._start("engine", [sys.executable, me, "generate", run.address, str(out)])
        run.until(lambda: read(out), 120, "the first completion")
        trainer = run.start_cluster("west", [sys.executable, me, "train"], steps=4, max_restarts=100)

        def newest() -> int:
            return max(VersionId.parse(version).version for version, *_ in read(out))

        for kill in range(KILLS):
            due, name = (kill + 1) * VERSIONS // (KILLS + 1), run.slaves[kill % SLAVES]
            run.until(lambda due=due: newest() >= due or trainer.code is not None, 300, f"a completion of v{due}")
            slaves[name].kill()
            before = len(read(out))
            run.until(lambda before=before: len(read(out)) > before + 2, 60, f"completions while {name} is dead")
            slaves[name] = run.start_slave(name)
        run.wait(trainer, 600)
        run.wait(engine, 120)
        completions = read(out)
        names = list(dict.fromkeys(version for version, *_ in completions))
        assert names[-1].startswith(f"v{VERSIONS}@") and len(names) > VERSIONS // 2, names
        _compare(tmp_path, [tmp_path / name for name in run.slaves], completions)
        slowest = max(took_s for *_, took_s in completions[1:])
        print(f"{len(completions)} completions of {len(names)} versions; the longest update took {slowest:.3f} s")
        assert slowest < 5.0, "two shared cores may pause a process; a pull of seconds may not"


def _compare(directory: Path, disks: list[Path], completions: list[Any]) -> None:
    """Recompute each completion from the export of the version that it names."""
    torch.set_num_threads(1)
    expected: dict[str, tuple[list[int], str]] = {}
    for version, tokens, digest, _ in completions:
        if version not in expected:
            model, file = build(), directory / "exported.safetensors"
            if not version.startswith("v0@"):
                export_snapshot(disks, VersionId.parse(version), file)
                assert dips.load(model, file) == version
            expected[version] = complete(model)
        assert (tokens, digest) == expected[version], version
    assert len({digest for _, digest in expected.values()}) == len(expected), "versions differ, or this shows nothing"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.argv[1] == "train":
        train()
    else:
        generate(sys.argv[2], Path(sys.argv[3]))
