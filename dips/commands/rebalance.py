"""The command `dips rebalance`: moves a run to other slaves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dips.commands.options import CONFIG, CREDENTIALS, find_master
from dips.config import load_run
from dips.errors import ConfigError
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
    slave: Annotated[
        str | None,
        typer.Option(help="Copy the layers of this slave over the lanes, on its host and while the run is up."),
    ] = None,
    credentials: CREDENTIALS = None,
    wait_s: Annotated[
        float, typer.Option(min=0, help="With --slave: seconds to wait for the master and the other hosts.")
    ] = 3600.0,
) -> None:
    """Move the layers to the slaves of another run file: more, fewer or different ones.

    With --slave: where slaves share no disk. Leave the master and all slaves running, and call the command once for
    each slave of the new run file, on its host, at any time within --wait-s of each other. No round begins meanwhile,
    and clusters train on. Each call copies what its slave lacks from the slaves that hold it, θ and m bit for bit,
    compares digests, and waits until all are durable; then one row in the ledger makes the new placement valid, and the
    master ends with exit code 78. Stop the former slaves, and start all with the new run file. The directory of a slave
    that was removed is left for you to delete. Two calls at a time need two operators' certificates. Until the row
    nothing has changed: if a call fails, is interrupted, or a master or slave restarts, repeat it; if no call is left,
    the run goes on after a lease with its former slaves.

    Without --slave: stop the master and all slaves first, and start them with the new run file afterwards. Clusters
    keep running: they train on without a master and learn the new slaves from their next grant.

    The directory of every old and new slave must be reachable from here under its path in the run file: on this
    machine, on shared storage, or mounted. A new slave's directory must exist. Each needs space for one more snapshot
    for a while.

    The newest durable version is copied, θ and m bit for bit, and read back; then one row in the ledger makes the new
    placement valid (`dips history` shows it), and the old snapshots are deleted, also those of older versions. Until
    that row nothing has changed: a rebalance that fails or is interrupted leaves the run as it was. Repeat the same
    command to finish an interrupted one.

    Exit codes: 0 done; 65 a snapshot is damaged; 69 master or slaves did not answer; 74 a disk is full or failed; 78 a
    run file, a directory or the memory is not usable, or a daemon runs.

    \b
    Example:
      dips rebalance --config new.yaml --old dips.yaml --dry-run
      dips rebalance --config new.yaml --old dips.yaml
      dips rebalance --config new.yaml --slave ps2
    """
    keep_files_private()
    from dips.commands import rebalance_lanes, rebalancing

    after = load_run(config)
    if slave is not None:
        if old is not None or dry_run or keep_old:
            raise ConfigError("--slave: the layers come from the slaves that hold them; leave the other options out")
        peer = find_master(config, None, credentials)
        rebalance_lanes.rebalance_over_lanes(after, slave, peer, wait_s, lambda line: print(line, flush=True))
        names = ", ".join(section.name for section in after.slaves)
        print(f"the layers lie on {names}: stop the former slaves, start the master and these with the new run file")
        return
    before = load_run(old) if old is not None else None
    if dry_run:
        rebalancing.show_plan(after, before)
    else:
        rebalancing.rebalance_run(after, before, keep_old)
