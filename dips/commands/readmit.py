"""`dips readmit`: lift the quarantine of a cluster."""

from __future__ import annotations

import asyncio

import typer

from dips.commands import operator
from dips.commands.options import CLUSTER, CREDENTIALS, MASTER, WHOSE, find_master
from dips.protocol.effects import Refused
from dips.protocol.events import ReadmissionAsked


def readmit(
    cluster: CLUSTER,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
) -> None:
    """Lift the quarantine of a cluster.

    A cluster that the gate kept out penalty.gate_patience times in a row, while the others were in, is quarantined: it
    trains and pulls, and what it pushes is judged by statistics that it cannot move. When you have fixed what was
    wrong with it (its data, its learning rate), this lets it warm up again: its next penalty.warmup_rounds pushes are
    accepted, but for the finite check and the hard cap. The ledger keeps it.

    Exit codes: 0 done; 1 it is not quarantined; 69 no master answers; 78 the master does not know it.

    \b
    Example:
      dips readmit west --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    answer = asyncio.run(operator.ask_master(peer, "Readmit", ReadmissionAsked(0, cluster)))
    if isinstance(answer, Refused):
        print(f"nothing done: {answer.reason}")
        raise typer.Exit(1)
    print(f"{cluster} is readmitted: its next pushes are a warm-up")
