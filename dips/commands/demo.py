"""The command `dips demo`: a complete run on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.errors import ConfigError


def demo(
    seconds: Annotated[float, typer.Option(min=30, help="Seconds to train, from the master's start.")] = 180.0,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Do not kill any process.")] = False,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="Also remove the directories of a slave and of the master halfway.")
    ] = False,
    recover: Annotated[
        bool, typer.Option("--recover", help="Also remove the directory of a slave halfway, without a mirror.")
    ] = False,
    secure: Annotated[
        bool, typer.Option("--secure", help="Make an authority and certificates first, and use TLS everywhere.")
    ] = False,
    preset: Annotated[
        Path | None,
        typer.Option(help="Use the rules of this `shared` section, as in configs/shared."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The directory of this run; default runs/demo-DATE-TIME.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial model and of the order of the data.")] = 1,
) -> None:
    """Run a complete demonstration on this machine.

    Starts one master, two slaves, and two unequal clusters that train one small model: real processes on loopback.
    Cluster fast (torchrun, two FSDP2 ranks) and cluster slow (one rank, about half the speed) train a Llama-style model
    of 1 M parameters on the source files of Python's standard library. Halfway, slow's torchrun and one slave are
    killed hard and come back. At the end the validation loss is compared with version 0 and with a table of bigrams,
    and plots and the exported model are written.

    With --mirror, slaves and master copy their state to a directory that stands for another disk. Halfway the slave and
    the master are killed and their directories removed, as if their machines were lost: both restore from the mirror.
    With --recover nothing is copied, and the directory of the slave is removed: `dips recover` continues from the last
    exported model, while all others run.

    With --secure an authority and a certificate for each process are made first, by `dips certs`.

    Exit code 0 if the model learned, the exported one is the same, and both clusters took part to the end; else 1,
    with what went wrong. Needs the extra: pip install '.[demo]' in a checkout.

    \b
    Example:
      dips demo                       (about four minutes)
      dips demo --seconds 60 --no-kill
      dips demo --secure              (with certificates)
      dips demo --mirror              (two machines are lost; about six minutes)
      dips demo --preset configs/shared/paper.yaml
      dips demo --recover             (one machine without a mirror is lost)
    """
    if mirror + recover + no_kill > 1:
        raise ConfigError("--mirror, --recover and --no-kill: expected at most one of them")
    run = _of_the_demo("run").run_demo
    way = "mirrored" if mirror else "unmirrored" if recover else "kept"
    raise typer.Exit(run(seconds=seconds, kill=not no_kill, out=out, seed=seed, way=way, secure=secure, preset=preset))


def _of_the_demo(module: str) -> Any:
    try:
        return importlib.import_module(f"dips.demo.{module}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("dips"):
            raise
        raise ConfigError(f"the demo needs the package {error.name}: pip install '.[demo]' in a checkout") from error
