"""One rank of torchft's DiLoCo for mesh.py, run by torchft's own interpreter; it imports nothing of Di-PS.

    mesh_torchft_rank.py FOLDER PLAN        (a plan as JSON)

Two replica groups of two ranks, one on each node; a rank holds its half of each layer as a plain parameter, so what
crosses the link is what crosses it for the mesh. Writes FOLDER/rankN.json: for each delay, in inner steps, what the
cycles of two steps took beyond their forwards.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
from torchft._torchft import LighthouseServer  # type: ignore[import-not-found]
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

LIMIT = timedelta(seconds=60)
NODES, CYCLE = 2, 2  # replica groups, and inner steps from one sync to the next
JOIN_MS = 10_000


def train(plan: dict[str, Any], rank: int, delay: int) -> list[float]:
    """Seconds that each cycle took beyond its forwards."""
    group, member = divmod(rank, NODES)
    ip, port = plan["ips"][group], plan["ports"][delay]
    socket.gethostname = lambda: ip  # by which others reach it: names are not resolved in a namespace
    shards = (torch.nn.Linear(plan["width"], plan["width"] // 2, bias=False) for _ in range(plan["layers"]))
    model = torch.nn.ModuleList(shards)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT), min_replica_size=NODES, use_async_quorum=False, init_sync=False,
        rank=member, world_size=2, load_state_dict=model.load_state_dict, state_dict=model.state_dict,
        replica_id=f"node{group}-{delay}", timeout=LIMIT, quorum_timeout=LIMIT, store_addr=ip, store_port=port,
        hostname=ip, lighthouse_addr=f"http://{plan['ips'][0]}:{plan['lighthouses'][delay]}",
    )  # fmt: skip
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.85, nesterov=True)
    added = []
    with DiLoCo(manager, [model], inner, outer, sync_every=CYCLE, fragment_sync_delay=delay):
        for _ in range(plan["rounds"] + 1):
            step, begun = manager.current_step(), time.perf_counter()
            for _ in range(CYCLE):
                time.sleep(plan["forward_s"])
                inner.step()
            added.append(time.perf_counter() - begun - CYCLE * plan["forward_s"])
            if manager.current_step() != step + 1:
                raise RuntimeError(f"the sync after step {step} failed")
    manager.shutdown(wait=False)
    return added[1:]  # the first one meets its peers


def main(folder: Path, plan: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    group, member = divmod(rank, NODES)
    served: list[Any] = []
    if rank == 0:
        places = [f"{plan['ips'][0]}:{port}" for port in plan["lighthouses"]]
        served += [LighthouseServer(bind=at, min_replicas=NODES, join_timeout_ms=JOIN_MS) for at in places]
    if member == 0:
        served += [TCPStore(plan["ips"][group], port, is_master=True, wait_for_workers=False) for port in plan["ports"]]
    found = [train(plan, rank, delay) for delay in range(CYCLE)]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    time.sleep(1.0 if served else 0.0)  # nobody's last question is still under way
    os._exit(0)  # threads of its servers do not end by themselves


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
