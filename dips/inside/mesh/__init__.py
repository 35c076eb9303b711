"""EDiT on a mesh: sharded inside a node, averaged between nodes now and then (docs/guides/inside.md).

loop.py     `MeshLoop`, the training script's part: when a sync is due, checkpoints, what is refused
sync.py     one sync: its collectives, layer by layer in the forward
merging.py  what each replica counts in a layer, and the layer's outer step; no torch
"""

from dips.inside.mesh.loop import MeshLoop

__all__ = ["MeshLoop"]
