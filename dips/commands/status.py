"""The command `dips status`: shows the run as its master sees it."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dips.commands.options import CREDENTIALS, MASTER, WHOSE, find_master
from dips.errors import Busy, UnavailableMaster
from dips.printable import make_tree_printable
from dips.protocol.view import RunView
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.view import terminal
from dips.view.judging import read_view
from dips.wire.generated.status_pb2 import StatusRequest
from dips.wire.generated.status_pb2_grpc import StatusServiceStub

STATUS_DEADLINE_S = 5.0


def status(
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole status as JSON, for scripts.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat each second until Ctrl-C.")] = False,
) -> None:
    """Show the round, clusters and slaves of a run.

    Each state is shown with its reason. --watch redraws the status each second on a terminal, and prints a line a
    second otherwise.

    Exit code 69 if no master answers.

    \b
    Example:
      dips status --config dips.yaml --watch
      dips status --master 127.0.0.1:7800 --json | jq .clusters
    """
    peer = find_master(config, master, credentials)
    if not watch:
        return _print_status(asyncio.run(ask_status(peer)), as_json)
    try:
        asyncio.run(_watch_status(peer, as_json))
    except KeyboardInterrupt:
        return None


async def ask_view(master: Endpoint, deadline_s: float = STATUS_DEADLINE_S) -> RunView:
    """Ask the master once and return its view of the run. Raises UnavailableMaster if no answer comes in time."""
    return read_view(await ask_status(master, deadline_s))


async def ask_status(master: Endpoint, deadline_s: float = STATUS_DEADLINE_S) -> dict[str, Any]:
    """Ask the master once and return its status. Raises UnavailableMaster if no answer comes in time."""
    channel = control.open_channel(master)
    try:
        return await _ask_status(StatusServiceStub(channel), master, deadline_s)
    finally:
        await channel.close()


async def _ask_status(stub: Any, master: Endpoint, deadline_s: float) -> dict[str, Any]:
    reply = await control.call_method(
        stub.Status,
        StatusRequest(),
        deadline_s=deadline_s,
        peer=master,
        unavailable=UnavailableMaster,
        explain=True,
    )
    answer: dict[str, Any] = make_tree_printable(json.loads(reply.json))
    master.require_run(answer.get("run"))
    return answer


def _print_status(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        Console().print(terminal.render_status(read_view(answer)))


async def _watch_status(master: Endpoint, as_json: bool) -> None:
    console, channel = Console(), control.open_channel(master)
    drawn = console.is_terminal and not as_json  # a file or a pipe cannot be redrawn
    try:
        with Live(console=console, auto_refresh=False, screen=True) if drawn else nullcontext() as live:
            while True:
                try:
                    answer = await _ask_status(StatusServiceStub(channel), master, STATUS_DEADLINE_S)
                except (UnavailableMaster, Busy) as error:
                    if live is not None:
                        live.update(Text(f"{error}; asking again"), refresh=True)  # rich reads brackets in a str
                    else:
                        print(f"{error}; asking again", file=sys.stderr)
                else:
                    if live is not None:
                        live.update(terminal.FittedStatus(read_view(answer)), refresh=True)
                    else:
                        print(json.dumps(answer) if as_json else terminal.one_line(read_view(answer)), flush=True)
                await asyncio.sleep(1.0)
    finally:
        await channel.close()
