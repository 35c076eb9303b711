"""The command `dips init`: makes a run from a model, which `dips seed` reads or makes in the same way."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.commands.options import CONFIG
from dips.config import RunFile, load_run
from dips.errors import ConfigError
from dips.files import keep_files_private
from dips.store.files import read_parameters

# ---- first model -----------------------------------------------------------------------------------------------------


def load_tensors(
    model: Path | None, factory: str | None, seed: int, trainable: Sequence[str] | None, share_buffers: tuple[str, ...]
) -> dict[str, Any]:
    """Return fp32 parameters by name, from a file, from MODULE:FUNCTION, or from both. Raises ConfigError for any
    problem.
    """
    check_source(model, factory)
    made, frozen = _from_factory(factory, seed, share_buffers) if factory else (None, [])
    tensors = made if model is None else _from_file(model, made, frozen)
    assert tensors is not None
    if trainable:
        tensors = {n: t for n, t in tensors.items() if any(fnmatchcase(n, p) for p in (*trainable, *share_buffers))}
        if not tensors:
            raise ConfigError(f"--trainable: no parameter's name matches {' or '.join(trainable)}")
    return tensors


def check_source(model: Path | None, factory: str | None) -> None:
    """Raise ConfigError for problems that are known before the model is made: no file, no torch, no such function."""
    if model is None and factory is None:
        raise ConfigError("nothing to begin from: give --model FILE, or --factory MODULE:FUNCTION with --seed N")
    if model is not None and not model.exists():
        raise ConfigError(f"{model}: expected a safetensors file with fp32 parameters: there is no such file")
    if factory is not None:
        try:
            importlib.import_module("torch")
        except ImportError as error:
            raise ConfigError(
                f"--factory {factory} needs torch here: pip install torch 'di-ps[client]', or give --model FILE"
            ) from error
        from dips.client.parallel.factory import find_function

        find_function(factory, "--factory")


def _from_factory(spec: str, seed: int, share_buffers: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Call MODULE:FUNCTION under a seed; return its trainable parameters and shared buffers by name, and the names of
    its frozen parameters.
    """
    import torch

    from dips.client.parallel import full_parameters
    from dips.client.parallel.factory import make_module
    from dips.client.parallel.unshared_buffers import advise_run

    made = make_module(spec, seed=seed)
    try:
        parameters, frozen = full_parameters(made, share_buffers)
    except ConfigError as error:
        raise ConfigError(f"--factory {spec}: {error}") from error
    if frozen and not parameters:
        raise ConfigError(f"--factory {spec}: expected parameters that train; all {len(frozen)} are frozen")
    if empty := [name for name, tensor in parameters.items() if tensor.is_meta]:
        raise ConfigError(f"--factory {spec}: expected parameters with values; {empty[0]} is on meta")
    wrong = [name for name, tensor in parameters.items() if tensor.dtype is not torch.float32]
    if wrong:
        raise ConfigError(f"--factory {spec}: expected parameters in float32; {wrong[0]} is not")
    if told := advise_run(made, share_buffers):
        print(told, file=sys.stderr)
    return {name: tensor.cpu().contiguous().numpy() for name, tensor in parameters.items()}, frozen


def _from_file(path: Path, made: dict[str, Any] | None, frozen: list[str]) -> dict[str, Any]:
    """Read a safetensors file, or a version's directory: the tensors that the factory's module trains, or all tensors
    without a factory.
    """
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        tensors = read_parameters(path)
        return {name: tensors[name] for name in _choose_names(path, set(tensors), made, frozen)}
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in _choose_names(path, set(file.keys()), made, frozen)}
    except (OSError, SafetensorError, TypeError) as error:  # TypeError: a dtype that numpy has not (bfloat16)
        raise ConfigError(f"{path}: expected a safetensors file with fp32 parameters: {error}") from error


def _choose_names(path: Path, names: set[str], made: dict[str, Any] | None, frozen: list[str]) -> list[str]:
    """Return those of a file's names that are the model's. Raises ConfigError if the factory's module has others."""
    wanted = names if made is None else set(made)
    if made is not None and (odd := (wanted - names) | (names - wanted - set(frozen))):
        one = sorted(odd)[0]
        where = "only in the file" if one in names else "only in the factory's module"
        raise ConfigError(f"{path}: parameters differ from the factory's; {one} is {where}")
    return sorted(wanted)


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
    force: Annotated[
        bool,
        typer.Option("--force", help="Delete the ledger that is there, and mirrors of a run of this name."),
    ] = False,
) -> None:
    """Make a run: its first model and its ledger.

    Writes v0@r0 and the ledger under master.directory of the run file. `dips new` writes a run file to begin with.

    The model is made here, never by a cluster. Parameters must be fp32; buffers are part of the model only if
    shared.share_buffers names them, frozen parameters never: the clusters share the parameters with requires_grad in
    the factory's module, or those that --trainable names (LoRA adapters alone, say). With both --model and --factory
    the file gives the values, and may hold the frozen parameters too.

    Slaves read the model from their key initial_model. On other machines copy the directory
    <master.directory>/initial to that path, or send the model by `dips seed`.

    With --force the run that is there is lost: its ledger, and its mirrors with the snapshots of all slaves, without a
    question. Slaves' directories stay: empty them, or the new run's master ends with 78.

    \b
    Example:
      dips init --config dips.yaml --factory dips.demo.model:build --seed 1
      dips init --config dips.yaml --model llama.safetensors --factory mymodel:build
      dips init --config dips.yaml --model adapters.safetensors --trainable '*.lora_*'
    """
    keep_files_private()
    from dips.master.genesis import make_run

    run_file = load_run(config)
    tensors = load_tensors(model, factory, seed, trainable, run_file.shared.share_buffers)
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
