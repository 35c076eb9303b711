"""A mesh of 2 × 2 under Di-PS, without training: each replica sets every parameter to a number of its own.

    train_mesh.py CLUSTER TOKENS CLUSTERS OUT

The mean of the two is what train_constant.py would set. After each step that ends with another version each rank writes
(version, number, steps since the last sync) to OUT.RANK. If OUT.die exists, rank 3 removes it and dies in a sync.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_constant import ConstantModel, constant, local, one_number

from dips.client import OuterLoop
from dips.config import Shared
from dips.inside.mesh import MeshLoop

STEPS = 2  # τ
APART = 0.75  # of each replica from the mean; nearer, OuterLoop would take the first step for one that undid a pull
PLAIN = {"lr": 1.0, "momentum": 0.0, "step": "sgd", "weights": "uniform"}


def main(cluster: str, tokens: int, clusters: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sync", "shard"))
    torch.manual_seed(0)
    model = ConstantModel()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = Shared.model_validate({"run": "mesh", "outer": PLAIN, "penalty": {"gates": []}})
    loop = MeshLoop(model, mesh, optimizer, rules, steps=STEPS)
    seen = []
    with OuterLoop(model, may_push=loop.is_synced) as outer:
        again = not out.with_name(f"{out.name}.die").exists()  # the other cluster waits until this one has come back
        out.with_name(f"{'again' if again else out.name}.ready.{rank}").touch()
        while len(list(out.parent.glob("*.ready.0"))) < clusters:
            time.sleep(0.05)
        while True:
            if not seen or seen[-1][0] != str(outer.version):
                seen.append((str(outer.version), one_number(model), loop._steps))
                out.with_name(f"{out.name}.{rank}").write_text(json.dumps(seen))
            if outer.finished:
                break
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    apart = APART * (1 - 2 * mesh.get_local_rank("sync"))
                    local(parameter).fill_(constant(cluster, outer.version.version) + apart)
            loop.step(tokens=tokens)
            dying = out.with_name(f"{out.name}.die")
            if rank == 3 and loop._sync.pending and outer.version.version >= 2 and dying.exists():
                dying.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            outer.step(tokens=tokens)
    loop.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
