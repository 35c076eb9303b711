"""What the master does again and again beside the run: look at its file, and at who may still take part.

A cluster whose certificate was revoked, has expired or is on no list any more is refused at its next call by the guard;
here it is expelled: the slaves drop what it moves, and its questions are answered, within a second and not at the end
of its lease. A changed `clusters` counts at once, in the same way.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dips.config import RunFile, load_run
from dips.config.watching import LOOK_S, ConfigWatch, describe_keys, keep_watching
from dips.errors import DipsError
from dips.master.runtime import Runtime
from dips.protocol import audit, events
from dips.telemetry import logs
from dips.transport.guard import Guard
from dips.transport.limits import CallLimits
from dips.wire import messages

CHANGEABLE = ("clusters", "limits", "log_level")
OTHERS = ("slaves.*",)  # keys that the slaves look at themselves
RUN_FILE = "run file"  # who did it, in the ledger's audit
OPERATOR_SERVICE = "/dips.v1.OperatorService/"
NOBODY = "no certificate"
_REQUESTS: dict[str, type] = {
    "Readmit": events.ReadmissionAsked,
    "Extend": events.ExtensionAsked,
    "Drain": events.DrainAsked,
    "Tune": events.TuningAsked,
    "Quarantine": events.QuarantineAsked,
    "Seed": events.SeedAsked,
    "Rollback": events.RollbackAsked,
}


class MasterReload:
    """Runs beside the runtime, on its loop."""

    def __init__(
        self,
        file: Path | None,
        config: RunFile,
        guard: Guard | None,
        calls: CallLimits,
        runtime: Runtime,
        log: logs.Log,
        fixed_level: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`file` None: there is nothing to look at; `fixed_level`: the command line named the log's level."""
        self._guard, self._calls, self._runtime, self._log, self._wall = guard, calls, runtime, log, wall
        self._fixed_level = fixed_level
        self._hurry = asyncio.Event()
        self._watch = (
            ConfigWatch(file, config, load_run, CHANGEABLE, self._report, OTHERS) if file is not None else None
        )
        if guard is not None:
            guard.on_refused = self.report_refusal

    async def run(self) -> None:
        """Until it is cancelled; what ends it otherwise is our bug: nobody would be expelled."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hurry.set)
        async with asyncio.TaskGroup() as tasks:
            if self._watch is not None:
                tasks.create_task(keep_watching(self._watch, self.apply_changes, self._hurry))
            if self._guard is not None:
                tasks.create_task(self._keep_expelling(self._guard))

    def apply_changes(self, config: RunFile, keys: list[str]) -> None:
        """Take over what may change; the ledger keeps it."""
        if "clusters" in keys and self._guard is not None:
            self._guard.change_clusters(config.clusters)
            self._expel_clusters(self._guard)
        if "limits" in keys:
            self._calls.change_rates(config.limits.peer_calls_per_s, config.limits.calls_per_s)
        if "log_level" in keys and not self._fixed_level:
            logs.set_level(config.log_level)
        told = describe_keys(config, keys)
        self._log.info("run file taken over", changed=told)
        self._report_act(RUN_FILE, "reload", told, "done", refused=False)

    def report_refusal(self, who: str, method: str, request: Any, reason: str) -> None:
        """A call that the guard refused: those of operators have rows in the ledger."""
        if not method.startswith(OPERATOR_SERVICE):
            return
        action = method.removeprefix(OPERATOR_SERVICE)
        self._report_act(who or NOBODY, action.lower(), _describe_request(action, request), reason, refused=True)

    async def _keep_expelling(self, guard: Guard) -> None:
        while True:
            self._expel_clusters(guard)
            await asyncio.sleep(LOOK_S)

    def _expel_clusters(self, guard: Guard) -> None:
        for cluster, reason in guard.take_expelled():
            self._log.warning("cluster expelled", cluster=cluster, reason=reason)
            self._runtime.put_event(events.ClusterExpelled(cluster, reason))

    def _report_act(self, who: str, action: str, arguments: str, outcome: str, *, refused: bool) -> None:
        event = events.OperatorReported(who, action, arguments, outcome, refused, self._wall())
        self._runtime.put_event(event)

    def _report(self, problem: str) -> None:
        self._log.warning("run file", problem=problem)


def _describe_request(action: str, request: Any) -> str:
    try:
        return audit.spell_request(messages.from_proto(request, _REQUESTS[action], req=0))[1]
    except (DipsError, KeyError):
        return "not to be read"
