"""Runs the pipelines of `dips plan cluster` that no framework runs: stages of unequal speed, size and share
(docs/guides/inside.md).

pipeline.py       `Pipeline`, the training script's part: steps, evaluation, checkpoints, what is refused
orders.py         the plan and each rank's order, with its transfers; no torch
replan.py         the search for a new plan when links have other rates, and its files
offload.py        what a rank's device holds, and what waits in host memory
memory.py         the account of it by category, and devices that are emulated
parts.py          the layers that a rank holds, sharded over its stage
tied.py           parameters that layers share
torch_runtime.py  torch's runtime that plays the order, and all of torch's private names
"""

from dips.inside.pipeline.memory import EmulatedDevice, OutOfDeviceMemory
from dips.inside.pipeline.pipeline import Pipeline
from dips.inside.pipeline.replan import PlanReplaced

__all__ = ["EmulatedDevice", "OutOfDeviceMemory", "Pipeline", "PlanReplaced"]
