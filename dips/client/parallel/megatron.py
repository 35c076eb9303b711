"""Megatron-core: tensor, pipeline and expert parallel, tied embeddings, distributed optimizer; global names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from dips.client.parallel.adapter import (
    Adapter,
    HeldParameter,
    TensorBlock,
    check_dtype,
    check_parameter,
    choose_buffers,
    pair_blocks,
)
from dips.client.parallel.rect import Rect, box_rects, cut_flat
from dips.errors import ConfigError

# ---- megatron names -------------------------------------------------------------------------------------------------
# Global names of Megatron-core's parameters and buffers: those of the whole model on one rank.
#
#     decoder.layers.0 on the second of two stages of two layers      decoder.layers.2
#     experts.local_experts.0 on the second of four expert ranks      experts.local_experts.N/4
#     experts.linear_fc1.weight0 (Transformer Engine's grouped GEMM)  experts.local_experts.0.linear_fc1.weight
#     output_layer.weight, tied                                       embedding.word_embeddings.weight
#
# So clusters with different numbers of stages and expert ranks, and either kind of experts, train one model.


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


# ---- megatron -------------------------------------------------------------------------------------------------------
# Megatron-core: tensor, pipeline (virtual stages too) and expert parallel, tied embeddings, distributed optimizer.
#
# Names are those of the model on one rank: the number of a layer counts over all stages, on any rank and chunk, the
# number of an expert over all ranks of its group, and a tied output layer has the name of the
# embedding, so it is pushed once and both copies are written. Experts are cut by their own tensor parallelism.
#
# A push takes the fp32 masters of Megatron's optimizers: with the distributed optimizer each data-parallel rank holds a
# part of them, so each pushes its own. A pull writes the parameters (`copy_`, never rebound: they are views of
# Megatron's buffers), calls `optimizer.reload_model_params()`, which makes masters from parameters of bf16, and then
# writes the masters themselves exactly; otherwise the next step would undo the pull. An optimizer without masters
# (fp32) is handled in the same way; the distributed one is read by its own parts, so parameters not yet gathered
# (overlap_param_gather) are never read.
#
# Vocabularies must be padded alike in all clusters: `make_vocab_size_divisible_by` times TP depends on the layout.
#
# Not supported, and refused by name: the legacy GroupedMLP over several ranks, experts of Transformer Engine that are
# tensor-parallel, Megatron's FSDP, fp8 parameters, the precision-aware and the CPU-offloading optimizer.


CUT_BY_TP = re.compile(r"\.linear_fc[12]\.weight$")  # split in every expert that is tensor-parallel
GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")  # two matrices in one parameter, each split over TP


class MegatronAdapter(Adapter):
    """The adapter for the model chunks of one rank."""

    kind = "Megatron-core"
    staged = True

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any = None, share_buffers: Collection[str] = ()) -> None:
        """Unwrap `chunks`: one model, or the chunks of virtual pipeline stages, wrapped or not."""
        self._chunks = [_unwrap_module(chunk) for chunk in chunks]
        self._optimizer, self._share_buffers = optimizer, share_buffers
        self._ranges = dict(_optimizer_ranges(optimizer))
        named = self._local_parameters()
        self._trained = {name for name, parameter, _ in named if parameter.requires_grad}  # also if it is frozen later

    def held_parameters(self) -> list[HeldParameter]:
        return list(self._held_parameters())

    def local_tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        yield from self._local_parameters()
        yield from ((name, buffer, buffer.detach()) for name, buffer in self._chosen_buffers())

    def _local_parameters(self) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
        for chunk in self._chunks:
            names = GlobalNames(chunk)
            for path, parameter in chunk.named_parameters():
                yield names.name_of(path), parameter, parameter.detach()

    def local_masters(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, parameter, _ in self.local_tensors():
            if isinstance(master := getattr(parameter, "main_param", None), torch.Tensor):
                yield name, master, master.detach()

    def reload_masters(self) -> None:
        if hasattr(self._optimizer, "reload_model_params"):
            self._optimizer.reload_model_params()

    def _held_parameters(self) -> Iterator[HeldParameter]:
        for chunk in self._chunks:
            names = GlobalNames(chunk)
            gated = bool(getattr(getattr(chunk, "config", None), "gated_linear_unit", False))
            for path, parameter in chunk.named_parameters():
                if (name := names.name_of(path)) in self._trained:
                    check_parameter(name, self._share_buffers)
                    yield self._describe_parameter(name, parameter, gated)
        for name, buffer in self._chosen_buffers():
            check_dtype(name, buffer.dtype)
            shape = tuple(buffer.shape)
            writes = pair_blocks(name, buffer, box_rects(shape, (0,) * len(shape), shape))
            yield HeldParameter(name, shape, writes, writes)

    def _chosen_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = (
            (names.name_of(path), buffer)
            for chunk in (self._chunks if self._share_buffers else ())
            for names in [GlobalNames(chunk)]
            for path, buffer in chunk.named_buffers()
        )
        return choose_buffers(named, self._share_buffers)

    def _describe_parameter(self, name: str, parameter: nn.Parameter, gated: bool) -> HeldParameter:
        check_dtype(name, parameter.dtype)
        if type(parameter.data) is not torch.Tensor:
            raise ConfigError(f"{name}: a parameter held as {type(parameter.data).__name__} is not supported")
        shape, parts = _partition_parameter(name, parameter, gated)
        writes = pair_blocks(name, parameter, parts)
        masters = self._master_blocks(name, parameter, parts)
        if masters is None:
            return HeldParameter(name, shape, writes, writes)
        return HeldParameter(name, shape, masters, writes, masters if parameter.dtype is not torch.float32 else ())

    def _master_blocks(self, name: str, parameter: nn.Parameter, parts: list[Rect]) -> tuple[TensorBlock, ...] | None:
        """Return the optimizer's masters of this parameter on this rank; None if it steps the parameter itself."""
        master = getattr(parameter, "main_param", None)
        if self._optimizer is None:
            if hasattr(parameter, "main_param"):
                raise ConfigError(
                    f"{name}: its fp32 master is in Megatron's optimizer, which would undo every pull: "
                    "pass it as well, OuterLoop(model, optimizer=optimizer)"
                )
            return None
        if not self._ranges:
            return None if master is None else pair_blocks(name, master, parts)
        begin, end = self._ranges.get(parameter, (0, 0))
        if parameter.dtype is torch.float32:
            master = parameter.detach().view(-1)[begin:end]
        elif master is None and begin < end:
            raise ConfigError(f"{name}: its fp32 master is not held as main_param (use_precision_aware_optimizer?)")
        if master is None:
            return ()
        return pair_blocks(name, master, [part for _, part in cut_flat(parts, begin, end)])


