"""How a model lies on the ranks of a cluster, and how it gets from there to the slaves and back.

    seam.py       what an adapter describes: which rectangles of which full parameter lie in which tensors of this rank
    tensors.py    the adapter for torch's own layouts; megatron.py the one for Megatron-core
    layout.py     chooses one, and gathers on all ranks what each of them holds
    plan.py       from that, the same on all ranks: which rank moves what, and what the ranks exchange
    host.py       this rank's host memory; copies to and from the model; lazy.py
                  for installs beside training, for which read_groups.py finds out which forward reads what

The manifest depends on the model alone, so clusters of different layouts train one global model.
"""

from __future__ import annotations

from dips.client.parallel.host import HostMemory, UntouchedMemory
from dips.client.parallel.layout import ModelLayout, full_parameters, lay_out
from dips.client.parallel.lazy import LazyMemory

__all__ = ["HostMemory", "LazyMemory", "ModelLayout", "UntouchedMemory", "full_parameters", "lay_out"]
