"""`dips quarantine`: keep a cluster out of the outer step, and let it in again."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from dips.commands import operator
from dips.commands.options import CLUSTER, CREDENTIALS, MASTER, WHOSE, find_master
from dips.protocol.effects import Refused
from dips.protocol.events import QuarantineAsked


def quarantine(
    cluster: CLUSTER,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    release: Annotated[bool, typer.Option("--release", help="Let it in again.")] = False,
    reason: Annotated[str, typer.Option(help="Why; `dips status` and the ledger show it.")] = "",
) -> None:
    """Keep a cluster out of the outer step while you look at it, and let it in again with --release.

    It goes on training and pulling, so that it stays close to the run; all that it pushes is gated, and its statistics
    are left alone. The ledger keeps the quarantine, also over restarts. It ends with --release, and by nothing else:
    `dips readmit` lifts the quarantine of the gate. To end what a cluster may do at all, revoke its certificate
    (`dips certs revoke`) or take it from the run file's list `clusters`.

    Exit codes: 0 done; 1 it is not quarantined; 69 no master answers; 77 you are no operator; 78 the master does not
    know it.

    \b
    Example:
      dips quarantine west --reason "its data is being checked" --config dips.yaml
      dips quarantine west --release --config dips.yaml
    """
    if release and reason:
        raise typer.BadParameter("--release takes no --reason", param_hint="--reason")
    peer = find_master(config, master, credentials)
    answer = asyncio.run(operator.ask_master(peer, "Quarantine", QuarantineAsked(0, cluster, release, reason)))
    if isinstance(answer, Refused):
        print(f"nothing done: {answer.reason}")
        raise typer.Exit(1)
    print(f"{cluster} is {'released: its next push is judged by the gate' if release else 'quarantined'}")
