"""A trainer that attaches with a model of 50,000 tensors and ends, for attach.py.

    attach_rank.py CLUSTER right|wrong|whole MEETING

Waits for MEETING/go.CLUSTER, then writes the seconds of each stage to MEETING/CLUSTER.json. `wrong`: one shape is not
the run's; `whole`: OuterLoop as it is, with its first pull.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from benchmarks.large_model import Shape, small_shapes
from dips.client import OuterLoop
from dips.client.ipc.address import find_address
from dips.client.parallel import HostMemory, lay_out
from dips.client.rank.agent_client import AgentClient, JobCollectives
from dips.client.rank.joining import attach_trainer
from dips.config import load_cluster
from dips.errors import DifferentModel

GO_S = 120.0


def build_model(shapes: Iterable[Shape]) -> nn.Module:
    """A tree of modules with these parameters."""
    model = nn.Module()
    for name, shape in shapes:
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return model


def time_stages(model: nn.Module, wrong: bool) -> dict[str, float]:
    """Do what OuterLoop does up to the answer to Attach, and time it."""
    config = load_cluster(Path(os.environ["DIPS_CLUSTER_FILE"]))
    collectives, marks = JobCollectives(), [time.perf_counter()]
    layout = lay_out(model, collectives)
    marks.append(time.perf_counter())
    HostMemory(layout.adapter, layout.held, layout.plan, collectives)
    marks.append(time.perf_counter())
    assert layout.plan.manifest.digest
    marks.append(time.perf_counter())
    client = AgentClient(collectives, find_address(config), config.poll_s)
    differences = ""
    try:
        attach_trainer(client, config, layout.plan.manifest, 1, (), "")
    except DifferentModel as error:
        differences = str(error)
    assert ("down_proj.weight: expected shape" in differences) == wrong, differences
    marks.append(time.perf_counter())
    spans = [end - begin for begin, end in pairwise(marks)]
    return dict(zip(("layout", "memory", "digest", "attach"), spans, strict=True))


def main(name: str, kind: str, meeting: Path) -> None:
    shapes = dict(small_shapes())
    if kind == "wrong":
        shapes["model.layers.40.mlp.experts.7.down_proj.weight"] = (1, 1)
    model = build_model(shapes.items())
    (meeting / f"ready.{name}").touch()
    end = time.monotonic() + GO_S
    while not (meeting / f"go.{name}").exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{name} was not told to go within {GO_S:g} s")
        time.sleep(0.01)
    if kind == "whole":
        begun = time.perf_counter()
        with OuterLoop(model):
            found = {"whole": time.perf_counter() - begun}
    else:
        found = time_stages(model, kind == "wrong")
    aside = meeting / f"{name}.tmp"
    aside.write_text(json.dumps(found))
    aside.rename(meeting / f"{name}.json")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
