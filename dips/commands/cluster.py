"""The command `dips cluster`: excludes a cluster from the outer step, or readmits it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from dips.commands import operator
from dips.commands.options import CLUSTER, CREDENTIALS, MASTER, WHOSE, find_master
from dips.protocol.effects import Refused
from dips.protocol.events import QuarantineAsked, ReadmissionAsked

words = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Exclude a cluster from the outer step, or readmit it."
)


@words.command()
def quarantine(
    cluster: CLUSTER,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    reason: Annotated[str, typer.Option(help="The reason, shown by `dips status` and the ledger.")] = "",
) -> None:
    """Exclude a cluster from the outer step while you investigate it.

    The cluster keeps training and pulling, so that it stays close to the run; all its pushes are gated, and its
    statistics do not change. The ledger keeps the quarantine, also over restarts, until `dips cluster readmit`. To
    exclude a cluster completely, revoke its certificate (`dips certs revoke`) or remove it from the run file's list
    `clusters`.

    Exit codes: 0 done; 69 no master answers; 77 you are no operator; 78 the master does not know the cluster.

    \b
    Example:
      dips cluster quarantine west --reason "its data is being checked" --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    asyncio.run(operator.ask_master(peer, QuarantineAsked(0, cluster, reason)))
    print(f"{cluster} is quarantined")


@words.command()
def readmit(
    cluster: CLUSTER,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
) -> None:
    """Lift the quarantine of a cluster: an operator's, the gate's, or both.

    A cluster whose pushes are gated penalty.gate_patience times in a row, while the others' are accepted, is
    quarantined: it trains and pulls, and its pushes are judged by statistics that it cannot change. When you have fixed
    the cause (its data, its learning rate), this command lets it warm up again: its next penalty.warmup_rounds pushes
    are accepted, except for the finite check and the hard cap. After an operator's quarantine its next push is judged
    as before. The ledger records it.

    Exit codes: 0 done; 1 it is not quarantined; 69 no master answers; 77 you are no operator; 78 the master does not
    know it.

    \b
    Example:
      dips cluster readmit west --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    answer = asyncio.run(operator.ask_master(peer, ReadmissionAsked(0, cluster)))
    if isinstance(answer, Refused):
        print(f"nothing done: {answer.reason}")
        raise typer.Exit(1)
    print(f"{cluster} is readmitted")
