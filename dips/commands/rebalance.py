"""The command `dips rebalance`: moves a run to other slaves."""

from __future__ import annotations

from typing import Annotated

import typer

from dips.commands.completing import complete_slave
from dips.commands.options import CONFIG, CREDENTIALS, find_master
from dips.config import load_run
from dips.files import keep_files_private
from dips.transport.endpoints import master_peer


def rebalance(
    config: CONFIG,
    slave: Annotated[
        list[str] | None,
        typer.Option(
            help="A slave of the new run file whose directory is on this host. Repeatable; default: all slaves.",
            autocompletion=complete_slave,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan only, on the master's host; the run may be up or down.")
    ] = False,
    credentials: CREDENTIALS = None,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the master, open pushes and the other hosts.")
    ] = 3600.0,
) -> None:
    """Move the layers to the slaves of another run file: more, fewer or different ones.

    Leave the master and all present slaves running. On one machine call the command once. Where slaves have hosts of
    their own, call it on the host of each slave of the new run file with --slave, also of those that stay, at any time
    within --wait-s of each other. The directory of a new slave must exist, and each needs space for one more snapshot
    for a while.

    No round begins meanwhile, and clusters train on. Each call copies what its slaves lack over the lanes from the
    slaves that hold it, θ and m bit for bit, compares digests, and waits until all are durable; then one row in the
    ledger makes the new placement valid (`dips history` shows it), older versions are given up, and the master ends
    with exit code 78. Stop the former slaves, and start all with the new run file; clusters learn the new slaves from
    their next grant. The directory of a slave that was removed is left for you to delete.

    Two calls at a time need two operators' certificates. Until the row nothing has changed: if a call fails, is
    interrupted, or a master or slave restarts, repeat it; if no call is left, the run goes on after a lease with its
    former slaves. A run that is down must be started first, with its former run file; a slave whose machine is lost and
    whose directory is not, on any host that has the directory.

    Exit codes: 0 done; 65 a snapshot is damaged; 69 master or slaves did not answer; 74 a disk is full or failed; 78 a
    run file, a directory or the memory is not usable.

    \b
    Example:
      dips rebalance --config new.yaml --dry-run
      dips rebalance --config new.yaml
      dips rebalance --config new.yaml --slave ps2
    """
    keep_files_private()
    from dips.commands import rebalancing

    after = load_run(config)
    if dry_run:
        rebalancing.show_plan(after)
        return
    names = slave or [section.name for section in after.slaves]
    # As the slaves of this host dial it: where the master listens on all interfaces, that is no address from here.
    known = find_master(config, None, credentials)
    peer = master_peer(after.slave_section(names[0]).master, known.tls, known.run)
    rebalancing.rebalance_run(after, names, peer, wait_s, lambda line: print(line, flush=True))
    placed = ", ".join(section.name for section in after.slaves)
    print(f"the layers lie on {placed}: stop the former slaves, start the master and these with the new run file")
