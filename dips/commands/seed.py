"""The command `dips seed`: sends a run its first model over the lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dips.client.rank.transfer import TransferRate
from dips.commands import operator
from dips.commands.init import check_source, load_tensors
from dips.commands.options import CREDENTIALS, MASTER, WHOSE, find_master
from dips.config import load_run
from dips.errors import ConfigError
from dips.ids import GENESIS
from dips.protocol.enums import LayerUnit
from dips.protocol.events import RunProposed, SeedAsked
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Manifest
from dips.transport.endpoints import Endpoint
from dips.wire.packed_manifest import unpack_manifest

Tensors = Mapping[str, Any]


def seed(
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    model: Annotated[
        Path | None, typer.Option(help="Read θ from this safetensors file, fp32; default: what `dips init` wrote.")
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Make θ by this function, which takes no arguments and returns a module."
        ),
    ] = None,
    number: Annotated[int, typer.Option("--seed", help="Seed for torch.manual_seed before the factory is called.")] = 0,
    trainable: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Share only parameters of such names, as '*.lora_*'. Repeatable."),
    ] = None,
    wait_s: Annotated[float, typer.Option(min=0, help="Give up after this many seconds without progress.")] = 600.0,
) -> None:
    """Send a run its first model over the lanes.

    Start dips-master and every dips-slave with empty directories: they wait. This command makes the run's ledger at the
    master and sends each slave its layers, which it compares with the ledger and writes to its disk; then the run
    begins. No shared disk or copied file is needed. If `dips init` has made the run, only slaves without the model get
    it.

    After a crash of any process, repeat the command: slaves that have their layers on disk are skipped, so it is
    harmless if all have them. A run that has begun accepts no other model.

    Exit codes: 0 every slave has it; 69 master or slaves did not answer, or nothing moved for --wait-s; 77 your
    certificate is not an operator's; 78 the run has begun with another model, or the model is not usable.

    \b
    Example:
      dips seed --config dips.yaml --factory dips.demo.model:build --seed 1
      dips seed --master master.example:7800 --credentials tls/alice.operator.crt --model start.safetensors
    """
    peer = find_master(config, master, credentials)
    if model is None and factory is None and config is not None:
        model = _model_of_init(config)
    check_source(model, factory)  # before waiting for a master
    with show_bar() as bar:
        load = lambda shared: load_tensors(model, factory, number, trainable, shared)  # noqa: E731
        asyncio.run(_bring_model(peer, load, bar, wait_s))
    print("every slave has the first model on its disk; `dips status` shows the run")


def _model_of_init(config: Path) -> Path:
    from dips.master.genesis import INITIAL

    path = load_run(config).master.directory / INITIAL / str(GENESIS)
    if not path.exists():
        raise ConfigError(f"nothing to bring: give --model FILE or --factory MODULE:FUNCTION; {path} is not here")
    return path


async def _bring_model(peer: Endpoint, load: Any, bar: SeedBar, wait_s: float) -> None:
    from dips.client.preflight.peers import describe_run
    from dips.commands.seed_lanes import ModelLanes, SeedTransfer, SeedWatch, await_master
    from dips.master.waiting import propose_run

    watch = SeedWatch(bar.show_rate, bar.show_wait)
    found = await await_master(peer, watch, wait_s)
    shared = found["shared"] if found["waiting"] else (await describe_run(peer))["shared"]
    grouping = Grouping(LayerUnit(shared["layers"]), tuple(shared["share_buffers"]))
    tensors: Tensors = load(grouping.share_buffers)
    proposed: RunProposed = propose_run(tensors, grouping)
    if found["waiting"]:
        await operator.ask_master(peer, proposed)
        bar.show_wait("the run's ledger is made")
    manifest = Manifest.from_json(unpack_manifest(proposed.packed, proposed.digest))
    transfer = SeedTransfer(ModelLanes(peer, str(found["run"]), manifest, tensors), watch, wait_s)
    await transfer.bring_model(SeedAsked(0, "", proposed.genesis))


@contextmanager
def show_bar() -> Iterator[SeedBar]:
    """Show a bar on standard error as long as the context lasts."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield SeedBar(progress)


class SeedBar:
    """Shows bytes, rate and the reason for waiting."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._said = progress, ""
        self._task = progress.add_task("waits", total=None)

    def show_rate(self, rate: TransferRate) -> None:
        self._progress.update(self._task, description="moving", total=rate.total, completed=rate.nbytes)

    def show_wait(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self._progress.print(reason, markup=False, highlight=False)
