"""The section `limits`: the rate of calls to the master's control server (docs/guides/threats.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dips.config.section import Section

LEAST_PEER_CALLS_PER_S = 20.0  # calls/s; one cluster makes fewer than ten, a slave may report 1,000 pushes at once


PEERS_AT_FULL_RATE = 60  # sets the limit of all calls: 1,000 pushing clusters make about 11,000 a second


class LimitsSection(Section):
    """Limits in calls per second; bursts of five times one peer's rate, of twice the total. May change while the master
    runs.
    """

    peer_calls_per_s: Annotated[float, Field(ge=LEAST_PEER_CALLS_PER_S, allow_inf_nan=False)] = 200.0

    @property
    def calls_per_s(self) -> float:
        """The limit for all peers together."""
        return PEERS_AT_FULL_RATE * self.peer_calls_per_s
