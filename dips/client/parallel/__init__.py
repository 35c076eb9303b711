"""How a model lies on the ranks of a cluster, and how it gets from there to the slaves and back (design.md section 6).

    seam.py       what an adapter says: which rectangles of which full parameter lie in which tensors of this rank
    tensors.py    the adapter for torch's own layouts; megatron.py the one for Megatron-core
    layout.py     chooses one, and lets all ranks hear what each holds
    plan.py       from that, the same on all ranks: who speaks for what, who hands what to whom
    host.py       this rank's host memory; copies to and from the model; streaming.py for hosts that are tight,
                  forward.py for a training that does not stand still; reach.py tells it which forward reads what

The manifest depends on the model alone, so clusters of different layouts train one global model.
"""

from __future__ import annotations

from dips.client.parallel.host import HostMemory
from dips.client.parallel.layout import Laid, lay_out, whole
from dips.client.parallel.lazy import LazyMemory
from dips.client.parallel.streaming import StreamedMemory

__all__ = ["HostMemory", "Laid", "LazyMemory", "StreamedMemory", "lay_out", "whole"]
