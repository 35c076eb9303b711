"""`dips extend`: change how far a run goes."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from dips.commands import operator
from dips.commands.options import CREDENTIALS, MASTER, WHOSE, find_master
from dips.protocol.effects import Refused
from dips.protocol.events import ExtensionAsked, TargetChange


def extend(
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Accepted tokens in all, those of today included.")] = None,
    rounds: Annotated[
        int | None, typer.Option("--versions", "--rounds", min=0, help="Outer steps in all; 0: no end by them.")
    ] = None,
    wall_s: Annotated[
        float | None, typer.Option("--wall-s", "--wall", min=0, help="Seconds since the master's start; 0: no end.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="How often the data ranges are trained in all.")] = None,
) -> None:
    """Change how far the run goes: `stop.*` and `data.epochs` of the run file, which say it for the beginning only.

    Each number is a total. What is not named stays. The ledger keeps the change (`dips history` shows it), and clusters
    learn it within a heartbeat: `outer.progress`, and learning rates with it, are of the new target. A smaller target
    than before is accepted if it is not yet reached.

    A finished run goes on from its last version; its agents have ended, so start dips-client on each cluster again.

    Exit codes: 0 done; 1 refused: that is reached already; 2 no target named; 69 no master answers.

    \b
    Example:
      dips extend --config dips.yaml --tokens 2000000000
      dips extend --config dips.yaml --rounds 500 --epochs 2
    """
    named = {"tokens": tokens, "versions": rounds, "wall_s": wall_s, "epochs": epochs}
    changes = tuple(TargetChange(key, float(value)) for key, value in named.items() if value is not None)
    if not changes:
        raise typer.BadParameter("name a target: --tokens, --rounds, --wall or --epochs", param_hint="dips extend")
    peer = find_master(config, master, credentials)
    answer = asyncio.run(operator.ask_master(peer, "Extend", ExtensionAsked(0, changes)))
    if isinstance(answer, Refused):
        print(f"nothing done: {answer.reason}")
        raise typer.Exit(1)
    print(f"the run goes on until {answer.targets.describe()}")
    if answer.resumed is not None:
        print(f"it was finished at {answer.resumed}, and goes on from there: start dips-client again on each cluster")
