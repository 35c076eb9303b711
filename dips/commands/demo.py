"""`dips demo`: a whole run on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.errors import ConfigError


def demo(
    seconds: Annotated[float, typer.Option(min=30, help="How long to train, from the master's start.")] = 180.0,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Kill nobody halfway.")] = False,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="Halfway, remove the directories of a slave and of the master, too.")
    ] = False,
    recover: Annotated[
        bool, typer.Option("--recover", help="Halfway, remove the directory of a slave, too; no mirror has it.")
    ] = False,
    secure: Annotated[
        bool, typer.Option("--secure", help="Make an authority and certificates first; everything talks TLS.")
    ] = False,
    preset: Annotated[
        Path | None,
        typer.Option(help="A `shared` section, as in configs/shared: its rules in place of the demo's."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of this run; default runs/demo-DATE-TIME.")] = None,
    seed: Annotated[int, typer.Option(help="Of the initial model and of the order of the data.")] = 1,
) -> None:
    """Show it all on this machine, and check it.

    One master, two slaves, and two unequal clusters that train one small model: real processes on loopback. Cluster
    fast (torchrun, two FSDP2 ranks) and cluster slow (one rank, about half the speed) train a Llama-style model of 1 M
    parameters on the source files of Python's standard library. Halfway, slow's torchrun and one slave are killed hard
    and come back. At the end the validation loss is compared with version 0 and with a table of bigrams, plots and the
    exported model are written, and every claim is checked.

    With --mirror, slaves and master copy what they have to a directory that stands for another disk. Halfway the slave
    and the master are killed and their directories removed, as if their machines were lost: both come back from there.
    With --recover nothing is copied, and the directory of the slave is removed: `dips recover` goes on from the last
    model that was exported.

    With --secure an authority and a certificate for each process are made first, by `dips certs`.

    Exit code 0 if all checks hold, 1 if one fails. Needs the extra: pip install '.[demo]' in a checkout.

    \b
    Example:
      dips demo                       (about four minutes)
      dips demo --seconds 60 --no-kill
      dips demo --secure              (with certificates)
      dips demo --mirror              (two machines are lost; about six minutes)
      dips demo --preset configs/shared/paper.yaml
      dips demo --recover             (one machine is lost, and nothing has mirrored it)
    """
    if (mirror and recover) or (no_kill and (mirror or recover)):
        raise ConfigError("--mirror, --recover and --no-kill: expected at most one of them")
    run = _of_the_demo("run").run_demo
    way = "mirrored" if mirror else "unmirrored" if recover else "kept"
    raise typer.Exit(run(seconds=seconds, kill=not no_kill, out=out, seed=seed, way=way, secure=secure, preset=preset))


def _of_the_demo(module: str) -> Any:
    try:
        return importlib.import_module(f"dips.demo.{module}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("dips"):
            raise
        raise ConfigError(f"the demo needs the package {error.name}: pip install '.[demo]' in a checkout") from error
