"""`dips cluster`: keep a cluster out of the outer step, and let it in again."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from dips.commands import operator
from dips.commands.options import CLUSTER, CREDENTIALS, MASTER, WHOSE, find_master
from dips.protocol.effects import Refused
from dips.protocol.events import QuarantineAsked, ReadmissionAsked

words = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Keep a cluster out of the outer step, or let it in again."
)


@words.command()
def quarantine(
    cluster: CLUSTER,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    reason: Annotated[str, typer.Option(help="Why; `dips status` and the ledger show it.")] = "",
) -> None:
    """Keep a cluster out of the outer step while you look at it.

    It goes on training and pulling, so that it stays close to the run; all that it pushes is gated, and its statistics
    are left alone. The ledger keeps the quarantine, also over restarts, until `dips cluster readmit`. To end what a
    cluster may do at all, revoke its certificate (`dips certs revoke`) or take it from the run file's list `clusters`.

    Exit codes: 0 done; 69 no master answers; 77 you are no operator; 78 the master does not know it.

    \b
    Example:
      dips cluster quarantine west --reason "its data is being checked" --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    asyncio.run(operator.ask_master(peer, "Quarantine", QuarantineAsked(0, cluster, reason)))
    print(f"{cluster} is quarantined")


@words.command()
def readmit(
    cluster: CLUSTER,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
) -> None:
    """Lift the quarantine of a cluster: an operator's, the gate's, or both.

    A cluster that the gate kept out penalty.gate_patience times in a row, while the others were in, is quarantined: it
    trains and pulls, and its pushes are judged by statistics that it cannot move. When you have fixed the cause (its
    data, its learning rate), this lets it warm up again: its next penalty.warmup_rounds pushes are accepted, but for
    the finite check and the hard cap. After an operator's quarantine its next push is judged as before. The ledger
    keeps it.

    Exit codes: 0 done; 1 it is not quarantined; 69 no master answers; 77 you are no operator; 78 the master does not
    know it.

    \b
    Example:
      dips cluster readmit west --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    answer = asyncio.run(operator.ask_master(peer, "Readmit", ReadmissionAsked(0, cluster)))
    if isinstance(answer, Refused):
        print(f"nothing done: {answer.reason}")
        raise typer.Exit(1)
    print(f"{cluster} is readmitted")
