"""torchft's DiLoCo on the task of train_study.py: a lighthouse, and replicas that are threads of this process.

train_torchft.py REPLICAS INNER_STEPS VERSIONS OUT    writes θ of each version to OUT: `NAME@VERSION` in an .npz
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch.distributed import TCPStore

from dips.study.learner import Inner
from dips.study.task import BatchDraw, make_model
from tests.integration.train_study import RECIPE, SEED, make_task

LR, MOMENTUM = 0.7, 0.8  # of the outer step
WITHIN = timedelta(seconds=60)

Arrays = dict[str, np.ndarray]


def train_replica(
    inner: Inner, replica: int, replicas: int, inner_steps: int, versions: int, lighthouse: str
) -> Arrays:
    """One replica group of one rank; return θ after each outer step."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=WITHIN), load_state_dict=lambda _: None, state_dict=dict, min_replica_size=replicas,
        use_async_quorum=False, init_sync=False, replica_id=str(replica), rank=0, world_size=1, timeout=WITHIN,
        store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1", lighthouse_addr=lighthouse,
    )  # fmt: skip
    (inner_optimizer,) = inner.optimizers
    outer = torch.optim.SGD(inner.model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
    found: Arrays = {}
    with DiLoCo(manager, [inner.model], inner_optimizer, outer, sync_every=inner_steps):
        for version in range(versions):
            for _ in range(inner_steps):
                inner.take_step(version / versions)
            assert (manager.current_step(), manager.num_participants()) == (version + 1, replicas)
            found |= {f"{n}@{version + 1}": p.detach().numpy().copy() for n, p in inner.parameters.items()}
    manager.shutdown(wait=False)
    return found


def main(replicas: int, inner_steps: int, versions: int, out: Path) -> None:
    from torchft._torchft import LighthouseServer

    torch.set_num_threads(1)
    task = make_task()
    inners = [Inner(task, RECIPE, BatchDraw(SEED, i, replicas), make_model(task, SEED)) for i in range(replicas)]
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=replicas)
    address = lighthouse.address()
    with ThreadPoolExecutor(replicas) as threads:
        works = [
            threads.submit(train_replica, inner, i, replicas, inner_steps, versions, address)
            for i, inner in enumerate(inners)
        ]
        found = [work.result() for work in works]
    lighthouse.shutdown()
    assert all(np.array_equal(a, other[name]) for other in found[1:] for name, a in found[0].items())
    np.savez(out, **found[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
