"""`dips recover`: go on from a saved model when disks are lost and no mirror has them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.commands.options import CONFIG
from dips.config import RunFile, load_run
from dips.errors import ConfigError
from dips.pidlock import lock_holder
from dips.private_files import keep_files_private
from dips.telemetry import logs


def recover(
    config: CONFIG,
    model: Annotated[Path, typer.Option(help="A safetensors file of the whole model, fp32.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Go on from a saved model after a disk was lost.

    First look for something better: a directory that can be brought back, or a mirror (`mirror:` in the run file), from
    which slaves and master restore themselves. Without these the run stands. This makes a new version, the head's
    successor, of a file: what `dips export` wrote, or a cluster saved, under the parameters' own names.

    Parameters of all layers come from the file. Momentum comes from the slaves' newest snapshots; the layers of a slave
    that has none lose theirs. Of a lost ledger nothing comes back but its counters: history, tokens and data ranges
    begin anew, with the file as version 0; then the agents must be started again, too.

    Stop the master and all slaves before; all slaves' directories must be reachable from here. Clusters train on, and
    pull the new version when the run serves it. `dips history` shows what was done.

    Exit codes: 0 done; 1 you said no; 78 something still serves, or the file is not this run's model.

    \b
    Example:
      dips recover --config dips.yaml --model model.safetensors
    """
    keep_files_private()
    from dips.master import recover as counters
    from dips.master.local_audit import make_local_row
    from dips.slave.rebuild import Rebuild

    run_file, log = load_run(config), logs.configure_log("recover", "dips", "WARNING")
    _require_stopped(run_file)
    with ExitStack() as held:
        begun_anew = _require_ledger(run_file, model)
        ledger = held.enter_context(counters.open_ledger(run_file))
        if begun_anew:
            counters.make_plan(run_file, ledger).carry_out(ledger)
        state = ledger.read_state()
        rebuild = Rebuild(run_file, state.row, model, log)
        held.callback(rebuild.close)
        found = rebuild.look_at_disks()
        lost = rebuild.layer_names([layer for one in found if one.momentum_of is None for layer in one.layers])
        version = counters.successor(state)
        _print_plan(state.versions[-1].version, version, model, found)
        if not yes and not typer.confirm(f"Make {version} of {model}?"):
            raise typer.Exit(1)
        digests = rebuild.write_version(version, found, max((peer.inc for peer in state.slaves), default=0))
        records = counters.version_of_file(state, version, str(model), lost, digests)
        ledger.write_records([*records, make_local_row("recover", f"{version} of {model}")], time.time())
    print(f"done: {version}. next: dips-master --config {config}, then the slaves")


def _require_stopped(config: RunFile) -> None:
    """Nobody serves this run on this machine; the locks are taken for good afterwards, one by one."""
    from dips.master.genesis import ledger_path

    locks = [("the master", Path(f"{ledger_path(config)}.lock")), *((f"slave {s.name}", s.lock) for s in config.slaves)]
    serving = [f"{who} (pid {holder})" for who, path in locks if (holder := lock_holder(path))]
    if serving:
        raise ConfigError(f"{' and '.join(serving)} still serve this run: stop the master and all slaves first")


def _require_ledger(config: RunFile, model: Path) -> bool:
    """Make a ledger of the file if there is none, here or in a mirror; return whether one was made."""
    from dips.master import genesis, restore
    from dips.master.mirror_files import newest_term

    path = genesis.ledger_path(config)
    if path.exists():
        return False
    store = restore.mirror_of(config)
    if store is not None and newest_term(store):
        raise ConfigError(f"{path}: no ledger is here, but its mirror {store.url} has one: start dips-master first")
    print(f"note: no ledger at {path}: history, tokens and data ranges begin anew")
    genesis.make_run(config, _read_tensors(model), wall=time.time)
    return True


def _read_tensors(model: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    try:
        return load_file(model)
    except Exception as error:
        raise ConfigError(f"--model {model}: cannot be read as safetensors: {error}") from error


def _print_plan(head: object, version: object, model: Path, found: Any) -> None:
    print(f"{version}, after {head}: parameters of {model}")
    for one in found:
        momentum = f"momentum of {one.momentum_of}" if one.momentum_of else "no snapshot is left: momentum 0"
        print(f"  {one.slave}: {len(one.layers)} layers, {momentum}")
