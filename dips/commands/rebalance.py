"""The command `dips rebalance`: moves a run to other slaves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dips.commands.options import CONFIG
from dips.config import load_run
from dips.files import keep_files_private


def rebalance(
    config: CONFIG,
    old: Annotated[
        Path | None,
        typer.Option(help="The previous run file; needed if a slave is removed or changes its directory."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan only; the run may be up.")] = False,
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Keep the old snapshots as old-vN@rM instead of deleting them.")
    ] = False,
) -> None:
    """Move the layers to the slaves of another run file: more, fewer or different ones.

    Stop the master and all slaves first, and start them with the new run file afterwards. Clusters keep running: they
    train on without a master and learn the new slaves from their next grant.

    The directory of every old and new slave must be reachable from here under its path in the run file: on this
    machine, on shared storage, or mounted. A new slave's directory must exist. Each needs space for one more snapshot
    for a while.

    The newest durable version is copied, θ and m bit for bit, and read back; then one row in the ledger makes the new
    placement valid (`dips history` shows it), and the old snapshots are deleted, also those of older versions. Until
    that row nothing has changed: a rebalance that fails or is interrupted leaves the run as it was. Repeat the same
    command to finish an interrupted one.

    Exit codes: 0 done; 65 a snapshot is damaged; 74 a disk is full or failed; 78 a run file, a directory or the memory
    is not usable, or a daemon runs.

    \b
    Example:
      dips rebalance --config new.yaml --old dips.yaml --dry-run
      dips rebalance --config new.yaml --old dips.yaml
    """
    keep_files_private()
    from dips.commands import rebalancing

    after = load_run(config)
    before = load_run(old) if old is not None else None
    if dry_run:
        rebalancing.show_plan(after, before)
    else:
        rebalancing.rebalance_run(after, before, keep_old)
