"""How a model lies on the ranks of a cluster: which ranges of its parameters this rank holds (design.md section 6).

The seam between Di-PS and a parallel layout is one function, `shards`: full names and shapes in, pieces of local memory
out. The manifest depends on the model alone, so clusters of different layouts train one global model.
"""

from __future__ import annotations

from dips.client.parallel.pieces import LocalPiece, Shards, shards

__all__ = ["LocalPiece", "Shards", "shards"]
