"""A training script without training, for recovery.py: inner steps of one length, each told with its times.

    recovery_rank.py CLUSTER LAYERS LAYER_NUMEL STEP_S MEETING

Appends a line of JSON for each call of `step` to MEETING/CLUSTER.jsonl: when it was made and when it returned (Unix
seconds), how often it gave the processor up to wait for something, and the version then installed.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch

from benchmarks.outer_rank import BenchModel
from dips.client import OuterLoop


def main(name: str, layers: int, numel: int, step_s: float, meeting: Path) -> None:
    model = BenchModel(layers, numel)
    with OuterLoop(model) as outer, (meeting / f"{name}.jsonl").open("a", buffering=1) as out:
        while not outer.finished:
            time.sleep(step_s)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-6)  # a model that does not move is refused
            waits, begun = _waits(), time.time()
            outer.step(tokens=1)
            call = {"begun": begun, "ended": time.time(), "waits": _waits() - waits, "version": str(outer.version)}
            out.write(json.dumps(call) + "\n")


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
