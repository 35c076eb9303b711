"""A training script without training: all clusters meet, then take part in one round together; see round.py.

    outer_rank.py CLUSTER CLUSTERS LAYERS LAYER_NUMEL MEETING STEP_S

With STEP_S above 0 nobody meets: an inner step takes so long, and each cluster trains for itself; see slow_cluster.py.
Writes a line of JSON for each outer step to MEETING/CLUSTER.jsonl: when it was begun and when `step` returned (Unix
seconds), and the version then installed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from dips.client import OuterLoop

MEET_S = 60.0


class Weights(nn.Module):
    """One layer, flat."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))


class BenchModel(nn.Module):
    """Layers named as a transformer's."""

    def __init__(self, layers: int, numel: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weights(numel) for _ in range(layers))


def meet(meeting: Path, name: str, clusters: int, number: int) -> None:
    """Wait until every cluster is here."""
    (meeting / f"{number}.{name}").touch()
    end = time.monotonic() + MEET_S
    while len(list(meeting.glob(f"{number}.*"))) < clusters:
        if time.monotonic() > end:
            raise TimeoutError(f"{name}: not all {clusters} clusters came to meeting {number}")
        time.sleep(0.002)


def main(name: str, clusters: int, layers: int, numel: int, meeting: Path, step_s: float) -> None:
    model = BenchModel(layers, numel)
    with OuterLoop(model) as outer, (meeting / f"{name}.jsonl").open("w") as out:
        number = 0
        while not outer.finished:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3)
            if step_s:
                time.sleep(step_s)
            else:
                meet(meeting, name, clusters, number)
            begun, number, base = time.time(), number + 1, outer.version
            outer.step(tokens=1)
            if outer.version == base:
                continue  # no outer step, or one that it had no part in
            line = {"begun": begun, "ended": time.time(), "version": str(outer.version)}
            out.write(json.dumps(line) + "\n")
            out.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), float(sys.argv[6]))
