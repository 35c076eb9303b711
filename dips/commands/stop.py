"""The command `dips stop`: ends a run with its next version."""

from __future__ import annotations

import asyncio

import typer

from dips.commands import operator
from dips.commands.options import CREDENTIALS, MASTER, WHOSE, find_master
from dips.commands.status import ask_view
from dips.protocol.effects import Extended, Refused
from dips.protocol.events import ExtensionAsked, TargetChange
from dips.protocol.view import RunView
from dips.transport.endpoints import Endpoint

TRIES = 5  # a version may be made between reading the head and the request


def stop(config: WHOSE = None, master: MASTER = None, credentials: CREDENTIALS = None) -> None:
    """End the run with its next version: clusters push once more, pull the last model, and their training ends.

    Nothing is lost, and no inner step is interrupted. The ledger records it as a change of `stop.versions`;
    `dips set stop.versions=0` undoes it, also after the end. Daemons keep answering until they are stopped.

    Exit codes: 0 done, or the run had ended before; 1 refused; 69 no master answers; 77 you are no operator.

    \b
    Example:
      dips stop --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    view, answer = asyncio.run(_ask_to_stop(peer))
    if answer is None:
        print(f"the run has ended at {view.head}")
        return
    if isinstance(answer, Refused):
        print(f"nothing done: {answer.reason}")
        raise typer.Exit(1)
    print(f"the run ends with version {view.head_version.version + 1}, its next; `dips status --watch` shows when")


async def _ask_to_stop(master: Endpoint) -> tuple[RunView, Extended | Refused | None]:
    """Return the run and the master's answer; None: the run had ended before."""
    for _ in range(TRIES):
        view = await ask_view(master)
        if view.finished:
            return view, None
        change = TargetChange("versions", float(view.head_version.version + 1))
        answer = await operator.ask_master(master, ExtensionAsked(0, (change,)))
        if not isinstance(answer, Refused):
            break
    return view, answer
