"""A planned pipeline under Di-PS whose first link sags: it takes another plan by itself, and starts anew with it.

    train_replanned.py DIRECTORY

plan.yaml is there, and what it was made from. Layers sleep for the seconds of the profile, and so do sends, one after
the other to each rank. From step SAGS on, those between the devices of FIRST take SAGGED times as long. Rank 0 writes a
line for each step to DIRECTORY/out.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from benchmarks.pipeline_rank import WIDTH, SlowLayer
from dips.client import OuterLoop
from dips.inside.pipeline import Pipeline
from dips.inside.pipeline.torch_runtime import RankStage
from dips.inside.planning.simulate import PassSeconds

LAYERS, BATCH, SECONDS, FIXED_S, BORDER_BYTES, BORDER_S = 6, 12, 0.01, 0.001, 1e6, 0.02
SAGS, SAGGED = 4, 10.0
FIRST = {"a", "b"}
MODEL = {
    "name": "slept",
    "batch": BATCH,
    "recompute": False,
    "layers": [
        {"name": "l", "parameters": 1e9, "flops": 1e9, "activation_bytes": 4e6, "border_bytes": BORDER_BYTES,
         "repeat": LAYERS}
    ],
}  # fmt: skip
PROFILE = {
    "nodes": [{"name": name, "kind": "k", "site": name} for name in "abc"],
    "kinds": {"k": {"memory_gb": 80, "tflops": 100}},
    "links": {a: {b: BORDER_BYTES / BORDER_S / 1.25e8 for b in "abc" if b != a} for a in "abc"},
    "measured": {"k": {"l": {key: [SECONDS, FIXED_S] for key in ("forward", "input", "weight")}}},
}


def build() -> list[SlowLayer]:
    """Return layers that take a sample's seconds for each row, and the fixed ones besides."""
    took = PassSeconds(*[SECONDS + FIXED_S] * 3)
    return [SlowLayer(took, 1, FIXED_S / (SECONDS + FIXED_S)) for _ in range(LAYERS)]


class SleptLines:
    """The lines from a rank to each other one: a send sleeps for its bytes, and then goes."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self._sagged, self._names = directory / "sagged", names
        self._lines = [ThreadPoolExecutor(1) for _ in names]

    def send(self, stage: RankStage, tensor: torch.Tensor, spec: Any, rank: int, tag: int) -> dist.P2POp:
        """Stand in for `RankStage._send`."""
        made = self._send(stage, tensor, spec, rank, tag)
        link = {self._names[dist.get_rank()], self._names[rank]}
        seconds = len(tensor) * BORDER_S * (SAGGED if link == FIRST and self._sagged.exists() else 1.0)
        # torch takes any operation but its own for a receive.
        made.op = lambda tensor, group_src, **to: SleptSend(
            self._lines[rank].submit(self._go, seconds, tensor, {"group_dst": group_src, **to})
        )
        return made

    _send = staticmethod(RankStage._send)

    @staticmethod
    def _go(seconds: float, tensor: torch.Tensor, to: Any) -> None:
        time.sleep(seconds)
        dist.isend(tensor, **to).wait()


class SleptSend:
    """A send under way, as torch's runtime waits for it."""

    def __init__(self, sent: Future[None]) -> None:
        self._sent = sent

    def wait(self) -> None:
        self._sent.result()


def main(directory: Path) -> None:
    """Train until the run is over."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, plan = dist.get_rank(), directory / "plan.yaml"
    stages = [stage["devices"][0].partition(".")[0] for stage in yaml.safe_load(plan.read_text())["pipeline"]["stages"]]
    lines = SleptLines(directory, stages)  # ranks are devices, stage by stage
    RankStage._send = lambda stage, *given: lines.send(stage, *given)  # type: ignore[method-assign]
    pipe = Pipeline(
        build, plan, loss=lambda output, targets: (output - targets).square().sum(), collective_s=30.0, adapt="auto",
        optimizer=lambda part: torch.optim.SGD(part.parameters(), lr=1e-4),
    )  # fmt: skip
    batch = torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    with OuterLoop(pipe.parts) as outer:
        while not outer.finished:
            begin_s = time.monotonic()
            loss = pipe.step(batch)
            if pipe.steps == SAGS:
                (directory / "sagged").touch()
            if rank == 0:
                told = {"stages": stages, "seconds": time.monotonic() - begin_s, "loss": loss, "gear": pipe.gear}
                told |= {"spent": pipe.last_seconds, "version": str(outer.version), "new_plan": str(pipe.new_plan)}
                with (directory / "out").open("a") as file:
                    file.write(json.dumps(told) + "\n")
            outer.step(tokens=pipe.tokens, loss=loss)
    pipe.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
