"""`dips drain`: take a slave out of service without breaking a round."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer
from rich.console import Console

from dips.commands import operator
from dips.commands.options import CREDENTIALS, MASTER, SLAVE, WHOSE, find_master
from dips.protocol.effects import Acknowledged, Pending
from dips.protocol.events import DrainAsked


def drain(
    slave: SLAVE,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    wait_s: Annotated[float, typer.Option(min=0, help="How long to wait for what is open on it.")] = 600.0,
) -> None:
    """Take a slave out of service, when nothing is open on it.

    From now on no push and no pull begins (clusters train on and ask again); what moves goes to its end, and so does
    the open round. Then the slave may be stopped, moved or updated, and no round is skipped for it. It serves again
    when it is started again. A slave that is stopped without this costs the open round and nothing else.

    A cluster needs no such word: SIGTERM to its dips-client ends the training and gives its unfinished work back: its
    data ranges are leased to others, its tokens since the last accepted push count as lost.

    Exit codes: 0 drained; 1 it does not serve, or not within --wait-s (it goes on draining); 69 no master answers;
    78 there is no such slave.

    \b
    Example:
      dips drain slave-0 --config dips.yaml && systemctl restart dips-slave@slave-0
    """
    peer, until = find_master(config, master, credentials), time.monotonic() + wait_s
    console = Console(stderr=True)
    with console.status(f"draining {slave}") as line:
        while True:
            answer = asyncio.run(operator.ask_master(peer, "Drain", DrainAsked(0, slave)))
            if not isinstance(answer, Pending) or time.monotonic() >= until:
                break
            line.update(f"draining: {answer.reason}")
    if isinstance(answer, Acknowledged):
        print(f"{slave} is drained: it may be stopped; it serves again when it is started again")
        return
    print(f"not drained: {answer.reason}")
    raise typer.Exit(1)
