"""The training job of one simulated agent: torchrun restarts dead ranks in place, or ends and is launched again."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from dips.client.agent.restarts import LaunchCommand
from dips.sim.ports import TrainerAgent, TrainerWorld
from dips.sim.site import Site
from dips.sim.trainer import SimTrainer


class TorchrunAgent(TrainerAgent, Protocol):
    """The parts of its agent that torchrun needs."""

    name: str

    def on_trainer_start(self) -> None: ...
    def on_command_end(self, before: LaunchCommand, reason: str) -> LaunchCommand | None: ...
    def on_hang_up(self, attempt: int) -> None: ...


class SimTorchrun:
    """Runs at most one trainer at a time; a dead one is replaced after a while."""

    def __init__(self, world: TrainerWorld, site: Site, agent: TorchrunAgent, launch: LaunchCommand) -> None:
        self._world, self._site, self._agent = world, site, agent
        self._launch = launch  # the present or last launch
        self._ended = False
        self.trainer: SimTrainer | None = None

    def start(self, restart: int = 0) -> None:
        """Start the trainer; `restart` counts the restarts of the ranks by this torchrun."""
        if not self._ended and self.trainer is None:
            self._agent.on_trainer_start()
            self.trainer = SimTrainer(self._world, self._site, self._agent, self._launch.launch, restart)

    def end(self, cause: str) -> None:
        """Kill everything by SIGKILL, for good."""
        self._ended = True
        if self.trainer is not None:
            self._lose_trainer(cause)

    def crash(self, reason: str) -> None:
        """End torchrun; its agent notices at once, and decides whether it is launched again."""
        self._lose_trainer("its trainer died")
        launch = self._agent.on_command_end(self._launch, reason)
        if launch is not None:
            self._launch = launch
            self._start_later(launch.delay_s + 1.5 * self._site.rng.random(), 0)

    def on_dead_rank(self, rank: int) -> None:
        """Process a rank's death: torchrun restarts all ranks, or ends if it has done so too often."""
        trainer = self.trainer
        assert trainer is not None
        if trainer.restart >= self._site.restarts:
            self.crash(f"rank {rank} died")
            return
        self._lose_trainer("its trainer died")
        rng = self._world.chance.generator_for(f"torchrun/{self._site.name}")
        # The end of rank 0's connection is noticed at once, or only after its successor has connected.
        seen_s = 0.0 if rng.random() < 0.5 else 4.0 * rng.random()
        hang_up = partial(self._agent.gate.pass_on, partial(self._agent.on_hang_up, trainer.attempt))
        self._world.call_later(seen_s, f"rank 0 of {self._site.name} is gone", hang_up)
        self._start_later(0.3 + 1.5 * rng.random(), trainer.restart + 1)

    def _lose_trainer(self, cause: str) -> None:
        trainer, self.trainer = self.trainer, None
        assert trainer is not None
        trainer.kill_ranks()
        trainer.in_hand.lose_work(cause)

    def _start_later(self, delay_s: float, restart: int) -> None:
        start = partial(self._agent.gate.pass_on, partial(self.start, restart))
        self._world.call_later(delay_s, f"{self._site.name} restarts its trainer", start)
