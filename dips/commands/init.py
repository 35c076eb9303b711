"""The command `dips init`: makes a run from a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from dips.commands.first_model import load_tensors
from dips.commands.options import CONFIG
from dips.config import RunFile, load_run
from dips.files import keep_files_private


def init(
    config: CONFIG,
    model: Annotated[Path | None, typer.Option(help="Read θ from this safetensors file, fp32.")] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Make θ by this function, which takes no arguments and returns a module."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for torch.manual_seed before the factory is called.")] = 0,
    trainable: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Share only parameters of such names, as '*.lora_*'. Repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Delete the run that is already there.")] = False,
) -> None:
    """Make a run: its first model and its ledger.

    Writes v0@r0 and the ledger under master.directory of the run file. `dips new` writes a run file to begin with.

    The model is made here, never by a cluster. Parameters must be fp32; buffers are part of the model only if
    shared.share_buffers names them, frozen parameters never: the clusters share the parameters with requires_grad in
    the factory's module, or those that --trainable names (LoRA adapters alone, say). With both --model and --factory
    the file gives the values, and may hold the frozen parameters too.

    Slaves read the model from their key initial_model. On other machines copy the directory
    <master.directory>/initial to that path, or send the model by `dips seed`.

    \b
    Example:
      dips init --config dips.yaml --factory dips.demo.model:build --seed 1
      dips init --config dips.yaml --model llama.safetensors --factory mymodel:build
      dips init --config dips.yaml --model adapters.safetensors --trainable '*.lora_*'
    """
    keep_files_private()
    from dips.master.genesis import make_run

    run_file = load_run(config)
    tensors = load_tensors(model, factory, seed, trainable or (), run_file.shared.share_buffers)
    row = make_run(run_file, tensors, force=force, wall=time.time)
    numel = sum(t.size for t in tensors.values())
    print(f"made run {row.run}: {len(tensors)} parameters, {numel / 1e6:.2f} M elements, {4 * numel / 1e6:.1f} MB")
    for slave, layers in row.placement:
        print(f"  {slave}: {len(layers)} layers")
    if used := _used_directories(run_file):
        print(f"empty these first, they hold snapshots of a former run: {', '.join(map(str, used))}")
    print(f"next: dips-master --config {config}, and dips-slave --config {config} --name NAME for each slave")


def _used_directories(run_file: RunFile) -> list[Path]:
    """Return the slaves' directories on this machine that hold snapshots."""
    from dips.store.version import version_of

    found = (s.directory for s in run_file.slaves if s.directory.is_dir())
    return [directory for directory in found if any(version_of(path) for path in directory.iterdir())]
