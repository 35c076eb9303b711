"""The command `dips drain`: takes a slave, or all of them, out of service without breaking a round."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer
from rich.console import Console

from dips.commands import operator
from dips.commands.options import CREDENTIALS, MASTER, SLAVE, WHOSE, find_master, slave_peer
from dips.errors import ConfigError, UnavailableMaster
from dips.protocol.effects import Acknowledged, Pending
from dips.protocol.events import DrainAllAsked, DrainAsked
from dips.transport.endpoints import Endpoint

RETRY_S = 1.0  # pause between two questions to a master that does not answer
LEAST_S = 1.0  # shortest timeout of one question


def drain(
    slave: SLAVE = "",
    every: Annotated[bool, typer.Option("--all", help="All slaves together: one outage instead of one each.")] = False,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    own: Annotated[
        bool,
        typer.Option("--self", help="Ask as the slave itself, with its certificate from the run file."),
    ] = False,
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for its open transfers and round.")] = 600.0,
) -> None:
    """Take a slave, or all of them, out of service once nothing is open on it.

    From now on no push or pull begins (clusters train on and ask again); transfers in progress and the open round are
    completed. Then the slave may be stopped, moved or updated without a skipped round. It serves again when it is
    restarted. Stopping a slave without draining it costs the open round and nothing else.

    Every slave is needed for every round, so --all is the way to upgrade them: stop and start all at once, and the run
    goes on when the last one is back. The request does not outlast the master: upgrade that afterwards.

    With --self the slave's own machine asks, as a preStop hook does: a slave that is not in service, or whose run has
    no model yet, may be stopped at once, and a master that does not answer is asked again until --wait-s is over.

    A cluster needs no drain: SIGTERM to its dips-client ends the training and returns its unfinished work: its data
    ranges are leased to others, its tokens since the last accepted push count as lost.

    Exit codes: 0 drained; 1 it does not serve, or was not drained within --wait-s (draining continues); 69 no master
    answers; 78 there is no such slave.

    \b
    Example:
      dips drain slave-0 --config dips.yaml && systemctl restart dips-slave@slave-0
      dips drain --all --config dips.yaml
      dips drain slave-0 --config dips.yaml --self --wait-s 240
    """
    if bool(slave) == every:
        raise ConfigError("whom to drain: give a SLAVE or --all, one of them")
    if own:
        if every:
            raise ConfigError("--self: expected the SLAVE whose certificate is used, got --all")
        if config is None or master is not None or credentials is not None:
            raise ConfigError("--self: expected --config, which names the master and the slave's certificate, alone")
        _drain_self(slave, slave_peer(config, slave), wait_s)
        return
    peer, until = find_master(config, master, credentials), time.monotonic() + wait_s
    question = DrainAsked(0, slave) if slave else DrainAllAsked(0)
    console, who = Console(stderr=True), slave or "all slaves"
    with console.status(f"draining {who}") as line:
        while True:
            answer = asyncio.run(operator.ask_master(peer, question))
            if not isinstance(answer, Pending) or time.monotonic() >= until:
                break
            line.update(f"draining: {answer.reason}")
    if isinstance(answer, Acknowledged):
        said = f"{slave} is" if slave else "all slaves are"
        print(f"{said} drained: stop what you will; a slave serves again when it is started again")
        return
    print(f"not drained: {answer.reason}")
    raise typer.Exit(1)


def _drain_self(slave: str, peer: Endpoint, wait_s: float) -> None:
    """Return when the slave may end. Prints each new reason for waiting on a line of its own, for a log."""
    until, said = time.monotonic() + wait_s, ""
    while True:
        try:
            answer = asyncio.run(_ask_until(peer, slave, until))
        except (UnavailableMaster, TimeoutError) as error:
            answer = Pending(str(error) or f"{peer} did not answer in time")
            time.sleep(min(RETRY_S, max(0.0, until - time.monotonic())))
        if not isinstance(answer, Pending):
            break
        if answer.reason != said:
            print(f"waits: {answer.reason}", flush=True)
            said = answer.reason
        if time.monotonic() >= until:
            print(f"not drained within {wait_s:g} s: {answer.reason}")
            raise typer.Exit(1)
    why = "drained" if isinstance(answer, Acknowledged) else answer.reason
    print(f"{slave} may be stopped: {why}")


async def _ask_until(peer: Endpoint, slave: str, until: float) -> Any:
    """Ask with a timeout, since the master holds a question open for longer than a hook may have left."""
    async with asyncio.timeout(max(LEAST_S, until - time.monotonic())):
        return await operator.ask_master(peer, DrainAsked(0, slave))
