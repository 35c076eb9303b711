"""The machines of a simulated cluster, which outlive its agents and trainers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dips.client.agent.account import Pace

STRAGGLING = 10.0  # factor of a straggling step's time


@dataclass
class Site:
    """The machines of one cluster: their name, their ranks and their speed."""

    name: str
    ranks: int
    step_s: float
    rng: Random
    aligned_steps: int = 0  # pace.aligned of its cluster file; 0: it pushes after the scenario's inner steps
    overlap: bool = False  # it trains during push, window and pull
    restarts: int = 0  # torchrun --max-restarts
    fragments: int = 1  # number of fragments of an overlapping transfer
    jitter: float = 0.6  # of step_s, between the shortest and the longest inner step
    straggles: float = 0.0  # share of inner steps that take STRAGGLING times as long
    diverged: int = 0  # number of coming pushes with bad content

    def make_pace(self, inner_steps: int) -> Pace:
        """Return the pace of an agent started here; `inner_steps` is the scenario's."""
        return Pace(aligned=self.aligned_steps) if self.aligned_steps else Pace(steps=inner_steps)

    def draw_step_s(self) -> float:
        """Return the duration of the next inner step."""
        step_s = self.step_s * (1.0 - self.jitter / 2 + self.jitter * self.rng.random())
        return step_s * STRAGGLING if self.straggles and self.rng.random() < self.straggles else step_s
