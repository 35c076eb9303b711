"""Rules of the clusters, broken from outside: each function returns what stands where (sabotage.py)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from dips.client.agent import membership
from dips.client.agent.account import Account, Portion
from dips.client.agent.agent import Agent
from dips.client.agent.core import AgentCore
from dips.client.agent.state import Actions, AgentState, AskMaster
from dips.errors import Denied, DipsError
from dips.protocol import clusters
from dips.protocol.entities import Cluster
from dips.protocol.enums import OutcomeKind
from dips.protocol.events import ClusterLeft
from dips.protocol.heartbeats import ClusterHeartbeat
from dips.protocol.run_state import RunState
from dips.sim.streams import Pulled
from dips.sim.trainer import SimRanks

Patch = tuple[Any, str, Any]  # (owner, name, what stands there instead)


def install_alone() -> list[Patch]:
    def agreed(landed: list[Pulled]) -> list[Pulled]:
        return [pulled for pulled in landed if pulled.whole]

    return [(SimRanks, "agree_on_version", staticmethod(agreed))]


def tokens_cut_at_pull() -> list[Patch]:
    def settle(self: Account, kind: OutcomeKind) -> Portion:
        """What was settled is carried on until a pull succeeds."""
        settled = self.frozen
        self.accepted += settled.tokens
        self.carried = replace(settled, ranges=(), begun=None) + self.carried
        self.frozen = Portion()
        return settled

    return [(Account, "settle_outcome", settle)]


def lose_what_was_settled() -> list[Patch]:
    honest_end, honest_heartbeat, honest_leave = (
        clusters.end_incarnation,
        membership.build_heartbeat,
        membership.leave_run,
    )

    def end(run: RunState, cluster: Cluster, reason: str, consumed: int, reported_lost: int = 0) -> None:
        # what a heartbeat reported as unsettled counts as lost
        honest_end(run, cluster, reason, consumed + cluster.settled, reported_lost)

    def heartbeat(s: AgentState) -> ClusterHeartbeat | None:
        told = honest_heartbeat(s)
        return told and replace(told, tokens_consumed=told.tokens_carried + told.tokens_lost)

    def leave(s: AgentState) -> ClusterLeft | None:
        left = honest_leave(s)
        return left and replace(left, tokens_consumed=s.account.unsettled_tokens + s.account.lost)

    return [
        (clusters, "end_incarnation", end),
        (membership, "build_heartbeat", heartbeat),
        (membership, "leave_run", leave),
    ]


def forget_a_range() -> list[Patch]:
    honest = Account.use_up

    def use_up(self: Account, used: int) -> None:
        if used % 16 != 15:
            honest(self, used)

    return [(Account, "use_up", use_up)]


def end_at_a_refusal() -> list[Patch]:
    honest = AgentCore.on_error

    def on_error(self: AgentCore, ask: AskMaster, error: DipsError, now: float) -> Actions:
        if isinstance(error, Denied):
            self.state.now = now
            self.state.fail_training(error)
            return self._take_actions()
        return honest(self, ask, error, now)

    return [(AgentCore, "on_error", on_error)]


def lose_a_cancellation() -> list[Patch]:
    async def keep_time(self: Agent) -> None:
        """Wait as `asyncio.wait_for` of Python 3.11 does: whoever is cancelled as its wait ends goes on."""
        while True:
            now = asyncio.get_running_loop().time()
            self.perform_actions(self._core.tick(now))
            waiting = asyncio.ensure_future(self._alarm.wait(max(0.0, self._core.next_deadline() - now)))
            try:
                await asyncio.wait({waiting})
            except asyncio.CancelledError:
                if not waiting.done():
                    waiting.cancel()
                    raise

    return [(Agent, "_keep_time", keep_time)]
