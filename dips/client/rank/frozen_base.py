"""A digest of a model's frozen parameters, equal in every layout: adapters belong to one base model.

Covers the first element of each parameter, as rank 0 holds it, rounded to bf16 as bases are often loaded. Unknown, and
then not compared, if ranks hold different parameters (a pipeline) or the base has other types (quantized).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from dips.client.parallel.tensors import plain_name
from dips.client.parallel.torch_types import is_dtensor
from dips.client.rank.collectives import JobCollectives

COMPARED = (torch.float32, torch.bfloat16)  # a base stored in bf16 has equal values in both
UNKNOWN = ""


@torch.no_grad()
def digest_frozen(parts: Sequence[nn.Module], collectives: JobCollectives) -> str:
    """Return the SHA-256 of names and first elements; UNKNOWN if there are none or they cannot be compared.
    Collective.
    """
    frozen = {plain_name(name): p for part in parts for name, p in part.named_parameters() if not p.requires_grad}
    by_rank = collectives.all_gather(hashlib.sha256("\n".join(sorted(frozen)).encode()).digest())
    if len(set(by_rank)) > 1:
        return UNKNOWN
    firsts = {name: _first_element(p) for name, p in frozen.items() if p.numel()}
    known = [first for first in firsts.values() if first is not None]
    if not known or len(known) < len(firsts):
        return UNKNOWN
    values = [float(first.to(torch.bfloat16)) for first in known]
    lines = sorted(f"{name} {value.hex()}" for name, value in zip(firsts, values, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _first_element(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the first element; None if it is not on this rank, or of a type that is not compared."""
    if is_dtensor(parameter):
        if any(parameter.device_mesh.get_coordinate() or [1]):
            return None
        parameter = parameter.to_local()
    if parameter.dtype not in COMPARED or not parameter.numel() or parameter.is_meta:
        return None
    return parameter.detach().reshape(-1)[0]
