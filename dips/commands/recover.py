"""The command `dips recover`: continues a run from a saved model when disks are lost and not mirrored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dips.commands.options import CONFIG
from dips.config import load_run
from dips.files import keep_files_private
from dips.telemetry import logs


def recover(
    config: CONFIG,
    model: Annotated[Path, typer.Option(help="The safetensors file of the whole model, fp32.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Continue from a saved model after a disk was lost.

    First look for something better: a directory that can be restored, or a mirror (`mirror:` in the run file), from
    which slaves and master restore themselves. Without these the run cannot continue. This command makes a new version,
    the successor of the head, from a file: written by `dips export`, or saved by a cluster, with the parameters' own
    names.

    Parameters of all layers come from the file. Momentum comes from the slaves' newest snapshots, which are restored
    from their mirrors if they are newer there; the layers of a slave without a snapshot lose their momentum. If the
    ledger is lost, only its counters are restored: history, tokens and data ranges start again, with the file as
    version 0; then the agents must be restarted, too.

    Stop the master and all slaves before; all slaves' directories must be reachable from here. Clusters train on, and
    pull the new version when the run serves it. `dips history` shows the recovery.

    A recovery that fails or is interrupted leaves the run as it was, or is completed by the same command or by the
    slaves.

    Exit codes: 0 done; 1 you declined; 74 a disk or mirror is full or failed; 78 a daemon still serves, or the file is
    not this run's model.

    \b
    Example:
      dips recover --config dips.yaml --model model.safetensors
    """
    keep_files_private()
    from dips.commands.recovering import recover_run

    run_file, log = load_run(config), logs.configure_log("recover", "dips", "WARNING")
    version = recover_run(run_file, model, log, lambda question: yes or typer.confirm(question))
    if version is None:
        raise typer.Exit(1)
    print(f"done: {version}. next: dips-master --config {config}, then the slaves")
