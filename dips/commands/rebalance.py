"""`dips rebalance`: other slaves for a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dips.commands.options import CONFIG
from dips.config import load_run
from dips.private_files import keep_files_private


def rebalance(
    config: CONFIG,
    old: Annotated[
        Path | None,
        typer.Option(help="The run file of before, for slaves that --config does not name or that change directory."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; the run may go on.")] = False,
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Leave the snapshots of before as old-vN@rM, for you to delete.")
    ] = False,
) -> None:
    """Move the layers to the slaves of another run file: more, fewer or other ones.

    Stop the master and all slaves first, and start them with the new run file afterwards. Clusters keep running: they
    train on without a master and find the new slaves in their next grant.

    Every slave's directory, of before and of after, must be reachable from here under the path in the run file: on this
    machine, on shared storage, or mounted. That of a new slave must exist. Each holds, besides what is there, one more
    snapshot for a while.

    The newest durable version is copied, θ and m bit for bit, and read back; then one row of the ledger makes the new
    placement the run's (`dips history` shows it), and the snapshots of before are deleted, those of older versions too.
    Until that row nothing has changed: a failed or interrupted rebalance leaves the run as it was. Repeat the same
    command to finish one that was interrupted.

    Exit codes: 0 done; 65 a snapshot is damaged; 74 a disk is full or failed; 78 the run files, a directory or the
    memory is not usable, or something runs.

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
