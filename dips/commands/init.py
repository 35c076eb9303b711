"""`dips init`: make a run from a model."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.commands.options import CONFIG
from dips.config import load_run
from dips.errors import ConfigError


def init(
    config: CONFIG,
    model: Annotated[Path | None, typer.Option(help="Take θ from a safetensors file, fp32.")] = None,
    factory: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Make θ: a function without arguments, returns a module."),
    ] = None,
    seed: Annotated[int, typer.Option(help="torch.manual_seed before the factory is called.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Throw the run away that is already there.")] = False,
) -> None:
    """Make a run: its first model and its ledger.

    Writes v0@r0 and the ledger under master.directory of the run file.

    The model comes from here, never from a cluster. Parameters must be fp32; buffers are not part of the model. With
    both --model and --factory, the file gives the numbers and the factory's module the order of the parameters, which
    clusters must agree on; with --model alone the order is that of the file.

    Slaves read the model from their key initial_model: copy <master.directory>/initial/model.safetensors to where that
    points, if they are on other machines.

    \b
    Example:
      dips init --config dips.yaml --factory dips.demo.model:build --seed 1
      dips init --config dips.yaml --model llama.safetensors --factory mymodel:build
    """
    from dips.master.genesis import make_run

    run_file = load_run(config)
    if model is None and factory is None:
        raise ConfigError("nothing to begin from: give --model FILE, or --factory MODULE:FUNCTION with --seed N")
    made = _from_factory(factory, seed) if factory else None
    tensors = made if model is None else _from_file(model, list(made) if made else None)
    assert tensors is not None
    row = make_run(run_file, tensors, force=force, wall=time.time)
    numel = sum(t.size for t in tensors.values())
    print(f"made run {row.run}: {len(tensors)} parameters, {numel / 1e6:.2f} M elements, {4 * numel / 1e6:.1f} MB")
    for slave, layers in row.placement:
        print(f"  {slave}: {len(layers)} layers")
    print(f"next: dips-master --config {config}, and dips-slave --config {config} --name NAME for each slave")


def _from_factory(spec: str, seed: int) -> dict[str, Any]:
    """Call MODULE:FUNCTION under a seed; return its parameters by name, in its order."""
    module_name, colon, function_name = spec.partition(":")
    if not colon:
        raise ConfigError(f"--factory: expected MODULE:FUNCTION, got {spec!r}")
    sys.path.insert(0, "")  # a factory beside the run file is the usual case
    try:
        import torch

        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--factory {spec}: {error}") from error
    torch.manual_seed(seed)
    made = function()
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"--factory {spec}: expected a torch.nn.Module, got {type(made).__name__}")
    wrong = [n for n, p in made.named_parameters() if p.dtype is not torch.float32]
    if wrong:
        raise ConfigError(f"--factory {spec}: expected parameters in float32; {wrong[0]} is not")
    return {name: p.detach().cpu().contiguous().numpy() for name, p in made.named_parameters()}


def _from_file(path: Path, order: list[str] | None) -> dict[str, Any]:
    """Read a safetensors file in `order`, or in its own."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = list(file.offset_keys())
            if order is not None and set(order) != set(names):
                one = sorted(set(order) ^ set(names))[0]
                where = "only in the file" if one in names else "only in the factory's module"
                raise ConfigError(f"{path}: parameters differ from the factory's; {one} is {where}")
            return {name: file.get_tensor(name) for name in order or names}
    except (OSError, SafetensorError, TypeError) as error:  # TypeError: a dtype that numpy has not (bfloat16)
        raise ConfigError(f"{path}: expected a safetensors file with fp32 parameters: {error}") from error
