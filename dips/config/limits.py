"""The section `limits`: how many calls the master's control server takes (docs/guides/threats.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dips.config.section import Section

LEAST_PEER_CALLS_PER_S = 20.0  # calls/s; one cluster makes below ten, a slave reports 1,000 pushes at once


PEERS_AT_FULL_RATE = 60  # of all calls: 1,000 clusters that all push make about 11,000 a second


class LimitsSection(Section):
    """Calls per second; a burst of five times one peer's, of twice all. May change while the master runs."""

    peer_calls_per_s: Annotated[float, Field(ge=LEAST_PEER_CALLS_PER_S, allow_inf_nan=False)] = 200.0

    @property
    def calls_per_s(self) -> float:
        """Of all peers together."""
        return PEERS_AT_FULL_RATE * self.peer_calls_per_s
