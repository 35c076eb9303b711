"""Two ranks on gloo look at themselves: how models lie on them, and what they do when one of them cannot pull.

torchrun --nproc-per-node 2 check_ranks.py OUT     writes OUT.RANK as JSON
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from train_constant import ConstantModel, local

from dips.client.parallel import HostMemory, ModelLayout, lay_out
from dips.client.rank import transfer
from dips.client.rank.agent_client import JobCollectives, check_all_ranks
from dips.client.rank.model_checks import EVERY, digest_frozen
from dips.client.rank.shard_transfer import ShardTransfer, TransferRequest
from dips.client.rank.transfer import TransferIdentity, TransferStats
from dips.errors import ConfigError, LocalProtocolError, UnavailableSlave
from dips.ids import GENESIS
from dips.protocol.effects import Grant

GRANT = Grant(GENESIS, (), 60.0)


def sharded(mesh: Any) -> nn.Module:
    model = ConstantModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def facts(layout: ModelLayout, model: nn.Module) -> dict[str, Any]:
    manifest = layout.plan.manifest
    return {
        "digest": manifest.digest,
        "manifest": manifest.to_json(),
        "pieces": [list(piece) for piece in layout.plan.pieces],
        "holds": sum(local(p).numel() for p in model.parameters()),
    }


def make_shard_transfer(model: nn.Module, collectives: JobCollectives) -> ShardTransfer:
    layout = lay_out(model, collectives)
    return ShardTransfer(HostMemory(layout.adapter, layout.held, layout.plan, collectives), collectives, stall_s=5.0)


def order(identity: TransferIdentity) -> TransferRequest:
    """A transfer of nothing in particular, of which no progress is reported."""
    return TransferRequest(GRANT, identity, lambda *_: "")


def refused(model: nn.Module, collectives: JobCollectives) -> str:
    """The error that this rank gets for a model that is refused on some rank."""
    try:
        lay_out(model, collectives)
    except ConfigError as error:
        return str(error)
    return ""


def partial() -> nn.Module:
    """A parameter that is the sum of what its ranks hold."""
    model, mesh = nn.Linear(4, 4, bias=False), init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()]))
    return model


def odd_one(collectives: JobCollectives) -> nn.Module:
    """A model with a layer more on rank 1, and another shape."""
    return nn.Sequential(
        nn.Linear(2, 2 + collectives.rank, bias=False), *[nn.Linear(3, 1, bias=False)] * collectives.rank
    )


def wrong_on_rank_1(collectives: JobCollectives) -> nn.Module:
    """A type that fp32 does not hold, on one rank only."""
    return nn.Linear(2, 2, bias=False, dtype=torch.float64 if collectives.rank else torch.float32)


def one_rank_fails(collectives: JobCollectives, model: nn.Module) -> dict[str, Any]:
    """Rank 1 cannot pull; rank 0 would wait for ever for its own bytes unless it is cancelled."""
    shard_transfer = make_shard_transfer(model, collectives)
    before = [local(p).clone() for p in model.parameters()]

    def pull(grant: Grant, base: TransferIdentity, pieces: Any, *, cancel: threading.Event, **_: Any) -> TransferStats:
        if collectives.rank == 1:
            raise UnavailableSlave("ps1 is gone")
        assert cancel.wait(30), "rank 0 was not cancelled"
        raise transfer.TransferCancelled("cancelled")

    transfer.pull_pieces = pull
    began = time.monotonic()
    moved = shard_transfer.begin_pull(order(TransferIdentity("run", "c", 1, 1, collectives.rank))).wait(0.2)
    same = all(torch.equal(a, local(p)) for a, p in zip(before, model.parameters(), strict=True))
    return {"ok": moved.ok, "reason": moved.reason, "seconds": time.monotonic() - began, "untouched": same}


def all_ranks_pull(collectives: JobCollectives, model: nn.Module) -> dict[str, Any]:
    """Every rank gets its bytes; moments of the optimizer stay, parameters keep their identity."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    moments = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    shard_transfer = make_shard_transfer(model, collectives)

    def pull(grant: Grant, base: TransferIdentity, pieces: Any, **_: Any) -> TransferStats:
        for piece in pieces:
            piece.array[:] = 7.0
        return TransferStats(0, 0.0, 1)

    transfer.pull_pieces = pull
    moved = shard_transfer.begin_pull(order(TransferIdentity("run", "c", 1, 2, shard_transfer.rank))).wait(0.2)
    shard_transfer.install_version(GRANT.version)
    kept = all(torch.equal(local(s[k]), local(moments[p][k])) for p, s in optimizer.state.items() for k in s)
    sevens = all(bool((local(p) == 7.0).all()) for p in model.parameters())
    return {"ok": moved.ok, "sevens": sevens, "moments": kept, "nbytes": moved.nbytes}


def pull_and_merge(collectives: JobCollectives, diverged: bool) -> dict[str, Any]:
    """Every rank trains on beside a pull of nines; with `diverged` one element of rank 1 is not finite by then."""
    model = sharded(init_device_mesh("cpu", (2,)))
    layout = lay_out(model, collectives)
    memory = HostMemory(layout.adapter, layout.held, layout.plan, collectives)
    shard_transfer = ShardTransfer(memory, collectives, stall_s=5.0)
    mine = [local(p).detach() for p in model.parameters()]
    with torch.no_grad():
        for shard in mine:
            shard.fill_(4.0)
        memory.gather_pieces()
        memory.keep_pushed_shard()
        for shard in mine:
            shard.add_(0.5)
        if diverged and collectives.rank == 1:
            next(shard for shard in mine if shard.numel()).view(-1)[0] = float("nan")
    for piece in memory.pieces:
        piece.array[:] = 9.0
    merged = shard_transfer.merge_version(GRANT.version)
    return {"merged": merged, "values": sorted({value for shard in mine for value in shard.flatten().tolist()})}


