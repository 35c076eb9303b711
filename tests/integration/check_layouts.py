"""Every layout on the ranks of one torchrun: what is pushed is θ, and what is pulled lies on every rank, bit for bit.

torchrun --nproc-per-node N check_layouts.py OUT KIND... [--device cuda]     writes OUT.RANK as JSON

Nothing here talks to a slave: `pieces` is what a rank would send, and what it would have received. Each rank compares
its own part with full parameters that it made from the seed, so a shard that is wrong on one rank is seen there.
Where there are fewer devices than ranks they are shared, and each rank is a host of its own.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import layouts
import numpy as np
import torch
import torch.distributed as dist
from layouts import full, laid, local, seeded

from benchmarks.accelerator import add_device, missing_device, take_device
from dips.client.parallel import HostMemory, ModelLayout, lay_out, shard_buffer
from dips.client.rank.agent_client import JobCollectives
from dips.wire.chunks import LayerLayout, Piece, describe_uncovered
from dips.wire.frame import Range

shard_buffer.TRANSIT_ITEMS = shard_buffer.LEAST_BLOCK_ITEMS = (
    100  # so that what the ranks exchange takes several blocks
)
SPREAD_ITEMS = 64  # so that what is replicated is spread in a model this small


def whole_theta(collectives: JobCollectives, layout: ModelLayout, memory: HostMemory) -> dict[str, np.ndarray]:
    """What all ranks together push: full parameters, each element from the one rank that speaks for it."""
    manifest = layout.plan.manifest
    mine = b"".join(piece.array.tobytes() for piece in memory.pieces)
    ranges = json.dumps([list(piece.range) for piece in memory.pieces]).encode()
    values = [np.frombuffer(words, np.float32) for words in collectives.all_gather(mine)]
    claims = [[Range(*r) for r in json.loads(words)] for words in collectives.all_gather(ranges)]
    assert (
        describe_uncovered(
            LayerLayout(manifest, range(len(manifest.layers))), {f"rank {r}": c for r, c in enumerate(claims)}
        )
        == []
    )
    theta = {p.name: np.full(p.numel, np.nan, np.float32) for layer in manifest.layers for p in layer.parameters}
    for of_rank, ranges_of in zip(values, claims, strict=True):
        ends = np.cumsum([claim.length for claim in ranges_of], dtype=int)
        parts = np.split(of_rank, ends)
        assert not parts.pop().size, "pieces have other lengths than their ranges"
        for (layer, param, offset, length), part in zip(ranges_of, parts, strict=True):
            name = manifest.layers[layer].parameters[param].name
            theta[name][offset : offset + length] = part
    return theta


def pull(layout: ModelLayout, memory: HostMemory, theta: dict[str, np.ndarray]) -> None:
    """Fill this rank's pieces with a version and install it."""
    dist.barrier()  # as every transfer begins: ranks of one host may still install from memory that they share
    for piece in memory.pieces:
        piece.array[:] = at(layout, piece, theta)
    assert memory.find_replaced_parameter() == ""
    memory.scatter_pieces()
    memory.install_shard()


def at(layout: ModelLayout, piece: Piece, theta: dict[str, np.ndarray]) -> np.ndarray:
    """What a piece is of full parameters."""
    parameter = layout.plan.manifest.layers[piece.layer].parameters[piece.param]
    return theta[parameter.name].reshape(-1)[piece.offset : piece.offset + piece.length]


def check(kind: str, collectives: JobCollectives) -> dict[str, Any]:
    """Take one layout through a push and two pulls."""
    reference = {name: p.detach().numpy().copy() for name, p in seeded().named_parameters()}
    model, _ = laid(kind, seeded(), collectives.world_size)
    layout = lay_out(model, collectives, spread_items=SPREAD_ITEMS)
    memory = HostMemory(layout.adapter, layout.held, layout.plan, collectives)
    inner = model.module if kind == "ddp" else model
    before = {name: local(p).clone() for name, p in inner.named_parameters()}
    memory.gather_pieces()
    pushed = whole_theta(collectives, layout, memory)
    wrong_push = [n for n, theta in reference.items() if not np.array_equal(pushed[n], theta.reshape(-1))]
    with torch.no_grad():
        for p in inner.parameters():
            local(p).fill_(float("nan"))
    pull(layout, memory, pushed)
    wrong_same = [n for n, p in inner.named_parameters() if not torch.equal(local(p), before[n])]
    changed = {
        n: theta + np.arange(theta.size, dtype=np.float32).reshape(theta.shape) for n, theta in reference.items()
    }
    pull(layout, memory, changed)
    wrong_change = [n for n, p in inner.named_parameters() if not np.array_equal(full(p).cpu().numpy(), changed[n])]
    memory.gather_pieces()
    again = whole_theta(collectives, layout, memory)
    wrong_change += [n for n, theta in changed.items() if not np.array_equal(again[n], theta.reshape(-1))]
    return {
        "digest": layout.plan.manifest.digest,
        "wrong": {"push": wrong_push, "same": wrong_same, "change": wrong_change},
        "moved": sum(piece.length for piece in memory.pieces),
        "held": sum(local(p).numel() for p in inner.parameters()),
        "host": memory.allocated_numel,
        "parameters": sum(theta.size for theta in reference.values()),
    }


def on_this_rank(check: Callable[[Any, JobCollectives], Any], cases: Mapping[str, Any], out: Path, device: str) -> None:
    """Check each case on one rank of the job, and write what was found to OUT.RANK."""
    if lacks := missing_device(device):
        if os.environ["LOCAL_RANK"] == "0":
            print(f"nothing was checked: {lacks}")
        return
    layouts.device = take_device(device, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else None)
    torch.set_num_threads(1)
    collectives = JobCollectives()
    found = {name: check(case, collectives) for name, case in cases.items()}
    out.with_name(f"{out.name}.{collectives.rank}").write_text(json.dumps(found))
    collectives.close()
    dist.destroy_process_group()


def read_words() -> tuple[Path, list[str], str]:
    """Of the command line: where to, what, and on which device."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("kinds", nargs="*")
    add_device(parser)
    args = parser.parse_args()
    return args.out, args.kinds, args.device


if __name__ == "__main__":
    out, kinds, device = read_words()
    on_this_rank(check, {kind: kind for kind in kinds}, out, device)
