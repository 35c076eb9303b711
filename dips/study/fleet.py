"""The clusters of a study's run: their speed, their pace, when they join and leave, and their faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dips.errors import ConfigError
from dips.protocol.options import FORBID
from dips.sim.scenario import NAMES
from dips.study.faults import Fault

PACES = ("steps", "aligned")
LINK_S = 0.45  # mean duration of a simulated transfer on a link of slowness 1


def _require(holds: bool, key: str, expected: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"{key}: expected {expected}, got {got!r}")


@dataclass(frozen=True, slots=True)
class FleetCluster:
    """One cluster; seconds are in virtual time, shares of the run's tokens."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    step_s: float = 1.0  # of an inner step
    jitter: float = 0.1  # of step_s, between the shortest and the longest
    straggles: float = 0.0  # share of inner steps that take ten times as long
    link_s: float = LINK_S  # of a push, and of a pull
    joins: float = 0.0  # share of the run at which it joins
    leaves: float = 1.0  # share at which it leaves; 1: never
    returns: float = 1.0  # share at which it returns after leaving; 1: never
    fails: float = 1.0  # share at which its processes are killed, and later restarted; 1: never
    down_s: float = 30.0  # time until they are restarted
    fault: Fault | None = None

    def __post_init__(self) -> None:
        for key in ("step_s", "link_s", "down_s"):
            _require(getattr(self, key) > 0, f"clusters: {key}", "a number above 0", getattr(self, key))
        _require(0 <= self.jitter < 2, "clusters: jitter", "a number in [0, 2)", self.jitter)
        for key in ("straggles", "joins", "leaves", "returns", "fails"):
            _require(0 <= getattr(self, key) <= 1, f"clusters: {key}", "a share, 0 to 1", getattr(self, key))
        _require(self.joins < self.leaves, "clusters: leaves", "a share above joins", self.leaves)
        back = self.returns == 1.0 or self.leaves < self.returns
        _require(back, "clusters: returns", "a share above leaves, or 1", self.returns)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The clusters of a run, with the options of their cluster files."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID
    members: tuple[FleetCluster, ...] = (FleetCluster(),) * 4
    inner_steps: int = 32
    pace: str = "steps"
    overlap: bool = False
    fragments: int = 1

    def __post_init__(self) -> None:
        _require(1 <= len(self.members) <= len(NAMES), "clusters", f"1 to {len(NAMES)} of them", len(self.members))
        _require(self.inner_steps >= 1, "inner_steps", "a whole number, at least 1", self.inner_steps)
        _require(self.pace in PACES, "pace", " or ".join(PACES), self.pace)
        _require(self.fragments >= 1, "fragments", "a whole number, at least 1", self.fragments)
        _require(any(m.joins == 0.0 for m in self.members), "clusters: joins", "0 for one at least", "none")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(NAMES[: len(self.members)])

    @property
    def step_rate(self) -> float:
        """The ideal rate: inner steps of all clusters per second of virtual time, while all are present."""
        return sum(1.0 / member.step_s for member in self.members)

    def due_steps(self, steps: int) -> dict[str, float]:
        """Return how many of a run's inner steps each cluster is due by its speed."""
        rate = self.step_rate
        return {name: steps / (member.step_s * rate) for name, member in zip(self.names, self.members, strict=True)}
