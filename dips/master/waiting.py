"""A master without a ledger: it waits for `dips seed`, or for a ledger that `dips init` or an operator puts there.

All callers are asked to come again. Slaves of a run whose ledger was lost are safe from it: they hold versions that no
new ledger has, and a master that begins with one ends at once (docs/rationale.md#4).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NoReturn

from dips import daemon
from dips.config import RunFile
from dips.errors import ConfigError, UnavailableMaster
from dips.http import HttpSubject
from dips.master import begin, genesis
from dips.master.ledger import hold_ledger
from dips.master.servicer import ClusterServicer, OperatorServicer, SlaveServicer, StatusServicer
from dips.protocol.events import RunProposed
from dips.protocol.seeding import WAITS
from dips.protocol.view import RunView
from dips.telemetry.logs import Log
from dips.transport import control
from dips.transport.gate import Report
from dips.transport.guard import Guard
from dips.transport.tls import TlsSource
from dips.wire.generated.cluster_pb2_grpc import add_ClusterServiceServicer_to_server
from dips.wire.generated.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from dips.wire.generated.slave_pb2_grpc import add_SlaveServiceServicer_to_server
from dips.wire.generated.status_pb2_grpc import add_StatusServiceServicer_to_server

REMEDY = "if this run had begun, put its newest ledger back and do not seed it"
LOOK_S = 1.0  # interval of checks for a ledger that `dips init` wrote
GRACE_S = 2.0  # longest wait for the answer to Begin to leave


class ModelAwaiting:
    """A stand-in for the runtime: it answers every question with what is waited for."""

    def __init__(self, config: RunFile) -> None:
        self._config = config

    async def ask_core(self, make: Callable[[int], Any]) -> NoReturn:
        self._refuse_all()

    async def take_heartbeat(self, heartbeat: Any) -> NoReturn:
        self._refuse_all()

    def put_event(self, event: Any) -> NoReturn:
        self._refuse_all()

    def build_view(self) -> RunView:
        """Return what is waited for, and the options that a model must fit."""
        return RunView(self._config.shared.run, WAITS, shared=self._config.shared.agreed)

    def _refuse_all(self) -> NoReturn:
        run = self._config.shared.run
        if genesis.ledger_path(self._config).exists():
            raise UnavailableMaster(f"run {run!r} begins: its master cannot be reached for a moment")
        raise UnavailableMaster(f"run {run!r} {WAITS}")


async def wait_for_ledger(
    config: RunFile, tls: TlsSource | None, guard: Guard | None, log: Log, ready: Callable[[str], None], report: Report
) -> str | None:
    """Serve until there is a ledger; return the host:port served at, None if it was stopped before."""
    begun, stopped = asyncio.Event(), asyncio.Event()
    server = control.make_server(report, guard)
    listen = config.master.listen
    address = f"{listen.rpartition(':')[0]}:{control.bind_server(server, listen, 'master.listen', guard)}"
    awaiting: Any = ModelAwaiting(config)
    add_ClusterServiceServicer_to_server(ClusterServicer(awaiting), server)
    add_SlaveServiceServicer_to_server(SlaveServicer(awaiting), server)
    add_StatusServiceServicer_to_server(StatusServicer(awaiting, {}), server)
    add_OperatorServiceServicer_to_server(OperatorServicer(awaiting, partial(_begin_run, config, begun)), server)
    await control.serve_health(server, ("",))  # the process lives, but none of its services serves yet
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, GRACE_S)
        subject = HttpSubject("master", dict, lambda _: (), lambda: WAITS)  # lives, and is not ready
        await daemon.open_http(config.master.http, config.http_token, tls, subject, log, stack)
        stack.enter_context(daemon.end_signals(stopped.set))
        log.warning("no_ledger", ledger=str(genesis.ledger_path(config)), address=address, waits=WAITS, remedy=REMEDY)
        ready(address)
        while not (begun.is_set() or stopped.is_set() or _is_made(config)):
            await _wait_for_any(begun, stopped)
    return None if stopped.is_set() else address


def _is_made(config: RunFile) -> bool:
    """Whether there is a ledger that its creator has finished."""
    path = genesis.ledger_path(config)
    if not path.exists():
        return False
    try:
        with hold_ledger(path):
            return True
    except ConfigError:
        return False


async def _wait_for_any(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _begin_run(config: RunFile, begun: asyncio.Event, proposed: RunProposed) -> None:
    """Create the ledger; on the event loop, so that two proposals are served one after the other."""
    begin.begin_run(config, proposed, time.time)
    begun.set()
