"""The section `limits`: how many calls the master's control server takes (docs/guides/threats.md)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from dips.config.section import Section

LEAST_PEER_CALLS_PER_S = 20.0  # calls/s; one cluster makes below ten, a slave reports 1,000 pushes at once


class LimitsSection(Section):
    """Calls per second; a burst of five times one peer's, of twice all. May change while the master runs."""

    peer_calls_per_s: Annotated[float, Field(ge=LEAST_PEER_CALLS_PER_S, allow_inf_nan=False)] = 200.0
    calls_per_s: Annotated[float, Field(allow_inf_nan=False)] = 12_000.0  # of all peers together

    @model_validator(mode="after")
    def _require_room(self) -> LimitsSection:
        if self.calls_per_s < self.peer_calls_per_s:
            raise ValueError(f"calls_per_s: expected at least peer_calls_per_s, got {self.calls_per_s:g}")
        return self
