"""The machine on which a simulated slave runs, with its disk, which survives the processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dips.errors import ConfigError
from dips.protocol.effects import Order
from dips.sim.disk import SimDisk
from dips.sim.heap import Chance
from dips.sim.mirror import SimMirror
from dips.sim.slave import SlaveProcess, SlaveWorld
from dips.slave.ports import F32


class SlaveMachineWorld(SlaveWorld, Protocol):
    """The parts of the world that the machine needs."""

    chance: Chance
    genesis: dict[int, F32]
    touched: dict[str, SlaveMachine]


class SlaveMachine:
    """The machine of a slave: its name, its disk, and its process if there is one."""

    def __init__(self, world: SlaveMachineWorld, name: str, layers: tuple[int, ...]) -> None:
        self.world, self.name, self.layers = world, name, layers
        self.rng = world.chance.generator_for(f"slave/{name}")
        genesis = {layer: world.genesis[layer] for layer in layers}
        self.disk = SimDisk(
            genesis,
            world.chance.generator_for(f"disk/{name}"),
            lambda: world.monitor.rare_event_occurred("snapshot"),
            world.scenario.seeded,
        )
        rng = world.chance.generator_for(f"mirror/{name}")
        self.mirror = SimMirror(self.disk, rng) if world.scenario.mirrors else None
        self.process: SlaveProcess | None = None
        self.lives = 0
        self._touched = world.touched
        world.network.attach_host(name, self)

    def mark_touched(self) -> None:
        """Note that the machine may have changed since the invariants were last checked."""
        self._touched[self.name] = self

    def start(self) -> None:
        if self.process is None:
            self.mark_touched()
            try:
                self.disk.require_owner()
            except ConfigError:
                self.world.monitor.rare_event_occurred("foreign_disk")  # an operator must restart it
                return
            self.lives += 1
            self.disk.begin_process()
            self.process = SlaveProcess(self, f"{self.name}-{self.lives}")

    def crash(self) -> None:
        """Kill the process by SIGKILL: a snapshot being written may be torn, complete, or not begun."""
        self.mark_touched()
        process, self.process = self.process, None
        if process is not None:
            process.kill_process()

    def on_message(self, sender: str, message: Any, answer: Callable[[Any], None]) -> None:
        if self.process is not None and isinstance(message, Order):
            process = self.process
            process.gate.pass_on(lambda: process.take_order(message, answer))
