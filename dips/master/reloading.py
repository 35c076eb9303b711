"""Reloads the run file and expels clusters that may no longer take part, in tasks beside the run.

The guard refuses the next call of a cluster whose certificate was revoked, has expired or is on no list any more; here
it is expelled: the slaves drop its transfers, and its questions are answered, within a second and not at the end of its
lease. A changed `clusters` has the same effect at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from dips.config import RunFile
from dips.config.watching import LOOK_S
from dips.errors import DipsError
from dips.master.runtime import Runtime
from dips.protocol import events
from dips.protocol.operator import REQUESTS, cut_text
from dips.telemetry import logs
from dips.transport.gate import Guard
from dips.wire import messages

CHANGEABLE = ("clusters",)
OTHERS = ("slaves.*",)  # keys that the slaves watch themselves
RUN_FILE = "run file"  # the caller in the ledger's audit
OPERATOR_SERVICE = "/dips.v1.OperatorService/"
NOBODY = "no certificate"


class MasterReload:
    """Applies changes of the run file (`apply_changes`), expels clusters (`keep_expelling`); on the master's loop."""

    def __init__(
        self,
        guard: Guard | None,
        runtime: Runtime,
        log: logs.Log,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._guard, self._runtime, self._log, self._wall = guard, runtime, log, wall
        if guard is not None:
            guard.on_refused = self.report_refusal

    def apply_changes(self, config: RunFile, keys: list[str], told: str) -> None:
        """Apply the changes of the keys CHANGEABLE and record them in the ledger's audit."""
        if "clusters" in keys and self._guard is not None:
            self._guard.change_clusters(config.clusters)
            self._expel_clusters(self._guard)
        self._report_act(RUN_FILE, "reload", told, "done", refused=False)

    def report_refusal(self, who: str, method: str, request: Any, reason: str) -> None:
        """Record a call of an operator that the guard refused in the ledger's audit."""
        if not method.startswith(OPERATOR_SERVICE):
            return
        action = method.removeprefix(OPERATOR_SERVICE).lower()
        self._report_act(who or NOBODY, action, _spell_request(action, request), reason, refused=True)

    async def keep_expelling(self) -> None:
        """Expel clusters until cancelled; any other exception is a bug, after which none would be expelled."""
        while self._guard is not None:
            self._expel_clusters(self._guard)
            await asyncio.sleep(LOOK_S)

    def _expel_clusters(self, guard: Guard) -> None:
        for cluster, reason in guard.take_expelled():
            self._log.warning("cluster expelled", cluster=cluster, reason=reason)
            self._runtime.put_event(events.ClusterExpelled(cluster, reason))

    def _report_act(self, who: str, action: str, arguments: str, outcome: str, *, refused: bool) -> None:
        event = events.OperatorReported(who, action, arguments, outcome, refused, self._wall())
        self._runtime.put_event(event)


def _spell_request(action: str, request: Any) -> str:
    """Return the arguments of a request that does not come to the Coordinator."""
    kinds = {kind.action: (asked, kind) for asked, kind in REQUESTS.items()}
    try:
        asked, kind = kinds[action]
        return cut_text(kind.spell(messages.from_proto(request, asked, req=0)))
    except (DipsError, KeyError):
        return "not to be read"