def _unwrap_module(module: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, Float16Module and similar wrappers."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def _partition_parameter(name: str, parameter: nn.Parameter, gated: bool) -> tuple[tuple[int, ...], list[Rect]]:
    """Return the full shape of a parameter and the rectangles of this rank's part of it."""
    shape = tuple(parameter.shape)
    size, rank = _tensor_parallel(name)
    cut = bool(getattr(parameter, "tensor_model_parallel", False))
    if size > 1 and not cut and is_expert(name) and CUT_BY_TP.search(name):
        raise ConfigError(
            f"{name}: expert tensor parallel {size} does not say how this parameter is cut (Transformer Engine?): use "
            "--expert-tensor-parallel-size 1 with more expert parallelism"
        )
    if size == 1 or not cut:
        return shape, box_rects(shape, (0,) * len(shape), shape)
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    # Transformer Engine's linear layers have stride 1 for a gated fc1 too.
    stride = 2 if gated and GATED.search(name) else parameter.partition_stride  # type: ignore[attr-defined]
    if stride > 1 and dim > 0:
        raise ConfigError(f"{name}: a partition of dim {dim} with stride {stride} is not supported: expected dim 0")
    full = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
    block = shape[dim] // stride
    sizes = (*shape[:dim], block, *shape[dim + 1 :])
    parts = []
    for i in range(stride):
        starts = [0] * len(shape)
        starts[dim] = (i * size + rank) * block
        parts += box_rects(full, starts, sizes)
    return full, parts


def _tensor_parallel(name: str) -> tuple[int, int]:
    """Return the number of ranks over which a parameter may be split, and this rank's index among them."""
    if is_expert(name):
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _optimizer_ranges(optimizer: Any) -> Iterator[tuple[nn.Parameter, tuple[int, int]]]:
    """Yield each parameter with the range of its local elements that the distributed optimizer holds on this rank."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if type(getattr(one, "optimizer", None)).__name__ == "HybridDeviceOptimizer":
            raise ConfigError("Megatron's CPU-offloading optimizer is not supported")
        for parameter in getattr(one, "model_param_gbuf_map", {}):
            found = one._get_model_param_range_map(parameter)["param"]
            yield parameter, (found.start, found.end)