def replaced_on(collectives: JobCollectives, ranks: set[int]) -> str:
    """The error that a rank gets for a push when the parameters of `ranks` are not those that were laid out."""
    model = ConstantModel()
    shard_transfer = make_shard_transfer(model, collectives)
    if collectives.rank in ranks:
        model.blocks[0] = nn.Linear(4, 5)
    try:
        shard_transfer.begin_push(order(TransferIdentity("run", "c", 1, 5, shard_transfer.rank))).cancel()
    except LocalProtocolError as error:
        return str(error)
    return ""


def sharded_late(collectives: JobCollectives) -> str:
    """The error that a rank gets for a push when `fully_shard` came after the model was laid out."""
    model = ConstantModel()
    shard_transfer = make_shard_transfer(model, collectives)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        shard_transfer.begin_push(order(TransferIdentity("run", "c", 1, 6, shard_transfer.rank)))
    except LocalProtocolError as error:
        return str(error)
    return ""


class LocalExperts(nn.Module):
    """Expert parallelism of one's own: each rank's expert is a plain tensor of the same name."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.expert = nn.Linear(4, 2), nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.expert.weight, 1.0 + rank)


@torch.no_grad()
def pushed_first(collectives: JobCollectives, model: nn.Module, off_by: float = 0.0, pushes: int = 1) -> list[str]:
    """What the first pushes come to: the error that this rank gets, or what it is warned of; "" if none.

    off_by  what is added to the model of rank 1 before the last
    """
    shard_transfer, told = make_shard_transfer(model, collectives), []
    transfer.push_pieces = lambda *_, **__: TransferStats(0, 0.0, 1)
    for number in range(pushes):
        if number == pushes - 1 and collectives.rank == 1:
            local(next(model.parameters())).add_(off_by)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                request = order(TransferIdentity("run", "c", 1, 7 + number, shard_transfer.rank))
                assert shard_transfer.begin_push(request).wait(0.2).ok
                told.append("".join(str(one.message) for one in warned))
            except ConfigError as error:
                told.append(f"ConfigError: {error}")
    return told


def trained_apart(collectives: JobCollectives) -> nn.Module:
    """A model that each rank trained with its own data, without DistributedDataParallel."""
    torch.manual_seed(1)
    model = ConstantModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(collectives.rank)
    for _ in range(16):
        model(torch.randint(7, (4,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def frozen_base(mesh: DeviceMesh | None) -> nn.Module:
    """One base model, whole or cut by rows along the last dim of a mesh."""
    torch.manual_seed(3)
    base = nn.Linear(4, 4).requires_grad_(False)
    if mesh is not None:
        rows = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        for name, whole in list(base.named_parameters()):
            place = mesh.get_coordinate()
            local = whole.detach().chunk(mesh.size(mesh.ndim - 1))[place[-1] if place else 0]
            cut = DTensor.from_local(local, mesh, rows, shape=whole.shape, stride=whole.stride())
            setattr(base, name, nn.Parameter(cut, requires_grad=False))
    return base


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    collectives = JobCollectives()
    words = collectives.broadcast(b"said by rank 0" if collectives.rank == 0 else None)
    flat = init_device_mesh("cpu", (2,))
    replicated = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    plain = nn.Linear(2, 2, bias=False)
    plain.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), flat, [Replicate()]))

    def of(model: nn.Module) -> dict[str, Any]:
        return facts(lay_out(model, collectives), model)

    found = {
        "received": words.decode(),
        "numbered": collectives.number_ranks(collectives.rank == 1),
        "hold": [check_all_ranks(True), check_all_ranks(collectives.rank == 0), check_all_ranks(collectives.rank == 1)],
        "plain": of(ConstantModel()),
        "fsdp": of(sharded(flat)),
        "hsdp": of(sharded(replicated)),
        "replicated": of(plain),
        "partial": refused(partial(), collectives),
        "odd one": refused(odd_one(collectives), collectives),
        "wrong on rank 1": refused(wrong_on_rank_1(collectives), collectives),
        "fails": one_rank_fails(collectives, sharded(flat)),
        "merges": pull_and_merge(collectives, diverged=False),
        "diverged": pull_and_merge(collectives, diverged=True),
        "sharded late": sharded_late(collectives),
        "replaced on rank 1": replaced_on(collectives, {1}),
        "ddp": pushed_first(collectives, nn.parallel.DistributedDataParallel(ConstantModel())),
        "shards": pushed_first(collectives, sharded(flat), off_by=0.5),
        "no ddp": pushed_first(collectives, trained_apart(collectives)),
        "experts": pushed_first(collectives, LocalExperts(collectives.rank)),
        "hsdp apart": pushed_first(collectives, sharded(replicated), off_by=0.5),
        "rounding": pushed_first(collectives, nn.Linear(64, 64), off_by=1e-8),
        "later": pushed_first(collectives, nn.Linear(4, 4), off_by=0.5, pushes=EVERY + 1),
        "frozen": {
            kind: digest_frozen([frozen_base(mesh)], collectives)
            for kind, mesh in {
                "whole": None,
                "cut": flat,
                "cut in two dims": init_device_mesh("cpu", (1, 2)),
                "cut from rank 1 on": DeviceMesh("cpu", [1, 0]),
                "on rank 1": DeviceMesh("cpu", [1]),
            }.items()
        },
        "pulls": all_ranks_pull(collectives, sharded(flat)),
    }
    out.with_name(f"{out.name}.{collectives.rank}").write_text(json.dumps(found))
    collectives.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
