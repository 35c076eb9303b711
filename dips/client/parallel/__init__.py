"""The layout of a model on the ranks of a cluster, and its transfer to the slaves and back.

    adapter.py    the adapters' interface: which rectangles of which full parameter are in which tensors of this rank,
                  and which parameters each forward reads
    tensors.py    the adapter for torch's own layouts; megatron.py the adapter for Megatron-core
    layout.py     chooses an adapter, and gathers every rank's layout on all ranks
    plan.py       computes from the layouts, identically on all ranks, which rank moves what and the ranks' exchanges
    host.py       this rank's host memory; copies to and from the model; lazy.py for installs beside training

The manifest depends on the model alone, so clusters of different layouts train one global model.
"""

from __future__ import annotations

from dips.client.parallel.host import HostMemory, UntouchedMemory
from dips.client.parallel.layout import ModelLayout, full_parameters, lay_out
from dips.client.parallel.lazy import LazyMemory

__all__ = ["HostMemory", "LazyMemory", "ModelLayout", "UntouchedMemory", "full_parameters", "lay_out"]
