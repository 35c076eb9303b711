"""`dips`: what an operator types: make a run, look at it, take a model out of it, see it all work.

Every word ends with the exit codes of errors.py. Nothing here decides or moves; each word calls the room that does.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dips import __version__
from dips.config import load_run
from dips.data import app as data
from dips.errors import ConfigError, UnavailableMaster
from dips.ids import GENESIS, VersionId
from dips.telemetry import exits
from dips.telemetry import status as picture
from dips.transport import control
from dips.wire.generated.status_pb2 import StatusRequest
from dips.wire.generated.status_pb2_grpc import StatusServiceStub

cli = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Di-PS: several training clusters, far apart and unequal, train one model through CPU parameter servers.

\b
First look:
  dips demo --seconds 60 --no-kill

\b
A run:
  dips init --config dips.yaml ...                          make it
  dips-master --config dips.yaml                            serve it
  dips-slave --config dips.yaml --name NAME                 once for each slave
  dips-client --config cluster.yaml -- torchrun ... train.py    once for each cluster
  dips status --config dips.yaml --watch                    look at it
  dips export --config dips.yaml --output model.safetensors take the model out

Exit codes: 0 done; 1 a check of the demo failed; 2 wrong words on the command line; 65 corrupt bytes; 69 nobody
answers; 78 the configuration is wrong. The message says what was expected, what came and what to do.""",
)

cli.add_typer(data.words, name="data")

CONFIG = Annotated[Path, typer.Option("--config", "-c", help="The run file: one run, its master and its slaves.")]
STATUS_DEADLINE_S = 5.0


