"""The inner learning rate as a function of the run's progress, since clusters have no common step count
(docs/architecture.md#life-of-a-round).

    scheduler = schedule(optimizer, outer)          # cosine from the optimizer's own lr to a tenth of it
    ...
    optimizer.step(); outer.step(local_tokens=n, loss=loss); scheduler.step()

A cluster that joins a running run has an empty optimizer state, so AdamW's first steps would apply the full learning
rate in noisy directions. Its rate therefore warms up over REJOIN_WARMUP_STEPS inner steps (`outer.lr_scale`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import cos, pi

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dips.client.rank.outer_loop import OuterLoop

NO_TARGET = "schedule() follows outer.progress, which stays 0 without `stop.tokens`: `dips set stop.tokens=N` sets it"


def cosine(progress: float, floor: float = 0.1) -> float:
    """Return the cosine decay from 1 at progress 0 to `floor` at progress 1."""
    return floor + (1 - floor) * (1 + cos(pi * min(1.0, max(0.0, progress)))) / 2


def schedule(optimizer: Optimizer, outer: OuterLoop, curve: Callable[[float], float] = cosine) -> LambdaLR:
    """Return a LambdaLR with the factor `curve(outer.progress) · outer.lr_scale`; call its `step` after each inner
    step.

    curve   maps the run's progress, 0 to 1, to a factor of the optimizer's own learning rate
    """
    if not outer.shared.stop.tokens and not outer.progress:  # the run may have a target that this file does not know
        warnings.warn(NO_TARGET, stacklevel=2)
        outer.remark(NO_TARGET)
    return LambdaLR(optimizer, lambda _: curve(outer.progress) * outer.lr_scale)
