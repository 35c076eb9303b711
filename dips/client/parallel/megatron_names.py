"""Global names of Megatron-core's parameters and buffers: those of the whole model on one rank.

    decoder.layers.0 on the second of two stages of two layers      decoder.layers.2
    experts.local_experts.0 on the second of four expert ranks      experts.local_experts.N/4
    experts.linear_fc1.weight0 (Transformer Engine's grouped GEMM)  experts.local_experts.0.linear_fc1.weight
    output_layer.weight, tied                                       embedding.word_embeddings.weight

So clusters with different numbers of stages and expert ranks, and either kind of experts, train one model.
"""

from __future__ import annotations

import re

from megatron.core import parallel_state
from torch import nn

from dips.errors import ConfigError

EMBEDDING = "embedding.word_embeddings.weight"
TIED = "output_layer.weight"
EXPERTS = ".experts."  # routed experts; shared experts are held like any other layer
SEQUENTIAL = re.compile(r"local_experts\.(\d+)\.(.+)")
GROUPED = re.compile(r"(linear_fc[12])\.(weight|bias)(\d+)")  # Transformer Engine: one parameter per expert
LEGACY = re.compile(r"weight[12]")  # the legacy GroupedMLP: all experts of a rank in one parameter


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to a routed expert."""
    return EXPERTS in name


class GlobalNames:
    """The global names of one model chunk."""

    def __init__(self, chunk: nn.Module) -> None:
        self._layers: dict[str, str] = {}  # global paths of layers by their path in the chunk
        self._first_experts: dict[str, int] = {}  # number of the first expert here, by the path of its module
        for path, module in chunk.named_modules():
            if re.search(r"(^|\.)layers\.\d+$", path) and hasattr(module, "layer_number"):
                self._layers[path] = f"{path.rpartition('.')[0]}.{module.layer_number - 1}"
            if path.endswith(".experts") and hasattr(module, "num_local_experts"):
                rank = parallel_state.get_expert_model_parallel_rank()
                self._first_experts[path] = rank * int(module.num_local_experts)
        self._tied = bool(getattr(chunk, "share_embeddings_and_output_weights", False))

    def name_of(self, path: str) -> str:
        """Return the global name for a path in the chunk."""
        if self._tied and path == TIED:
            return EMBEDDING
        path = self._number_expert(path)
        layer = next((local for local in self._layers if path.startswith(f"{local}.")), None)
        return path if layer is None else self._layers[layer] + path[len(layer) :]

    def _number_expert(self, path: str) -> str:
        experts = next((local for local in self._first_experts if path.startswith(f"{local}.")), None)
        if experts is None:
            return path
        first, rest = self._first_experts[experts], path[len(experts) + 1 :]
        if found := SEQUENTIAL.fullmatch(rest):
            return f"{experts}.local_experts.{first + int(found[1])}.{found[2]}"
        if found := GROUPED.fullmatch(rest):
            return f"{experts}.local_experts.{first + int(found[3])}.{found[1]}.{found[2]}"
        if LEGACY.fullmatch(rest) and _count_expert_ranks() > 1:
            raise ConfigError(
                f"{path}: the legacy GroupedMLP keeps the experts of a rank in one parameter, which is not supported "
                "over several ranks: leave --moe-grouped-gemm out (SequentialMLP), or use Transformer Engine's"
            )
        return path


def _count_expert_ranks() -> int:
    return int(
        parallel_state.get_expert_model_parallel_world_size() * parallel_state.get_expert_tensor_parallel_world_size()
    )
