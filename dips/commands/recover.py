"""The command `dips recover`: continues a run from a saved model when disks are lost and not mirrored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dips.commands.options import CREDENTIALS, MASTER, WHOSE, find_master
from dips.config import load_run
from dips.errors import ConfigError
from dips.files import keep_files_private
from dips.ids import VersionId
from dips.protocol.enums import SlaveState
from dips.protocol.view import RunView
from dips.telemetry import logs
from dips.transport.endpoints import Endpoint


def recover(
    model: Annotated[Path, typer.Option(help="The safetensors file of the whole model, fp32.")],
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    lost_ledger: Annotated[
        bool, typer.Option("--lost-ledger", help="The ledger is lost, too: master and slaves are stopped; see below.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    wait_s: Annotated[float, typer.Option(min=0, help="Give up after this many seconds without progress.")] = 600.0,
) -> None:
    """Continue from a saved model after a slave's disk was lost.

    First look for something better: a mirror (`mirror:` in the run file), from which slaves and master restore
    themselves; or the lost slave's directory, with which it may be started on any host. Without these the run stands
    still, since nobody else has its layers. This command makes a new version, the successor of the head, from a file:
    written by `dips export` or `dips follow`, or saved by a cluster, with the parameters' own names.

    Start the lost slave on an empty directory, on any host, and leave all others running. The file is needed here only:
    θ of all layers goes over the lanes to the slaves, so that the model is one that was saved. Momentum comes from each
    slave's newest snapshot; the layers of a slave without one lose it. When the version is on all disks, a row in the
    ledger makes it the head (`dips history` shows it). Clusters train on, and pull it then. Until the row nothing has
    changed: repeat the command if it fails, is interrupted, or a process restarts.

    With --lost-ledger: if neither the ledger nor its mirror nor a backup is left. Without a ledger no master can let
    anybody move anything, so this is done on the disks: stop all; the directories of master and slaves must be
    reachable from here. The ledger's counters are restored; history, tokens and data ranges start again, with the file
    as version 0. Start master and slaves; agents must be restarted, too.

    Exit codes: 0 done; 1 you declined; 69 master or slaves did not answer, or nothing moved for --wait-s; 74 a disk or
    mirror is full or failed; 77 your certificate is not an operator's; 78 nothing is lost, or the file is not this
    run's model; a daemon still serves (--lost-ledger).

    \b
    Example:
      dips recover --config dips.yaml --model model.safetensors
      dips recover --master master.example:7800 --credentials tls/alice.operator.crt --model model.safetensors
    """
    keep_files_private()

    def agree(question: str) -> bool:
        return yes or typer.confirm(question)

    if lost_ledger:
        if config is None:
            raise ConfigError("--lost-ledger works on the directories that the run file names: give --config FILE")
        from dips.commands.recovering import recover_run

        log = logs.configure_log("recover", "dips", "WARNING")
        made = recover_run(load_run(config), model, log, agree)
        if made is None:
            raise typer.Exit(1)
        print(f"done: {made}. next: dips-master --config {config}, then the slaves")
        return
    version = _recover_over_lanes(find_master(config, master, credentials), model, wait_s, agree)
    if version is None:
        raise typer.Exit(1)
    print(f"done: {version} is the head; `dips status` shows who serves it")


def _recover_over_lanes(master: Endpoint, model: Path, wait_s: float, agree: Callable[[str], bool]) -> VersionId | None:
    """Send the model to the slaves; return the version that it became, None if `agree` declined the question.

    Errors  ConfigError: the file is not the run's model, or nothing is lost; UnavailableMaster, UnavailableSlave
    """
    from dips.client.preflight.peers import describe_run
    from dips.commands.init import load_tensors
    from dips.commands.seed import show_bar
    from dips.commands.seed_lanes import ModelLanes, SeedTransfer, SeedWatch
    from dips.commands.status import ask_view
    from dips.master import genesis
    from dips.protocol.enums import LayerUnit
    from dips.protocol.events import RecoverAsked
    from dips.protocol.grouping import Grouping
    from dips.protocol.manifest import Manifest

    described = asyncio.run(describe_run(master))
    shared, manifest = described["shared"], Manifest.from_json(described["manifest"])
    grouping = Grouping(LayerUnit(shared["layers"]), tuple(shared["share_buffers"]))
    tensors = load_tensors(model, None, 0, None, grouping.share_buffers)
    ours = genesis.manifest_of(tensors, grouping)
    if ours.digest != manifest.digest:
        different = "; ".join(manifest.describe_differences(ours))
        raise ConfigError(f"--model {model}: this is not the run's model: {different}")
    _print_lost(asyncio.run(ask_view(master)), model)
    if not agree(f"Make a version of {model}?"):
        return None
    digests = tuple(genesis.layer_digest(layer, tensors) for layer in manifest.layers)
    with show_bar() as bar:
        watch = SeedWatch(bar.show_rate, bar.show_wait)
        transfer = SeedTransfer(ModelLanes(master, str(described["run"]), manifest, tensors), watch, wait_s)
        asyncio.run(transfer.bring_model(RecoverAsked(0, "", digests, model.name)))
    return transfer.version


def _print_lost(view: RunView, model: Path) -> None:
    lacking = [
        f"  {name}: {slave.reason}" for name, slave in view.slaves.items() if slave.state is not SlaveState.READY
    ]
    print(f"the head is {view.head}; the version after it: θ of {model}, momentum of each slave's newest snapshot")
    print("\n".join(lacking or ["  every slave serves it"]))
