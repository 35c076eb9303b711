"""A rank that trains the task of a study as the emulator's clusters do: same model, batches and inner steps.

    train_study.py CLUSTER CLUSTERS VERSIONS DIRECTORY

CLUSTER is its number among CLUSTERS. The learning rate goes by the version that it trains on, of VERSIONS: a ledger
tells that, and no clock. Nobody trains before all are there. Cluster 1 pushes late LATE times: it stands still until
cluster 0 is two versions on. At which versions is up to the machine: it may never hold a given one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from dips.client import OuterLoop
from dips.study.learner import Inner, Recipe
from dips.study.task import BatchDraw, Task, make_model
from dips.study.text import build

SEED = 11
LATE = 2  # pushes
LATE_EACH = 6  # versions
RECIPE = Recipe(lr=1e-3)  # at 4e-3 AdamW makes 1e-2 of what sums in another order differ, in ten rounds


def make_task() -> Task:
    """A decoder of two blocks on the standard library's bytes, small enough for two cores."""
    return build(width=32, heads=2, hidden=88, batch=4, length=32)


def main(cluster: int, clusters: int, versions: int, directory: Path) -> None:
    torch.set_num_threads(1)
    task = make_task()
    inner = Inner(task, RECIPE, BatchDraw(SEED, cluster, clusters), make_model(task, SEED))
    with OuterLoop(inner.model) as outer:
        (directory / f"{cluster}.ready").touch()
        while len(list(directory.glob("*.ready"))) < clusters:
            time.sleep(0.02)
        place = directory / f"{cluster}.version"
        late_at = [LATE_EACH * i for i in range(LATE, 0, -1)] if cluster == 1 else []
        while not outer.finished:
            version = outer.version.version
            place.write_text(str(version))
            if late_at and version >= late_at[-1]:
                late_at.pop()
                while int((directory / "0.version").read_text() or 0) < version + 2:
                    time.sleep(0.02)
            loss = inner.take_step(outer.version.version / versions)
            outer.step(tokens=task.tokens, loss=loss)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