def main() -> None:
    """Entry point of the console script."""
    exits.run(cli)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dips {__version__}")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    """Options before the word."""


# ---- dips demo ------------------------------------------------------------------------------------------------------


@cli.command()
def demo(
    seconds: Annotated[float, typer.Option(min=30, help="How long to train, from the master's start.")] = 180.0,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Kill nobody halfway.")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory of this run; default runs/demo-DATE-TIME.")] = None,
    seed: Annotated[int, typer.Option(help="Of the initial model and of the order of the data.")] = 1,
) -> None:
    """Show it all on this machine, and check it.

    One master, two slaves, and two unequal clusters that train one small model: real processes on loopback. Cluster
    fast (torchrun, two FSDP2 ranks) and cluster slow (one rank, about half the speed) train a Llama-style model of 1 M
    parameters on the source files of Python's standard library. Halfway, slow's torchrun and one slave are killed hard
    and come back. At the end the validation loss is compared with version 0 and with a table of bigrams, plots and the
    exported model are written, and every claim is checked.

    Exit code 0 if all checks hold, 1 if one fails. Needs the extra: pip install 'dips[demo]'.

    \b
    Example:
      dips demo                       (about four minutes)
      dips demo --seconds 60 --no-kill
    """
    run = _of_the_demo("run").run
    raise typer.Exit(run(seconds=seconds, kill=not no_kill, out=out, seed=seed))


def _of_the_demo(module: str) -> Any:
    try:
        return importlib.import_module(f"dips.demo.{module}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("dips"):
            raise
        raise ConfigError(f"the demo needs the package {error.name}: pip install 'dips[demo]'") from error


# ---- dips init ------------------------------------------------------------------------------------------------------


@cli.command()
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


# ---- dips status ----------------------------------------------------------------------------------------------------


@cli.command()
def status(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The run file; names the master.")] = None,
    master: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The master, instead of --config.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole status as JSON, for scripts.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C, once a second.")] = False,
) -> None:
    """Show the run: round, clusters, slaves, and why.

    Each state comes with its reason.

    Exit code 69 if no master answers.

    \b
    Example:
      dips status --config dips.yaml --watch
      dips status --master 127.0.0.1:7800 --json | jq .clusters
    """
    if (config is None) == (master is None):
        raise ConfigError("whom to ask: give --config FILE or --master HOST:PORT, one of them")
    address = master or load_run(config).master.listen  # type: ignore[arg-type]
    if not watch:
        return _show(asyncio.run(ask_status(address)), as_json)
    try:
        asyncio.run(_watch(address, as_json))
    except KeyboardInterrupt:
        return None


async def ask_status(address: str, deadline_s: float = STATUS_DEADLINE_S) -> dict[str, Any]:
    """Ask the master once; raise UnavailableMaster if nobody answers in time."""
    channel = control.channel(address)
    try:
        return await _ask(StatusServiceStub(channel), address, deadline_s)
    finally:
        await channel.close()


async def _ask(stub: Any, address: str, deadline_s: float) -> dict[str, Any]:
    reply = await control.call(
        stub.Status,
        StatusRequest(),
        deadline_s=deadline_s,
        peer=f"the master at {address}",
        unavailable=UnavailableMaster,
    )
    answer: dict[str, Any] = json.loads(reply.json)
    return answer


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        Console().print(picture.render(answer))


async def _watch(address: str, as_json: bool) -> None:
    console, channel = Console(), control.channel(address)
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal and not as_json) as live:
            while True:
                try:
                    answer = await _ask(StatusServiceStub(channel), address, STATUS_DEADLINE_S)
                except UnavailableMaster as error:
                    live.update(f"{error}; asking again", refresh=True)
                else:
                    if as_json:
                        print(json.dumps(answer))
                    else:
                        live.update(picture.render(answer), refresh=True)
                await asyncio.sleep(1.0)
    finally:
        await channel.close()


# ---- dips export, dips history -------------------------------------------------------------------------------------


@cli.command()
def export(
    config: CONFIG,
    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file to write.")],
    version: Annotated[str | None, typer.Option(metavar="vN@rM", help="Which version; default the head.")] = None,
) -> None:
    """Write one version as a safetensors file.

    Parameters have the model's own names. Reads the slaves' snapshots, so it works while the run goes on and after it
    has ended; the directories of all slaves must be readable from here.

    \b
    Example:
      dips export --config dips.yaml --output model.safetensors
      dips export --config dips.yaml --output early.safetensors --version v12@r17
    """
    from dips.master.genesis import INITIAL_MODEL
    from dips.slave.export import export as write

    run_file = load_run(config)
    wanted = _parse(version) if version else _head(config)
    if wanted == GENESIS:  # no slave writes it down
        shutil.copyfile(run_file.master.directory / INITIAL_MODEL, output)
        written = GENESIS
    else:
        written = write([s.directory for s in run_file.slaves], wanted, output)
    print(f"wrote {written} to {output} ({output.stat().st_size / 1e6:.1f} MB)")


def _parse(version: str) -> VersionId:
    try:
        return VersionId.parse(version)
    except ValueError as error:
        raise ConfigError(f"--version: {error}") from error


@cli.command()
def history(
    config: CONFIG,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    last: Annotated[int, typer.Option(min=1, help="So many of the newest rounds.")] = 20,
) -> None:
    """List the rounds: how each ended, and whose pushes.

    Read from the ledger; the master may be up or down.

    \b
    Example:
      dips history --config dips.yaml --last 50
    """
    rounds = _rounds(config, last)
    if as_json:
        for row in rounds:
            print(json.dumps(asdict(row)))
    else:
        Console().print(_history_table(rounds))


def _head(config: Path) -> VersionId | None:
    """The committed head, or None where the ledger is not at hand: then the newest complete snapshot is taken."""
    from dips.master.genesis import ledger_path
    from dips.master.ledger import Ledger

    path = ledger_path(load_run(config))
    if not path.exists():
        print(f"note: no ledger at {path}: taking the newest version that all slaves have", file=sys.stderr)
        return None
    with closing(Ledger.open(path, readonly=True)) as ledger:
        return ledger.state().versions[-1].version


def _rounds(config: Path, last: int) -> list[Any]:
    from dips.master.genesis import ledger_path
    from dips.master.ledger import Ledger

    with closing(Ledger.open(ledger_path(load_run(config)), readonly=True)) as ledger:
        return ledger.history(last)


def _history_table(rounds: Sequence[Any]) -> Table:
    table = Table(title="rounds", title_justify="left", title_style="bold")
    for column in ("round", "ended", "version", "tokens", "ranges", "‖δ‖", "contributions", "why"):
        table.add_column(column, justify="right" if column in ("round", "tokens", "ranges", "‖δ‖") else "left")
    for r in rounds:
        pushes = ", ".join(
            f"{o.push.cluster}" + ("" if o.kind == "accepted" else f" ({o.kind}: {o.reason})") for o in r.outcomes
        )
        applied, ranges = r.kind == "applied", sum(len(o.ranges) for o in r.outcomes)
        norm = f"{r.delta_norm:.3g}" + (" clipped" if r.clipped else "") if applied else "–"
        table.add_row(
            f"r{r.round}",
            r.kind,
            str(r.version or "–"),
            picture.count(r.tokens),
            str(ranges or "not tracked"),
            norm,
            pushes or "–",
            r.reason or "–",
        )
    return table


if __name__ == "__main__":
    main()
