"""`dips init`: make a run from a model."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.commands import templates
from dips.config import RunFile, load_run
from dips.errors import ConfigError
from dips.private_files import keep_files_private


def init(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The run file: one run, its master and its slaves.")
    ] = None,
    template: Annotated[
        bool, typer.Option("--template", help="Write dips.yaml, shared.yaml and cluster.yaml with every key, and end.")
    ] = False,
    model: Annotated[Path | None, typer.Option(help="Take θ from a safetensors file, fp32.")] = None,
    factory: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Make θ: a function without arguments, returns a module."),
    ] = None,
    seed: Annotated[int, typer.Option(help="torch.manual_seed before the factory is called.")] = 0,
    trainable: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only parameters of such names, as in '*.lora_*'; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Throw the run away that is already there.")] = False,
) -> None:
    """Make a run: its first model and its ledger.

    Writes v0@r0 and the ledger under master.directory of the run file. With --template it writes commented files to
    begin with instead: beside --config, or here.

    The model comes from here, never from a cluster. Parameters must be fp32; buffers are part of the model only where
    shared.share_buffers names them, frozen parameters never: what the factory's module gives requires_grad, or what
    --trainable names, is what the clusters share (LoRA adapters alone, say). With both --model and --factory the file
    gives the numbers, and may hold the frozen parameters too.

    Slaves read the model from their key initial_model: copy <master.directory>/initial/model.safetensors to where that
    points, if they are on other machines.

    \b
    Example:
      dips init --template
      dips init --config dips.yaml --factory dips.demo.model:build --seed 1
      dips init --config dips.yaml --model llama.safetensors --factory mymodel:build
      dips init --config dips.yaml --model adapters.safetensors --trainable '*.lora_*'
    """
    keep_files_private()
    from dips.master.genesis import make_run

    if template:
        templates.write_templates(config or Path("dips.yaml"))
        return
    if config is None:
        raise typer.BadParameter("which run? name its run file, or write one with --template", param_hint="--config")
    run_file = load_run(config)
    if model is None and factory is None:
        raise ConfigError("nothing to begin from: give --model FILE, or --factory MODULE:FUNCTION with --seed N")
    shared = run_file.shared.share_buffers
    made, frozen = _from_factory(factory, seed, shared) if factory else (None, [])
    tensors = made if model is None else _from_file(model, made, frozen)
    assert tensors is not None
    if trainable:
        tensors = {n: t for n, t in tensors.items() if any(fnmatchcase(n, p) for p in (*trainable, *shared))}
        if not tensors:
            raise ConfigError(f"--trainable: no parameter's name matches {' or '.join(trainable)}")
    row = make_run(run_file, tensors, force=force, wall=time.time)
    numel = sum(t.size for t in tensors.values())
    print(f"made run {row.run}: {len(tensors)} parameters, {numel / 1e6:.2f} M elements, {4 * numel / 1e6:.1f} MB")
    for slave, layers in row.placement:
        print(f"  {slave}: {len(layers)} layers")
    if used := _used_directories(run_file):
        print(f"empty these first, they hold snapshots of a former run: {', '.join(map(str, used))}")
    print(f"next: dips-master --config {config}, and dips-slave --config {config} --name NAME for each slave")


def _used_directories(run_file: RunFile) -> list[Path]:
    """Directories of slaves with snapshots in them, as far as they can be seen from here."""
    from dips.slave.snapshot_files import version_of

    found = (s.directory for s in run_file.slaves if s.directory.is_dir())
    return [directory for directory in found if any(version_of(path) for path in directory.iterdir())]


def _from_factory(spec: str, seed: int, share_buffers: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Call MODULE:FUNCTION under a seed; return its trainable parameters and shared buffers by name, and the names of
    the frozen parameters.
    """
    import torch

    from dips.client.parallel import full_parameters
    from dips.client.parallel.factory import make_module

    made = make_module(spec, seed=seed)
    try:
        parameters, frozen = full_parameters(made, share_buffers)
    except ConfigError as error:
        raise ConfigError(f"--factory {spec}: {error}") from error
    wrong = [name for name, tensor in parameters.items() if tensor.dtype is not torch.float32]
    if wrong:
        raise ConfigError(f"--factory {spec}: expected parameters in float32; {wrong[0]} is not")
    return {name: tensor.cpu().contiguous().numpy() for name, tensor in parameters.items()}, frozen


def _from_file(path: Path, made: dict[str, Any] | None, frozen: list[str]) -> dict[str, Any]:
    """Read a safetensors file: what the factory's module trains, or all of it if there is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
            wanted = names if made is None else made.keys()
            if made is not None and (odd := (wanted - names) | (names - wanted - set(frozen))):
                one = sorted(odd)[0]
                where = "only in the file" if one in names else "only in the factory's module"
                raise ConfigError(f"{path}: parameters differ from the factory's; {one} is {where}")
            return {name: file.get_tensor(name) for name in sorted(wanted)}
    except (OSError, SafetensorError, TypeError) as error:  # TypeError: a dtype that numpy has not (bfloat16)
        raise ConfigError(f"{path}: expected a safetensors file with fp32 parameters: {error}") from error
